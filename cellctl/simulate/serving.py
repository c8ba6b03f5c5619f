"""All serving cells as one pool: executions in flight advance together, slower the more of them share a slot.

The law: an execution takes 1 + slope * (max(load, floor) - 1) of its nominal time, load = executions / slots of the
serving cells. `work` is the pool's own clock, in nominal seconds done per execution; an end is due when that clock
reaches it. With no cell serving both clocks stand still: the wait is the infrastructure's and no limit counts it. A
paused execution takes no slot, gets nothing done, and its limit stands still, too.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

NEVER = float("inf")


@dataclass
class Running:
    """`began` and `limit` by the clock that limits go by, `end` by that of work. Of a paused one: what is left."""

    began: float
    end: float
    limit: float


class Serving:
    """`advance` to a time, then read or change; `next_end()` says when the next execution ends if nothing changes."""

    def __init__(self, slope: float, floor: float, limit_s: float) -> None:
        self._slope, self._floor, self._limit_s = slope, floor, limit_s
        self.slots = 0
        self.load = 0.0  # executions / slots
        self._rate = 0.0  # nominal seconds per second
        self.now = self._work = self._clock = 0.0
        self._ends: list[tuple[float, str]] = []
        self._limits: list[tuple[float, str]] = []
        self.running: dict[str, Running] = {}
        self.paused: dict[str, Running] = {}

    def add_slots(self, slots: int) -> None:
        """A cell begins to serve, or with a negative number ends."""
        self.slots += slots
        self._changed()

    def _changed(self) -> None:
        self.load = len(self.running) / self.slots if self.slots else 0.0
        slowdown = max(0.05, 1.0 + self._slope * (max(self.load, self._floor) - 1.0))
        self._rate = 1.0 / slowdown if self.slots else 0.0

    def advance(self, now: float) -> None:
        passed = now - self.now
        if passed > 0.0 and self.slots:
            self._work += passed * self._rate
            self._clock += passed
        self.now = now

    def start(self, execution: str, work_s: float) -> None:
        self._run(execution, Running(self._clock, self._work + work_s, self._clock + self._limit_s))

    def _run(self, execution: str, one: Running) -> None:
        self.running[execution] = one
        self._changed()
        heapq.heappush(self._ends, (one.end, execution))
        heapq.heappush(self._limits, (one.limit, execution))

    def pause(self, execution: str) -> None:
        """One that does not run is left as it is."""
        one = self.running.pop(execution, None)
        if one is not None:
            self.paused[execution] = Running(one.began - self._clock, one.end - self._work, one.limit - self._clock)
            self._changed()

    def resume(self, execution: str) -> None:
        """One that is not paused is left as it is."""
        left = self.paused.pop(execution, None)
        if left is not None:
            clock = self._clock
            self._run(execution, Running(left.began + clock, left.end + self._work, left.limit + clock))

    def next_end(self) -> float:
        if not self.slots or not self.running:
            return NEVER
        self._forget()
        due = self.now + max(0.0, self._ends[0][0] - self._work) / self._rate
        return min(due, self.now + max(0.0, self._limits[0][0] - self._clock))

    def end(self) -> tuple[str, bool, float]:
        """The execution that ends now, whether the limit ended it, and its seconds without the waits that are ours.
        Call it at the time `next_end` gave.
        """
        self._forget()
        by_work = max(0.0, self._ends[0][0] - self._work) / self._rate
        timed_out = self._limits[0][0] - self._clock < by_work
        execution = self._limits[0][1] if timed_out else self._ends[0][1]
        one = self.running.pop(execution)
        self._changed()
        return execution, timed_out, self._clock - one.began

    def _forget(self) -> None:
        """Entries of executions that ended, or paused since and so end at another time."""
        while (one := self.running.get(self._ends[0][1])) is None or one.end != self._ends[0][0]:
            heapq.heappop(self._ends)
        while (one := self.running.get(self._limits[0][1])) is None or one.limit != self._limits[0][0]:
            heapq.heappop(self._limits)
