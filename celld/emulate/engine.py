"""An engine's state without a model: requests in a pool of decoding, memory, weights, pauses. Owns no socket.

Held, not refused: while paused, released or without weights nothing is decoded and new requests wait. Refused, with
nothing changed: a release or a flush while requests run. An update of weights waits for them, or in a pause cuts their
answers into spans of versions.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from celld.emulate.pool import NEVER, Pace, Pool

RELEASABLE = ("weights", "kv_cache", "cuda_graph")
LETTERS = range(64, 90)  # ids that byte-level tokenizers give to printable characters
LOGPROB = -0.6931471805599453
LOOKED_AT_BYTES = 1 << 20  # of the weights, to tell them from others
WAIT_S = 0.01  # between two looks whether what runs has ended


class Refused(Exception):
    """Not in this state; the message says what to do."""


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds that really pass for what is not decoding."""

    release_s: float = 0.0
    update_s: float = 0.0


@dataclass(frozen=True)
class Weights:
    """What is served. `check` stands for the tensors: it differs where they do."""

    model: Path
    version: str
    check: int

    @classmethod
    def read(cls, model: Path, version: str) -> Weights:
        """Raises Refused if the directory holds no model."""
        if not (model / "config.json").is_file():
            raise Refused(f"{model} has no config.json")
        tensors = model / "model.safetensors"
        with open(tensors if tensors.exists() else model / "config.json", "rb") as file:
            return cls(model, version, zlib.crc32(file.read(LOOKED_AT_BYTES)))


@dataclass
class Request:
    """One submission. `news` wakes its stream; `sent` are the tokens that went out; `spans`: (from which token on, by
    which weights).
    """

    rid: str
    prompt: list[int]
    wanted: int
    every: int
    tokens: int = 0
    finish: dict[str, Any] | None = None
    sent: int = 0
    kept: int = 0  # tokens from before it was taken back the last time
    retractions: int = 0
    spans: list[tuple[int, Weights]] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def ids(self, start: int, stop: int) -> list[int]:
        """What was sampled: given by the place in the text and by the weights, so that it is the same when asked
        again.
        """
        out: list[int] = []
        for number, (begin, weights) in enumerate(self.spans):
            end = self.spans[number + 1][0] if number + 1 < len(self.spans) else stop
            first = len(self.prompt) + weights.check
            out += [LETTERS[(first + i) % len(LETTERS)] for i in range(max(begin, start), min(end, stop))]
        return out

    def served_by(self, weights: Weights) -> None:
        """From here on, by these."""
        self.spans = [span for span in self.spans if span[0] < self.tokens]
        if not self.spans or self.spans[-1][1] != weights:
            self.spans.append((self.tokens, weights))

    def versions(self) -> list[dict[str, Any]]:
        """Its spans of tokens by version, those without a token left out."""
        ends = [*(begin for begin, _ in self.spans[1:]), self.tokens]
        spans = zip(self.spans, ends, strict=False)  # one that never began has no span
        return [{"version": w.version, "start": begin, "end": end} for (begin, w), end in spans if end > begin]


class Engine:
    """All methods run on the event loop; a timer reports tokens when they are due."""

    def __init__(self, pace: Pace, times: Times, *, model: Path, version: str) -> None:
        self.weights = Weights.read(model, version)
        self.times = times
        self.requests: dict[str, Request] = {}
        self.waiting: list[str] = []
        self.released: set[str] = set()
        self.paused = False
        self.updating = False
        self._loading = False
        self.counts = {"requests": 0, "aborted": 0, "prompt_tokens": 0}
        self.pool = Pool(pace)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def can_decode(self) -> bool:
        return not self.paused and not self._loading and not self.released - {"cuda_graph"}

    @property
    def running(self) -> int:
        return len(self.pool.running)

    def touch(self) -> None:
        """To the present time: reports go out, waiting requests start if they may, the timer is set anew."""
        self.pool.advance(self._loop.time())
        for rid, tokens, last in self.pool.reports():
            self._report(rid, tokens, last)
        self.pool.held = self.paused or self._loading
        if self.can_decode:
            for rid in self.waiting:
                self._begin(rid, self.requests[rid])
            self.waiting.clear()
        if self._timer is not None:
            self._timer.cancel()
        due = self.pool.next_due()
        self._timer = self._loop.call_at(due, self.touch) if due < NEVER else None

    def _begin(self, rid: str, request: Request) -> None:
        request.served_by(self.weights)
        self.pool.start(rid, request.wanted - request.kept, request.every)

    def _report(self, rid: str, tokens: int, last: bool) -> None:
        """`tokens` since it was last begun."""
        request = self.requests[rid]
        request.tokens = request.kept + tokens
        if last:
            request.finish = {"type": "length", "length": request.tokens}
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
            request = self.requests.get(rid)
            if request is not None and request.finish is None:
                self._take_out(rid, request)
                request.finish = {"type": "abort", "message": "Abort before finish"}
                request.news.set()
        self.touch()

    def _take_out(self, rid: str, request: Request) -> None:
        self.counts["aborted"] += 1
        if rid in self.waiting:
            self.waiting.remove(rid)
        else:
            request.tokens = request.kept + self.pool.remove(rid)

    def forget(self, request: Request) -> None:
        """Its answer is out, or its client is gone."""
        if self.requests.get(request.rid) is request:
            if request.finish is None:
                self._take_out(request.rid, request)
            del self.requests[request.rid]
            self.touch()

    # ---- control ----------------------------------------------------------------------------------------------------

    def pause(self, mode: str) -> None:
        """`abort` ends what runs, `retract` puts it back among what waits, `in_place` freezes it where it is."""
        if mode == "abort":
            self.abort(list(self.requests))
        self.touch()
        if mode == "retract":
            for rid in list(self.pool.running):
                request = self.requests[rid]
                request.tokens = request.kept = request.kept + self.pool.remove(rid)
                request.retractions += 1
                self.waiting.append(rid)
        self.paused = True
        self.touch()

    def proceed(self) -> None:
        self.paused = False
        self.touch()

    def slow_down(self, sleep_s: float) -> None:
        """So much more for every token."""
        self.touch()
        self.pool.slow_s = sleep_s
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

    async def flush(self, wait_s: float) -> None:
        """Nothing is cached; what a flush proves is that nothing runs."""
        await self._until_idle(wait_s)
        self.must_be_idle("flush")

    async def _until_idle(self, wait_s: float) -> None:
        until = self._loop.time() + wait_s
        while self.running and self._loop.time() < until:  # noqa: ASYNC110 - bounded, and a few looks at most
            await asyncio.sleep(WAIT_S)

    async def update_weights(self, model: Path, version: str | None, *, flush: bool) -> None:
        """In a pause at once, else when what runs has ended."""
        if "weights" in self.released:
            raise Refused("weights are released: resume them first")
        weights = Weights.read(model, version or self.weights.version)
        while self.running and not self.paused:
            await self._until_idle(1.0)
        if flush:
            self.must_be_idle("update of weights with a flush")
        self._loading = True
        self.touch()
        await asyncio.sleep(self.times.update_s)
        self._loading = False
        self.serve(weights)

    def serve(self, weights: Weights) -> None:
        """From here on by these weights, also what runs."""
        self.touch()
        self.weights = weights
        for rid in self.pool.running:
            request = self.requests[rid]
            request.tokens = request.kept + self.pool.done(rid)
            request.served_by(weights)
        self.touch()

    def rename(self, version: str) -> None:
        self.serve(Weights(self.weights.model, version, self.weights.check))
