"""The recent histories of one execution, as tokens and (when asked) as the JSON text of those tokens.

Owns the fast path of reading: the text of a full prompt begins with the text of a history already read, so only what
follows has to be parsed. Equal text of rendered arrays means equal tokens, so the result is that of the plain parse.
Tapes are append-only: a view of a tape stays true for ever, a history that branches off gets a tape of its own.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import orjson
from numpy.typing import NDArray

from gyre_base.runrecords import NO_IDS, Ids, common_prefix

TAPES = 8  # recent histories per execution; more only helps beyond 8 parallel agents
WORTH_BYTES = 256  # a shorter match saves nothing
SENTINEL = -(1 << 62) - int.from_bytes(os.urandom(7), "big")  # stands for the tokens cut out; in no file
_MARK = str(SENTINEL).encode()
PROMPT, COMPLETION = b'"prompt_ids"', b'"completion_ids"'
_COMMA, _SPACE = 44, 32


class Tape:
    """int32[used] tokens; `text` renders them as `1,2,3,` when first needed."""

    __slots__ = ("_ids", "_marks", "_rendered", "text", "used")

    def __init__(self, ids: Ids) -> None:
        self._ids = np.array(ids, np.int32)
        self.used = len(ids)
        self.text = bytearray()
        self._rendered = 0
        self._marks: list[tuple[int, int]] = [(0, 0)]  # (byte, token)

    @property
    def ids(self) -> Ids:
        return self._ids[: self.used]

    @property
    def size(self) -> int:
        return self._ids.nbytes + len(self.text)

    def view(self, start: int, end: int) -> Ids:
        """Read-only; what lies there never changes."""
        out = self._ids[start:end]
        out.flags.writeable = False
        return out

    def append(self, ids: Ids, text: bytes | None = None) -> None:
        if text is not None and self._rendered == self.used:
            self.text += text
            self._rendered += len(ids)
            self._marks.append((len(self.text), self._rendered))
        need = self.used + len(ids)
        if need > len(self._ids):
            grown = np.empty(max(need, len(self._ids) * 3 // 2, 64), np.int32)
            grown[: self.used] = self.ids
            self._ids = grown  # views of the old array keep it alive
        self._ids[self.used : need] = ids
        self.used = need

    def fork(self, at: int) -> Tape:
        """A new tape with the first `at` tokens, text included."""
        out = Tape(self._ids[:at])
        if self._rendered:
            keep = min(at, self._rendered)
            cut = self._byte(keep)
            out.text, out._rendered = self.text[:cut], keep
            out._marks = [m for m in self._marks if m[1] <= keep]
        return out

    def render(self) -> bytearray:
        if self._rendered < self.used:
            self.text += _rendered(self._ids[self._rendered : self.used])
            self.text += b","
            self._rendered = self.used
            self._marks.append((len(self.text), self.used))
        return self.text

    def tokens_before(self, byte: int) -> int:
        """How many tokens end before a byte that follows a comma."""
        at, tokens = self._marks[bisect_right(self._marks, (byte, 1 << 62)) - 1]
        return tokens + int(np.count_nonzero(np.frombuffer(self.text, np.uint8, byte - at, at) == _COMMA))

    def _byte(self, token: int) -> int:
        """Where the text of the first `token` tokens ends."""
        at, tokens = max(m for m in self._marks if m[1] <= token)
        if tokens == token:
            return at
        commas = np.flatnonzero(np.frombuffer(self.text, np.uint8, offset=at) == _COMMA)
        return at + int(commas[token - tokens - 1]) + 1


class Tapes:
    """The tapes of one execution, latest last."""

    def __init__(self) -> None:
        self.items: list[Tape] = []

    def lay(
        self, tape: Tape | None, keep: int, tail: Ids, completion: Ids, text: bytes | None = None
    ) -> tuple[Tape, Ids, Ids]:
        """Put a call's tokens on a tape: the first `keep` of `tape`, then these. Returns (tape, prompt, completion).

        `text` renders tail and completion, where that is known.
        """
        new = np.concatenate([tail, completion]) if len(completion) else tail
        if tape is None:
            tape = self._new(Tape(NO_IDS))
        ahead = tape.ids[keep:]
        shared = common_prefix(ahead, new)
        if shared < min(len(ahead), len(new)):
            tape, shared = self._new(tape.fork(keep + shared)), shared
        if keep + len(new) > tape.used:
            tape.append(new[shared:], text if not shared else None)
        self._touch(tape)
        middle = keep + len(tail)
        return tape, tape.view(0, middle), tape.view(middle, middle + len(completion))

    def nearest(self, prompt: Ids) -> tuple[Tape | None, int]:
        """The tape that shares most with a prompt, and how much."""
        best: Tape | None = None
        longest = 0
        for tape in reversed(self.items):
            shared = common_prefix(tape.ids, prompt)
            if shared > longest:
                best, longest = tape, shared
            if longest == len(prompt):
                break
        return best, longest

    def _new(self, tape: Tape) -> Tape:
        self.items.append(tape)
        del self.items[:-TAPES]
        return tape

    def _touch(self, tape: Tape) -> None:
        if self.items[-1:] != [tape]:
            self.items = [t for t in self.items if t is not tape]
            self._new(tape)


@dataclass(frozen=True, slots=True)
class Short:
    """A line without its long arrays: `rest` is JSON with SENTINEL where they were cut out.

    The prompt is the first `keep` tokens of `tape`, then `tail` (None: what follows SENTINEL in `rest`). `text` renders
    tail and completion, as on a tape, if both are known as text.
    """

    rest: bytes
    tape: Tape | None
    keep: int
    tail: Ids | None
    completion: Ids | None
    text: bytes | None


def array_at(line: bytes, key: bytes = PROMPT, least: int = WORTH_BYTES) -> tuple[int, int] | None:
    """[start, end) of the inside of the first array with a key; None if it does not look like one, or is short."""
    at = line.find(key)
    if at < 1 or line[max(at - 8, 0) : at].rstrip()[-1:] not in (b",", b"{"):
        return None
    start = at + len(key)
    opening = line[start : start + 8].split(b"[", 1)
    if len(opening) != 2 or opening[0].strip() != b":":
        return None
    start += len(opening[0]) + 1
    end = line.find(b"]", start)
    return (start, end) if end - start >= least else None


def shortened(line: bytes, array: tuple[int, int], tapes: Sequence[Tape]) -> Short | None:
    """The line with its arrays cut out: what a tape knows, and what can be converted without JSON. None: neither."""
    start, end = array
    text, first, last = line, start, end
    if b" " in line[start : start + 32]:
        packed = _compact(line, start, end)
        if packed is None:
            return None
        text, first, last = packed, 0, len(packed)
    tape, cut, keep = _best(text, first, last, tapes)
    if cut < WORTH_BYTES:
        tape, cut, keep = None, 0, 0
    tail = text[first + cut : last]
    ids = numbers(tail) if tail else NO_IDS
    if tape is None and ids is None:
        return None
    more = b"" if ids is not None else b"," + tail
    head, foot = line[:start] + _MARK + more, line[end:]
    completion, said = None, b""
    if (found := array_at(foot, COMPLETION, 1)) is not None:
        said = foot[found[0] : found[1]]
        completion = numbers(said)
        if completion is not None:
            foot = foot[: found[0]] + _MARK + foot[found[1] :]
    known = None
    if ids is not None and completion is not None:
        known = (tail + b"," if tail else b"") + said + b","
    return Short(head + foot, tape, keep, ids, completion, known)


def numbers(text: bytes) -> Ids | None:
    """int32[n] of `1,2,3`, exactly as JSON would read it; None for anything that is not plainly written ids."""
    if text.translate(None, b"0123456789,") or b",," in text or text[:1] == b"," or text[-1:] == b",":
        return None
    ids: Ids = np.fromstring(text, np.int32, sep=",")
    return ids if _rendered(ids) == text else None  # leading zeros and overflows do not come back as they went in


def _rendered(ids: Ids) -> bytes:
    return orjson.dumps(ids, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]


def _best(text: bytes, first: int, last: int, tapes: Sequence[Tape]) -> tuple[Tape | None, int, int]:
    """(tape, bytes shared with it cut at a token, tokens of those)."""
    best, cut = None, 0
    for tape in reversed(tapes):
        rendered = tape.render()
        if len(rendered) > cut and text.startswith(rendered, first):
            best, cut = tape, len(rendered)
    if best is not None:
        return best, cut, best.used
    whole = False
    view = np.frombuffer(text, np.uint8, last - first, first)
    for tape in reversed(tapes):
        shared = common_prefix(np.frombuffer(tape.text, np.uint8), view)
        ends = shared == len(view) and shared < len(tape.text) and tape.text[shared] == _COMMA
        if not ends:
            shared = tape.text.rfind(b",", 0, shared) + 1
        if shared > cut:
            best, cut, whole = tape, shared, ends
    return best, cut, best.tokens_before(cut) + whole if best is not None else 0


def _compact(line: bytes, start: int, end: int) -> bytes | None:
    """The inside of an array without the blanks behind its commas; None if there are others."""
    chars: NDArray[np.uint8] = np.frombuffer(line, np.uint8, end - start, start)
    blank = chars == _SPACE
    if blank[0] or not (chars[:-1] == _COMMA)[blank[1:]].all():
        return None
    packed: bytes = chars[~blank].tobytes()
    return packed
