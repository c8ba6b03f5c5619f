"""Where each call leaves the history before it, and which calls are retries.

Owns the classification: a break is named by *where* the common prefix ends. Reads the forest, changes nothing, chooses
nothing. Kinds:

tail-trim          all but the last one or two tokens of the completion came back (a stop token or separator)
drift              the prefix ends inside the last completion: re-tokenised, thinking stripped, arguments reserialised
deep-edit          it ends earlier: a reminder or date changed, the tool list changed, the user went back
compaction         the agent fell back to its first prompt or to nothing, and its prompt shrank
sub-agent          an agent's first call
side               a call beside the conversation (titles, suggestions)
retry              the same prompt again by the same agent, one after the other
parallel-siblings  the same prompt by other agents, or at the same time with both answers used
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from trajtools.forest import Forest, Mark, Segment

TAIL_TRIM_TOKENS = 2  # a stop token and a separator
SHOWN_IDS = 8
KINDS = ("tail-trim", "drift", "deep-edit", "compaction", "sub-agent", "side", "retry", "parallel-siblings")


@dataclass(frozen=True)
class Link:
    """The earlier call whose tokens a prompt shares most with, and how many: the inferred parent."""

    mark: Mark
    shared: int


@dataclass(frozen=True)
class Break:
    """A call whose prompt does not continue `against`: `lost` tokens of that were not reused. Ids at the fork."""

    kind: str
    call: str
    against: str
    depth: int
    lost: int
    expected: tuple[int, ...]
    got: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Analysis:
    """What the calls of one execution are to each other."""

    links: dict[str, Link]
    breaks: tuple[Break, ...]
    extended: frozenset[str]  # calls whose completion (or part of it) is in a later prompt
    superseded: frozenset[str]  # retries that lost, and first attempts that a retry replaced
    drifted: dict[str, tuple[str, ...]]  # call -> calls that continued it inexactly (tail-trim, drift)


def analyse(forest: Forest) -> Analysis:
    """Classify every call against the ones that began before it."""
    order = sorted(forest.marks(), key=lambda m: (m.call.t0, m.call.seq, m.id))
    links = link(order)
    extended = frozenset(x.mark.id for x in links.values() if x.shared > x.mark.prompt_tokens)
    kinds = _Kinds(order, links, extended)
    breaks, drifted = [], defaultdict(list)
    for mark in order:
        against = links.get(mark.id)
        kind = kinds.of(mark, against)
        if kind is None or against is None:
            continue
        breaks.append(_describe(forest, kind, mark, against))
        if kind in ("tail-trim", "drift"):
            drifted[against.mark.id].append(mark.id)
    superseded = frozenset(_superseded(_twins(order), extended, forest, order))
    return Analysis(links, tuple(breaks), extended, superseded, {k: tuple(v) for k, v in drifted.items()})


# ---- the nearest earlier call --------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Passing:
    """Earlier calls whose tokens run through a segment."""

    marks: list[Mark] = field(default_factory=list)
    best: Mark | None = None  # the latest of those that end deepest
    best_of: dict[str, Mark] = field(default_factory=dict)  # the same by agent

    def add(self, mark: Mark) -> None:
        self.marks.append(mark)
        if self.best is None or mark.end >= self.best.end:
            self.best = mark
        mine = self.best_of.get(mark.call.agent.id)
        if mine is None or mark.end >= mine.end:
            self.best_of[mark.call.agent.id] = mark

    def nearest(self, agent: str, limit: int) -> Link | None:
        """Most shared tokens up to depth `limit`; among equals the same agent, then the latest."""
        if self.best is None:
            return None
        if self.best.end < limit:
            mine = self.best_of.get(agent)
            mark = mine if mine is not None and mine.end == self.best.end else self.best
            return Link(mark, mark.end)
        found = None
        for mark in reversed(self.marks):
            if mark.end >= limit:
                if mark.call.agent.id == agent:
                    return Link(mark, limit)
                found = found or mark
        return Link(found, limit) if found else None


def link(order: Sequence[Mark]) -> dict[str, Link]:
    """For each call the nearest of those before it in `order`; calls that share nothing with any are absent."""
    passing: dict[Segment, _Passing] = defaultdict(_Passing)
    out: dict[str, Link] = {}
    for mark in order:
        limit = mark.prompt_tokens
        for segment in reversed(mark.segment.path()[1:]):
            if segment.start < limit and segment in passing:
                found = passing[segment].nearest(mark.call.agent.id, min(limit, segment.end))
                if found is not None:
                    out[mark.id] = found
                    break
        for segment in mark.segment.path()[1:]:
            passing[segment].add(mark)
    return out


# ---- kinds ---------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Kinds:
    """Classifies the calls of `order`, first to last; remembers each agent's first and latest call."""

    order: Sequence[Mark]
    links: dict[str, Link]
    extended: frozenset[str]
    first: dict[str, Mark] = field(default_factory=dict)
    latest: dict[str, Mark] = field(default_factory=dict)
    resumed: dict[str, int] = field(default_factory=dict)  # call -> place in `order` of the last one that continues it

    def __post_init__(self) -> None:
        for place, mark in enumerate(self.order):
            found = self.links.get(mark.id)
            if found is not None and found.shared > found.mark.prompt_tokens:
                self.resumed[found.mark.id] = place
        self.place = {mark.id: place for place, mark in enumerate(self.order)}

    def of(self, mark: Mark, against: Link | None) -> str | None:
        """The kind of break, None if the call continues a history or is the first of all."""
        agent = mark.call.agent.id
        before = self.latest.get(agent)
        side = is_side(mark)
        kind = self._kind(mark, against, before, side)
        if not side:  # a side call says nothing about where its agent's conversation is
            self.first.setdefault(agent, mark)
            self.latest[agent] = mark
        return kind

    def _kind(self, mark: Mark, against: Link | None, before: Mark | None, side: bool) -> str | None:
        if against is None:
            return None
        near = against.mark
        if against.shared == mark.prompt_tokens == near.prompt_tokens:
            return "parallel-siblings" if self._parallel(mark, near) else "retry"
        if against.shared >= near.end:
            return None
        if against.shared >= near.prompt_tokens:
            return "tail-trim" if near.end - against.shared <= TAIL_TRIM_TOKENS else "drift"
        if side:
            return "side"
        if before is None:
            return "sub-agent" if mark.call.agent.role != "main" else None
        return self._far(mark, against, before)

    def _parallel(self, a: Mark, b: Mark) -> bool:
        return a.call.agent.id != b.call.agent.id or (overlap(a, b) and {a.id, b.id} <= self.extended)

    def _far(self, mark: Mark, against: Link, before: Mark) -> str:
        """The prefix ends before the last completion: edited, compacted, or (without agent ids) another agent."""
        shrank = mark.prompt_tokens < before.prompt_tokens
        to_the_start = against.shared <= self.first[mark.call.agent.id].prompt_tokens
        if not (shrank and (to_the_start or before.call.purpose == "summary")):
            return "deep-edit"
        returns = self.resumed.get(before.id, -1) > self.place[mark.id]
        return "sub-agent" if returns else "compaction"


def is_side(mark: Mark) -> bool:
    return mark.call.purpose == "aux" or mark.call.label == "side"


def _describe(forest: Forest, kind: str, mark: Mark, against: Link) -> Break:
    depth, near = against.shared, against.mark
    return Break(
        kind=kind,
        call=mark.id,
        against=near.id,
        depth=depth,
        lost=near.end - depth,
        expected=tuple(forest.tokens(near, depth, depth + SHOWN_IDS).tolist()),
        got=tuple(forest.tokens(mark, depth, min(depth + SHOWN_IDS, mark.prompt_tokens)).tolist()),
    )


# ---- retries -------------------------------------------------------------------------------------------------------


def _twins(order: Iterable[Mark]) -> dict[str, tuple[Mark, ...]]:
    """Call -> all answers to one request of one agent, itself included."""
    groups: dict[tuple[int, Segment, int, str], list[Mark]] = defaultdict(list)
    for mark in order:
        last = mark.segment_at(max(mark.prompt_tokens - 1, 0))
        groups[(id(last), last, mark.prompt_tokens, mark.call.agent.id)].append(mark)
    return {mark.id: tuple(group) for group in groups.values() if len(group) > 1 for mark in group}


def _superseded(
    twins: dict[str, tuple[Mark, ...]], extended: frozenset[str], forest: Forest, order: Sequence[Mark]
) -> Iterator[str]:
    """Every retry that lost, and first attempts that a retry with an edited prompt replaced."""
    for group in {id(group): group for group in twins.values()}.values():
        survivors = {mark.id for mark in survivors_of(group, extended)}
        yield from (mark.id for mark in group if mark.id not in survivors)
    for mark in order:  # a declared retry may have changed its prompt a little
        of = mark.call.attempt.of
        if of is not None and of in forest and of != mark.id and of not in extended and mark.id not in twins:
            yield of


def survivors_of(group: Sequence[Mark], extended: frozenset[str]) -> list[Mark]:
    """Who of several answers to one request the conversation went on with.

    The extended ones, else the one delivered, else the last. Nobody if nothing decides: then the shared prefix stays
    trainable and every candidate is left out.
    """
    used = [mark for mark in group if mark.id in extended]
    if used:
        return used
    delivered = [mark for mark in group if mark.call.delivered]
    if len(delivered) == 1:
        return delivered
    rest = delivered or [mark for mark in group if mark.call.delivered is None]
    undecided = any(overlap(a, b) for a in rest for b in rest if a is not b)
    return [] if undecided else rest[-1:]


def overlap(a: Mark, b: Mark) -> bool:
    """Whether two calls were in flight at the same time."""
    return a.call.t0 < b.call.t1 and b.call.t0 < a.call.t1
