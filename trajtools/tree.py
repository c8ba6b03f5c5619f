"""The branching history of an execution as lines: who continued what, how far, and what of it is trained.

Owns the shape that `tree` draws. A line is a run of calls along one path; the busiest way on from a branch stays on the
line, every other way is a branch of it. So a conversation with a hundred retries is one line with a hundred short ones,
not a hundred levels. Prints nothing: `terminal` makes text, `picture` makes SVG and HTML.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from trajtools.breaks import Analysis, Break, analyse
from trajtools.choose import DEFAULT, Choice, Rules, choose, class_of
from trajtools.forest import Mark, Segment
from trajtools.recording import Execution
from trajtools.words import short

ALIKE = 3  # branches of one kind under one line that are folded into a row when there are more


@dataclass(eq=False)
class Line:
    """Calls along one path from depth `start` (where it leaves its parent) to `end`. Sizes are tokens or blocks."""

    id: int
    parent: int | None
    level: int
    kind: str  # class of its last call
    agent: str
    start: int
    end: int
    calls: tuple[str, ...]
    marks: tuple[tuple[int, int, bool], ...]  # (prompt end, completion end, owned) of each call: what to draw
    sampled: int
    owned: int
    fate: str  # kept, stub, retry, not-chosen, side, unlabelled, ... (what became of it)
    left_by: str  # kind of the break by which it leaves its parent, "" if it continues one
    lost: int
    t0: float
    t1: float
    branches: list[Line] = field(default_factory=list)

    def walk(self) -> Iterator[Line]:
        yield self
        for branch in self.branches:
            yield from branch.walk()

    def calls_below(self) -> int:
        return sum(len(line.calls) for line in self.walk())

    def as_json(self, execution: str) -> dict[str, Any]:
        names = (
            "id",
            "parent",
            "level",
            "kind",
            "agent",
            "start",
            "end",
            "sampled",
            "owned",
            "fate",
            "left_by",
            "lost",
        )
        return {"execution": execution, **{n: getattr(self, n) for n in names}, "calls": list(self.calls)}


@dataclass(frozen=True, eq=False)
class History:
    """One execution, ready to be drawn."""

    execution: str
    group: str
    outcome: str
    score: float | None
    unit: str
    calls: int
    recorded: int
    distinct: int
    owned: int
    breaks: dict[str, int]
    roots: tuple[Line, ...]

    def lines(self) -> Iterator[Line]:
        for root in self.roots:
            yield from root.walk()

    def title(self) -> str:
        score = f" {self.score:g}" if self.score is not None else ""
        ratio = self.recorded / max(self.distinct, 1)
        return (
            f"{self.execution}  {self.outcome}{score}  {self.calls:,} calls  {self.recorded:,} {self.unit} recorded, "
            f"{self.distinct:,} distinct ({ratio:.1f}x)"
            + (f", {self.owned:,} trained" if self.unit == "tokens" else "")
        )


def history(execution: Execution, rules: Rules = DEFAULT) -> History:
    """Everything `tree` says of one execution."""
    forest, reward = execution.forest, execution.reward
    analysis = analyse(forest)
    choice = choose(forest, rules, analysis, withheld=execution.withheld(rules))
    return History(
        execution=execution.id,
        group=execution.group,
        outcome=reward.status if reward else "unscored",
        score=reward.value if reward else None,
        unit="tokens" if execution.blocks is None else "blocks",
        calls=len(forest),
        recorded=forest.prompt_tokens + forest.sampled_tokens,
        distinct=forest.unique_tokens(),
        owned=choice.owned,
        breaks=dict(Counter(b.kind for b in analysis.breaks).most_common()),
        roots=tuple(_Grower(execution, analysis, choice).roots()),
    )


class _Grower:
    """Cuts the forest into lines."""

    def __init__(self, execution: Execution, analysis: Analysis, choice: Choice) -> None:
        self._forest = execution.forest
        self._breaks: dict[str, Break] = {b.call: b for b in analysis.breaks}
        self._owned: Counter[str] = Counter()
        for call, start, end in choice.owned_ranges:
            self._owned[call] += end - start
        self._fates = _fates(choice, analysis)
        self._best: dict[Segment, int] = {}
        for rank, kept in enumerate(choice.kept):
            for segment in kept.path:
                self._best.setdefault(segment, rank)
        self._calls: dict[Segment, int] = {}
        for segment in reversed(self._forest.segments()):  # children before parents
            own = len(segment.marks)
            self._calls[segment] = own + sum(self._calls[c] for c in segment.children.values())
        self._next = 0

    def roots(self) -> list[Line]:
        root = self._forest.root
        empty = list(root.marks)
        out = [self._line(child, None, 0) for child in self._ordered(list(root.children.values()))]
        if empty:
            out.append(self._made(empty, None, 0, 0, 0))
        return out

    def _ordered(self, children: list[Segment]) -> list[Segment]:
        return sorted(children, key=lambda c: (c.start, min((m.call.t0 for m in _below(c)), default=0.0)))

    def _line(self, head: Segment, parent: int | None, level: int) -> Line:
        segment, path = head, [head]
        aside: list[Segment] = []
        while segment.children:
            onward = max(segment.children.values(), key=self._weight)
            aside.extend(c for c in segment.children.values() if c is not onward)
            segment = onward
            path.append(segment)
        marks = sorted((m for s in path for m in s.marks), key=lambda m: (m.end, m.call.t0))
        line = self._made(marks, parent, level, head.start, path[-1].end)
        line.branches = [self._line(c, line.id, level + 1) for c in self._ordered(aside)]
        return line

    def _weight(self, child: Segment) -> tuple[int, int, int]:
        best = self._best.get(child)
        return self._calls[child], 0 if best is None else 1 << 20 >> best, child.end

    def _made(self, marks: list[Mark], parent: int | None, level: int, start: int, end: int) -> Line:
        number = self._next
        self._next += 1
        first = min(marks, key=lambda m: (m.call.t0, m.call.seq), default=None)
        last = max(marks, key=lambda m: (m.end, m.call.t1), default=None)
        found = self._breaks.get(first.id) if first is not None else None
        owned = sum(self._owned[m.id] for m in marks)
        fate = self._fates.get(last.id, "kept" if owned else "context") if last is not None else "context"
        return Line(
            id=number,
            parent=parent,
            level=level,
            kind=class_of(last) if last is not None else "context",
            agent=last.call.agent.id if last is not None else "",
            start=start,
            end=end,
            calls=tuple(m.id for m in marks),
            marks=tuple((m.prompt_tokens, m.end, self._owned[m.id] > 0) for m in marks),
            sampled=sum(m.sampled for m in marks),
            owned=owned,
            fate=fate,
            left_by=found.kind if found is not None else "",
            lost=found.lost if found is not None else 0,
            t0=min((m.call.t0 for m in marks), default=0.0),
            t1=max((m.call.t1 for m in marks), default=0.0),
        )


def _below(segment: Segment) -> Iterator[Mark]:
    stack = [segment]
    while stack:
        at = stack.pop()
        yield from at.marks
        stack.extend(at.children.values())


def _fates(choice: Choice, analysis: Analysis) -> dict[str, str]:
    """What became of calls that own nothing."""
    out = {t.id: "not-chosen" for t in choice.passed_over}
    out |= {t.id: "stub" for t in choice.stubs}
    out |= dict.fromkeys(analysis.superseded, "retry")
    return out


# ---- text ----------------------------------------------------------------------------------------------------------


def terminal(told: History, depth: int | None = None, width: int = 100) -> Iterator[str]:
    """The lines as a tree of text. `depth`: deeper branches are counted instead; many alike become one row."""
    yield told.title()
    for i, root in enumerate(told.roots):
        yield from _rows(root, "", i == len(told.roots) - 1, depth, told, width)


def _rows(line: Line, before: str, last: bool, depth: int | None, told: History, width: int) -> Iterator[str]:
    yield before + ("└─ " if last else "├─ ") + _label(line, told.unit)
    below = before + ("   " if last else "│  ")
    if depth is not None and line.level >= depth and line.branches:
        lines = [x for b in line.branches for x in b.walk()]
        yield f"{below}└─ … {len(lines):,} more branches, {sum(len(x.calls) for x in lines):,} calls"
        return
    shown, folded = _folded(line.branches)
    rest = len(shown) + len(folded)
    for branch in shown:
        rest -= 1
        yield from _rows(branch, below, not rest, depth, told, width)
    for (fate, left_by), many in folded.items():
        rest -= 1
        what = left_by or fate
        spread = f"at {min(b.start for b in many):,} to {max(b.start for b in many):,}"
        hook = "├─" if rest else "└─"
        yield (
            f"{below}{hook} {len(many)} × {what} ({fate}): {sum(b.calls_below() for b in many):,} calls, "
            f"{sum(b.sampled for b in many):,} {told.unit} sampled, {spread}"
        )


def _folded(branches: list[Line]) -> tuple[list[Line], dict[tuple[str, str], list[Line]]]:
    """(branches to show one by one, short ones that are alike and many)."""
    alike: dict[tuple[str, str], list[Line]] = defaultdict(list)
    for branch in branches:
        if len(branch.calls) <= 1 and not branch.branches and branch.fate != "kept":
            alike[branch.fate, branch.left_by].append(branch)
    folded = {key: many for key, many in alike.items() if len(many) > ALIKE}
    gone = {id(b) for many in folded.values() for b in many}
    return [b for b in branches if id(b) not in gone], folded


def _label(line: Line, unit: str) -> str:
    who = line.kind + (f" {short(line.agent)}" if line.agent not in ("main", "") else "")
    calls = "no call" if not line.calls else f"{len(line.calls)} call{'s' if len(line.calls) > 1 else ''}"
    ends = [short(call) for call in (*line.calls[:1], *line.calls[1:][-1:])]
    names = f" {'..'.join(ends)}" if ends else ""
    left = (
        f"  [{line.left_by} at {line.start:,}" + (f", {line.lost:,} lost" if line.lost else "") + "]"
        if line.left_by
        else ""
    )
    plain = unit == "tokens"
    fate = f"  {line.owned:,} trained" if line.owned else ""
    fate += f"  {line.fate}" if plain and line.fate != "kept" else ""
    return f"{who}  {calls}{names}  {line.start:,} → {line.end:,} {unit}  {line.sampled:,} sampled{fate}{left}"
