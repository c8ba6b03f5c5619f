"""A call log in memory: one forest per execution and everything else that was recorded of it.

Owns reading for the reports and tools: a file, a folder of shards (`calls/` of a run) or a stream. Arrays of a call
live in the forest only, so memory is the distinct tokens. Changes no file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, TypeAlias

from gyre_base.runfile import (
    Call,
    CallWriter,
    ExecEnd,
    ExecStart,
    Intent,
    Note,
    ReadReport,
    Record,
    Reward,
    RunHeader,
    RunReader,
    encode,
)
from trajtools.breaks import Analysis, analyse
from trajtools.forest import ConflictingCall, Forest, Mark

Source: TypeAlias = str | Path | BinaryIO


@dataclass(eq=False)
class Execution:
    """One execution of a log. `others`: its records that are not calls, in file order."""

    id: str
    forest: Forest
    others: list[Record] = field(default_factory=list)
    offsets: dict[str, int] = field(default_factory=dict)  # call -> byte offset of its line

    @property
    def reward(self) -> Reward | None:
        """The last word on its outcome."""
        return next((r for r in reversed(self.others) if isinstance(r, Reward)), None)

    @property
    def end(self) -> ExecEnd | None:
        return next((r for r in reversed(self.others) if isinstance(r, ExecEnd)), None)

    @property
    def group(self) -> str:
        return next((r.group for r in self.others if isinstance(r, ExecStart)), "")

    def lost_calls(self) -> list[str]:
        """Intents without a call: something was dispatched and never logged."""
        return [r.call for r in self.others if isinstance(r, Intent) and r.call not in self.forest]

    def calls(self, analysis: Analysis | None = None) -> Iterator[tuple[Call, str | None, int]]:
        """(call with its arrays, base, keep) by start time: what a writer needs for delta lines."""
        links = (analysis or analyse(self.forest)).links
        for mark in sorted(self.forest.marks(), key=lambda m: (m.call.t0, m.call.seq, m.id)):
            found = links.get(mark.id)
            yield whole_call(self.forest, mark), found.mark.id if found else None, found.shared if found else 0


@dataclass(eq=False)
class Recording:
    """A whole log."""

    executions: dict[str, Execution] = field(default_factory=dict)
    loose: list[Record] = field(default_factory=list)  # headers and notes that belong to no execution
    reports: dict[str, ReadReport] = field(default_factory=dict)  # by file
    conflicts: list[tuple[str, str, int]] = field(default_factory=list)  # (execution, call, offset)
    size: int = 0

    @property
    def vocab(self) -> int | None:
        sizes = [r.tokenizer.get("vocab") for r in self.loose if isinstance(r, RunHeader)]
        return next((v for v in sizes if isinstance(v, int)), None)

    def execution(self, name: str) -> Execution:
        if name not in self.executions:
            self.executions[name] = Execution(name, Forest(name))
        return self.executions[name]


def load(
    source: Source,
    *,
    on_call: Callable[[Call], None] | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> Recording:
    """Read it all. `on_call` sees each call with its arrays before the forest takes them; `on_bytes`: progress."""
    recording = Recording()
    for name, part in _parts(source):
        reader = RunReader(part)
        recording.reports[name] = reader.report
        for located in reader.records():
            _take(recording, located.record, located.offset, on_call)
            if on_bytes is not None:
                on_bytes(recording.size + located.end)
        recording.conflicts.extend(reader.report.conflicts)
        recording.size += reader.offset
    for execution in recording.executions.values():
        _relabel(execution)
    return recording


def files_of(source: str | Path) -> list[Path]:
    """The run files behind a path: itself, or every *.jsonl of a folder by name."""
    path = Path(source)
    return sorted(path.glob("*.jsonl")) if path.is_dir() else [path]


def whole_call(forest: Forest, mark: Mark) -> Call:
    """The call as recorded, arrays included."""
    tokens = forest.tokens(mark)
    prompt, completion = tokens[: mark.prompt_tokens], tokens[mark.prompt_tokens :]
    return dataclasses.replace(mark.call, prompt_ids=prompt, completion_ids=completion, logprobs=mark.logprobs)


def write_slim(recording: Recording, out: str | Path) -> int:
    """Write it in delta form, execution by execution, calls by start time; equal sets, equal bytes. Returns size."""
    path = Path(out)
    part = path.with_name(path.name + ".part")
    writer, size = CallWriter(), 0
    with part.open("wb") as file:
        for record in recording.loose:
            size += file.write(encode(record))
        for name in sorted(recording.executions):
            for line in _lines(recording.executions[name], writer):
                size += file.write(line)
    part.replace(path)
    return size


def _lines(execution: Execution, writer: CallWriter) -> Iterator[bytes]:
    closing = (Reward, ExecEnd)
    yield from (encode(r) for r in execution.others if not isinstance(r, closing))
    for call, base, keep in execution.calls():
        yield writer.call(call, base=base, keep=keep)
    yield from (encode(r) for r in execution.others if isinstance(r, closing))
    writer.forget(execution.id)


def _relabel(execution: Execution) -> None:
    """proxyd learns from later calls what an earlier one was (a compaction, a side call) and says so in a note."""
    for note in execution.others:
        if isinstance(note, Note) and note.text == "relabel" and str(note.extra.get("call")) in execution.forest:
            mark = execution.forest[str(note.extra["call"])]
            purpose, label = (str(note.extra.get(k) or getattr(mark.call, k)) for k in ("purpose", "label"))
            mark.call = dataclasses.replace(mark.call, purpose=purpose, label=label)


def _parts(source: Source) -> list[tuple[str, Source]]:
    if isinstance(source, (str, Path)):
        return [(path.name, path) for path in files_of(source)]
    return [("-", source)]


def _take(recording: Recording, record: Record, offset: int, on_call: Callable[[Call], None] | None) -> None:
    match record:
        case Call():
            if on_call is not None:
                on_call(record)
            execution = recording.execution(record.exec)
            try:
                if execution.forest.insert(record):
                    execution.offsets[record.call] = offset
            except ConflictingCall:
                recording.conflicts.append((record.exec, record.call, offset))
        case RunHeader() | Note(exec=None):
            recording.loose.append(record)
        case Note():
            recording.execution(str(record.exec)).others.append(record)
        case _:
            recording.execution(record.exec).others.append(record)
