"""Making a run file safe to append to after a crash.

Owns what is cut off: the torn end, nothing else. Damage further up is for readers to report.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from gyre_base.runframes import Frames, is_framed


def repair_tail(path: Path) -> bytes:
    """Make a file of either form safe to append to, before the first append. Returns what was cut off (kept in
    `<name>.torn` too).

    A last line that is whole but lacks its newline is data and gets one.
    """
    with path.open("rb+") as file:
        start, add = (_end_of_frames(file), b"") if is_framed(file) else _end_of_lines(file)
        file.seek(start)
        cut = file.read()
        if cut:
            with path.with_name(path.name + ".torn").open("ab") as side:
                side.write(cut)
            file.truncate(start)
        elif add:
            file.write(add)
        return cut


def _end_of_frames(file: Any) -> int:
    """Where the last whole frame ends."""
    frames = Frames(file)
    for _ in frames:
        pass
    return frames.offset


def _end_of_lines(file: Any) -> tuple[int, bytes]:
    """Where the last whole line ends, and what it lacks."""
    size = file.seek(0, 2)
    start = _last_line(file, size)
    file.seek(start)
    line = file.read()
    if not line:
        return size, b""
    try:
        orjson.loads(line)
    except orjson.JSONDecodeError:
        return start, b""
    return size, b"\n"


def _last_line(file: Any, size: int) -> int:
    """Offset just after the last newline, searched backwards."""
    end = size
    while end > 0:
        start = max(0, end - (1 << 16))
        file.seek(start)
        at = file.read(end - start).rfind(b"\n")
        if at >= 0:
            return int(start + at + 1)
        end = start
    return 0
