"""Decoding as a law of load: every running request gets tokens at one pace, slower the more of them share a slot. Pure.

The law of the simulator: a token takes 1 + slope * (max(load, floor) - 1) of its nominal time, load = requests / slots.
`_clock` is the pool's own clock, in tokens that each running request has got; it stands still while the pool is held.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

NEVER = float("inf")


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How fast one engine decodes, in seconds that really pass."""

    slots: int
    tokens_per_s: float  # of one request at load 1
    load_slope: float = 0.0
    load_floor: float = 0.5

    def at(self, running: int) -> float:
        """Tokens per second and request with so many running."""
        load = max(running / self.slots, self.load_floor)
        return self.tokens_per_s / max(0.05, 1.0 + self.load_slope * (load - 1.0))


@dataclass
class Work:
    """One running request: the clock at its start, tokens wanted, tokens that were reported."""

    began: float
    wanted: int
    every: int  # tokens between reports
    reported: int = 0


class Pool:
    """`advance` to a time, then read or change. Times are any clock that does not go back."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._clock = self._now = 0.0
        self._due: list[tuple[float, str]] = []
        self.running: dict[str, Work] = {}
        self.held = False
        self.slow_s = 0.0  # more for every token, for tests
        self.request_s = 0.0  # seconds of requests that were running and not held, summed over requests
        self.tokens = 0  # that left the pool

    @property
    def slots(self) -> int:
        return self._pace.slots

    def advance(self, now: float) -> None:
        passed, self._now = now - self._now, now
        if passed > 0.0 and self.running and not self.held:
            self._clock += passed * self._rate()
            self.request_s += passed * len(self.running)

    def _rate(self) -> float:
        """Tokens per second that each running request gets now."""
        pace = self._pace.at(len(self.running))
        return pace / (1.0 + pace * self.slow_s)

    def start(self, rid: str, wanted: int, every: int) -> None:
        self.running[rid] = work = Work(self._clock, wanted, max(1, every))
        self._plan(rid, work)

    def _plan(self, rid: str, work: Work) -> None:
        """A first token at once, as an engine streams; then every so many."""
        step = work.every if work.reported else 1
        heapq.heappush(self._due, (work.began + min(work.wanted, work.reported + step), rid))

    def next_due(self) -> float:
        """When the next report is due if nothing changes."""
        self._forget()
        if self.held or not self._due:
            return NEVER
        return self._now + max(0.0, self._due[0][0] - self._clock) / self._rate()

    def reports(self) -> list[tuple[str, int, bool]]:
        """(request, its tokens so far, whether these are all) of everything due; a request that has all is gone."""
        out: list[tuple[str, int, bool]] = []
        self._forget()
        while self._due and self._due[0][0] <= self._clock + 1e-6:
            rid = heapq.heappop(self._due)[1]
            work = self.running[rid]
            work.reported = self.done(rid)
            last = work.reported >= work.wanted
            if last:
                self.remove(rid)
            else:
                self._plan(rid, work)
            out.append((rid, work.reported, last))
            self._forget()
        return out

    def done(self, rid: str) -> int:
        """Tokens that a running request has."""
        work = self.running[rid]
        return min(work.wanted, int(self._clock - work.began + 1e-6))

    def remove(self, rid: str) -> int:
        """Take a request out. Returns its tokens."""
        tokens = self.done(rid)
        del self.running[rid]
        self.tokens += tokens
        return tokens

    def _forget(self) -> None:
        """Reports of requests that left, or that were planned for an earlier one of the same name."""
        while self._due and self._due[0][1] not in self.running:
            heapq.heappop(self._due)
