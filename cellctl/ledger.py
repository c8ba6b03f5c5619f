"""Executions and groups: who is dispatched, who is finished, who is tried again. Every task is done, in flight or
pending, exactly one.

Pure bookkeeping; the scheduler in core.py decides when to dispatch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from gyre_base.vocabulary import Outcome, Purpose


@dataclass
class Execution:
    """One attempt at one place of a group. `executor` is empty while it waits for one."""

    id: str
    group: str
    place: int
    attempt: int
    purpose: Purpose
    executor: str = ""
    dispatched_at: float = 0.0
    assigned_at: float = 0.0
    excused: int = 0  # of the attempts before, those that ended because an executor was told to leave
    calls_no_more: bool = False  # its harness has ended; only its score is to come
    paused: str = ""  # why its calls are held; "" = they are served
    outcome: Outcome | None = None
    score: float | None = None
    wall_s: float = 0.0


@dataclass
class Group:
    """The executions of one task. `members[place]` is the newest attempt; a group closes when all have an outcome."""

    id: str
    task: str
    serial: int
    purpose: Purpose
    version: str
    members: list[str] = field(default_factory=list)
    attempts: list[str] = field(default_factory=list)  # every attempt, until the group closes
    running: int = 0
    closed: bool = False
    packed: bool = False
    enough: bool = True


@dataclass
class TaskQueue:
    """Tasks in an order fixed by the seed; a new pass reshuffles. `next` names one task per group."""

    tasks: tuple[str, ...]
    seed: int
    given: int = 0
    _order: list[str] = field(default_factory=list)
    _window: list[str] = field(default_factory=list)

    def next_by(self, key: Callable[[str], float], window: int) -> str:
        """The task with the largest key of the next `window` ones; the next window begins when all of this are given,
        so nobody waits for ever. The earliest of equals.
        """
        if not self._window:
            self._window = [self.next() for _ in range(window)]
        task = max(self._window, key=key)
        self._window.remove(task)
        return task

    def next(self) -> str:
        if not self._order:
            self._order = _shuffled(self.tasks, self.seed + self.given)
        self.given += 1
        return self._order.pop()


def _shuffled(items: tuple[str, ...], seed: int) -> list[str]:
    """Fisher-Yates over a linear congruential sequence: the same everywhere, no hidden random state."""
    out, state = list(items), seed * 2 + 1
    for i in range(len(out) - 1, 0, -1):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        j = (state >> 33) % (i + 1)
        out[i], out[j] = out[j], out[i]
    return out


class Ledger:
    """All groups and executions of the run. Finished groups keep only what reports need."""

    def __init__(self, retry_budget: int) -> None:
        self.executions: dict[str, Execution] = {}
        self.groups: dict[str, Group] = {}
        self.in_flight: dict[str, Execution] = {}
        self._in_scoring = 0  # of those, how many call no more
        self.paused = 0  # of those, how many are paused; such call again, so that none is both
        self.outcomes: dict[str, dict[str, int]] = {}
        self.retries = 0
        self.open_by_purpose: Counter[Purpose] = Counter()  # groups dispatched, not closed
        self.closed_groups = 0  # of training
        self._unpacked: dict[str, Group] = {}
        self._retry_budget = retry_budget
        self._serial = 0

    def open_group(self, task: str, size: int, purpose: Purpose, version: str, now: float) -> list[Execution]:
        """A new group and its first attempts, not yet assigned to executors."""
        serial, self._serial = self._serial, self._serial + 1
        prefix = {Purpose.TRAIN: "g", Purpose.EVAL_SAMPLED: "s", Purpose.EVAL_GREEDY: "d"}[purpose]
        group = Group(id=f"{prefix}{serial:05d}", task=task, serial=serial, purpose=purpose, version=version)
        self.groups[group.id] = group
        self.open_by_purpose[purpose] += 1
        return [self._attempt(group, place, 0, now) for place in range(size)]

    def _attempt(self, group: Group, place: int, attempt: int, now: float) -> Execution:
        made = Execution(
            id=f"{group.id}-{place:02d}.{attempt}",
            group=group.id,
            place=place,
            attempt=attempt,
            purpose=group.purpose,
            dispatched_at=now,
        )
        self.executions[made.id] = self.in_flight[made.id] = made
        group.attempts.append(made.id)
        group.running += 1
        if place == len(group.members):
            group.members.append(made.id)
        else:
            group.members[place] = made.id
        return made

    def finish(
        self, execution: str, outcome: Outcome, score: float | None, wall_s: float, now: float, *, excused: bool = False
    ) -> Execution | None:
        """Note an outcome. Returns the next attempt if this one failed by our fault and the budget allows one.

        An `excused` end (a requeue, a preemption) costs nothing of it: an execution of many hours lives through many.
        """
        done = self.in_flight.pop(execution)
        self._in_scoring -= done.calls_no_more
        self.paused -= bool(done.paused)
        self.groups[done.group].running -= 1
        done.outcome, done.score, done.wall_s = outcome, score, wall_s
        by_outcome = self.outcomes.setdefault(done.purpose.value, {})
        charged = done.attempt - done.excused
        if outcome in (Outcome.INFRA_FAILED, Outcome.CANCELLED) and (excused or charged < self._retry_budget):
            self.retries += 1
            again = self._attempt(self.groups[done.group], done.place, done.attempt + 1, now)
            again.excused = done.excused + excused
            return again
        by_outcome[outcome.value] = by_outcome.get(outcome.value, 0) + 1
        return None

    def closes(self, group: str) -> bool:
        """Whether every place of the group now has its final outcome."""
        record = self.groups[group]
        return not record.closed and record.running == 0

    def close(self, group: str) -> list[Execution]:
        """Final members in order of place; forgets superseded attempts."""
        record = self.groups[group]
        record.closed = True
        self.open_by_purpose[record.purpose] -= 1
        if record.purpose is Purpose.TRAIN:
            self.closed_groups += 1
            self._unpacked[group] = record
        final = [self.executions[m] for m in record.members]
        for name in record.attempts:
            del self.executions[name]
        record.attempts.clear()
        return final

    def pack(self, group: str, enough: bool) -> None:
        """trajd has packed it; `enough` says whether it has enough valid members to be trained."""
        record = self._unpacked.pop(group)
        record.packed, record.enough = True, enough

    def end_calls(self, execution: str) -> None:
        """Its harness has ended: it needs no engine any more, whatever its evaluator still does."""
        record = self.in_flight.get(execution)
        if record is not None and not record.calls_no_more:
            self.pause(execution, "")
            record.calls_no_more = True
            self._in_scoring += 1

    def pause(self, execution: str, why: str) -> bool:
        """Hold its calls because of `why`, or with "" let them go on. False if that changes nothing or it is over."""
        record = self.in_flight.get(execution)
        if record is None or record.calls_no_more or bool(record.paused) == bool(why):
            return False
        record.paused = why
        self.paused += 1 if why else -1
        return True

    def level(self) -> int:
        """Executions dispatched whose harness has not ended and that are not paused (the water level).

        At least 1 until all have their outcome: one that is lost while it is scored runs again, and needs an engine.
        """
        return max(len(self.in_flight) - self._in_scoring - self.paused, min(1, len(self.in_flight)))

    def held_by(self, executor: str) -> Iterator[Execution]:
        return iter([e for e in self.in_flight.values() if e.executor == executor])

    def groups_open(self) -> int:
        """Training groups dispatched and not yet packed."""
        return self.open_by_purpose[Purpose.TRAIN] + len(self._unpacked)

    def unpacked(self) -> list[Group]:
        """Closed training groups that trajd has not answered for."""
        return list(self._unpacked.values())
