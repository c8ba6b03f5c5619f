"""Which group is in which batch: lots of groups with enough valid executions, in the order in which they closed, or
as the reserve lets them out. Pure.

A place, once given, is never taken away: the journal gives the same places at the next start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import correlation
from typing import Any

from gyre_base.ids import PolicyVersion
from gyre_base.messages import GroupClosed
from gyre_base.reserve import Reserve
from trajtools.trajd.events import Packed, PackedStep


class LedgerBroken(AssertionError):
    """An invariant does not hold: a bug here, never a peer's fault."""


@dataclass
class Group:
    """A closed group. `loaded`: its payloads are in this process and can be leased. `reported`: cellctl knows."""

    closed: GroupClosed
    packed: Packed | None = None
    loaded: bool = False
    reported: bool = False

    @property
    def name(self) -> str:
        return self.closed.group

    @property
    def steps(self) -> tuple[PackedStep, ...]:
        return self.content.steps

    @property
    def content(self) -> Packed:
        if self.packed is None:
            raise LedgerBroken(f"{self.name} has a place but is not packed")
        return self.packed


class Lots:
    """Groups by name, by order of closing, by place."""

    def __init__(self, groups_per_batch: int, order: str = "arrival", reserve_groups: int = 0) -> None:
        self.size = groups_per_batch
        self.reserve: Reserve[Group] = Reserve(order, reserve_groups, groups_per_batch)
        self._newest = (0, 0)  # (closing, to_come) of the newest closing heard of: words may come out of order
        self.groups: dict[str, Group] = {}
        self.group_of: dict[str, Group] = {}  # by micro-step
        self._order: list[str] = []  # as they closed
        self._resolved = 0  # of `_order`: how many have been told apart into enough and not enough
        self._placed: list[Group] = []

    def close(self, closed: GroupClosed) -> bool:
        """Note a closed group; the first word on its members holds. False if it was known."""
        if closed.group in self.groups:
            return False
        self.groups[closed.group] = Group(closed)
        self._order.append(closed.group)
        self._newest = max(self._newest, (closed.closing, closed.to_come))
        return True

    def pack(self, packed: Packed) -> None:
        """Note what a group was packed into. Raises LedgerBroken if it was packed differently before."""
        group = self.groups[packed.group]
        if group.packed is not None and group.packed.steps != packed.steps:
            raise LedgerBroken(f"{group.name} was packed into other micro-steps before; has its call log changed?")
        if group.packed is None:
            group.packed = packed
            self.group_of.update({step.id: group for step in packed.steps})
        group.loaded = True
        self._place()

    def _place(self) -> None:
        """The reserve sees groups in the order of closing, so one waits for an earlier one that is still being
        packed.
        """
        while self._resolved < len(self._order):
            group = self.groups[self._order[self._resolved]]
            if group.packed is None:
                return
            self._resolved += 1
            to_come = self._newest[1] + len(self._order) - self._resolved
            if group.packed.enough:
                self._placed.extend(self.reserve.add(group, group.closed.seconds, to_come))
            else:
                self._placed.extend(self.reserve.settle(to_come))

    def not_loaded(self, from_batch: int) -> list[str]:
        """Groups that batches from `from_batch` on need, or may need, and whose payloads are not here."""
        done = {group.name for group in self._placed[: from_batch * self.size]}
        groups = [self.groups[name] for name in self._order if name not in done]
        return [g.name for g in groups if not g.loaded and (g.packed is None or g.packed.enough)]

    def lot(self, batch: int) -> list[Group]:
        """Groups placed in a batch so far."""
        return self._placed[batch * self.size : (batch + 1) * self.size]

    def ids(self, batch: int) -> list[str]:
        return [step.id for group in self.lot(batch) for step in group.steps]

    def is_full(self, batch: int) -> bool:
        return len(self.lot(batch)) == self.size

    @property
    def started(self) -> int:
        """Batches with at least one group."""
        return -(-len(self._placed) // self.size)

    def executions(self, batch: int) -> int:
        return sum(group.content.counted for group in self.lot(batch))

    def owned_tokens(self, batch: int) -> int:
        return sum(group.content.owned_tokens for group in self.lot(batch))

    def staleness(self, batch: int, base_version: str) -> dict[str, Any]:
        """d = base step - dispatched step, by counted executions. Negative after a resume from before the dispatch."""
        by: Counter[int] = Counter()
        for group in self.lot(batch):
            by[_step(base_version) - _step(group.closed.dispatched_version)] += group.content.counted
        total = by.total()
        mean = sum(d * n for d, n in by.items()) / total if total else 0.0
        return {"mean": mean, "max": max(by, default=0), "by": {str(d): n for d, n in sorted(by.items())}}

    def bias(self, batches: int) -> dict[str, float | None]:
        """Correlations over the groups of the first batches of duration, mean score and place in the burst (steps from
        the dispatch to the batch): what training in order of arrival does to the order of easy and hard.
        """
        rows = [
            (group.closed.seconds, _mean_score(group.closed), float(batch - _step(group.closed.dispatched_version)))
            for batch in range(batches)
            for group in self.lot(batch)
        ]
        seconds, scores, places = zip(*rows, strict=True) if rows else ((), (), ())
        return {
            "duration_by_place": _correlation(seconds, places),
            "score_by_place": _correlation(scores, places),
            "score_by_duration": _correlation(scores, seconds),
        }


def _mean_score(closed: GroupClosed) -> float:
    """Of the executions that count; 0.0 if none does."""
    scores = [e.score for e in closed.executions if e.outcome.counts and e.score is not None]
    return sum(scores) / len(scores) if scores else 0.0


def _correlation(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Pearson's; None where one of them does not vary."""
    return round(correlation(x, y), 4) if len(set(x)) > 1 and len(set(y)) > 1 else None


def _step(version: str) -> int:
    return PolicyVersion.parse(version).step
