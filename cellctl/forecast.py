"""How long a task's executions will take: learnt from those that ended. Pure.

Siblings are informative: ln(duration) = task + rollout, so a task's own mean counts the more, the more of its
executions have been seen and the larger the task's part of the variance is (the intra-class correlation; 0.41 in the
published durations, which is what is believed until enough tasks were seen twice).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cellctl.core import Scheduler

BELIEVED_CORRELATION = 0.41
ENOUGH_TASKS = 8  # with two executions or more each: from then on the correlation is measured
NOTHING_SEEN = (math.log(3600.0), 0.35)  # an hour: only the order of tasks matters before anything has ended


@dataclass
class Sums:
    """Of ln(seconds)."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value
        self.squares += value * value

    @property
    def mean(self) -> float:
        return self.total / self.count

    @property
    def scatter(self) -> float:
        """Sum of squared distances from the mean."""
        return max(0.0, self.squares - self.total * self.total / self.count)


class Forecast:
    """`learn` every duration; `seconds` of a task, `remaining_s` of an execution that already runs."""

    def __init__(self) -> None:
        self._all = Sums()
        self._tasks: dict[str, Sums] = {}
        self._repeated = 0  # tasks with two executions or more
        self._within = 0.0  # sum over tasks of their scatter
        self._within_degrees = 0

    def learn(self, task: str, seconds: float) -> None:
        """An execution ended by itself or by its limit. What our own failure cut off says nothing: leave it out."""
        if seconds <= 0.0:
            return
        value = math.log(seconds)
        own = self._tasks.setdefault(task, Sums())
        before = own.scatter if own.count else 0.0
        own.add(value)
        self._all.add(value)
        if own.count >= 2:
            self._repeated += own.count == 2
            self._within += own.scatter - before
            self._within_degrees += 1

    @property
    def seen(self) -> int:
        """Executions learnt from."""
        return self._all.count

    @property
    def correlation(self) -> float:
        """The task's share of the variance of ln(seconds)."""
        if self._repeated < ENOUGH_TASKS:
            return BELIEVED_CORRELATION
        total = self._all.scatter / max(1, self._all.count - 1)
        within = self._within / self._within_degrees
        return min(0.99, max(0.0, 1.0 - within / total)) if total > 0.0 else 0.0

    def log_normal(self, task: str) -> tuple[float, float]:
        """(mean, sigma) of ln(seconds) of this task's next execution."""
        if not self._all.count:
            return NOTHING_SEEN
        correlation, own = self.correlation, self._tasks.get(task)
        total = self._all.scatter / max(1, self._all.count - 1)
        if own is None:
            return self._all.mean, math.sqrt(total)
        trust = own.count * correlation / (1.0 - correlation + own.count * correlation)
        mean = self._all.mean + trust * (own.mean - self._all.mean)
        return mean, math.sqrt(total * (1.0 - correlation * trust))

    def seconds(self, task: str) -> float:
        """The mean of this task's next execution."""
        mean, sigma = self.log_normal(task)
        return math.exp(mean + sigma * sigma / 2.0)

    def remaining_s(self, task: str, age_s: float, limit_s: float) -> float:
        """Mean seconds left of an execution that has run for `age_s` and is ended at `limit_s`."""
        mean, sigma = self.log_normal(task)
        left = max(0.0, limit_s - age_s)
        if age_s <= 0.0 or sigma <= 0.0:
            return min(left, max(0.0, self.seconds(task) - age_s))
        z = (math.log(age_s) - mean) / sigma
        survives = _above(z)
        if survives < 1e-6:  # far older than anything seen: by the tail of the law, about one more part in z
            return min(left, age_s * sigma / z)
        return min(left, self.seconds(task) * _above(z - sigma) / survives - age_s)


def _above(z: float) -> float:
    """P(a standard normal exceeds z)."""
    return 0.5 * math.erfc(z / math.sqrt(2.0))


class WorkLevel:
    """The water level by work instead of by count: an execution that is forecast to end within a tenth of the mean
    duration counts for the part of that tenth that is left. Summed anew when time or the count has moved noticeably.
    """

    HORIZON, MOVED = 0.1, 0.005  # of the mean duration; of the mean duration and of the count
    SEEN = 4  # times those that run: before, mostly the short ones have ended, and all that run would seem overdue

    def __init__(self) -> None:
        self._at, self._count, self._level = -math.inf, 0, 0

    def of(self, scheduler: Scheduler, now: float) -> int:
        count = scheduler.ledger.level()
        if scheduler.forecast.seen < self.SEEN * count:
            return count
        mean_s = scheduler.forecast.seconds("")
        moved = abs(count - self._count) > self.MOVED * self._count or now - self._at > self.MOVED * mean_s
        if moved:
            limit_s, groups = scheduler.config.tasks.harness_limit_s, scheduler.ledger.groups
            parts = (
                scheduler.forecast.remaining_s(groups[e.group].task, now - e.dispatched_at, limit_s)
                for e in scheduler.ledger.in_flight.values()
                if not e.calls_no_more
            )
            horizon_s = self.HORIZON * mean_s
            self._level = math.ceil(sum(min(1.0, part / horizon_s) for part in parts))
            self._at, self._count = now, count
        return min(max(1, self._level), count)  # whatever is forecast: who still runs needs somebody that serves
