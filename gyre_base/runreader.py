"""Reading a run file: delta lines resolved, damage reported, duplicates ignored, from any offset and while it grows.

Owns the rules for what a reader does with each line (docs, "Run file", damaged files). Never changes the file. Memory:
the distinct tokens of the executions in flight (`forget` drops one), not the sum of their prompts.
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from gyre_base.runblocks import Blocks
from gyre_base.runcodec import KINDS, BadRecord, call_fields, decode, ids_array, logprobs_array, parse_object
from gyre_base.runrecords import NO_IDS, Call, Ids, Logprobs, Record, chain_hash
from gyre_base.runtape import SENTINEL, Short, Tape, Tapes, array_at, shortened

MISSED: Any = object()  # the fast path does not apply; the plain one decides
_BLOCK_BYTES = 1 << 20  # lines can be megabytes long
_TAPE_BYTES = 48 << 20  # of all executions together
_BLANK = b"\x00\r\n\t "
_EXEC = re.compile(rb'"exec"\s*:\s*"([^"\\]*)"')


@dataclass(frozen=True)
class Located:
    """A record and where its line lies: bytes [offset, end)."""

    offset: int
    end: int
    record: Record


@dataclass(frozen=True)
class Bad:
    """A line taken out, or a defect of a call that was kept (`kept`: as context only)."""

    offset: int
    end: int
    reason: str
    kept: bool = False


@dataclass
class ReadReport:
    """What a reader met besides good records. `torn`: (offset, bytes) of an unfinished last line (a crash)."""

    records: Counter[str] = field(default_factory=Counter)
    unknown_kinds: Counter[str] = field(default_factory=Counter)
    bad: list[Bad] = field(default_factory=list)
    defects: list[Bad] = field(default_factory=list)
    conflicts: list[tuple[str, str, int]] = field(default_factory=list)  # (execution, call, offset)
    duplicates: int = 0
    recovered: int = 0  # records found behind a torn one on the same line
    torn: tuple[int, int] | None = None


class RunReader:
    """Iterates one run file. Call `records` again to go on where it ended: a torn end is read once it is whole."""

    def __init__(
        self, source: str | Path | BinaryIO, offset: int = 0, *, blocks: Blocks | None = None, fast: bool = True
    ) -> None:
        """`fast` False: every line is parsed whole (the oracle of the tests). `blocks`: shared by several readers."""
        self._source = source
        self.offset = offset
        self.report = ReadReport()
        self.blocks = blocks if blocks is not None else Blocks()
        self._fast = fast
        self._histories: dict[str, _History] = {}
        self._recent: OrderedDict[str, int] = OrderedDict()  # execution -> bytes of its tapes, latest last
        self._tape_bytes = 0

    def records(self) -> Iterator[Located]:
        """Every good record from `offset` to the present end, in file order. Raises RunFileError on a higher major."""
        if isinstance(self._source, (str, Path)):
            with open(self._source, "rb", buffering=0) as file:
                file.seek(self.offset)
                yield from self._lines(file)
        else:
            yield from self._lines(self._source)

    def forget(self, execution: str) -> None:
        """Drop the state of an execution that gets no more calls. A later delta on it would be an orphan."""
        self._histories.pop(execution, None)

    def one(self, line: bytes, offset: int) -> Iterator[Located]:
        """The records of one whole line that lies at `offset`; for those who find lines themselves."""
        if line := line.strip(_BLANK):
            yield from self._line(line, offset, offset + len(line))

    def objects(self, objects: Iterable[tuple[int, int, dict[str, Any]]]) -> Iterator[Located]:
        """Records of objects that another form (binary frames) gave: (offset, end, object)."""
        for start, end, obj in objects:
            try:
                record = self._record(obj, start, end)
            except BadRecord as error:
                self.report.bad.append(Bad(start, end, str(error)))
                continue
            if record is not None:
                yield Located(start, end, record)

    def _lines(self, file: BinaryIO) -> Iterator[Located]:
        self.report.torn = None
        for raw, ended in split_lines(file):
            start, end = self.offset, self.offset + len(raw) + ended
            line = raw
            if raw[:1] != b"{" or raw[-1:] != b"}":
                line = raw.strip(_BLANK + b"\xef\xbb\xbf") if start == 0 else raw.strip(_BLANK)
            if not ended and line and not _is_whole(line):
                self.report.torn = (start, len(raw))
                return
            self.offset = end
            if line:
                yield from self._line(line, start + (raw.find(line) if line is not raw else 0), end)

    def _line(self, line: bytes, start: int, end: int) -> Iterator[Located]:
        try:
            record = self._shortcut(line, start, end) if self._fast else MISSED
            if record is MISSED:
                record = self._record(parse_object(line), start, end)
        except BadRecord as error:
            self.report.bad.append(Bad(start, end, str(error)))
            yield from self._behind_torn(line, start, end)
            return
        if record is not None:
            yield Located(start, end, record)

    def _shortcut(self, line: bytes, start: int, end: int) -> Any:
        """The record of a full call line whose prompt begins like a history that was read; MISSED if it is not one."""
        array = array_at(line)
        if array is None:
            return MISSED
        found = _EXEC.search(line, 0, array[0]) or _EXEC.search(line, array[1])
        execution = found[1].decode(errors="replace") if found is not None else None
        history = self._histories.get(execution) if execution is not None else None
        short = shortened(line, array, history.tapes.items if history is not None else ())
        if short is None:
            return MISSED
        try:
            obj = parse_object(short.rest)
        except BadRecord:
            return MISSED
        if not self._refilled(obj, short, execution):
            return MISSED
        call = self._call(obj, start, end, short)
        if call is not None:
            self.report.records["call"] += 1
        return call

    @staticmethod
    def _refilled(obj: dict[str, Any], short: Short, execution: str | None) -> bool:
        """Put the arrays back in. False if they were cut out elsewhere than thought (a nested key, a second one)."""
        ids, completion = obj.get("prompt_ids"), obj.get("completion_ids")
        if obj["k"] != "call" or "level" in obj or not (isinstance(ids, list) and ids and ids[0] == SENTINEL):
            return False
        if short.tape is not None and (obj.get("exec") != execution or "base" in obj):
            return False
        if short.completion is not None:
            if completion != [SENTINEL]:
                return False
            obj["completion_ids"] = short.completion
        del ids[0]
        if short.tail is not None:
            if ids:
                return False
            obj["prompt_ids"] = short.tail
        return True

    def _behind_torn(self, line: bytes, start: int, end: int) -> Iterator[Located]:
        """A crash between two writes glues a torn record to the next whole one: look for a suffix that is a record."""
        at = line.find(b'{"k":', 1)
        for _ in range(16):  # bounded: a megabyte of noise must not be parsed at every brace
            if at < 0:
                return
            try:
                record = self._record(parse_object(line[at:]), start + at, end)
            except BadRecord:
                at = line.find(b'{"k":', at + 1)
                continue
            self.report.recovered += 1
            if record is not None:
                yield Located(start + at, end, record)
            return

    def _record(self, obj: dict[str, Any], start: int, end: int) -> Record | None:
        """The record of one object; None if there is nothing to pass on (unknown kind, duplicate, conflict)."""
        kind = obj["k"]
        if kind not in KINDS:
            self.report.unknown_kinds[kind] += 1
            return None
        record = self._call(obj, start, end) if kind == "call" else decode(obj)
        if record is not None:
            self.report.records[kind] += 1
        return record

    def _call(self, obj: dict[str, Any], start: int, end: int, short: Short | None = None) -> Call | None:
        """`short`: what was cut out of the line; its arrays are back in `obj`, but for what lies on its tape."""
        fields = call_fields(obj)
        execution, call_id = fields["exec"], fields["call"]
        line = _Line.of(obj, self.blocks)
        if line.logprobs is not None and len(line.logprobs) != len(line.completion):
            reason = f"call {call_id}: {len(line.logprobs)} logprobs, {len(line.completion)} tokens: context only"
            self.report.defects.append(Bad(start, end, reason, kept=True))
        history = self._histories.setdefault(execution, _History(self.blocks))
        prompt, digest, place = history.resolve(line, short)
        if call_id in history:
            if history.same(call_id, line, prompt, digest):
                self.report.duplicates += 1
            else:
                self.report.conflicts.append((execution, call_id, start))
            return None
        prompt, completion = history.add(
            call_id, line, prompt, digest, place, short.text if short is not None else None
        )
        self._bound(execution, history)
        logprobs = line.logprobs if line.logprobs is None or len(line.logprobs) == len(completion) else None
        return Call(**fields, prompt_ids=prompt, completion_ids=completion, logprobs=logprobs)

    def _bound(self, execution: str, history: _History) -> None:
        """Keep the tapes of recent executions only; the others are told again from their bodies when needed."""
        size = history.tape_bytes()
        self._tape_bytes += size - self._recent.pop(execution, 0)
        self._recent[execution] = size
        while self._tape_bytes > _TAPE_BYTES and len(self._recent) > 1:
            oldest, freed = self._recent.popitem(last=False)
            self._tape_bytes -= freed
            if oldest in self._histories:
                self._histories[oldest].drop_tapes()


def read_run(source: str | Path | BinaryIO, offset: int = 0) -> tuple[list[Record], ReadReport]:
    """Everything at once, for files known to be small. Long files: iterate a `RunReader`."""
    reader = RunReader(source, offset)
    return [located.record for located in reader.records()], reader.report


def _is_whole(line: bytes) -> bool:
    try:
        parse_object(line)
    except BadRecord:
        return False
    return True


def split_lines(file: BinaryIO) -> Iterator[tuple[bytes, bool]]:
    """(line without its newline, whether it had one). Lines may be of any length; memory is one line and a block."""
    rest: list[bytes] = []
    block = bytearray(_BLOCK_BYTES)  # filled again and again: it stays in the cache
    view = memoryview(block)
    while size := file.readinto(block):  # type: ignore[attr-defined]
        start = 0
        while (at := block.find(b"\n", start, size)) >= 0:
            line = bytes(view[start:at])
            if rest:
                line = b"".join((*rest, line))
                rest.clear()
            yield line, True
            start = at + 1
        if start < size:
            rest.append(bytes(view[start:size]))
    if rest:
        yield b"".join(rest), False


# ---- what is kept of earlier calls, to resolve later ones ---------------------------------------------------------


@dataclass(slots=True)
class _Line:
    """The part of a call line that says which tokens it is about."""

    base: str | None
    keep: int
    tail: Ids
    completion: Ids
    logprobs: Logprobs | None
    stated: str | None  # the chain hash that the line carries
    text: bool = False

    @classmethod
    def of(cls, obj: dict[str, Any], blocks: Blocks) -> _Line:
        base, keep, stated = obj.get("base"), obj.get("keep", 0), obj.get("h")
        if not isinstance(keep, int) or keep < 0 or not isinstance(base, (str, type(None))):
            raise BadRecord("base or keep is of a wrong type")
        keep = keep if base is not None else 0
        if obj.get("level", "token") == "text":
            tail, completion = (_numbers(obj.get(key, []), key, blocks) for key in ("prompt", "completion"))
            return cls(base, keep, tail, completion, None, stated, text=True)
        tail = ids_array(obj.get("prompt_ids", []), "prompt_ids")
        completion = ids_array(obj.get("completion_ids", []), "completion_ids")
        return cls(base, keep, tail, completion, logprobs_array(obj.get("logprobs")), stated)


def _numbers(values: Any, key: str, blocks: Blocks) -> Ids:
    if not isinstance(values, list) or not all(isinstance(v, dict) for v in values):
        raise BadRecord(f"{key} is not a list of blocks")
    return blocks.numbers(values)


@dataclass(slots=True)
class _Body:
    """A call as stored: prompt = the first `keep` tokens of base's prompt + completion, then `tail`."""

    base: str | None
    keep: int
    tail: Ids
    completion: Ids
    answer: bytes  # digest of completion and logprobs
    hash: bytes  # chain hash of its line

    @property
    def tokens(self) -> int:
        return self.keep + len(self.tail) + len(self.completion)


class _History:
    """The calls of one execution: tails and completions, plus the whole tokens of a few recent ones."""

    def __init__(self, blocks: Blocks) -> None:
        self.tapes = Tapes()
        self._blocks = blocks
        self._bodies: dict[str, _Body] = {}
        self._on: dict[int, tuple[Tape, str]] = {}  # id of a tape -> (it, the last call laid on it)

    def __contains__(self, call: str) -> bool:
        return call in self._bodies

    def tape_bytes(self) -> int:
        return sum(tape.size for tape in self.tapes.items)

    def drop_tapes(self) -> None:
        self.tapes = Tapes()
        self._on.clear()

    def resolve(self, line: _Line, short: Short | None = None) -> tuple[Ids, bytes, tuple[Tape | None, int]]:
        """(prompt int32[P], chain hash, (tape, tokens of the prompt on it)). Raises BadRecord: no base, wrong hash."""
        prompt, parent = line.tail, b""
        place: tuple[Tape | None, int] = (None, 0)
        tape = short.tape if short is not None else None
        if line.base is not None:
            base = self._bodies.get(line.base)
            if base is None:
                raise BadRecord(f"its base {line.base} is missing (an orphan until the next full line)")
            if line.keep > base.tokens:
                raise BadRecord(f"keep {line.keep} is longer than its base {line.base} ({base.tokens})")
            head, parent = self._sequence(line.base, line.keep), base.hash
            place = self._tape_of(line.base), line.keep
            prompt = np.concatenate([head, line.tail])
        elif tape is not None:  # laid down before the hash is looked at: tokens that nobody claims do no harm
            assert short is not None
            laid, prompt, _ = self.tapes.lay(tape, short.keep, line.tail, line.completion, short.text)
            place = laid, len(prompt)
        tail = prompt if tape is not None else line.tail
        hashed = (
            (self._blocks.hashed(tail), self._blocks.hashed(line.completion)) if line.text else (tail, line.completion)
        )
        digest = chain_hash(parent, line.keep, *hashed, line.logprobs)
        if line.stated is not None and line.stated != digest.hex():
            raise BadRecord("the chain hash does not fit: a digit changed or the base is another one")
        return prompt, digest, place

    def same(self, call: str, line: _Line, prompt: Ids, digest: bytes) -> bool:
        """Whether a second line of this id says the same tokens and logprobs, whatever its form."""
        body = self._bodies[call]
        if body.hash == digest:
            return True
        if body.answer != _answer(line) or body.tokens != len(prompt) + len(line.completion):
            return False
        return bool(np.array_equal(self._sequence(call, len(prompt)), prompt))

    def add(
        self,
        call: str,
        line: _Line,
        prompt: Ids,
        digest: bytes,
        place: tuple[Tape | None, int],
        text: bytes | None = None,
    ) -> tuple[Ids, Ids]:
        """Store it against the recent history it shares most with: distinct tokens are kept, not prompts.

        Returns its prompt and completion as views that hold no copy of the history.
        """
        tape, keep = place
        if tape is None:
            tape, keep = self.tapes.nearest(prompt)
        base = self._on[id(tape)][1] if tape is not None and id(tape) in self._on else line.base
        if base is not None:
            keep_of_base = min(keep, self._bodies[base].tokens)
        text = text if not keep and line.base is None else None  # it renders the whole prompt, or was used already
        laid, whole, completion = self.tapes.lay(tape, keep, prompt[keep:], line.completion, text)
        stored = keep_of_base if base is not None else 0
        tail = whole[stored:].copy()
        self._bodies[call] = _Body(base, stored, tail, line.completion, _answer(line), digest)
        self._note(laid, call)
        return whole, completion

    def _note(self, tape: Tape, call: str) -> None:
        """The deepest call of a tape stands for it."""
        before = self._on.get(id(tape))
        if before is None or self._bodies[call].tokens >= self._bodies[before[1]].tokens:
            self._on[id(tape)] = (tape, call)
        alive = {id(t) for t in self.tapes.items}
        if len(self._on) > len(alive):
            self._on = {key: value for key, value in self._on.items() if key in alive}

    def _tape_of(self, call: str) -> Tape | None:
        return next((tape for tape, last in self._on.values() if last == call), None)

    def _sequence(self, call: str | None, n: int) -> Ids:
        """The first n tokens of a call's prompt + completion, filled from the end along the bases."""
        tapes = {last: tape for tape, last in self._on.values()}
        if call in tapes:
            return tapes[call].view(0, n)
        out: Ids = np.empty(n, np.int32)
        while n > 0 and call is not None:
            if (tape := tapes.get(call)) is not None:
                out[:n] = tape.view(0, n)
                break
            body = self._bodies[call]
            prompt = body.keep + len(body.tail)
            if n > prompt:
                out[prompt:n] = body.completion[: n - prompt]
            if n > body.keep:
                out[body.keep : min(n, prompt)] = body.tail[: n - body.keep]
            n, call = min(n, body.keep), body.base
        return out


def _answer(line: _Line) -> bytes:
    return chain_hash(b"answer", 0, NO_IDS, line.completion, line.logprobs)
