"""Reading a run file, lines or frames: deltas resolved, damage reported, duplicates ignored, from any offset and while
it grows.

Owns the rules for what a reader does with each record (docs, "Run file", damaged files). Never changes the file.
Memory: the distinct tokens of the executions in flight (`forget` drops one), not the sum of their prompts.
"""

from __future__ import annotations

import dataclasses
import io
import re
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from gyre_base.runblocks import Blocks
from gyre_base.runcodec import KINDS, BadRecord, call_fields, decode, parse_object
from gyre_base.runframes import FRAME_KINDS, Frame, Frames, is_framed
from gyre_base.runhistory import History, Line
from gyre_base.runlines import HEAD_BYTES, Window
from gyre_base.runpacked import objects
from gyre_base.runrecords import Call, Record
from gyre_base.runtape import PROMPT, SENTINEL, Ahead, Short, ahead, array_at, shortened, spliced

MISSED: Any = object()  # the fast path does not apply; the plain one decides
_TAPE_BYTES = 48 << 20  # of all executions together
_BLANK = b"\x00\r\n\t "
_EXEC = re.compile(rb'"exec"\s*:\s*"([^"\\]*)"')


@dataclass(frozen=True)
class Located:
    """A record and where its line or frame lies: bytes [offset, end)."""

    offset: int
    end: int
    record: Record


@dataclass(frozen=True)
class Bad:
    """Bytes [offset, end) taken out, or a defect of a call that was kept (`kept`: as context only)."""

    offset: int
    end: int
    reason: str
    kept: bool = False


@dataclass
class ReadReport:
    """What a reader met besides good records. `torn`: (offset, bytes) of an unfinished last record (a crash)."""

    unit: str = "line"  # or "frame": what stands at these offsets

    records: Counter[str] = field(default_factory=Counter)
    unknown_kinds: Counter[str] = field(default_factory=Counter)
    bad: list[Bad] = field(default_factory=list)
    defects: list[Bad] = field(default_factory=list)
    conflicts: list[tuple[str, str, int]] = field(default_factory=list)  # (execution, call, offset)
    duplicates: int = 0
    recovered: int = 0  # records found behind a torn one on the same line
    torn: tuple[int, int] | None = None


class RunReader:
    """Iterates one run file of either form. Call `records` again to go on where it ended: a torn end is read once it is
    whole.
    """

    def __init__(
        self, source: str | Path | BinaryIO, offset: int = 0, *, blocks: Blocks | None = None, fast: bool = True
    ) -> None:
        """`fast` False: every line is parsed whole (the oracle of the tests). `blocks`: shared by several readers."""
        self._source = source
        self.offset = offset
        self.report = ReadReport()
        self.blocks = blocks if blocks is not None else Blocks()
        self._fast = fast
        self._histories: dict[str, History] = {}
        self._recent: OrderedDict[str, int] = OrderedDict()  # execution -> bytes of its tapes, latest last
        self._tape_bytes = 0

    def records(self) -> Iterator[Located]:
        """Every good record from `offset` to the present end, in file order. Raises RunFileError on a higher major."""
        if not isinstance(self._source, (str, Path)):
            framed = self._source.seekable() and is_framed(self._source)
            yield from self._frames(self._source) if framed else self._lines(self._source)
            return
        with open(self._source, "rb", buffering=0) as file:
            if is_framed(file):
                yield from self._frames(io.BufferedReader(file, 1 << 20))
            else:
                file.seek(self.offset)
                yield from self._lines(file)

    def forget(self, execution: str) -> None:
        """Drop the state of an execution that gets no more calls. A later delta on it would be an orphan."""
        self._histories.pop(execution, None)

    def one(self, line: bytes, offset: int) -> Iterator[Located]:
        """The records of one whole line that lies at `offset`; for those who find lines themselves."""
        if whole := line.strip(_BLANK):
            yield from self._line(whole, offset + line.find(whole), offset + len(line))

    def frame(self, frame: Frame) -> Iterator[Located]:
        """The records of one frame; for those who find frames themselves."""
        self.report.unit = "frame"
        try:
            if not frame.sound:
                raise BadRecord("its checksum does not fit" if frame.kind else "no frame begins here")
            found = objects(frame)
        except BadRecord as error:
            self.report.bad.append(Bad(frame.start, frame.end, str(error)))
            return
        if frame.kind not in FRAME_KINDS:
            self.report.unknown_kinds[f"frame {frame.kind}"] += 1
        for obj in found:
            try:
                record = self._record(obj, frame.start, frame.end)
            except BadRecord as error:
                self.report.bad.append(Bad(frame.start, frame.end, str(error)))
                continue
            if record is not None:
                yield Located(frame.start, frame.end, record)

    def _frames(self, file: BinaryIO) -> Iterator[Located]:
        self.report.unit, self.report.torn = "frame", None
        frames = Frames(file, self.offset)
        for frame in frames:
            self.offset = frame.end
            yield from self.frame(frame)
        self.offset, self.report.torn = frames.offset, frames.torn

    def _lines(self, file: BinaryIO) -> Iterator[Located]:
        self.report.torn = None
        lines = Window(file)
        while lines.advance():
            cut = self._ahead(lines) if self._fast else None
            lines.finish(cut.end if cut is not None else 0)
            start, end = self.offset, self.offset + lines.end - lines.start + lines.ended
            record = self._spliced(lines, cut, start, end) if cut is not None and lines.ended else MISSED
            if record is not MISSED:
                self.offset = end
                if record is not None:
                    yield Located(start, end, record)
                continue
            raw = line = lines.line()
            if raw[:1] != b"{" or raw[-1:] != b"}":
                line = raw.strip(_BLANK + b"\xef\xbb\xbf") if start == 0 else raw.strip(_BLANK)
            if not lines.ended and line and not _is_whole(line):
                self.report.torn = (start, len(raw))
                return
            self.offset = end
            if line:
                yield from self._line(line, start + (raw.find(line) if line is not raw else 0), end)

    def _ahead(self, lines: Window) -> Ahead | None:
        """What is known of the present line before its end is: a plain head of a known execution, all of a tape."""
        if not lines.buffer.startswith(b"{", lines.start):
            return None
        head_end = min(lines.start + HEAD_BYTES, lines.filled)
        key = lines.buffer.find(PROMPT, lines.start, head_end)
        if key < 0 or lines.buffer.find(b"\n", lines.start, key) >= 0:  # it is a later line's
            return None
        found = _EXEC.search(lines.buffer, lines.start, key)
        history = self._histories.get(found[1].decode(errors="replace")) if found is not None else None
        return ahead(lines, history.tapes.items, key - lines.start) if history is not None else None

    def _spliced(self, lines: Window, cut: Ahead, start: int, end: int) -> Any:
        """The record of the present line, parsed without what is ahead; MISSED if it has to be looked at as a whole."""
        short = spliced(lines, cut)
        found = _EXEC.search(short.rest) if short is not None else None
        if short is None or found is None:
            return MISSED
        try:
            return self._filled_in(short, found[1].decode(errors="replace"), start, end)
        except BadRecord:
            return MISSED  # said again, with its reason, by whoever reads the whole line

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
        return self._filled_in(short, execution, start, end) if short is not None else MISSED

    def _filled_in(self, short: Short, execution: str | None, start: int, end: int) -> Any:
        """The record of a line whose arrays were cut out; MISSED if they were not what they seemed."""
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
            self.report.bad[-1] = dataclasses.replace(self.report.bad[-1], end=start + at)
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
        line = Line.of(obj, self.blocks)
        history = self._histories.setdefault(execution, History(self.blocks))
        prompt, digest, place = history.resolve(line, short)
        if line.logprobs is not None and len(line.logprobs) != len(line.completion):
            reason = f"call {call_id}: {len(line.logprobs)} logprobs, {len(line.completion)} tokens: context only"
            self.report.defects.append(Bad(start, end, reason, kept=True))
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

    def _bound(self, execution: str, history: History) -> None:
        """Keep the tapes of recent executions only; the others are told again from their bodies when needed."""
        latest = next(reversed(self._recent), None)
        if latest == execution:
            return  # its size is looked at when it is another's turn
        if latest is not None and (before := self._histories.get(latest)):
            self._weigh(latest, before)
        self._weigh(execution, history)
        while self._tape_bytes > _TAPE_BYTES and len(self._recent) > 1:
            oldest, freed = self._recent.popitem(last=False)
            self._tape_bytes -= freed
            if oldest in self._histories:
                self._histories[oldest].drop_tapes()

    def _weigh(self, execution: str, history: History) -> None:
        size = history.tape_bytes()
        self._tape_bytes += size - self._recent.pop(execution, 0)
        self._recent[execution] = size


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
