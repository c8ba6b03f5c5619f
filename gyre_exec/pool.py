"""How many executors there should be: the pool grows with the dispatched work and shrinks when executors stand idle.

Pure. Owns the decision only: what runs is told to it (`Seen`), what to do is its answer. Whatever ended a job (a time
limit, preemption, a lost node, an operator), its place is filled again while there is work for it; a job that Slurm
requeued itself is still there and is not started twice. Jobs that end before they ever join are tried again more and
more slowly.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gyre_base.messages import message

FIRST_PAUSE_S, LONGEST_PAUSE_S = 5.0, 300.0


@message("pool.seen")
class Seen:
    """shell -> core: the water level, executions by executor that cellctl knows, and what the launcher's jobs do."""

    level: int
    held: dict[str, int] = dataclasses.field(default_factory=dict)
    jobs: dict[str, str] = dataclasses.field(default_factory=dict)  # name -> pending | running; the ended are absent


@message("pool.submit")
class Submit:
    """core -> shell: start these executors, in one array where there are arrays."""

    names: tuple[str, ...]


@message("pool.leave")
class Leave:
    """core -> shell: ask this executor to end if it holds nothing."""

    name: str


@message("pool.withdraw")
class Withdraw:
    """core -> shell: end the job of an executor that has never joined."""

    name: str


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Numbers of one pool."""

    least: int = 1
    most: int = 1
    slots: int = 160  # executions that one executor takes
    idle_s: float = 120.0  # an executor that held nothing for so long may go
    unseen_s: float = 0.0  # for so long a job just submitted may not be listed yet


class Pool:
    """`handle` is the only entry."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self._idle_since: dict[str, float] = {}
        self._asked: dict[str, float] = {}  # submitted, not listed yet
        self._alive: set[str] = set()
        self._joined: set[str] = set()
        self._failures = 0
        self._not_before = 0.0

    def handle(self, event: Any, now: float) -> list[Any]:
        """One look at the world in, commands out."""
        match event:
            case Seen():
                self._take(event, now)
                return self._decide(event, now)
        raise AssertionError(f"pool: no rule for {event!r}")

    def wanted(self, level: int) -> int:
        """Executors for so many dispatched executions."""
        return max(self.bounds.least, min(self.bounds.most, math.ceil(level / self.bounds.slots)))

    def _take(self, seen: Seen, now: float) -> None:
        self._asked = {n: at for n, at in self._asked.items() if n not in seen.jobs and now - at < self.bounds.unseen_s}
        alive = {*seen.jobs, *self._asked}
        for name in self._alive - alive:
            if name not in self._joined:
                self._failures += 1
                self._not_before = now + min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (self._failures - 1))
            self._joined.discard(name)
        self._alive = alive
        new = set(seen.held) - self._joined
        self._joined |= set(seen.held) & alive
        if new & self._joined:
            self._failures, self._not_before = 0, now
        idle = {n for n, held in seen.held.items() if held == 0}
        self._idle_since = {n: self._idle_since.get(n, now) for n in idle}

    def _decide(self, seen: Seen, now: float) -> list[Any]:
        spare = len(self._alive) - self.wanted(seen.level)
        if spare > 0:
            return self._shrink(seen.held, spare, now)
        if spare == 0 or now < self._not_before:
            return []
        taken = self._alive | set(seen.held)  # one that cellctl still knows is not over yet, or is somebody else's
        free = (f"ex{i}" for i in range(self.bounds.most + len(taken)))
        names = tuple(n for n in free if n not in taken)[:-spare]
        self._asked |= dict.fromkeys(names, now)
        self._alive |= set(names)
        return [Submit(names=names)]

    def _shrink(self, held: Mapping[str, int], spare: int, now: float) -> list[Any]:
        """Those that wait in the queue first, then those that stand idle; the highest numbers first."""
        order = sorted(self._alive, key=lambda n: (len(n), n), reverse=True)
        waiting = [n for n in order if n not in held and n not in self._asked and n not in self._joined]
        idle = [n for n in order if now - self._idle_since.get(n, now) >= self.bounds.idle_s]
        commands: list[Any] = [Withdraw(name=n) for n in waiting]
        commands += [Leave(name=n) for n in idle if n not in waiting]
        return commands[:spare]
