"""A choice as one packed sequence, and packed sequences as micro-steps.

Owns the order: depth first, the best trajectory first (so it is contiguous), every shared prefix once, unbranched runs
joined. The form is `gyre_base.microstep`; the token at packed index i is predicted at `predecessor[i]`. A token is
trainable if an eligible call sampled it with a finite logprob; each one is owned, by the best kept path through it. An
execution never spans micro-steps, so no trajectory does. `flatten` is the same data as plain rows, for comparison.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gyre_base.microstep import (
    ROOT,
    CallRange,
    PackedExecution,
    PackedPath,
    PackedRouting,
    VersionSpan,
    chain,
    context_mismatches,
)
from gyre_base.routing import Routing, known, rows_of
from gyre_base.runfile import Ids, Logprobs
from trajtools.choose import Choice, runs
from trajtools.forest import NOBODY, Mark, Segment

__all__ = ["FlatSample", "context_mismatches", "flatten", "micro_steps", "owned_ranges", "pack"]


def pack(choice: Choice, *, group: str = "", advantage: float = 0.0, dispatched_step: int = 0) -> PackedExecution:
    """One execution as one sequence. T = distinct tokens on its kept paths; `total_owned` = T_e."""
    plan = _Plan(choice)
    parts = [part for head in plan.order for part in plan.parts[head]]
    segments = plan.table()
    position, predecessor = chain(segments)
    owner = _joined((part.owner for part in parts), np.int32)
    trainable: NDArray[np.bool_] = np.not_equal(owner, NOBODY)
    calls, versions = plan.completions(owner)
    return PackedExecution(
        execution=choice.execution,
        group=group,
        advantage=advantage,
        total_owned=choice.owned,
        dispatched_step=dispatched_step,
        tokens=_joined((part.tokens for part in parts), np.int32),
        position=position,
        predecessor=predecessor,
        logprob=_joined((part.logprob for part in parts), np.float32),
        owned=trainable.copy(),
        trainable=trainable,
        segments=segments,
        paths=plan.paths(trainable),
        calls=calls,
        versions=versions,
        routing=plan.routing(owner, predecessor),
    )


def owned_ranges(choice: Choice) -> tuple[tuple[str, str, int, int], ...]:
    """(execution, call, first, last + 1) of every owned run of a completion: what a ledger of trained tokens needs."""
    return tuple((choice.execution, *owned) for owned in choice.owned_ranges)


def micro_steps(packed: Sequence[PackedExecution], budget_tokens: int) -> list[list[PackedExecution]]:
    """Whole executions, first-fit by decreasing length; ties stay in order. One above the budget travels alone."""
    bins: list[list[PackedExecution]] = []
    room: list[int] = []
    for execution in sorted(packed, key=len, reverse=True):
        place = next((i for i, free in enumerate(room) if free >= len(execution)), None)
        if place is None:
            bins.append([execution])
            room.append(budget_tokens - len(execution))
        else:
            bins[place].append(execution)
            room[place] -= len(execution)
    return bins


# ---- layout --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Part:
    """A forest segment inside a packed one, cut at the end of its path. Arrays of one length."""

    segment: Segment
    tokens: Ids
    owner: NDArray[np.int32]
    logprob: Logprobs


class _Plan:
    """Forest segments of the kept paths, joined where nothing kept branches off; `order` is depth first."""

    def __init__(self, choice: Choice) -> None:
        self._choice = choice
        self._rank: dict[Segment, int] = {}  # best kept trajectory through a segment
        self._used: dict[Segment, int] = {}
        children: dict[Segment | None, list[Segment]] = defaultdict(list)
        for rank, trajectory in enumerate(choice.kept):
            for above, segment in zip((None, *trajectory.path), trajectory.path, strict=False):
                used = min(segment.end, trajectory.end) - segment.start
                self._used[segment] = max(self._used.get(segment, 0), used)
                if segment not in self._rank:
                    self._rank[segment] = rank
                    children[above].append(segment)  # by rank, since the best comes first
        self.parts: dict[Segment, list[_Part]] = {}  # by the first forest segment of a packed one
        self._parent: dict[Segment, Segment | None] = {}
        self._head: dict[Segment, Segment] = {}
        self.order = list(self._walk(children))
        self._index = {head: i for i, head in enumerate(self.order)}
        self._starts = np.cumsum([0, *(self._length(head) for head in self.order)])
        self._place: dict[Segment, int] = {}  # packed index of each forest segment's first token
        for i, head in enumerate(self.order):
            at = int(self._starts[i])
            for part in self.parts[head]:
                self._place[part.segment] = at
                at += len(part.tokens)

    def _walk(self, children: dict[Segment | None, list[Segment]]) -> Iterator[Segment]:
        stack: list[tuple[Segment, Segment | None]] = [(s, None) for s in reversed(children[None])]
        while stack:
            head, above = stack.pop()
            run = [head]
            while len(children[run[-1]]) == 1:
                run.append(children[run[-1]][0])
            self.parts[head] = [self._part(segment) for segment in run]
            self._parent[head] = above
            self._head.update((segment, head) for segment in run)
            stack.extend((child, head) for child in reversed(children[run[-1]]))
            yield head

    def _part(self, segment: Segment) -> _Part:
        used = self._used[segment]
        paint = self._choice.painted.get(segment)
        if paint is None:
            blank = np.full(used, np.nan, np.float32)
            return _Part(segment, segment.tokens[:used], np.full(used, NOBODY, np.int32), blank)
        return _Part(segment, segment.tokens[:used], paint.owner[:used], paint.logprob[:used])

    def _length(self, head: Segment) -> int:
        return sum(len(part.tokens) for part in self.parts[head])

    def table(self) -> NDArray[np.int32]:
        """int32[S, 3]: start, end, parent."""
        above = (self._parent[head] for head in self.order)
        parents = [ROOT if parent is None else self._index[parent] for parent in above]
        rows = [(self._starts[i], self._starts[i + 1], parent) for i, parent in enumerate(parents)]
        return np.array(rows, np.int32).reshape(-1, 3)

    def paths(self, owned: NDArray[np.bool_]) -> tuple[PackedPath, ...]:
        """Each kept trajectory: its packed segments and the runs of owned tokens in those it is the best of."""
        return tuple(self._path(rank, owned) for rank in range(len(self._choice.kept)))

    def _path(self, rank: int, owned: NDArray[np.bool_]) -> PackedPath:
        trajectory = self._choice.kept[rank]
        heads = list(dict.fromkeys(self._head[segment] for segment in trajectory.path))
        ranges: list[tuple[int, int]] = []
        for head in heads:
            if self._rank[head] == rank:
                start, end = self._starts[self._index[head]], self._starts[self._index[head] + 1]
                ranges.extend((int(start) + a, int(start) + b) for a, b in runs(owned[start:end]))
        return PackedPath(
            trajectory=trajectory.id,
            kind=trajectory.kind,
            segments=tuple(self._index[head] for head in heads),
            owned=tuple(ranges),
        )

    def completions(self, owner: NDArray[np.int32]) -> tuple[tuple[CallRange, ...], tuple[VersionSpan, ...]]:
        """For each call that owns tokens here: where its completion lies, and which version sampled what it owns."""
        calls: list[CallRange] = []
        versions: list[VersionSpan] = []
        for order in np.unique(owner[owner != NOBODY]).tolist():
            mark = self._choice.marks[order]
            places = self._places(mark)
            calls.append(_call_range(mark, places))
            for place, size, offset in places:
                mine = runs(owner[place : place + size] == order)
                versions.extend(_versions(mark, place, offset, mine))
        return tuple(sorted(calls, key=lambda c: c.start)), tuple(sorted(versions, key=lambda v: v.start))

    def routing(self, owner: NDArray[np.int32], predecessor: NDArray[np.int32]) -> PackedRouting | None:
        """The rows that the owners recorded, at the tokens they are of: those before each owned token.

        Where two owned tokens follow the same one, the earlier commit's row stands for both: it is computed once.
        """
        at: list[NDArray[np.int32]] = []
        found: list[Routing] = []
        for order in np.unique(owner[owner != NOBODY]).tolist():
            mark = self._choice.marks[order]
            rows = rows_of(mark.call.arrays, mark.sampled)
            if rows is None or (found and rows.shape[1:] != found[0].shape[1:]):
                continue
            for place, size, offset in self._places(mark):
                mine = np.flatnonzero(owner[place : place + size] == order)
                mine = mine[known(rows[offset + mine])]
                at.append(predecessor[place + mine])
                found.append(rows[offset + mine])
        if not any(map(len, at)):
            return None
        places, first = np.unique(np.concatenate(at), return_index=True)
        return PackedRouting(at=places.astype(np.int32), experts=np.concatenate(found)[first])

    def _places(self, mark: Mark) -> list[tuple[int, int, int]]:
        """(packed index, tokens, offset in the completion) of the parts of a completion on kept paths, in order."""
        return [
            (self._place[segment] + start, min(end, self._used[segment]) - start, offset)
            for segment, start, end, offset in reversed(list(mark.pieces()))
            if segment in self._place and start < self._used[segment]
        ]


def _call_range(mark: Mark, places: Sequence[tuple[int, int, int]]) -> CallRange:
    """From the first token of the completion as far as it lies in one run."""
    start = end = places[0][0]
    for place, size, _ in places:
        if place == end:
            end += size
    return CallRange(call=mark.id, start=start, end=end, prompt_length=mark.prompt_tokens, prompt_digest=mark.context)


def _versions(mark: Mark, place: int, offset: int, mine: Iterable[tuple[int, int]]) -> Iterator[VersionSpan]:
    """The version spans of one part, cut to the runs of tokens that the call owns there."""
    for first, last in mine:
        for span in mark.call.spans:
            start, end = max(span.start - offset, first), min(span.end - offset, last)
            if start < end:
                yield VersionSpan(start=place + start, end=place + end, version=span.policy)


def _joined(parts: Iterable[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype), *parts])


# ---- flat rows -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class FlatSample:
    """One kept trajectory as a plain row of N tokens: shared prefixes repeated, ownership as packed.

    tokens int32[N], owned bool[N], trainable bool[N], logprob float32[N], index int32[N] (packed index of each token).
    """

    execution: str
    group: str
    trajectory: str
    kind: str
    advantage: float
    total_owned: int
    tokens: Ids
    owned: NDArray[np.bool_]
    trainable: NDArray[np.bool_]
    logprob: Logprobs
    index: Ids


def flatten(packed: PackedExecution) -> list[FlatSample]:
    """Every path of a packed execution as a row; an owned token is owned in one row only."""
    return [_row(packed, path) for path in packed.paths]


def _row(packed: PackedExecution, path: PackedPath) -> FlatSample:
    ranges = [np.arange(packed.segments[s, 0], packed.segments[s, 1], dtype=np.int32) for s in path.segments]
    index = np.concatenate(ranges) if ranges else np.zeros(0, np.int32)
    mine = np.zeros(len(packed), np.bool_)
    for start, end in path.owned:
        mine[start:end] = True
    return FlatSample(
        execution=packed.execution,
        group=packed.group,
        trajectory=path.trajectory,
        kind=path.kind,
        advantage=packed.advantage,
        total_owned=packed.total_owned,
        tokens=packed.tokens[index],
        owned=mine[index],
        trainable=packed.trainable[index],
        logprob=packed.logprob[index],
        index=index,
    )
