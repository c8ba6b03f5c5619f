"""Recorded durations of executions, by task: what the simulator draws from, the planner plans for and a forecast starts
from.

A file is JSON lines. Either one object per execution (or per task, with lists) with `hours`, `duration_h`,
`duration_s` or `wall_s` and, if known, `task`; or what `trajtools stats --json` prints: `durations_s`, a list per task.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from gyre_base.config import ConfigError

PER_HOUR = {"hours": 1.0, "duration_h": 1.0, "duration_s": 1 / 3600, "wall_s": 1 / 3600}
BY_GROUP = "durations_s"


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
        wanted = ", ".join((*PER_HOUR, BY_GROUP))
        raise ConfigError(f"{path} has no durations: want JSON lines with one of {wanted}")
    return by_task


def _of(row: Any) -> Iterator[tuple[str, float]]:
    if not isinstance(row, dict):
        return
    for group, seconds in (row.get(BY_GROUP) or {}).items():
        yield from ((group, float(s) / 3600.0) for s in seconds)
    for key, factor in PER_HOUR.items():
        value = row.get(key)
        values = value if isinstance(value, list) else [] if value is None else [value]
        yield from ((str(row.get("task", "")), float(one) * factor) for one in values)
