"""Recorded durations of executions, by task: what the simulator draws from, the planner plans for and a forecast starts
from.

A file is JSON lines: objects with `hours`, `duration_h`, `duration_s` or `wall_s`, one number or a list of them, and,
if known, `task`. Other objects are passed over, so the output of `trajtools stats --json` is such a file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from gyre_base.config import ConfigError

PER_HOUR = {"hours": 1.0, "duration_h": 1.0, "duration_s": 1 / 3600, "wall_s": 1 / 3600}


def read(path: Path) -> dict[str, list[float]]:
    """Hours by task. Raises ConfigError if the file has none."""
    by_task: dict[str, list[float]] = {}
    try:
        rows = [orjson.loads(line) for line in path.read_bytes().splitlines() if line.strip()]
        for row in rows:
            for task, hours in _of(row):
                by_task.setdefault(task, []).append(hours)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"cannot read durations from {path}: {error}") from None
    by_task = {task: hours for task, hours in by_task.items() if max(hours) > 0.0}
    if not by_task:
        raise ConfigError(f"{path} has no durations: want JSON lines with one of {', '.join(PER_HOUR)}")
    return by_task


def _of(row: Any) -> Iterator[tuple[str, float]]:
    if not isinstance(row, dict):
        return
    for key, factor in PER_HOUR.items():
        value = row.get(key)
        values = value if isinstance(value, list) else [] if value is None else [value]
        yield from ((str(row.get("task", "")), float(one) * factor) for one in values)
