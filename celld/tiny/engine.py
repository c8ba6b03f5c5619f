"""The engine's worker thread: scheduler and runner take turns, and commands run between steps.

Owns every mutable thing of the engine (weight version, pause, memory, counters); all of it is touched from the worker
thread alone, so nothing is locked. The HTTP side hands in closures and gets `Progress` values back on its event loop.
Never speaks HTTP.

Held, not refused: while paused, released or without weights no step runs and new requests wait in the queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from celld.tiny.kvstore import Found, Giver, Taker
from celld.tiny.runner import Runner, WeightsError
from celld.tiny.scheduler import Request, Scheduler
from celld.transfer.engine import TransferFailed

log = logging.getLogger(__name__)
T = TypeVar("T")
RELEASABLE = ("weights", "kv_cache", "cuda_graph")  # the last one is accepted and has nothing to release


class Refused(Exception):
    """Not in this state; the message says what to do. Nothing was changed."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Sampled tokens [start, stop) of a request are there; the last one carries a finish reason and its spans."""

    request: Request
    start: int
    stop: int
    version: str
    finish_reason: dict[str, Any] | None
    spans: list[dict[str, Any]] | None


@dataclass(slots=True)
class Counters:
    """Totals since start, for /metrics and /v1/loads."""

    requests: int = 0
    aborted: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    stored_tokens: int = 0  # of the cached ones, those that another engine had computed
    generation_tokens: int = 0
    retractions: int = 0
    steps: int = 0
    busy_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Loads:
    """A snapshot of what the engine holds."""

    running: int
    waiting: int
    used_tokens: int
    rows: int
    pool_tokens: int
    gen_throughput: float  # tokens per second over the last window with work
    paused: bool
    kv_bytes: int
    weights_bytes: int


class Engine:
    """Runs requests; every public method may be called from the event loop that `start` was called on."""

    def __init__(
        self, runner: Runner, scheduler: Scheduler, *, version: str, shared: tuple[Giver, Taker] | None = None
    ) -> None:
        """`shared`: keys and values go to and come from other engines; the scheduler must note what it keeps."""
        self._runner, self._scheduler, self._shared = runner, scheduler, shared
        self._version = version
        self._model_path = runner.weights.path if runner.weights else Path()
        self._paused = False
        self._weights_due = False  # memory for weights was taken again, and none are in it yet
        self._updating = False  # an open begin/end_weight_update session
        self._requests: dict[str, Request] = {}
        self._looking: list[Request] = []  # for their prefix among other engines; the scheduler does not know them yet
        self._inbox: deque[Callable[[], None]] = deque()
        self._barrier: deque[Callable[[], None]] = deque()  # wait until everything in flight is through
        self._held: deque[Request] = deque()  # came while something waits at the barrier
        self._wake = threading.Event()
        self._stopping = False
        self._sleep_s = 0.0
        self._counters = Counters()
        self._window = (0.0, 0, 0.0)  # busy_s and tokens at the window's start, throughput of the last full window
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # -- called from the event loop -----------------------------------------------------------------------------

    def start(self, deliver: Callable[[list[Progress]], None], failed: Callable[[BaseException], None]) -> None:
        """Start the worker; `deliver` and `failed` are called on the running event loop."""
        self._loop, self._deliver, self._failed = asyncio.get_running_loop(), deliver, failed
        self._thread.start()

    async def stop(self) -> None:
        """Abort what runs, so that its clients get their partial answers, and end the worker."""
        await self.ask(lambda: self._abort(self._matching("")))
        self._stopping = True
        self._wake.set()
        await asyncio.to_thread(self._thread.join, 5.0)

    def submit(self, request: Request) -> None:
        """Queue a request; its rid must not be in flight."""
        self._send(lambda: self._submit(request))

    def abort(self, rid: str) -> None:
        """Stop every request whose id starts with `rid` (as the real engine does)."""
        self._send(lambda: self._abort(self._matching(rid)))

    def drop(self, request: Request) -> None:
        """Stop exactly this request: its client is gone."""
        self._send(lambda: self._abort([request]))

    def abort_all(self) -> None:
        """Stop every request."""
        self._send(lambda: self._abort(self._matching("")))

    async def ask(self, call: Callable[[], T]) -> T:
        """Run a closure on the worker between two steps and await its result."""
        return await self._answer(call, self._inbox)

    async def ask_idle(self, call: Callable[[], T]) -> T:
        """The same once everything submitted so far has finished; requests that come meanwhile are held."""
        return await self._answer(call, self._barrier)

    async def _answer(self, call: Callable[[], T], queue: deque[Callable[[], None]]) -> T:
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(call())
            except Exception as error:
                future.set_exception(error)

        queue.append(run)
        self._wake.set()
        return await asyncio.wrap_future(future)

    def _send(self, call: Callable[[], None]) -> None:
        self._inbox.append(call)
        self._wake.set()

    # -- commands: on the worker thread, through `ask` ----------------------------------------------------------

    def pause(self, mode: str) -> None:
        """Stop stepping; `abort` ends what is in flight, `retract` requeues it, `in_place` freezes it."""
        if mode == "abort":
            self._abort(self._matching(""))
        elif mode == "retract":
            self._counters.retractions += self._scheduler.retract()
        self._paused = True

    def proceed(self) -> None:
        """Step again."""
        self._paused = False
        self._read_again()

    def _read_again(self) -> None:
        if self._weights_due:
            self._weights_due = False
            self._runner.resume_weights()

    def flush(self) -> bool:
        """Forget cached prefixes; False while requests run, or wait without a pause."""
        if not self._idle():
            return False
        self._scheduler.forget_cache()
        return True

    def release(self, tags: tuple[str, ...]) -> None:
        """Let go of memory; refused while requests run (the real engine dies of that)."""
        if not self._idle():
            raise Refused(
                f"{len(self._scheduler.running)} requests run and {len(self._scheduler.waiting)} wait: "
                "stop routing, abort or drain, then release"
            )
        if "kv_cache" in tags:
            self._scheduler.forget_cache()
            self._runner.release_pool()
        if "weights" in tags:
            self._weights_due = False
            self._scheduler.forget_cache()
            self._runner.release_weights()

    def resume(self, tags: tuple[str, ...]) -> None:
        """Take memory again. Weights come back from where they were read, unless that file has changed: in a pause only
        when it ends, because an update mostly comes before and would read others over them."""
        self._weights_due = self._weights_due or "weights" in tags
        if not self._paused:
            self._read_again()
        if "kv_cache" in tags:
            self._runner.resume_pool()

    def update_weights(self, path: Path, version: str | None, flush: bool) -> int:
        """Read new weights; the number of requests that go on with them. Raises Refused or WeightsError."""
        if flush and self._scheduler.running:
            raise Refused(
                f"{len(self._scheduler.running)} requests keep their keys and values (paused in place), so the cache "
                "can't be flushed: pause with retract or abort, or send flush_cache false"
            )
        self._runner.load(path)
        self._model_path, self._weights_due = path, False
        if self._shared is not None:
            self._shared[0].clear()  # nobody asks for what old weights computed
        if flush:
            self._scheduler.forget_cache()
        if version is not None:
            self.set_version(version)
        return len(self._requests)

    def set_version(self, version: str) -> None:
        """Name the weights; what was sampled so far keeps the old name."""
        if version != self._version:
            self._scheduler.mark_version(self._version)
        self._version = version

    def bracket(self, opens: bool) -> None:
        """Open or close a weight-update session."""
        if opens == self._updating:
            raise Refused("a weight update is already open" if opens else "no weight update is open")
        self._updating = opens

    def slow_down(self, sleep_s: float) -> None:
        """Sleep before every step: a test aid of the real engine."""
        self._sleep_s = sleep_s

    def checksums(self) -> dict[str, str]:
        """A digest per tensor of the weights that are served."""
        self._read_again()
        if self._runner.weights is None:
            raise Refused("the weights are released")
        return self._runner.weights.checksums

    def loads(self) -> Loads:
        """What is held now."""
        runner, scheduler = self._runner, self._scheduler
        return Loads(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting) + len(self._held),
            used_tokens=scheduler.used_tokens,
            rows=scheduler.rows,
            pool_tokens=scheduler.rows * runner.context_length,
            gen_throughput=self._window[2],
            paused=self._paused,
            kv_bytes=runner.pool_bytes,
            weights_bytes=runner.weights_bytes,
        )

    # -- read from the event loop: plain values, replaced as a whole ------------------------------------------------

    @property
    def version(self) -> str:
        return self._version

    @property
    def model_path(self) -> Path:
        return self._model_path

    @property
    def counters(self) -> Counters:
        return self._counters

    # -- the worker ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._wake.clear()
                while self._inbox:
                    self._inbox.popleft()()
                self._pass_barrier()
                if not (self._can_step() and self._step()):
                    self._wake.wait()
        except BaseException as error:  # a bug: the process can't go on without its worker
            with contextlib.suppress(RuntimeError):  # the event loop may be gone already
                self._loop.call_soon_threadsafe(self._failed, error)

    def _can_step(self) -> bool:
        return not self._paused and self._runner.ready

    def _step(self) -> bool:
        """One forward pass; False when there is nothing to do."""
        if self._sleep_s:
            time.sleep(self._sleep_s)
        started = time.perf_counter()
        plan = self._scheduler.plan()
        if plan is None:
            return False
        tokens, logprobs = self._runner.step(plan)
        due = self._scheduler.commit(plan, tokens, logprobs)
        self._give()
        self._report(due)
        counters = self._counters
        counters.steps += 1
        counters.generation_tokens += len(tokens)
        counters.busy_s += time.perf_counter() - started
        busy_s, generated, _ = self._window
        if counters.busy_s - busy_s > 1.0:
            rate = (counters.generation_tokens - generated) / (counters.busy_s - busy_s)
            self._window = (counters.busy_s, counters.generation_tokens, rate)
        return True

    def _idle(self) -> bool:
        """Nothing runs, and nothing waits unless it is held."""
        return not self._scheduler.running and not (self._requests and self._can_step())

    def _pass_barrier(self) -> None:
        """Run what waited for idleness, then let in the requests that came meanwhile."""
        while self._barrier and not (self._requests and self._can_step()):
            self._barrier.popleft()()
        if not self._barrier:
            while self._held:
                self._submit(self._held.popleft())

    def _submit(self, request: Request) -> None:
        if self._barrier:
            self._held.append(request)
            return
        self._requests[request.rid] = request
        self._counters.requests += 1
        if request.max_new_tokens == 0:
            request.finish_reason = {"type": "length", "length": 0}
            self._report([request])
        elif self._shared is not None and request.salt:
            self._looking.append(request)
            have = self._scheduler.cached(request)
            self._shared[1].look(
                request.salt, request.tokens[:-1], have, lambda found: self._send(lambda: self._looked(request, found))
            )
        else:
            self._scheduler.submit(request)

    def _looked(self, request: Request, found: Found | None) -> None:
        """What other engines have of its prompt goes to a cache slot, from where the scheduler takes it."""
        if request not in self._looking:  # aborted meanwhile
            return
        self._looking.remove(request)
        if found is not None and self._runner.pool is not None:
            have = self._scheduler.cached(request)
            place = self._scheduler.adopt(request.salt, request.tokens[: found.tokens]) if found.tokens > have else None
            if place is not None:
                copies, slot = place
                self._runner.copy(copies)
                self._runner.write_kv(slot, found.values)
                request.adopted = (have, found.tokens)
        self._scheduler.submit(request)

    def _give(self) -> None:
        """Offer what has just been kept, before anyone hears that its request is over and sends it elsewhere."""
        if self._shared is None:
            return
        copies, kept = self._scheduler.newly_kept()
        if not kept:
            return
        self._runner.copy(copies)
        for each in kept:
            try:
                self._shared[0].give(each.salt, each.tokens, partial(self._runner.read_kv, each.slot))
            except (OSError, TransferFailed) as error:
                log.warning("keys and values can't be offered: %s", error)

    def _matching(self, rid: str) -> list[Request]:
        known = [*self._requests.values(), *self._held]
        return [request for request in known if request.rid.startswith(rid)]

    def _abort(self, requests: list[Request]) -> None:
        apart = [request for request in requests if request in self._held or request in self._looking]
        stopped = self._scheduler.abort(request for request in requests if request not in apart)
        self._give()
        for request in apart:
            (self._held if request in self._held else self._looking).remove(request)
            request.finish_reason = {"type": "abort", "message": "Abort in waiting queue"}
            stopped.append(request)
        self._counters.aborted += len(stopped)
        self._report(stopped)

    def _report(self, requests: list[Request]) -> None:
        """Hand progress to the event loop, all of one step at once."""
        if not requests:
            return
        news: list[Progress] = []
        for request in requests:
            start, request.reported = request.reported, request.completion_tokens
            spans = None
            if request.finish_reason is not None:
                spans = request.spans(self._version)
                self._requests.pop(request.rid, None)
                self._counters.prompt_tokens += request.prompt_tokens
                self._counters.cached_tokens += max(request.cached_tokens, 0)
                self._counters.stored_tokens += request.stored_tokens
            news.append(Progress(request, start, request.reported, self._version, request.finish_reason, spans))
        with contextlib.suppress(RuntimeError):  # the event loop closed first: nobody listens any more
            self._loop.call_soon_threadsafe(self._deliver, news)


__all__ = ["RELEASABLE", "Counters", "Engine", "Loads", "Progress", "Refused", "WeightsError"]
