"""`repair`: a damaged run file without its damage, and a side file of what was taken out. The input is never changed.

Good lines, or frames of a call log, are copied byte for byte. Taken out: what is no record, torn prefixes glued to a
whole record, orphans whose base is lost, a torn tail. A last whole line without its newline gets one.
"""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import orjson

from gyre_base.runfile import ReadReport, RunReader
from gyre_base.runframes import BLOCK, Frames, is_framed

Cut: TypeAlias = tuple[int, int, str]


class NotARunFile(ValueError):
    """Nothing would be left of it."""


@dataclass(frozen=True)
class Mended:
    """What a repair did."""

    records: int
    recovered: int
    taken: int
    bytes_taken: int
    out: str
    side: str | None

    @property
    def ok(self) -> bool:
        return not self.taken

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def lines(self) -> list[str]:
        if not self.taken:
            return [f"nothing to repair: {self.records:,} records written to {self.out}"]
        return [
            f"{self.records:,} records written to {self.out} ({self.recovered:,} found behind a torn one); "
            f"{self.taken:,} pieces ({self.bytes_taken:,} bytes) taken out, see {self.side}"
        ]


def repair(source: Path, out: Path, side: Path | None = None) -> Mended:
    """Write `out`, and `side` (default: out + ".taken.jsonl") if anything was taken. Raises NotARunFile."""
    reader = RunReader(source)
    for _ in reader.records():
        pass
    report = reader.report
    if (report.bad and not report.records and not report.unknown_kinds) or in_blocks(source):
        raise NotARunFile(
            f"{source.name} holds no line of a run file and is no call log; other records and compressed run files are "
            "read by `trajtools convert`"
        )
    cuts = cuts_of(report)
    side = side or out.with_name(out.name + ".taken.jsonl")
    part = out.with_name(out.name + ".part")
    with source.open("rb") as given, part.open("wb") as made:
        size = given.seek(0, 2)
        place, last = 0, b"\n"
        for start, end in [*((a, b) for a, b, _ in cuts), (size, size)]:
            last = _copy(given, made, place, start) or last
            place = max(place, end)
        if last != b"\n" and report.unit == "line":
            made.write(b"\n")
        if cuts:
            side.write_bytes(b"".join(pieces(given, source.name, cuts)))
    part.replace(out)
    return Mended(
        records=sum(report.records.values()),
        recovered=report.recovered,
        taken=len(cuts),
        bytes_taken=sum(b - a for a, b, _ in cuts),
        out=str(out),
        side=str(side) if cuts else None,
    )


def in_blocks(source: Path) -> bool:
    """Whether it is a compressed run file, of which nothing can be cut out and to which nothing can be appended."""
    with source.open("rb") as file:
        first = next(iter(Frames(file)), None) if is_framed(file) else None
        return first is not None and first.kind == BLOCK


def _copy(given: Any, made: Any, start: int, end: int) -> bytes:
    """Copy bytes [start, end); returns the last one."""
    given.seek(start)
    last = b""
    while start < end and (block := given.read(min(1 << 20, end - start))):
        made.write(block)
        start, last = start + len(block), block[-1:]
    return last


def cuts_of(report: ReadReport) -> list[Cut]:
    """(start, end, reason) of what a reader left out of a file, the torn end included."""
    cuts = [(bad.offset, bad.end, bad.reason) for bad in report.bad]
    if report.torn is not None:
        start, size = report.torn
        cuts.append((start, start + size, f"the last {report.unit} is torn"))
    return sorted(cuts)


def pieces(given: BinaryIO, name: str, cuts: Iterable[Cut]) -> Iterator[bytes]:
    """A line of JSON per piece: where it was, why it was left out, and its bytes."""
    for start, end, reason in cuts:
        given.seek(start)
        data = given.read(end - start)
        row: dict[str, Any] = {"file": name, "offset": start, "bytes": end - start, "reason": reason}
        try:
            row["text"] = data.decode()
        except UnicodeDecodeError:
            row["base64"] = base64.b64encode(data).decode()
        yield orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE)
