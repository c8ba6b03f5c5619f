"""Where the records of each execution lie in the call log. An index, never a copy: arrays are read when needed.

Scans `calls/*.jsonl` from where it stopped, whole lines only: a torn tail is read once it is whole. One file per life
of proxyd, oldest first. `extent` says how far it has read; loading within a recorded extent gives the same calls at
every restart, whatever was appended since.
"""

from __future__ import annotations

import dataclasses
import io
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import orjson

from gyre_base.runfile import Call, Note, ReadReport, RunReader

Extent: TypeAlias = dict[str, int]  # file name -> bytes read
_HEAD = re.compile(rb'\{"k":"(?:call|intent|exec|exec_end|reward)","exec":"([^"\\]+)"')
_RECORD = b'{"k":"'
_CHUNK = 4 << 20


@dataclass(frozen=True, slots=True)
class Place:
    """One line: bytes [start, end) of a file."""

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
    lines: int = 0
    unplaced: int = 0  # lines that name no execution (headers, damage)
    _places: dict[str, list[Place]] = field(default_factory=dict)

    @property
    def executions(self) -> int:
        return len(self._places)

    def scan(self) -> int:
        """Read what was appended. Returns the number of new lines."""
        before = self.lines
        for path in sorted(self.folder.glob("*.jsonl"), key=_life):
            self._scan_file(path)
        return self.lines - before

    def _scan_file(self, path: Path) -> None:
        at = self.extent.get(path.name, 0)
        if path.stat().st_size <= at:
            return
        with path.open("rb", buffering=_CHUNK) as file:
            file.seek(at)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                about = _executions(line)
                for execution in about:
                    self._places.setdefault(execution, []).append(Place(path.name, at, at + len(line)))
                self.unplaced += not about
                at += len(line)
                self.lines += 1
        self.extent[path.name] = at

    def load(self, execution: str, extent: Extent | None = None) -> Loaded:
        """Its calls, as far as `extent` (default: all that was scanned). Unknown executions have none."""
        places = [p for p in self._places.get(execution, ()) if extent is None or p.end <= extent.get(p.file, 0)]
        reader = RunReader(io.BytesIO(b"".join(self._lines(places))))
        calls: list[Call] = []
        labels: dict[str, tuple[str, str]] = {}
        for located in reader.records():
            match located.record:
                case Call(exec=name) as call if name == execution:
                    calls.append(call)
                case Note(text="relabel", exec=name, extra=about) if name == execution:
                    labels[str(about.get("call"))] = (str(about.get("purpose", "turn")), str(about.get("label", "")))
        return Loaded(tuple(_relabelled(call, labels) for call in calls), reader.report)

    def _lines(self, places: list[Place]) -> list[bytes]:
        out: list[bytes] = []
        for name in dict.fromkeys(place.file for place in places):
            with (self.folder / name).open("rb") as file:
                for place in (p for p in places if p.file == name):
                    file.seek(place.start)
                    out.append(file.read(place.end - place.start))
        return out


def damage(report: ReadReport) -> Counter[str]:
    """What a reader met besides good records, by kind; empty for a sound log."""
    found = {
        "bad_lines": len(report.bad),
        "defects": len(report.defects),
        "conflicts": len(report.conflicts),
        "duplicates": report.duplicates,
        "recovered": report.recovered,
    }
    return Counter({kind: n for kind, n in found.items() if n})


def _executions(line: bytes) -> list[str]:
    """Executions that a line is about; more than one if a crash glued a torn record to a whole one."""
    if line.count(_RECORD) == 1 and (match := _HEAD.match(line)):
        return [match[1].decode()]
    try:
        whole = orjson.loads(line)
    except orjson.JSONDecodeError:
        return list(dict.fromkeys(found.decode() for found in _HEAD.findall(line)))
    name = whole.get("exec") if isinstance(whole, dict) else None
    return [name] if isinstance(name, str) else []


def _relabelled(call: Call, labels: dict[str, tuple[str, str]]) -> Call:
    if call.call not in labels:
        return call
    purpose, label = labels[call.call]
    return dataclasses.replace(call, purpose=purpose, label=label or call.label)


def _life(path: Path) -> tuple[int, str]:
    text = path.stem.rpartition("-")[2]
    return (int(text) if text.isdigit() else -1, path.name)
