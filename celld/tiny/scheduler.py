"""What the engine computes next: a pure core over requests, rows and cache slots.

Owns the queue, the assignment of rows, the prefix cache and its eviction, stop conditions and version spans. Never
touches tensors or clocks: `plan` says what to compute, `commit` takes what was sampled.

Slots of the key/value pool: [0, rows) hold the running requests, densely and in order of `running`, so that a decode
step reads them as one view; [rows, rows + cache_slots) keep prefixes of finished requests. Copies of a plan happen in
their order, before its forward pass. Invariant: only the last running row may be in the middle of its prefill.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from celld.tiny.prefix import PrefixIndex

MIN_SHARED_TOKENS = 32  # waiting one step for a neighbour's prefill pays off from about here


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """One submission: what was asked and how far it is. `tokens` is the prompt and then everything sampled."""

    rid: str
    tokens: list[int]
    max_new_tokens: int
    stop_ids: frozenset[int] = frozenset()
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = -1  # -1 is off
    noise_key: int = 0  # 64 bits; with the position it fixes the sampling noise
    salt: str = ""
    stream_interval: int = 0  # tokens per intermediate chunk; 0 reports only the end
    prompt_tokens: int = 0
    logprobs: list[float] = field(default_factory=list)
    filled: int = 0  # leading tokens whose keys and values lie in `row`
    row: int = -1
    prefilling: bool = False  # has a row and not yet its first token there
    holder: int = -1
    cached_tokens: int = -1  # of the prompt, when first admitted; -1 before
    adopted: tuple[int, int] = (0, 0)  # the prompt's tokens [start, stop) came from another engine
    stored_tokens: int = 0  # of cached_tokens, those that did
    retractions: int = 0
    reported: int = 0  # sampled tokens already handed out
    finish_reason: dict[str, Any] | None = None
    version_ends: list[tuple[str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.tokens)

    @property
    def completion_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    def spans(self, current: str) -> list[dict[str, Any]]:
        """Version spans over sampled token indices, as `weight_versions` has them."""
        spans: list[dict[str, Any]] = []
        for version, end in (*self.version_ends, (current, self.completion_tokens)):
            start = spans[-1]["end"] if spans else 0
            if spans and end <= start:
                continue
            if spans and spans[-1]["version"] == version:
                spans[-1]["end"] = end
            else:
                spans.append({"version": version, "start": start, "end": end})
        return spans


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy keys and values of the first `length` positions from slot `source` to slot `target`."""

    source: int
    target: int
    length: int


@dataclass(frozen=True, slots=True)
class Kept:
    """A string whose keys and values have come to lie in a cache slot (once the copies before it are made)."""

    holder: int
    salt: str
    tokens: list[int]
    slot: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Compute tokens [start, stop) of a request in its row; keys and values of [0, start) are there."""

    request: Request
    start: int
    stop: int

    @property
    def completes(self) -> bool:
        return self.stop == len(self.request.tokens)


@dataclass(frozen=True, slots=True)
class Plan:
    """One forward pass: `decode` are rows 0.. with one new token each, `prefill` the rows after them."""

    copies: list[Copy]
    decode: list[Request]
    prefill: list[Chunk]

    @property
    def sampled(self) -> list[Request]:
        """The requests that get a token from this pass, in the order the runner returns them."""
        return self.decode + [chunk.request for chunk in self.prefill if chunk.completes]


class Scheduler:
    """Continuous batching with prefix reuse over `rows` concurrent requests."""

    def __init__(self, *, rows: int, cache_slots: int, prefill_tokens: int = 1024, notes_kept: bool = False) -> None:
        self.rows = rows
        self.notes_kept = notes_kept  # for `newly_kept`, which somebody must then call
        self.prefill_tokens = prefill_tokens  # per step; bounds how long a decode step can be delayed
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self._index = PrefixIndex()  # strings whose keys and values lie in a slot
        self._filling = PrefixIndex()  # strings that will, when their prefill is through
        self._retained: OrderedDict[int, int] = OrderedDict()  # holder -> slot, least recently used first
        self._free = list(range(rows + cache_slots - 1, rows - 1, -1))
        self._copies: list[Copy] = []
        self._kept: list[Kept] = []
        self._holders = 0

    # -- what is asked of it ------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.append(request)

    def plan(self) -> Plan | None:
        """The next forward pass, or None when nothing can be computed."""
        ready = self._ready_rows()
        budget = self.prefill_tokens - sum(len(r.tokens) - r.filled for r in self.running[ready:])
        self._admit(budget)
        if not self.running:
            return None
        copies, self._copies = self._copies, []
        return Plan(copies, self.running[:ready], self._chunks(self.running[ready:]))

    def commit(self, plan: Plan, tokens: Sequence[int], logprobs: Sequence[float]) -> list[Request]:
        """Take the sampled tokens; the result are the requests with something to report, finished ones included."""
        for request in plan.decode:
            request.filled += 1
        for chunk in plan.prefill:
            self._filled(chunk)
        due: list[Request] = []
        for request, token, logprob in zip(plan.sampled, tokens, logprobs, strict=True):
            request.tokens.append(token)
            request.logprobs.append(logprob)
            request.finish_reason = _finish_reason(request, token)
            if request.finish_reason is not None:
                self._retire(request)
                due.append(request)
            elif _reports_now(request):
                due.append(request)
        return due

    def abort(self, requests: Iterable[Request]) -> list[Request]:
        """Stop requests where they are; they keep what they have. Those that were over already are left out."""
        stopped: list[Request] = []
        for request in requests:
            if request.finish_reason is not None:
                continue
            if request.row >= 0:
                request.finish_reason = {"type": "abort", "message": "Aborted"}
                self._retire(request)
            else:
                self.waiting.remove(request)
                request.finish_reason = {"type": "abort", "message": "Abort in waiting queue"}
            stopped.append(request)
        return stopped

    def retract(self) -> int:
        """Send every running request back to the head of the queue: keys and values are dropped, output is kept."""
        count = len(self.running)
        for request in self.running:
            self._unindex(request)
            request.row, request.filled, request.prefilling = -1, 0, False
            request.retractions += 1
        self.waiting.extendleft(reversed(self.running))
        self.running.clear()
        return count

    def forget_cache(self) -> None:
        """Drop every retained prefix. Running requests would keep theirs, so there must be none."""
        if self.running:
            raise RuntimeError(f"{len(self.running)} requests are running")
        self._free.extend(self._retained.values())
        self._retained.clear()
        self._index.clear()
        self._copies.clear()
        self._kept.clear()

    def newly_kept(self) -> tuple[list[Copy], list[Kept]]:
        """Strings that went to a cache slot since the last call, and the copies to be made before they are read."""
        kept, self._kept = [kept for kept in self._kept if kept.holder in self._retained], []
        if not kept:
            return [], []
        copies, self._copies = self._copies, []
        return copies, kept

    def cached(self, request: Request) -> int:
        """How many of its leading tokens the cache has now."""
        return self._index.longest(request.salt, request.tokens[:-1])[1]

    def adopt(self, salt: str, tokens: list[int]) -> tuple[list[Copy], int] | None:
        """A cache slot for a string that was computed elsewhere: (copies to make first, slot); None: there is none."""
        slot = self._cache_slot()
        if slot is None:
            return None
        self._holders += 1
        self._retained[self._holders] = slot
        self._index.insert(self._holders, salt, tokens)
        copies, self._copies = self._copies, []
        return copies, slot

    def mark_version(self, old_version: str) -> None:
        """The weights change now: what was sampled so far belongs to `old_version`."""
        for request in (*self.running, *self.waiting):
            if request.completion_tokens:
                request.version_ends.append((old_version, request.completion_tokens))

    @property
    def retained_slots(self) -> int:
        return len(self._retained)

    @property
    def used_tokens(self) -> int:
        """Positions that running requests hold keys and values for."""
        return sum(request.filled for request in self.running)

    # -- admission ----------------------------------------------------------------------------------------------

    def _ready_rows(self) -> int:
        """Rows past their prefill, which need exactly one token: all, or all but the last (see the invariant)."""
        return len(self.running) - bool(self.running and self.running[-1].prefilling)

    def _admit(self, budget: int) -> None:
        """Give rows to waiting requests while their uncached tokens fit; the last may be cut and go on next step."""
        deferred: list[Request] = []
        while self.waiting and len(self.running) < self.rows and budget > 0:
            request = self.waiting.popleft()
            holder, matched = self._index.longest(request.salt, request.tokens[:-1])
            if self._worth_waiting(request, matched):
                deferred.append(request)
                continue
            self._place(request, holder, matched)
            budget -= len(request.tokens) - matched
        self.waiting.extendleft(reversed(deferred))

    def _worth_waiting(self, request: Request, matched: int) -> bool:
        """Whether a prefill under way will soon offer a much longer prefix than the cache does now."""
        return bool(len(self._filling)) and (
            self._filling.longest(request.salt, request.tokens[:-1])[1] >= matched + MIN_SHARED_TOKENS
        )

    def _place(self, request: Request, holder: int | None, matched: int) -> None:
        request.row = len(self.running)
        self.running.append(request)
        if holder is not None:
            self._copies.append(Copy(self._slot(holder), request.row, matched))
            if holder in self._retained:
                self._retained.move_to_end(holder)
        request.filled, request.prefilling = matched, True
        if request.cached_tokens < 0:
            start, stop = request.adopted
            request.cached_tokens = matched
            request.stored_tokens = max(0, min(matched, stop) - start)
        self._holders += 1
        request.holder = self._holders
        self._filling.insert(request.holder, request.salt, request.tokens)

    def _slot(self, holder: int) -> int:
        slot = self._retained.get(holder)
        return slot if slot is not None else next(r.row for r in self.running if r.holder == holder)

    def _chunks(self, requests: list[Request]) -> list[Chunk]:
        chunks, budget = [], self.prefill_tokens
        for request in requests:
            stop = min(len(request.tokens), request.filled + budget)
            chunks.append(Chunk(request, request.filled, stop))
            budget -= stop - request.filled
        return chunks

    def _filled(self, chunk: Chunk) -> None:
        request = chunk.request
        request.filled = chunk.stop
        if chunk.completes:
            request.prefilling = False
            self._filling.remove(request.holder)
            self._index.insert(request.holder, request.salt, request.tokens)

    # -- the end of a request -----------------------------------------------------------------------------------

    def _unindex(self, request: Request) -> None:
        for index in (self._index, self._filling):
            if request.holder in index:
                index.remove(request.holder)

    def _retire(self, request: Request) -> None:
        """Keep the request's prefix in a cache slot and close the gap that it leaves among the rows."""
        self._unindex(request)
        string = request.tokens[: request.filled]
        if string:
            self._retain(request, string)
        self._close_gap(request.row)
        request.row, request.prefilling = -1, False

    def _retain(self, request: Request, string: list[int]) -> None:
        """Copy a row to a cache slot; retained prefixes of it are redundant now and give up theirs."""
        holder, matched = self._index.longest(request.salt, string)
        if holder is not None and matched == len(string) and holder in self._retained:
            self._retained.move_to_end(holder)
            return
        for other in self._index.contained_in(request.salt, string):
            if other in self._retained:
                self._forget(other)
        slot = self._cache_slot()
        if slot is None:
            return
        self._retained[request.holder] = slot
        self._index.insert(request.holder, request.salt, string)
        self._copies.append(Copy(request.row, slot, len(string)))
        if self.notes_kept:
            self._kept.append(Kept(request.holder, request.salt, string, slot))

    def _cache_slot(self) -> int | None:
        """A free one, if need be the one used longest ago."""
        if not self._free and self._retained:
            self._forget(next(iter(self._retained)))
        return self._free.pop() if self._free else None

    def _forget(self, holder: int) -> None:
        self._index.remove(holder)
        self._free.append(self._retained.pop(holder))

    def _close_gap(self, row: int) -> None:
        """Rows stay dense, and one in the middle of its prefill stays last."""
        last = len(self.running) - 1
        if row < last and self._ready_rows() == last and row < last - 1:
            self._move(last - 1, row)
            row = last - 1
        if row < last:
            self._move(last, row)
        self.running.pop()

    def _move(self, source: int, target: int) -> None:
        request = self.running[source]
        self._copies.append(Copy(source, target, request.filled))
        self.running[target] = request
        request.row = target


def _reports_now(request: Request) -> bool:
    """The first token at once, then one chunk per interval."""
    done, interval = request.completion_tokens, request.stream_interval
    return interval > 0 and (done == 1 or done % interval == 0)


def _finish_reason(request: Request, token: int) -> dict[str, Any] | None:
    """Length goes before stop, as in the real engine."""
    if request.completion_tokens >= request.max_new_tokens:
        return {"type": "length", "length": request.max_new_tokens}
    if token in request.stop_ids:
        return {"type": "stop", "matched": token}
    return None
