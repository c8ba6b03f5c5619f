"""Other tools' token-level records as run files.

Owns recognising a format and the honest translation: ids and logprobs are copied, never invented; what has none is left
out and counted. Formats: gyre.run/1 itself (made slim), NeMo-Gym rollouts (.jsonl), NeMo-RL message logs (.json).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from gyre_base.runfile import Call, Note, Record, RunHeader
from trajtools.load import Recording, load, write_slim
from trajtools.readers import nemo

FORMATS = ("gyre.run", "nemo-gym", "nemo-rl")


class UnknownFormat(ValueError):
    """Not a record that we can read at token level; the text says what was seen."""


@dataclass(frozen=True)
class Converted:
    """What a conversion wrote, and what it had to leave out by reason."""

    format: str
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
        first = (
            f"{self.format}: {self.executions:,} executions, {self.calls:,} calls, {self.sampled:,} sampled tokens "
            f"written to {self.out} ({self.size:,} bytes)"
        )
        return [first, *(f"  left out: {n:,} {why}" for why, n in self.left_out.items())]


def convert(path: str | Path, out: str | Path) -> Converted:
    """Write the file at `path` as a gyre.run/1 file at `out`. Raises UnknownFormat; the input is never changed."""
    source = Path(path)
    name, records = recognise(source)
    recording = load(source) if name == "gyre.run" else _gather(name, source, records)
    left_out = Counter({"lines that are no record": sum(len(r.bad) for r in recording.reports.values())})
    for record in [*recording.loose, *(r for e in recording.executions.values() for r in e.others)]:
        if isinstance(record, Note):
            left_out.update(record.extra.get("left_out", {}))
    return Converted(
        format=name,
        executions=len(recording.executions),
        calls=sum(len(e.forest) for e in recording.executions.values()),
        sampled=sum(e.forest.sampled_tokens for e in recording.executions.values()),
        left_out={why: n for why, n in left_out.items() if n},
        out=str(out),
        size=write_slim(recording, out),
    )


def recognise(path: Path) -> tuple[str, Iterator[Record]]:
    """(format, its records) of a file, by its first object."""
    with path.open("rb") as file:
        head = file.readline()
    first = _parsed(head)
    if isinstance(first, dict) and isinstance(first.get("k"), str):
        return "gyre.run", iter(())
    if nemo.is_gym(first):
        return "nemo-gym", nemo.gym_records(path)
    whole = first if first is not None else _parsed(path.read_bytes())
    if (rollouts := nemo.rl_rollouts(whole)) is not None:
        return "nemo-rl", nemo.rl_records(rollouts)
    seen = type(whole).__name__ if whole is not None else "something that is not JSON"
    keys = f" with the keys {', '.join(sorted(map(str, whole))[:8])}" if isinstance(whole, dict) else ""
    raise UnknownFormat(f"{path.name} holds {seen}{keys}; token-level formats read here: {', '.join(FORMATS)}")


def _gather(name: str, source: Path, records: Iterator[Record]) -> Recording:
    recording = Recording(loose=[RunHeader(run=source.stem, writer=f"trajtools convert {name}")])
    for record in records:
        execution = getattr(record, "exec", None)
        if isinstance(record, Call):
            recording.execution(record.exec).forest.insert(record)
        elif execution is None:
            recording.loose.append(record)
        else:
            recording.execution(execution).others.append(record)
    return recording


def _parsed(text: bytes) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
