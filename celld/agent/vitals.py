"""Whether a cell's children get anything done: tokens of the engine, micro-steps of the rank. Pure.

A child that answers but, with work in hand, adds nothing to its count for `stall_s` is stalled: an open socket proves
nothing. `progress` and `work` of both together are what the agent's heartbeat says.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class _Child:
    count: int
    work: int
    moved: float


class Vitals:
    """Counts by child; a child's own count may start again from 0."""

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._children: dict[str, _Child] = {}
        self._silences: dict[str, int] = {}
        self.progress = 0

    @property
    def work(self) -> int:
        return sum(child.work for child in self._children.values())

    def silent(self, name: str) -> int:
        """It did not answer: how many times in a row now."""
        self._silences[name] = self._silences.get(name, 0) + 1
        return self._silences[name]

    def look(self, name: str, count: int, work: int, now: float) -> float:
        """Seconds for which the child has had work and added nothing, if that is too long; else 0."""
        self._silences.pop(name, None)
        child = self._children.setdefault(name, _Child(count, work, now))
        if count != child.count or not work or not child.work:
            self.progress += max(0, count - child.count)
            child.moved = now
        child.count, child.work = count, work
        return now - child.moved if now - child.moved > self._stall_s else 0.0

    def forget(self, name: str) -> None:
        """It is started anew."""
        self._children.pop(name, None)
        self._silences.pop(name, None)
