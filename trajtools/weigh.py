"""Advantages of a group and the weights of its tokens.

Owns the arithmetic of DESIGN section 7: one value per execution, only outcomes that count, removal before mean and
deviation. Weights are 1/T_e per owned token with T_e kept as an integer and the divisor E (executions that count)
applied last, so that micro-steps can stream. A group with too few values is reported, never dropped in silence.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gyre_base.microstep import PackedExecution
from gyre_base.vocabulary import Outcome


@dataclass(frozen=True, kw_only=True)
class Result:
    """How one execution of a group ended. `score` None is "no score" (a `no_artifact` without one counts as 0)."""

    execution: str
    outcome: Outcome
    score: float | None = None
    duration_s: float | None = None

    @property
    def value(self) -> float | None:
        """The number that enters the statistics, None if the execution does not count."""
        if not self.outcome.counts:
            return None
        if self.score is None:
            return 0.0 if self.outcome is Outcome.NO_ARTIFACT else None
        return float(self.score) if np.isfinite(self.score) else None


@dataclass(frozen=True, kw_only=True)
class GroupWeights:
    """Advantages by execution (only those that count), and what they were computed from.

    `enough` False: fewer than n_min values, the group is to be replaced and `advantages` is empty.
    `removed`: (execution, outcome, duration in s or None) of what did not count.
    """

    advantages: Mapping[str, float]
    enough: bool
    counted: int
    mean: float
    std: float
    removed: tuple[tuple[str, str, float | None], ...]


def group_weights(results: Sequence[Result], *, eps: float = 1e-6, n_min: int = 2) -> GroupWeights:
    """(value - mean) / (population std + eps) per execution. Equal values give 0, and still count."""
    values = {r.execution: value for r in results if (value := r.value) is not None}
    removed = tuple((r.execution, r.outcome.value, r.duration_s) for r in results if r.execution not in values)
    array = np.array(list(values.values()), np.float64)
    mean, std = (float(array.mean()), float(array.std())) if len(array) else (0.0, 0.0)
    enough = len(values) >= n_min
    level = bool(len(array)) and bool((array == array[0]).all())  # rounding must not make a signal of equal values
    advantages = {name: 0.0 if level else (value - mean) / (std + eps) for name, value in values.items()}
    return GroupWeights(
        advantages=advantages if enough else {},
        enough=enough,
        counted=len(values),
        mean=mean,
        std=0.0 if level else std,
        removed=removed,
    )


def weight_of(packed: PackedExecution) -> float:
    """Sum of 1/T_e over the owned tokens here: 1.0 for a whole execution, 0.0 without owned tokens."""
    return float(packed.owned.sum()) / packed.total_owned if packed.total_owned else 0.0


def weight_sum(executions: Iterable[PackedExecution]) -> float:
    """The weights of a batch after the mean over its executions that count: 1 within 1e-9, or something was lost."""
    parts = [weight_of(packed) for packed in executions if packed.total_owned]
    return sum(parts) / len(parts) if parts else 0.0
