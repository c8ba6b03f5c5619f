"""How long executions take: a two-level log-normal model, or recorded durations.

A recorded file is JSON lines with `hours` (or `duration_s`, `wall_s`) and, if known, `task`: with tasks, a group
draws from one task's executions, so that siblings stay alike; without, every execution draws from all.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Protocol

import numpy as np
import orjson

from cellctl.simulate.profile import Durations
from gyre_base.config import ConfigError

PER_HOUR = {"hours": 1.0, "duration_h": 1.0, "duration_s": 1 / 3600, "wall_s": 1 / 3600}


class Workload(Protocol):
    """`group(serial)` is the same in every arm that has the same seed."""

    mean_h: float

    def group(self, serial: int, size: int) -> list[float]:
        """Nominal hours of the executions of one group."""
        ...


class TwoLevel:
    """ln(hours) = ln(median) + task effect + rollout effect; a share of the tasks is harder by a factor."""

    def __init__(self, durations: Durations, seed: int) -> None:
        self._d, self._seed = durations, seed
        spread = math.exp((durations.task_sigma**2 + durations.rollout_sigma**2) / 2.0)
        self.mean_h = durations.median_h * spread * (1.0 + durations.hard_share * (durations.hard_factor - 1.0))

    def group(self, serial: int, size: int) -> list[float]:
        d = self._d
        chance = np.random.default_rng((self._seed, serial))
        hard, draws = chance.random(), chance.standard_normal(size + 1)
        task = (
            math.log(d.median_h) + d.task_sigma * draws[0] + (math.log(d.hard_factor) if hard < d.hard_share else 0.0)
        )
        hours = np.exp(task + d.rollout_sigma * draws[1:])
        return [float(h) for h in (np.minimum(hours, d.harness_limit_h) if d.harness_limit_h else hours)]


class Recorded:
    """Draws from a file, with replacement."""

    def __init__(self, tasks: list[list[float]], seed: int) -> None:
        self._tasks, self._seed = tasks, seed
        self.mean_h = sum(sum(t) / len(t) for t in tasks) / len(tasks)

    def group(self, serial: int, size: int) -> list[float]:
        chance = np.random.default_rng((self._seed, serial))
        hours = self._tasks[int(chance.integers(len(self._tasks)))]
        return [hours[i] for i in chance.integers(len(hours), size=size)]


def read_durations(path: Path) -> list[list[float]]:
    """Hours by task. Raises ConfigError if the file has none."""
    by_task: dict[str, list[float]] = {}
    try:
        rows = [orjson.loads(line) for line in path.read_bytes().splitlines() if line.strip()]
    except (OSError, orjson.JSONDecodeError) as error:
        raise ConfigError(f"cannot read durations from {path}: {error}") from None
    for row in rows:
        for key, factor in PER_HOUR.items():
            value = row.get(key) if isinstance(row, dict) else None
            for one in value if isinstance(value, list) else [] if value is None else [value]:
                by_task.setdefault(str(row.get("task", "")), []).append(float(one) * factor)
    if not by_task:
        raise ConfigError(f"{path} has no durations: want JSON lines with one of {', '.join(PER_HOUR)}")
    return list(by_task.values())


def make(durations: Durations, seed: int) -> Workload:
    if durations.file:
        return Recorded(read_durations(Path(durations.file)), seed)
    return TwoLevel(durations, seed)
