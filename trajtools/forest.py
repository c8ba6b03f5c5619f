"""The calls of one execution as a token radix forest: shared prefixes are stored once.

Owns the shape. A segment is a run of tokens without a branch; a call leaves a mark (where its prompt and its completion
end), not a node: a linear conversation of 400 calls is one segment with 400 marks. Which token was sampled by whom is a
second pass over the marks (`paint`), so the result does not depend on the order of insertion. Sampled tokens are never
rewritten: a changed token is a branch. Classifies and chooses nothing.

Depth counts tokens from the root; a segment covers depths [start, end).
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from gyre_base.runfile import NO_IDS, Call, Ids, Logprobs, common_prefix, context_digest, trainable_mask

ORIGINS = 8  # as many as a reader keeps histories
NOBODY = -1  # owner of a token that no eligible call sampled


class ConflictingCall(ValueError):
    """A call id came twice with different tokens or logprobs. The first one stays."""


class Segment:
    """Tokens of depths [start, end) on one path. `children` by first token; `marks`: calls that end inside."""

    __slots__ = ("_buffer", "_used", "children", "marks", "parent", "start")

    def __init__(self, parent: Segment | None, start: int, tokens: Ids) -> None:
        self.parent = parent
        self.start = start
        self.children: dict[int, Segment] = {}
        self.marks: list[Mark] = []
        self._buffer = tokens.copy()
        self._used = len(tokens)

    def __len__(self) -> int:
        return self._used

    @property
    def end(self) -> int:
        return self.start + self._used

    @property
    def tokens(self) -> Ids:
        """int32[end - start], a view."""
        return self._buffer[: self._used]

    def append(self, tokens: Ids) -> None:
        """Grow a leaf in place; amortised O(new tokens)."""
        need = self._used + len(tokens)
        if need > len(self._buffer):
            grown = np.empty(max(need, len(self._buffer) * 3 // 2), np.int32)
            grown[: self._used] = self.tokens
            self._buffer = grown
        self._buffer[self._used : need] = tokens
        self._used = need

    def split(self, offset: int) -> None:
        """Keep the first `offset` tokens; the rest becomes the only child, with the children and marks behind it."""
        rest = Segment(self, self.start + offset, self.tokens[offset:])
        rest.children = self.children
        for child in rest.children.values():
            child.parent = rest
        rest.marks = [mark for mark in self.marks if mark.end > rest.start]
        for mark in rest.marks:
            mark.segment = rest
        self.marks = [mark for mark in self.marks if mark.end <= rest.start]
        self.children = {int(rest.tokens[0]): rest}
        self._used = offset
        if offset * 2 < len(self._buffer):
            self._buffer = self.tokens.copy()

    def path(self) -> list[Segment]:
        """Segments from the root (which is empty) to this one."""
        out = [self]
        while out[-1].parent is not None:
            out.append(out[-1].parent)
        return out[::-1]


@dataclass(slots=True, eq=False)
class Mark:
    """A call in the forest: its record without the arrays, and where they lie.

    Prompt = depths [0, prompt_tokens), completion = [prompt_tokens, end) on the path of `segment`.
    """

    call: Call
    logprobs: Logprobs | None
    prompt_tokens: int
    end: int
    segment: Segment
    order: int = 0  # place by commit; set by `Forest.marks`
    mask: NDArray[np.bool_] | None = None  # of `trainable`, once asked for
    digest: str | None = None  # of the prompt, as recorded or once asked for

    @property
    def context(self) -> str:
        """xxh3-128 of the prompt: what the engine got, if its writer kept that."""
        if self.digest is None:
            self.digest = context_digest(self.tokens(0, self.prompt_tokens))
        return self.digest

    @property
    def id(self) -> str:
        return self.call.call

    @property
    def sampled(self) -> int:
        return self.end - self.prompt_tokens

    def trainable(self) -> NDArray[np.bool_]:
        """bool[sampled]: tokens that could be targets. Without a prompt the first one has no context, so none is."""
        if self.mask is None:
            known = self.logprobs is not None and self.prompt_tokens > 0
            self.mask = trainable_mask(self.logprobs) if known else np.zeros(self.sampled, np.bool_)  # type: ignore[arg-type]
        return self.mask

    def tokens(self, start: int, end: int) -> Ids:
        """int32: tokens of depths [start, end) on this path."""
        parts = [
            segment.tokens[max(start - segment.start, 0) : end - segment.start]
            for segment in self.segment.path()
            if segment.start < end and segment.end > start
        ]
        return np.concatenate(parts) if parts else NO_IDS

    def segment_at(self, depth: int) -> Segment:
        """The segment of this path that covers `depth` (or ends the path, for the depth just behind it)."""
        segment = self.segment
        while segment.start > depth and segment.parent is not None:
            segment = segment.parent
        return segment

    def pieces(self) -> Iterator[tuple[Segment, int, int, int]]:
        """(segment, from, to, offset in the completion), last piece first: where the completion lies."""
        end = self.end
        for segment in reversed(self.segment.path()):
            first = max(self.prompt_tokens, segment.start)
            if end <= first:
                break
            yield segment, first - segment.start, end - segment.start, first - self.prompt_tokens
            end = segment.start


@dataclass(frozen=True, slots=True)
class _Origin:
    """The memory that a prompt begins. A reader's histories only grow, so the next prompt in it begins alike."""

    mark: Mark
    owner: weakref.ref[Ids]
    address: int

    @classmethod
    def of(cls, mark: Mark, prompt: Ids) -> _Origin | None:
        if prompt.flags.writeable or not isinstance(prompt.base, np.ndarray):
            return None
        return cls(mark, weakref.ref(prompt.base), _address(prompt))

    def shared(self, prompt: Ids) -> int:
        """Tokens that need no comparison."""
        same = not prompt.flags.writeable and self.owner() is prompt.base and self.address == _address(prompt)
        return min(len(prompt), self.mark.prompt_tokens) if same else 0


def _address(array: Ids) -> int:
    return int(array.__array_interface__["data"][0])


class Forest:
    """All calls of one execution."""

    def __init__(self, execution: str) -> None:
        self.execution = execution
        self.root = Segment(None, 0, NO_IDS)
        self.prompt_tokens = 0  # sum over calls: what a plain log stores
        self.sampled_tokens = 0
        self._marks: dict[str, Mark] = {}
        self._origins: dict[int, _Origin] = {}  # id of the memory -> the latest prompt in it, latest last

    def __contains__(self, call: str) -> bool:
        return call in self._marks

    def __len__(self) -> int:
        return len(self._marks)

    def __getitem__(self, call: str) -> Mark:
        return self._marks[call]

    def insert(self, call: Call) -> bool:
        """Add a call. False if it was there already (same tokens). Raises ConflictingCall if it was something else.

        Read-only prompts are taken at their word: two that begin in the same memory are not compared there.
        """
        if call.exec != self.execution:
            raise ValueError(f"call {call.call} belongs to {call.exec}, not to {self.execution}")
        if call.call in self._marks:
            self._compare(self._marks[call.call], call)
            return False
        segment, offset, known = self._resume(call.prompt_ids)
        parts = call.prompt_ids[known:], call.completion_ids
        for tokens in (np.concatenate(parts),) if known else parts:  # a whole prompt would be long to copy
            segment, offset = self._descend(segment, offset, tokens)
        prompt, sampled = len(call.prompt_ids), len(call.completion_ids)
        mark = Mark(_bare(call), call.logprobs, prompt, prompt + sampled, segment, digest=call.context)
        segment.marks.append(mark)
        self._marks[call.call] = mark
        self._note(mark, call.prompt_ids)
        self.prompt_tokens += prompt
        self.sampled_tokens += sampled
        return True

    def marks(self) -> list[Mark]:
        """Every call by commit: end time, then sequence number, then id."""
        out = sorted(self._marks.values(), key=lambda m: (m.call.t1, m.call.seq, m.id))
        for order, mark in enumerate(out):
            mark.order = order
        return out

    def segments(self) -> list[Segment]:
        """Every segment but the root, parents first, children by first token: the same list for the same calls."""
        out: list[Segment] = []
        stack = [self.root]
        while stack:
            segment = stack.pop()
            out.append(segment)
            stack.extend(segment.children[token] for token in sorted(segment.children, reverse=True))
        return out[1:]

    def unique_tokens(self) -> int:
        """Tokens stored."""
        return sum(map(len, self.segments()))

    def leaves(self) -> int:
        return sum(not segment.children for segment in self.segments())

    def tokens(self, mark: Mark, start: int = 0, end: int | None = None) -> Ids:
        """int32: tokens of depths [start, end) on the path of a call, up to the end of its completion."""
        return mark.tokens(start, mark.end if end is None else min(end, mark.end))

    def digest(self) -> str:
        """One hash of all of it, logprobs and labels included. Equal for any order and any form of the same calls."""
        state = xxhash.xxh3_128()
        for segment in self.segments():
            state.update(struct.pack("<qqq", segment.start, len(segment), len(segment.children)))
            state.update(segment.tokens.tobytes())
            _digest_marks(state, segment)
        _digest_marks(state, self.root)
        return state.hexdigest()

    def _resume(self, prompt: Ids) -> tuple[Segment, int, int]:
        """(place, tokens up to it): behind what lies in the same memory as an earlier prompt, else the root."""
        found = self._origins.get(id(prompt.base))
        known = found.shared(prompt) if found is not None else 0
        if found is None or not known:
            return self.root, 0, 0
        segment = found.mark.segment
        while segment.start >= known and segment.parent is not None:
            segment = segment.parent
        return segment, known - segment.start, known

    def _note(self, mark: Mark, prompt: Ids) -> None:
        self._origins.pop(id(prompt.base), None)
        if (origin := _Origin.of(mark, prompt)) is not None:
            self._origins[id(prompt.base)] = origin
            if len(self._origins) > ORIGINS:
                del self._origins[next(iter(self._origins))]

    def _descend(self, segment: Segment, offset: int, tokens: Ids) -> tuple[Segment, int]:
        """Walk `tokens` from a place, adding what is new. Returns the place behind the last one."""
        while len(tokens):
            if offset < len(segment):
                shared = common_prefix(segment.tokens[offset:], tokens)
                offset, tokens = offset + shared, tokens[shared:]
                if not len(tokens):
                    break
            if offset < len(segment):
                segment.split(offset)
            child = segment.children.get(int(tokens[0]))
            if child is None and (segment.children or segment is self.root):
                child = Segment(segment, segment.end, tokens)
                segment.children[int(tokens[0])] = child
                return child, len(tokens)
            if child is None:
                segment.append(tokens)
                return segment, len(segment)
            segment, offset = child, 0
        return segment, offset

    def _compare(self, mark: Mark, call: Call) -> None:
        same = (
            mark.prompt_tokens == len(call.prompt_ids)
            and mark.sampled == len(call.completion_ids)
            and np.array_equal(self.tokens(mark), np.concatenate([call.prompt_ids, call.completion_ids]))
            and _bits(mark.logprobs) == _bits(call.logprobs)
        )
        if not same:
            raise ConflictingCall(f"call {call.call} of {call.exec} came twice with different tokens or logprobs")


@dataclass(frozen=True, eq=False)
class Paint:
    """Who sampled the tokens of a segment: owner[len] = place by commit of a call (or NOBODY), logprob[len]."""

    owner: NDArray[np.int32]
    logprob: Logprobs

    @property
    def trainable(self) -> NDArray[np.bool_]:
        return np.not_equal(self.owner, NOBODY)


def paint(eligible: Iterable[Mark]) -> dict[Segment, Paint]:
    """Provenance of every trainable token that an eligible call sampled; segments without one are absent.

    A token that two calls sampled in the same place counts once, for the earliest commit. `eligible` must come from
    `Forest.marks` (which sets the order).
    """
    painted: dict[Segment, Paint] = {}
    for mark in sorted(eligible, key=lambda m: m.order):
        trainable = mark.trainable()
        if not trainable.any():
            continue
        for segment, start, end, offset in mark.pieces():
            if segment not in painted:
                n = len(segment)
                painted[segment] = Paint(np.full(n, NOBODY, np.int32), np.full(n, np.nan, np.float32))
            owner, logprob = painted[segment].owner[start:end], painted[segment].logprob[start:end]
            free = (owner == NOBODY) & trainable[offset : offset + end - start]
            owner[free] = mark.order
            if mark.logprobs is not None:
                logprob[free] = mark.logprobs[offset : offset + end - start][free]
    return painted


def _digest_marks(state: xxhash.xxh3_128, segment: Segment) -> None:
    for mark in sorted(segment.marks, key=lambda m: m.id):
        call = mark.call
        about = (call.agent, call.purpose, call.label, call.spans, call.delivered, call.attempt, call.t1, call.seq)
        state.update(repr((mark.id, mark.prompt_tokens, mark.end, mark.context, about)).encode())
        state.update(_bits(mark.logprobs))


def _bare(call: Call) -> Call:
    """The call without its arrays. Ten times faster than `dataclasses.replace`, which builds every field again."""
    out = object.__new__(Call)
    out.__dict__.update(call.__dict__, prompt_ids=NO_IDS, completion_ids=NO_IDS, logprobs=None)
    return out


def _bits(logprobs: Logprobs | None) -> bytes:
    return b"none" if logprobs is None else np.ascontiguousarray(logprobs, "<f4").tobytes()
