"""Reading a record into a `Recording`, whole or one execution at a time.

Owns what can be read: a run file (lines or frames), a folder of shards, a run's directory or its `calls/` (with the
outcomes beside them), a stream, or a record of another tool (`readers`). `Stream` goes through the executions one at a
time when there are many. Changes no file.
"""

from __future__ import annotations

import dataclasses
import io
import re
import shutil
import tempfile
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, TypeAlias

import orjson

from gyre_base.runfile import BadRecord, Located, ReadReport, RunHeader, RunReader
from gyre_base.runframes import BLOCK, Frame, Frames, frame_at, is_framed
from gyre_base.runlines import split_lines
from gyre_base.runpacked import head_of
from trajtools.beside import Outcomes, files_of
from trajtools.mend import cuts_of, pieces
from trajtools.recording import Execution, OnCall, Recording, relabel

Source: TypeAlias = str | Path | BinaryIO
OnBytes: TypeAlias = Callable[[int], None]
AT_ONCE = 64  # executions held in memory before `Stream` turns to one at a time
_HEAD = re.compile(rb'\{"k":"(?:call|intent|exec|exec_end|reward|note)","exec":"([^"\\]+)"')
_RECORD = b'{"k":"'


def load(source: Source, *, on_call: OnCall | None = None, on_bytes: OnBytes | None = None) -> Recording:
    """Read it all. `on_call` sees each call with its arrays before the forest takes them; `on_bytes`: progress."""
    recording = Recording()
    with _parts(source) as parts:
        for name, part in parts:
            for located in _records(recording, name, part):
                recording.take(located.record, located.offset, on_call)
                if on_bytes is not None:
                    on_bytes(recording.size + located.end)
            _close(recording, name, part)
    outcomes = Outcomes(source)
    for execution in recording.executions.values():
        _finish(execution, outcomes)
    return recording


def _finish(execution: Execution, outcomes: Outcomes) -> None:
    """What is known only when all of it was read."""
    relabel(execution)
    if execution.reward is None:
        execution.others.extend(outcomes.records(execution.id))


# ---- one execution at a time ---------------------------------------------------------------------------------------


class Stream:
    """The executions of a log by name, each let go before the next where there are many.

    Memory: one execution (or `at_once` small ones) and 24 bytes per record. `recording` is complete, but for its
    executions, when the iterator ends.
    """

    def __init__(
        self, source: Source, *, on_bytes: OnBytes | None = None, at_once: int = AT_ONCE, side: Path | None = None
    ) -> None:
        """`side`: where what is left out of a run file goes, if there is any (`wrote_side`)."""
        self.recording = Recording()
        self.wrote_side = False
        self._outcomes = Outcomes(source)
        self._source, self._on_bytes, self._at_once, self._side = source, on_bytes, at_once, side

    def executions(self) -> Iterator[Execution]:
        with _parts(self._source) as parts:
            if self._load(parts):
                for name in sorted(self.recording.executions):
                    _finish(self.recording.executions[name], self._outcomes)
                    yield self.recording.executions[name]
            else:
                self.recording = Recording()
                yield from self._one_at_a_time(parts)
            if self._side is not None:
                self._set_aside(parts, self._side)

    def _set_aside(self, parts: list[tuple[str, Path | BinaryIO]], side: Path) -> None:
        """Every record that was left out, as `repair` would take it out. Other forms have none to set aside."""
        taken: list[bytes] = []
        for name, part in parts:
            report = self.recording.reports.get(name)
            cuts = cuts_of(report) if report is not None and _by_record(part) else []
            with _open(part) as file:
                taken += pieces(file, name, cuts) if cuts else []
        if taken:
            side.write_bytes(b"".join(taken))
            self.wrote_side = True

    def _load(self, parts: list[tuple[str, Path | BinaryIO]]) -> bool:
        """Everything, unless there are too many executions in files that can be read again by record."""
        again = all(_by_record(part) for _, part in parts)
        for name, part in parts:
            for located in _records(self.recording, name, part):
                self.recording.take(located.record, located.offset)
                if self._on_bytes is not None:
                    self._on_bytes(self.recording.size + located.end)
                if again and len(self.recording.executions) > self._at_once:
                    return False
            _close(self.recording, name, part)
        return True

    def _one_at_a_time(self, parts: list[tuple[str, Path | BinaryIO]]) -> Iterator[Execution]:
        with ExitStack() as stack:
            files = [stack.enter_context(p.open("rb")) if isinstance(p, Path) else p for _, p in parts]
            places = _Places()
            readers = []
            for number, file in enumerate(files):
                reader = RunReader(file, blocks=self.recording.blocks)
                places.scan(number, file, reader, self.recording)
                readers.append(reader)
                self.recording.reports[parts[number][0]] = reader.report
                if self._on_bytes is not None:
                    self._on_bytes(self.recording.size)
            for name in sorted(places.records):
                yield self._execution(name, places.records.pop(name), files, readers)

    def _execution(self, name: str, records: array[int], files: list[BinaryIO], readers: list[RunReader]) -> Execution:
        made = Recording(blocks=self.recording.blocks)
        for number, start, end in zip(records[::3], records[1::3], records[2::3], strict=True):
            file, reader = files[number], readers[number]
            file.seek(start)
            data = file.read(end - start)
            framed = reader.report.unit == "frame"
            for located in reader.frame(frame_at(data, start)) if framed else reader.one(data, start):
                made.take(located.record, located.offset)
        for reader in readers:
            reader.forget(name)
            for conflict in (c for c in reader.report.conflicts if c[0] == name):
                made.conflict(*conflict)
        self.recording.conflicts.extend(made.conflicts)
        self.recording.mixed.extend(made.mixed)
        execution = made.execution(name)
        _finish(execution, self._outcomes)
        return execution


@dataclass
class _Places:
    """Where the records of each execution lie: (file, start, end) after one another."""

    records: dict[str, array[int]] = field(default_factory=dict)

    def scan(self, number: int, file: BinaryIO, reader: RunReader, recording: Recording) -> None:
        """One pass over a file."""
        recording.size += file.seek(0, 2)
        if is_framed(file):
            self._frames(number, file, reader, recording)
        else:
            self._lines(number, file, reader, recording)

    def _frames(self, number: int, file: BinaryIO, reader: RunReader, recording: Recording) -> None:
        """Frames that name no execution are taken at once, damaged ones among them."""
        reader.report.unit = "frame"
        frames = Frames(file)
        for frame in frames:
            owner = _owner(frame)
            if owner is not None:
                self._add(owner, number, frame.start, frame.end)
                continue
            for located in reader.frame(frame):
                recording.take(located.record, located.offset)
        reader.report.torn = frames.torn

    def _lines(self, number: int, file: BinaryIO, reader: RunReader, recording: Recording) -> None:
        """Lines without a plain head are read as a whole to find whose they are."""
        file.seek(0)
        at = 0
        for line, ended in split_lines(file):
            end = at + len(line) + ended
            found = _HEAD.match(line)
            plain = found is not None and (ended or line.endswith(b"}")) and line.find(_RECORD, 1) < 0
            if plain and found is not None:
                self._add(found[1].decode(errors="replace"), number, at, end)
            else:
                self._odd(number, at, line, ended, reader, recording)
            at = end

    def _odd(self, number: int, at: int, line: bytes, ended: bool, reader: RunReader, recording: Recording) -> None:
        look = RunReader(io.BytesIO(line + (b"\n" if ended else b"")), blocks=recording.blocks)
        owners = set()
        for located in look.records():
            name = getattr(located.record, "exec", None)
            if isinstance(name, str):
                owners.add(name)
            else:
                recording.take(located.record, at)
        orphan = [re.search(rb'"exec"\s*:\s*"([^"\\]+)"', line)] if look.report.bad and not owners else []
        owners |= {m[1].decode(errors="replace") for m in orphan if m and b'"base"' in line}
        end = at + len(line) + ended
        for name in owners:
            self._add(name, number, at, end)
        if not owners:
            reader.report.bad.extend(dataclasses.replace(b, offset=at + b.offset, end=end) for b in look.report.bad)
            reader.report.unknown_kinds.update(look.report.unknown_kinds)
            if look.report.torn:
                reader.report.torn = (at, len(line))

    def _add(self, name: str, number: int, start: int, end: int) -> None:
        self.records.setdefault(name, array("q")).extend((number, start, end))


def _owner(frame: Frame) -> str | None:
    """The execution that a frame is about, None if it names none that is sure."""
    try:
        name = head_of(frame).get("exec") if frame.sound else None
    except BadRecord:
        return None
    return name if isinstance(name, str) else None


# ---- files ---------------------------------------------------------------------------------------------------------


@contextmanager
def _parts(source: Source) -> Iterator[list[tuple[str, Path | BinaryIO]]]:
    """Named files. A stream that can't be read twice goes to a temporary file first."""
    if isinstance(source, (str, Path)):
        yield [(path.name, path) for path in files_of(source)]
        return
    if _seekable(source):
        yield [("-", source)]
        return
    with tempfile.TemporaryFile() as copy:
        shutil.copyfileobj(source, copy, 1 << 20)
        copy.seek(0)
        yield [("-", copy)]


def _seekable(source: BinaryIO) -> bool:
    try:
        return source.seekable()
    except AttributeError:
        return False


@contextmanager
def _open(part: Path | BinaryIO) -> Iterator[BinaryIO]:
    if isinstance(part, Path):
        with part.open("rb", buffering=0) as file:
            yield file
    else:
        part.seek(0)
        yield part


def _by_record(part: Path | BinaryIO) -> bool:
    """Whether one record can be read without its neighbours: lines and logs of frames, no compressed blocks."""
    with _open(part) as file:
        if file.seek(0, 2) == 0:
            return True
        if is_framed(file):
            first = next(iter(Frames(file)), None)
            return first is None or first.kind != BLOCK
    return _is_lines(part)


def _is_lines(part: Path | BinaryIO) -> bool:
    """Whether one of the first lines is a record of ours."""
    with _open(part) as file:
        for number, (line, _) in enumerate(split_lines(file)):
            line = line.strip(b"\xef\xbb\xbf\x00\r\n\t ")
            if line.startswith(_RECORD):
                return True
            if number > 8:
                break
            try:
                obj = orjson.loads(line)
            except orjson.JSONDecodeError:
                continue
            if isinstance(obj, dict) and isinstance(obj.get("k"), str):
                return True
    return False


def _records(recording: Recording, name: str, part: Path | BinaryIO) -> Iterator[Located]:
    """The records of one file of whatever format; what damaged it goes to `recording.reports`."""
    from trajtools.readers import recognise  # late: most logs are run files

    if isinstance(part, Path) and not part.exists():
        raise FileNotFoundError(2, "No such file or directory", str(part))
    with _open(part) as file:
        framed = is_framed(file)
    if not framed and not _is_lines(part):
        with _open(part) as file:
            recording.format, records = recognise(
                file, name, recording.blocks, part if isinstance(part, Path) else None
            )
        if recording.format != "gyre.run":
            recording.reports[name] = ReadReport()
            recording.loose.append(RunHeader(run=Path(name).stem, writer=f"trajtools from {recording.format}"))
            yield from (Located(-1, -1, record) for record in records)
            return
    reader = RunReader(part, blocks=recording.blocks)
    recording.reports[name] = reader.report
    if not isinstance(part, Path):
        part.seek(0)
    yield from reader.records()


def _close(recording: Recording, name: str, part: Path | BinaryIO) -> None:
    for conflict in recording.reports[name].conflicts:
        recording.conflict(*conflict)
    with _open(part) as file:
        recording.size += file.seek(0, 2)
