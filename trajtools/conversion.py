"""One form of a record as another: run file (lines or binary), ATIF 1.7, Arrow or Parquet.

Owns choosing the form by the name of the output and saying what was left out. Reads anything that `load` reads.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gyre_base.runfile import Note
from trajtools.load import OnBytes, Source, load
from trajtools.readers import FORMATS, UnknownFormat
from trajtools.recording import Recording
from trajtools.words import sizes
from trajtools.writers.slim import write_slim

FORMS = ("run", "gtr", "atif", "arrow", "parquet")
_BY_SUFFIX = {".gtr": "gtr", ".json": "atif", ".arrow": "arrow", ".parquet": "parquet"}


class CannotWrite(ValueError):
    """This record can't be told in that form; the text says why and what to do."""


@dataclass(frozen=True)
class Converted:
    """What a conversion wrote, and what it had to leave out by reason."""

    format: str
    level: str
    executions: int
    calls: int
    sampled: int
    left_out: dict[str, int]
    out: str
    size: int

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def lines(self) -> list[str]:
        """For a person; the first line says it all."""
        unit = "sampled tokens" if self.level == "token" else "sampled blocks of text (no token ids were recorded)"
        first = (
            f"{self.format}: {sizes(self.executions, self.calls)}, {self.sampled:,} {unit} "
            f"written to {self.out} ({self.size:,} bytes)"
        )
        return [first, *(f"  left out: {n:,} {why}" for why, n in self.left_out.items())]


def convert(
    source: Source, out: str | Path, form: str | None = None, *, on_bytes: OnBytes | None = None, **options: Any
) -> Converted:
    """Write `source` at `out`. Raises UnknownFormat, CannotWrite; the input is never changed."""
    path = Path(out)
    form = form_of(path, form)
    if form == "gtr" and path.suffix != ".gtr":
        raise CannotWrite(f"a binary run file ends in .gtr, not in {path.suffix or 'nothing'}")
    recording = load(source, on_bytes=on_bytes)
    if not recording.executions and not recording.loose:
        raise UnknownFormat(
            f"{getattr(source, 'name', source)} holds no record; formats read here: {', '.join(FORMATS)}"
        )
    left_out = Counter({"damaged lines or frames": sum(len(r.bad) for r in recording.reports.values())})
    left_out["calls of another level than their execution"] = len(recording.mixed)
    for record in [*recording.loose, *(r for e in recording.executions.values() for r in e.others)]:
        if isinstance(record, Note):
            left_out.update(record.extra.get("left_out", {}))
    size = _write(recording, path, form, options, left_out)
    levels = {e.level for e in recording.executions.values()} or {"token"}
    return Converted(
        format=recording.format,
        level=levels.pop() if len(levels) == 1 else "mixed",
        executions=len(recording.executions),
        calls=sum(len(e.forest) for e in recording.executions.values()),
        sampled=sum(e.forest.sampled_tokens for e in recording.executions.values()),
        left_out={why: n for why, n in left_out.items() if n},
        out=str(out),
        size=size,
    )


def form_of(out: Path, form: str | None) -> str:
    """The form that was named, else what the name of the output says."""
    return form or _BY_SUFFIX.get(out.suffix, "run")


def _write(recording: Recording, path: Path, form: str, options: dict[str, Any], left_out: Counter[str]) -> int:
    if form == "atif":
        from trajtools.writers.atif import write_atif

        return int(write_atif(recording, path, left_out=left_out, **options))
    if form in ("arrow", "parquet"):
        from trajtools.writers.table import write_table

        return int(write_table(recording, path, form))
    return write_slim(recording, path)
