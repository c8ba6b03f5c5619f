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

from gyre_base.runlines import Window
from gyre_base.runrecords import NO_IDS, Ids, common_prefix

TAPES = 8  # recent histories per execution; more only helps beyond 8 parallel agents
WORTH_BYTES = 256  # a shorter match saves nothing
SENTINEL = -(1 << 62) - int.from_bytes(os.urandom(7), "big")  # stands for the tokens cut out; in no file
_MARK = str(SENTINEL).encode()
PROMPT, COMPLETION = b'"prompt_ids"', b'"completion_ids"'
_COMMA = 44
_JOIN_BYTES = 1 << 20  # a longer text is not copied to save a call
COMPACT, SPACED = b",", b", "  # what writers put between two ids
_OPENINGS = {b":[": COMPACT, b": [": SPACED}


class Tape:
    """int32[used] tokens; `text` renders them when first needed, each followed by the separator of that file."""

    __slots__ = ("_ids", "_marks", "_rendered", "separator", "text", "used")

    def __init__(self, ids: Ids, separator: bytes = COMPACT) -> None:
        self._ids = np.array(ids, np.int32)
        self.used = len(ids)
        self.separator = separator
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

    def append(self, ids: Ids, text: Rendered | None = None) -> None:
        if text is not None and self._rendered == self.used and text.separator == self.separator:
            self.text += text.text
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
        out = Tape(self._ids[:at], self.separator)
        if self._rendered:
            keep = min(at, self._rendered)
            cut = self._byte(keep)
            out.text, out._rendered = self.text[:cut], keep
            out._marks = [m for m in self._marks if m[1] <= keep]
        return out

    def render(self, separator: bytes) -> bytearray:
        if separator != self.separator:  # lines of two writers meet in one execution
            self.separator, self._rendered, self._marks = separator, 0, [(0, 0)]
            self.text = bytearray()
        if self._rendered < self.used:
            self.text += _spread(_rendered(self._ids[self._rendered : self.used]), separator)
            self.text += separator
            self._rendered = self.used
            self._marks.append((len(self.text), self.used))
        return self.text

    def tokens_before(self, byte: int) -> int:
        """How many tokens end before a byte that follows a separator."""
        at, tokens = self._marks[bisect_right(self._marks, (byte, 1 << 62)) - 1]
        return tokens + int(np.count_nonzero(np.frombuffer(self.text, np.uint8, byte - at, at) == _COMMA))

    def _byte(self, token: int) -> int:
        """Where the text of the first `token` tokens ends."""
        at, tokens = max(m for m in self._marks if m[1] <= token)
        if tokens == token:
            return at
        commas = np.flatnonzero(np.frombuffer(self.text, np.uint8, offset=at) == _COMMA)
        return at + int(commas[token - tokens - 1]) + len(self.separator)


class Tapes:
    """The tapes of one execution, latest last."""

    def __init__(self) -> None:
        self.items: list[Tape] = []

    def lay(
        self, tape: Tape | None, keep: int, tail: Ids, completion: Ids, text: Rendered | None = None
    ) -> tuple[Tape, Ids, Ids]:
        """Put a call's tokens on a tape: the first `keep` of `tape`, then these. Returns (tape, prompt, completion).

        `text` renders tail and completion, where that is known.
        """
        new = np.concatenate([tail, completion]) if len(completion) and len(tail) else tail if len(tail) else completion
        if tape is None:
            tape = self._new(Tape(NO_IDS, text.separator if text is not None else COMPACT))
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
class Rendered:
    """Tokens as JSON text, each followed by `separator`."""

    text: bytes
    separator: bytes


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
    text: Rendered | None


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


@dataclass(frozen=True, slots=True)
class Ahead:
    """A line under way begins like a history: its bytes [start, end) are all of `tape`, inside the prompt's array."""

    start: int
    end: int
    tape: Tape
    separator: bytes


def ahead(lines: Window, tapes: Sequence[Tape], key: int) -> Ahead | None:
    """Where the prompt of the present line (its key stands `key` bytes into it) leaves a whole tape; None: nowhere."""
    at = lines.start + key + len(PROMPT)
    opening = next((o for o in _OPENINGS if lines.buffer.startswith(o, at)), None)
    if opening is None:
        return None
    first, separator = key + len(PROMPT) + len(opening), _OPENINGS[opening]
    for tape in reversed(tapes):
        rendered = tape.render(separator)
        if len(rendered) < WORTH_BYTES or not lines.need(first + len(rendered)):
            continue
        if lines.buffer.startswith(rendered, lines.start + first):
            return Ahead(first, first + len(rendered), tape, separator)
    return None


def spliced(lines: Window, cut: Ahead) -> Short | None:
    """The present line without what is ahead; None if its array does not go on as it began."""
    with memoryview(lines.buffer) as view:
        head = bytes(view[lines.start : lines.start + cut.start])
        foot = bytes(view[lines.start + cut.end : lines.end])
    end = foot.find(b"]")
    if end <= 0 or foot[-1:] != b"}":
        return None
    return _short(head, foot[:end], foot[end:], cut.tape, cut.tape.used, cut.separator)


def shortened(line: bytes, array: tuple[int, int], tapes: Sequence[Tape]) -> Short | None:
    """The line with its arrays cut out: what a tape knows, and what can be converted without JSON. None: neither."""
    start, end = array
    separator = SPACED if b" " in line[start : start + 32] else COMPACT
    tape, cut, keep = _best(line, start, end, tapes, separator)
    if cut < WORTH_BYTES:
        tape, cut, keep = None, 0, 0
    return _short(line[:start], line[start + cut : end], line[end:], tape, keep, separator)


def _short(head: bytes, tail: bytes, foot: bytes, tape: Tape | None, keep: int, separator: bytes) -> Short | None:
    """From the text before the prompt's array, of its part that is on no tape, and behind it."""
    found = array_at(foot, COMPLETION, 1)
    said = foot[found[0] : found[1]] if found is not None else b""
    if separator != COMPACT:
        tail, said = tail.replace(separator, COMPACT), said.replace(separator, COMPACT)
    ids, completion, known = _both(tail, said)
    if tape is None and ids is None:
        return None
    if found is not None and completion is not None:
        foot = foot[: found[0]] + _MARK + foot[found[1] :]
    more = b"" if ids is not None else COMPACT + tail
    text = Rendered(_spread(known, separator), separator) if known is not None else None
    return Short(head + _MARK + more + foot, tape, keep, ids, completion, text)


def _spread(text: bytes, separator: bytes) -> bytes:
    return text if separator == COMPACT else text.replace(COMPACT, separator)


def _both(tail: bytes, said: bytes) -> tuple[Ids | None, Ids | None, bytes | None]:
    """(ids of each, or None where it is not plainly written; their text in one piece if both are)."""
    if tail and said and len(tail) < _JOIN_BYTES:
        joined = tail + COMPACT + said
        if (ids := numbers(joined)) is not None:
            count = tail.count(COMPACT) + 1
            return ids[:count], ids[count:], joined + COMPACT
    first, second = numbers(tail) if tail else NO_IDS, numbers(said)
    return first, second, said + COMPACT if not tail and second is not None else None


def numbers(text: bytes) -> Ids | None:
    """int32[n] of `1,2,3`, exactly as JSON would read it; None for anything that is not plainly written ids."""
    if text.translate(None, b"0123456789,") or text[:1] in (b",", b"") or text[-1:] == b",":
        return None
    try:
        ids: Ids = np.fromstring(text, np.int32, sep=",")
    except ValueError:  # a gap; older versions of numpy stop there
        return None
    return ids if _rendered(ids) == text else None  # leading zeros and overflows do not come back as they went in


def _rendered(ids: Ids) -> bytes:
    return orjson.dumps(ids, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]


def _best(line: bytes, first: int, last: int, tapes: Sequence[Tape], separator: bytes) -> tuple[Tape | None, int, int]:
    """(tape, bytes of line[first:last] shared with it, cut behind a separator; tokens of those)."""
    best, cut = None, 0
    for tape in reversed(tapes):
        rendered = tape.render(separator)
        if cut < len(rendered) <= last - first and line.startswith(rendered, first):
            best, cut = tape, len(rendered)
    if best is not None:
        return best, cut, best.used
    whole = False
    view = np.frombuffer(line, np.uint8, last - first, first)
    for tape in reversed(tapes):
        shared = common_prefix(np.frombuffer(tape.text, np.uint8), view)
        ends = shared == len(view) and shared < len(tape.text) and tape.text[shared] == _COMMA
        if not ends:
            behind = tape.text.rfind(separator, 0, shared)
            shared = behind + len(separator) if behind >= 0 else 0
        if shared > cut:
            best, cut, whole = tape, shared, ends
    return best, cut, best.tokens_before(cut) + whole if best is not None else 0
