"""An engine's state without a model: requests in a pool of decoding, memory, weights, pauses. Owns no socket.

Held, not refused: while paused, released or without weights nothing is decoded and new requests wait. Refused, with
nothing changed: a release, a flush or an update of weights while requests run.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from celld.emulate.pool import NEVER, Pace, Pool

RELEASABLE = ("weights", "kv_cache", "cuda_graph")
LETTERS = range(64, 90)  # ids that byte-level tokenizers give to printable characters
LOGPROB = -0.6931471805599453


class Refused(Exception):
    """Not in this state; the message says what to do."""


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds that really pass for what is not decoding."""

    release_s: float = 0.0
    update_s: float = 0.0


@dataclass
class Request:
    """One submission. `news` wakes its stream; `sent` are the tokens that went out."""

    rid: str
    prompt: list[int]
    wanted: int
    every: int
    tokens: int = 0
    finish: dict[str, Any] | None = None
    sent: int = 0
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def ids(self, start: int, stop: int) -> list[int]:
        """What was sampled: nothing depends on it but that it is the same when asked again."""
        return [LETTERS[(len(self.prompt) + i) % len(LETTERS)] for i in range(start, stop)]


class Engine:
    """All methods run on the event loop; a timer reports tokens when they are due."""

    def __init__(self, pace: Pace, times: Times, *, model: Path, version: str) -> None:
        self.model, self.version = model, version
        self.times = times
        self.requests: dict[str, Request] = {}
        self.waiting: list[str] = []
        self.released: set[str] = set()
        self.paused = False
        self.updating = False
        self.counts = {"requests": 0, "aborted": 0, "prompt_tokens": 0}
        self.pool = Pool(pace)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def can_decode(self) -> bool:
        return not self.paused and not self.released - {"cuda_graph"}

    @property
    def running(self) -> int:
        return len(self.pool.running)

    def touch(self) -> None:
        """To the present time: reports go out, waiting requests start if they may, the timer is set anew."""
        self.pool.advance(self._loop.time())
        for rid, tokens, last in self.pool.reports():
            self._report(rid, tokens, {"type": "length", "length": tokens} if last else None)
        self.pool.held = self.paused
        if self.can_decode:
            for rid in self.waiting:
                self.pool.start(rid, self.requests[rid].wanted, self.requests[rid].every)
            self.waiting.clear()
        if self._timer is not None:
            self._timer.cancel()
        due = self.pool.next_due()
        self._timer = self._loop.call_at(due, self.touch) if due < NEVER else None

    def _report(self, rid: str, tokens: int, finish: dict[str, Any] | None) -> None:
        request = self.requests[rid]
        request.tokens, request.finish = tokens, finish
        request.news.set()

    def submit(self, request: Request) -> None:
        self.requests[request.rid] = request
        self.counts["requests"] += 1
        self.counts["prompt_tokens"] += len(request.prompt)
        self.waiting.append(request.rid)
        self.touch()

    def abort(self, rids: list[str]) -> None:
        """Their streams end with what there is."""
        self.touch()
        for rid in rids:
            if rid in self.requests and self.requests[rid].finish is None:
                self.counts["aborted"] += 1
                self._report(rid, self._take_out(rid), {"type": "abort", "message": "Abort before finish"})
        self.touch()

    def _take_out(self, rid: str) -> int:
        if rid in self.waiting:
            self.waiting.remove(rid)
            return 0
        return self.pool.remove(rid) if rid in self.pool.running else self.requests[rid].tokens

    def forget(self, request: Request) -> None:
        """Its answer is out, or its client is gone."""
        if self.requests.get(request.rid) is request:
            if request.finish is None:
                self._take_out(request.rid)
            del self.requests[request.rid]
            self.touch()

    # ---- control ----------------------------------------------------------------------------------------------------

    def pause(self, mode: str) -> None:
        """`abort` ends what runs; the other modes freeze it where it is."""
        if mode == "abort":
            self.abort(list(self.requests))
        self.touch()
        self.paused = True
        self.touch()

    def proceed(self) -> None:
        self.paused = False
        self.touch()

    def must_be_idle(self, what: str) -> None:
        self.touch()
        if self.running:
            raise Refused(f"{what}: {self.running} requests run, abort them first")

    async def release(self, tags: tuple[str, ...]) -> None:
        self.must_be_idle("release")
        new = set(tags) - self.released
        self.released |= new
        if new:
            await asyncio.sleep(self.times.release_s)

    def resume(self, tags: tuple[str, ...]) -> None:
        self.released -= set(tags)
        self.touch()

    def bracket(self, opens: bool) -> None:
        if self.updating is opens:
            raise Refused("a weight update is open already" if opens else "no weight update is open")
        self.updating = opens

    async def update_weights(self, model: Path, version: str | None) -> None:
        if "weights" in self.released:
            raise Refused("weights are released: resume them first")
        if not (model / "config.json").is_file():
            raise Refused(f"{model} has no config.json")
        self.must_be_idle("update of weights")
        await asyncio.sleep(self.times.update_s)
        self.model, self.version = model, version or self.version
