"""What is wrong with a call log: damaged records, conflicts, calls that are missing. Counted, the first few named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trajtools.recording import Execution, Recording
from trajtools.words import counted

SHOWN = 5  # bad records and incomplete executions that a report names; all are counted


@dataclass(frozen=True)
class Damage:
    """What the reader met besides good records."""

    bad_records: int
    bad: tuple[tuple[str, int, int, str], ...]  # file, offset, bytes, reason of the first few
    recovered: int
    torn: tuple[tuple[str, int, int, str], ...]  # file, offset, bytes, "line" or "frame"
    duplicates: int
    conflicts: int
    defects: int
    mixed: int
    unknown_kinds: dict[str, int]

    @classmethod
    def of(cls, recording: Recording) -> Damage:
        reports = recording.reports
        unknown: Counter[str] = Counter()
        for report in reports.values():
            unknown.update(report.unknown_kinds)
        return cls(
            bad_records=sum(len(r.bad) for r in reports.values()),
            bad=tuple((name, b.offset, b.end - b.offset, b.reason) for name, r in reports.items() for b in r.bad)[
                :SHOWN
            ],
            recovered=sum(r.recovered for r in reports.values()),
            torn=tuple((name, *r.torn, r.unit) for name, r in reports.items() if r.torn),
            duplicates=sum(r.duplicates for r in reports.values()),
            conflicts=len(recording.conflicts),
            defects=sum(len(r.defects) for r in reports.values()),
            mixed=len(recording.mixed),
            unknown_kinds=dict(unknown),
        )

    @property
    def ok(self) -> bool:
        """Whether every whole line or frame was a record; a torn last one is the trace of a crash, not damage."""
        return not (self.bad_records or self.conflicts or self.mixed)

    def lines(self) -> list[str]:
        out = [
            f"  torn last {unit} in {name} at byte {at}: {size} bytes, not read" for name, at, size, unit in self.torn
        ]
        out += [f"  left out of {name} at byte {at}, {size} bytes: {reason}" for name, at, size, reason in self.bad]
        counts = {
            "bad records in all": self.bad_records if self.bad_records > len(self.bad) else 0,
            "records recovered behind a torn one": self.recovered,
            "duplicate calls ignored": self.duplicates,
            "calls in conflict (same id, other tokens)": self.conflicts,
            "calls kept as context only": self.defects,
            "calls of another level than their execution, left out": self.mixed,
            **{f"records of unknown kind {kind!r}": n for kind, n in self.unknown_kinds.items()},
        }
        return out + [f"  {what}: {n:,}" for what, n in counts.items() if n]


class Gaps:
    """Executions that are not what they should be: counted, the first few named."""

    def __init__(self) -> None:
        self.quarantined = self.incomplete = 0
        self.missing: list[tuple[str, str]] = []

    def add(self, execution: Execution) -> None:
        missing = execution.told_missing()
        self.quarantined += bool(execution.conflicts)
        self.incomplete += bool(missing)
        if missing and len(self.missing) < SHOWN:
            self.missing.append((execution.id, missing))

    def fields(self) -> dict[str, Any]:
        return {"quarantined": self.quarantined, "incomplete": self.incomplete, "missing": tuple(self.missing)}


def gap_lines(quarantined: int, incomplete: int, missing: Sequence[tuple[str, str]]) -> list[str]:
    """For a person; no lines if nothing is wrong."""
    out = []
    if quarantined:
        out.append(f"  {counted(quarantined, 'execution')} quarantined (two payloads under one call id): none trains")
    if incomplete:
        out.append(f"  {counted(incomplete, 'execution')} incomplete (kept unless --incomplete mask)")
    return out + [f"    {name}: {what}" for name, what in missing]
