"""How long executions take: a two-level log-normal model, or recorded durations (durations.py).

With tasks recorded, a group draws from one task's executions, so that siblings stay alike; without, every execution
draws from all.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Protocol

import numpy as np

from cellctl import durations as recorded
from cellctl.simulate.profile import Durations


class Workload(Protocol):
    """What executions would take, the same in every arm that has the same seed, in whatever order tasks are given."""

    mean_h: float

    def group(self, task: int, visit: int, size: int) -> list[float]:
        """Nominal hours of the executions of a task's group; `visit` counts the task's groups from 0."""
        ...


class TwoLevel:
    """ln(hours) = ln(median) + task effect + rollout effect; a share of the tasks is harder by a factor."""

    def __init__(self, durations: Durations, seed: int) -> None:
        self._d, self._seed = durations, seed
        spread = math.exp((durations.task_sigma**2 + durations.rollout_sigma**2) / 2.0)
        self.mean_h = durations.median_h * spread * (1.0 + durations.hard_share * (durations.hard_factor - 1.0))

    def task_ln_h(self, task: int) -> float:
        """The task's own centre: ln of its median hours."""
        d = self._d
        chance = np.random.default_rng((self._seed, task))
        harder = math.log(d.hard_factor) if chance.random() < d.hard_share else 0.0
        return math.log(d.median_h) + d.task_sigma * float(chance.standard_normal()) + harder

    def group(self, task: int, visit: int, size: int) -> list[float]:
        d = self._d
        draws = np.random.default_rng((self._seed, task, visit)).standard_normal(size)
        hours = np.exp(self.task_ln_h(task) + d.rollout_sigma * draws)
        return [float(h) for h in (np.minimum(hours, d.harness_limit_h) if d.harness_limit_h else hours)]


class Recorded:
    """Each task takes after one that was recorded; its executions are drawn from that one's, with replacement."""

    def __init__(self, tasks: list[list[float]], seed: int) -> None:
        self._tasks, self._seed = tasks, seed
        self.mean_h = sum(sum(t) / len(t) for t in tasks) / len(tasks)

    def group(self, task: int, visit: int, size: int) -> list[float]:
        like = int(np.random.default_rng((self._seed, task)).integers(len(self._tasks)))
        hours = self._tasks[like]
        picks = np.random.default_rng((self._seed, task, visit)).integers(len(hours), size=size)
        return [hours[i] for i in picks]


def make(durations: Durations, seed: int) -> Workload:
    if durations.file:
        return Recorded(list(recorded.read(Path(durations.file)).values()), seed)
    return TwoLevel(durations, seed)
