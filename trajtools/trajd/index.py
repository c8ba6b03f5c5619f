"""Where the records of each execution lie in the call log. An index, never a copy: arrays are read when needed.

Scans `calls/*.gtr` from where it stopped, whole frames only: a torn tail is read once it is whole. One file per life
of each proxyd, oldest life first. `extent` says how far it has read; loading within a recorded extent gives the same
calls at every restart, whatever was appended since.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from gyre_base.runfile import BadRecord, Call, Note, ReadReport, RunReader
from gyre_base.runframes import Frame, Frames, frame_at
from gyre_base.runpacked import head_of

Extent: TypeAlias = dict[str, int]  # file name -> bytes read
_CHUNK = 4 << 20


@dataclass(frozen=True, slots=True)
class Place:
    """One frame, or what stands where one should: bytes [start, end) of a file."""

    file: str
    start: int
    end: int


@dataclass(frozen=True, eq=False)
class Loaded:
    """The calls of one execution in file order, relabelled, and what the reader met."""

    calls: tuple[Call, ...]
    report: ReadReport


@dataclass
class CallIndex:
    """See the module. Used by one thread at a time."""

    folder: Path
    extent: Extent = field(default_factory=dict)
    records: int = 0
    unplaced: int = 0  # records that name no execution (headers, damage)
    _places: dict[str, list[Place]] = field(default_factory=dict)

    @property
    def executions(self) -> int:
        return len(self._places)

    def scan(self) -> int:
        """Read what was appended. Returns the number of new records."""
        before = self.records
        for path in sorted(self.folder.glob("*.gtr"), key=_life):
            self._scan_file(path)
        return self.records - before

    def _scan_file(self, path: Path) -> None:
        at = self.extent.get(path.name, 0)
        if path.stat().st_size <= at:
            return
        with path.open("rb", buffering=_CHUNK) as file:
            frames = Frames(file, at)
            for frame in frames:
                if (name := _execution(frame)) is not None:
                    self._places.setdefault(name, []).append(Place(path.name, frame.start, frame.end))
                self.unplaced += name is None
                self.records += 1
            self.extent[path.name] = frames.offset

    def load(self, execution: str, extent: Extent | None = None) -> Loaded:
        """Its calls, as far as `extent` (default: all that was scanned). Unknown executions have none."""
        places = [p for p in self._places.get(execution, ()) if extent is None or p.end <= extent.get(p.file, 0)]
        reader = RunReader(self.folder)  # which reads nothing itself: it is handed frames
        calls: list[Call] = []
        labels: dict[str, tuple[str, str]] = {}
        for frame in self._frames(places):
            for located in reader.frame(frame):
                match located.record:
                    case Call() as call:
                        calls.append(call)
                    case Note(text="relabel", extra=about):
                        said = str(about.get("purpose", "turn")), str(about.get("label", ""))
                        labels[str(about.get("call"))] = said
        return Loaded(tuple(_relabelled(call, labels) for call in calls), reader.report)

    def _frames(self, places: list[Place]) -> Iterator[Frame]:
        for name in dict.fromkeys(place.file for place in places):
            with (self.folder / name).open("rb") as file:
                for place in (p for p in places if p.file == name):
                    file.seek(place.start)
                    yield frame_at(file.read(place.end - place.start), place.start)


def damage(report: ReadReport) -> Counter[str]:
    """What a reader met besides good records, by kind; empty for a sound log."""
    found = {
        "bad_records": len(report.bad),
        "defects": len(report.defects),
        "conflicts": len(report.conflicts),
        "duplicates": report.duplicates,
        "recovered": report.recovered,
    }
    return Counter({kind: n for kind, n in found.items() if n})


def _execution(frame: Frame) -> str | None:
    """Whom a frame is about. A damaged one with a head that can be read still is counted as its execution's."""
    try:
        name = head_of(frame).get("exec")
    except BadRecord:
        return None
    return name if isinstance(name, str) else None


def _relabelled(call: Call, labels: dict[str, tuple[str, str]]) -> Call:
    if call.call not in labels:
        return call
    purpose, label = labels[call.call]
    return dataclasses.replace(call, purpose=purpose, label=label or call.label)


def _life(path: Path) -> tuple[int, str]:
    text = path.stem.rpartition("-")[2]
    return (int(text) if text.isdigit() else -1, path.name)
