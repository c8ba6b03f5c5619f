"""Which trajectories of an execution are trained, and which of their tokens each one owns.

Owns DESIGN section 6: leaf classes, stubs, retries, at most Jmax, ownership after choosing. Invariants: a token is
owned by at most one kept trajectory; sampled = owned + dropped, itemised by reason. Weighs and packs nothing.

Two rules fill the slots. `greedy`: class by class, most new trainable tokens first. `paper`: within the best class that
still has new trainable tokens, a leaf drawn in proportion to them (seeded). The class comes first in both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from trajtools.breaks import Analysis, analyse, is_side
from trajtools.forest import Forest, Mark, Paint, Segment, paint

CLASSES = ("main", "main-summary", "sub-agent", "sub-agent-summary")  # best first
OwnedRange: TypeAlias = tuple[str, int, int]  # call, first and last + 1 of its completion
WITHHELD = ("conflict", "incomplete")  # of a whole execution
REASONS = (*WITHHELD, "side", "unlabelled", "retry", "undelivered", "untrainable", "duplicate", "stub", "not-chosen")


@dataclass(frozen=True, kw_only=True)
class Rules:
    """How to choose. `stubs`: drop them, attach them to a kept path without a slot (for tree packing), or keep."""

    jmax: int | None = 5  # None: all
    rule: Literal["greedy", "paper"] = "greedy"
    seed: int = 0  # of the paper's draw
    stubs: Literal["drop", "attach", "keep"] = "drop"
    unlabelled: bool = False  # train calls that nothing classified
    incomplete: Literal["keep", "mask"] = "keep"  # of executions that miss calls: what is there is on-policy still


DEFAULT = Rules()


@dataclass(frozen=True, eq=False)
class Trajectory:
    """A root-to-leaf path. `path` without the empty root; `end` its depth; `new_tokens` the trainable ones it owns."""

    leaf: Mark
    kind: str
    path: tuple[Segment, ...]
    end: int
    new_tokens: int
    stub: bool = False

    @property
    def id(self) -> str:
        return self.leaf.id


@dataclass(frozen=True, eq=False)
class Choice:
    """The kept trajectories, best first (priority of ownership), and what became of every sampled token."""

    execution: str
    kept: tuple[Trajectory, ...]
    passed_over: tuple[Trajectory, ...]  # leaves without a slot, with what they would have added
    stubs: tuple[Trajectory, ...]
    sampled: int
    owned: int  # T_e
    dropped: Mapping[str, int]  # reason -> sampled tokens
    painted: Mapping[Segment, Paint]
    marks: tuple[Mark, ...]  # by commit: `Paint.owner` points here
    owned_ranges: tuple[OwnedRange, ...]

    def by_kind(self) -> dict[str, int]:
        """Owned tokens per class: shows when one class starves the others."""
        out: Counter[str] = Counter()
        for trajectory in self.kept:
            out[trajectory.kind] += trajectory.new_tokens
        return dict(out)


def class_of(mark: Mark) -> str:
    """The class of a leaf that ends in this call: by agent and by the purpose of the call (our reading)."""
    if mark.call.label in CLASSES:
        return mark.call.label
    agent = "main" if mark.call.agent.role == "main" else "sub-agent"
    return f"{agent}-summary" if mark.call.purpose == "summary" else agent


def choose(
    forest: Forest, rules: Rules = DEFAULT, analysis: Analysis | None = None, *, withheld: str | None = None
) -> Choice:
    """Fill the slots of one execution. The same calls give the same choice, in whatever order they came.

    `withheld`: why nothing of this execution may train (one of WITHHELD); then all of it is dropped for that.
    """
    analysis = analysis or analyse(forest)
    marks = forest.marks()
    excluded = {mark.id: why for mark in marks if (why := withheld or _why_not(mark, rules, analysis))}
    eligible = [mark for mark in marks if mark.id not in excluded]
    painted = paint(eligible)
    tips = _tips(eligible)
    is_stub = _stub_test(analysis, {mark.id for mark in eligible}, rules)
    stubs = [tip for tip in tips if is_stub(tip)]
    slots = _Slots(painted, rules, forest.execution)
    kept = slots.fill([tip for tip in tips if not is_stub(tip)])
    attached = slots.attach(stubs) if rules.stubs == "attach" else []
    ledger = _Ledger(painted, slots.covered, [tip for tip in stubs if tip.id not in {t.id for t in attached}])
    dropped, ranges = ledger.account(marks, excluded)
    return Choice(
        execution=forest.execution,
        kept=(*kept, *attached),
        passed_over=tuple(slots.left()),
        stubs=tuple(slots.as_trajectory(tip, stub=True) for tip in stubs),
        sampled=forest.sampled_tokens,
        owned=sum(end - start for _, start, end in ranges),
        dropped=dropped,
        painted=painted,
        marks=tuple(marks),
        owned_ranges=tuple(ranges),
    )


# ---- candidates ----------------------------------------------------------------------------------------------------


def _why_not(mark: Mark, rules: Rules, analysis: Analysis) -> str | None:
    """Why a call takes no part in the loss; None if it does."""
    if is_side(mark):
        return "side"
    if mark.call.label not in (*CLASSES, "retry") and not rules.unlabelled:
        return "unlabelled"
    if mark.id in analysis.superseded:
        return "retry"
    if mark.call.delivered is False and mark.id not in analysis.extended:
        return "undelivered"
    return None


def _tips(eligible: Sequence[Mark]) -> list[Mark]:
    """Calls behind which no other eligible call ends: leaves of the eligible part. Of equal ends the earliest."""
    deeper: set[Segment] = set()  # segments with an eligible end in a descendant
    for segment in {mark.segment for mark in eligible}:
        while segment.parent is not None and segment.parent not in deeper:
            segment = segment.parent
            deeper.add(segment)
    last: dict[Segment, Mark] = {}
    for mark in eligible:  # by commit
        if mark.segment not in deeper and (mark.segment not in last or mark.end > last[mark.segment].end):
            last[mark.segment] = mark
    return sorted(last.values(), key=lambda m: m.order)


def _stub_test(analysis: Analysis, eligible: set[str], rules: Rules) -> Callable[[Mark], bool]:
    """A stub exists only because its last turn came back changed: another eligible call continued it inexactly."""
    if rules.stubs == "keep":
        return lambda tip: False
    return lambda tip: any(call in eligible for call in analysis.drifted.get(tip.id, ()))


# ---- slots ---------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Slots:
    """Keeps which part of each segment is covered by a kept trajectory; depths are relative to the segment."""

    painted: Mapping[Segment, Paint]
    rules: Rules
    execution: str
    covered: dict[Segment, int] = field(default_factory=dict)
    _left: list[Mark] = field(default_factory=list)

    def fill(self, tips: list[Mark]) -> list[Trajectory]:
        """Up to Jmax trajectories, best first."""
        self._left = list(tips)
        draw = self._drawing() if self.rules.rule == "paper" else self._most_new
        kept: list[Trajectory] = []
        for kind in CLASSES:
            while self.rules.jmax is None or len(kept) < self.rules.jmax:
                gains = [(tip, self._gain(tip)) for tip in self._left if class_of(tip) == kind]
                gains = [(tip, gain) for tip, gain in gains if gain > 0]
                if not gains:
                    break
                kept.append(self._keep(draw(gains)))
        return kept

    def attach(self, stubs: Iterable[Mark]) -> list[Trajectory]:
        """Stubs whose fork lies on a kept path: they cost only their own tokens in a tree."""
        out = []
        for tip in stubs:
            fork = tip.segment_at(max(tip.prompt_tokens - 1, 0))
            if fork in self.covered and self._gain(tip) > 0:
                out.append(self._keep(tip, stub=True))
        return out

    def left(self) -> list[Trajectory]:
        """Leaves without a slot, most new tokens first."""
        out = [self.as_trajectory(tip) for tip in self._left]
        return sorted(out, key=lambda t: (CLASSES.index(t.kind), -t.new_tokens, t.leaf.call.t1, t.id))

    def as_trajectory(self, tip: Mark, stub: bool = False) -> Trajectory:
        return Trajectory(tip, class_of(tip), tuple(tip.segment.path()[1:]), tip.end, self._gain(tip), stub)

    def _keep(self, tip: Mark, stub: bool = False) -> Trajectory:
        trajectory = self.as_trajectory(tip, stub)
        for segment in trajectory.path:
            self.covered[segment] = min(segment.end, tip.end) - segment.start
        if tip in self._left:
            self._left.remove(tip)
        return trajectory

    def _gain(self, tip: Mark) -> int:
        """Trainable tokens on the path that no kept trajectory has."""
        new = (s for s in tip.segment.path() if s not in self.covered and s in self.painted)
        return sum(int(self.painted[s].trainable[: tip.end - s.start].sum()) for s in new)

    @staticmethod
    def _most_new(gains: list[tuple[Mark, int]]) -> Mark:
        return min(gains, key=lambda g: (-g[1], g[0].call.t1, g[0].id))[0]

    def _drawing(self) -> Callable[[list[tuple[Mark, int]]], Mark]:
        """The paper's draw: in proportion to the tokens not yet masked; the generator belongs to (seed, execution)."""
        rng = np.random.default_rng(xxhash.xxh3_64_intdigest(f"{self.rules.seed}:{self.execution}".encode()))

        def draw(gains: list[tuple[Mark, int]]) -> Mark:
            gains = sorted(gains, key=lambda g: g[0].id)
            weights = np.array([gain for _, gain in gains], np.float64)
            return gains[int(rng.choice(len(gains), p=weights / weights.sum()))][0]

        return draw


# ---- accounting ----------------------------------------------------------------------------------------------------


class _Ledger:
    """Gives every sampled token of every call one fate."""

    def __init__(self, painted: Mapping[Segment, Paint], covered: Mapping[Segment, int], stubs: Iterable[Mark]) -> None:
        self._painted = painted
        self._covered = covered
        self._stubs = {tip.segment for tip in stubs}

    def account(self, marks: Sequence[Mark], excluded: Mapping[str, str]) -> tuple[dict[str, int], list[OwnedRange]]:
        """(dropped by reason, owned ranges of each completion)."""
        dropped: Counter[str] = Counter()
        ranges: list[OwnedRange] = []
        for mark in marks:
            if why := excluded.get(mark.id):
                dropped[why] += mark.sampled
                continue
            owned = self._owned(mark, dropped)
            ranges.extend((mark.id, start, end) for start, end in runs(owned))
        return {why: dropped[why] for why in REASONS if dropped[why]}, ranges

    def _owned(self, mark: Mark, dropped: Counter[str]) -> NDArray[np.bool_]:
        """bool[sampled]: owned tokens of one call; the others are added to `dropped`."""
        owned = np.zeros(mark.sampled, np.bool_)
        trainable = mark.trainable()
        dropped["untrainable"] += mark.sampled - int(np.count_nonzero(trainable))
        for segment, start, end, offset in mark.pieces():
            can = trainable[offset : offset + end - start]
            if segment not in self._painted:
                continue
            mine = can & (self._painted[segment].owner[start:end] == mark.order)
            kept = mine.copy()
            kept[max(self._covered.get(segment, 0) - start, 0) :] = False
            can_n, mine_n, kept_n = (int(np.count_nonzero(x)) for x in (can, mine, kept))  # each within the one before
            dropped["duplicate"] += can_n - mine_n
            dropped["stub" if segment in self._stubs else "not-chosen"] += mine_n - kept_n
            owned[offset : offset + end - start] = kept
        return owned


def runs(flags: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """[start, end) of every run of True."""
    count = int(np.count_nonzero(flags))
    if count in (0, len(flags)):  # nearly always
        return [(0, count)] if count else []
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]
