"""The slim form of a recording: executions by name, calls by start, deltas against the nearest earlier call.

Equal sets of calls give equal bytes. Lines, or the binary form if the name ends in .gtr.
"""

from __future__ import annotations

from pathlib import Path

from gyre_base.runblocks import Blocks
from gyre_base.runcodec import to_line, to_object
from gyre_base.runfile import CallWriter, ExecEnd, Note, Record, Reward
from gyre_base.runpacked import BlockWriter
from trajtools.breaks import Analysis
from trajtools.recording import CONFLICT, Execution, Recording

KEYFRAME_CALLS = 256  # a slim file is written whole, so damage is rare: fewer full lines than in a live log


class SlimWriter:
    """Writes executions in delta form, calls by start time; equal sets, equal bytes. Binary if named .gtr."""

    def __init__(self, out: str | Path, blocks: Blocks) -> None:
        self._path = Path(out)
        self._part = self._path.with_name(self._path.name + ".part")
        binary = self._path.suffix == ".gtr"  # its blocks carry checksums: no keyframes needed to bound damage
        self._writer = CallWriter(blocks=blocks, keyframe_calls=1 << 30 if binary else KEYFRAME_CALLS)
        self._file = self._part.open("wb")
        self._blocks = BlockWriter(self._file) if binary else None
        self._size = 0

    def _put(self, obj: dict[str, object]) -> None:
        if self._blocks is not None:
            self._blocks.write(obj)
        else:
            self._size += self._file.write(to_line(obj))

    def loose(self, records: list[Record]) -> None:
        for record in records:
            self._put(to_object(record))

    def execution(self, execution: Execution, analysis: Analysis | None = None) -> None:
        closing = (Reward, ExecEnd)
        for record in execution.others:
            if not isinstance(record, closing):
                self._put(to_object(record))
        for call, base, keep in execution.calls(analysis):
            self._put(self._writer.object(call, base=base, keep=keep))
        if execution.conflicts and not any(isinstance(r, Note) and r.text == CONFLICT for r in execution.others):
            calls = sorted(set(execution.conflicts))
            self._put(to_object(Note(exec=execution.id, text=CONFLICT, extra={"calls": calls})))
        for record in execution.others:
            if isinstance(record, closing):
                self._put(to_object(record))
        self._writer.forget(execution.id)

    def close(self) -> int:
        """Into place. Returns the size."""
        size = self._blocks.close() if self._blocks is not None else self._size
        self._file.close()
        self._part.replace(self._path)
        return size


def write_slim(recording: Recording, out: str | Path) -> int:
    """The whole of it; see `SlimWriter`. Returns the size."""
    writer = SlimWriter(out, recording.blocks)
    writer.loose(recording.loose)
    for name in sorted(recording.executions):
        writer.execution(recording.executions[name])
    return writer.close()
