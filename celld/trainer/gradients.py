"""The gradient sum of one batch on one rank: which micro-steps are in it, and the sums beside it.

Owns adding, the wire form and the check of what a peer sends. Pure but for tensor arithmetic; no sockets, no model.
Invariant: `flat` is exactly the sum of the gradients of `ids`, each once; sums of cells are added in the cells' fixed
order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import xxhash
from torch import Tensor

from gyre_base.messages import GradientSum
from gyre_base.microstep import MicroStep, PackedExecution


class ContributionDamaged(ValueError):
    """A peer's sum that can't be counted: other ids, another length, another digest."""


@dataclass(frozen=True, eq=False)
class Computed:
    """One micro-step: its flat gradient, sum of 1/T_e over its owned tokens (float64), statistics as sums."""

    gradient: Tensor
    weight_sum: float
    stats: Mapping[str, float]


@dataclass(eq=False)
class BatchSum:
    """Grows by `add` while the batch is open."""

    batch: int
    base_version: str
    flat: Tensor
    ids: list[str] = field(default_factory=list)
    weight_sum: float = 0.0
    stats: Counter[str] = field(default_factory=Counter)

    @classmethod
    def empty(cls, batch: int, base_version: str, size: int) -> BatchSum:
        return cls(batch, base_version, torch.zeros(size))

    def add(self, ids: Iterable[str], part: Computed) -> None:
        """Raises ValueError for an id that is already in: it would be trained twice."""
        new = list(ids)
        if again := set(new) & set(self.ids):
            raise ValueError(f"{', '.join(sorted(again))} would be counted twice in batch {self.batch}")
        self.flat.add_(part.gradient)
        self.ids.extend(new)
        self.weight_sum += part.weight_sum
        self.stats.update(part.stats)

    def message(self) -> GradientSum:
        payload = self.flat.cpu().numpy().astype("<f4", copy=False).tobytes()
        return GradientSum(
            batch=self.batch,
            ids=tuple(self.ids),
            weight_sum=self.weight_sum,
            stats=dict(self.stats),
            digest=xxhash.xxh3_128_hexdigest(payload),
            payload=payload,
        )


def held(own: BatchSum | None, batch: int, ids: Iterable[str]) -> Computed:
    """The core's own sum, not copied, checked as a peer's. Raises ContributionDamaged."""
    if own is None:
        raise ContributionDamaged("this rank has no sum")
    _check_ids(own, batch, ids)
    return Computed(own.flat, own.weight_sum, own.stats)


def received(message: GradientSum, batch: int, ids: Iterable[str], size: int) -> Computed:
    """A peer's sum, checked against what trajd says it contains. Raises ContributionDamaged."""
    _check_ids(message, batch, ids)
    if len(message.payload) != 4 * size or xxhash.xxh3_128_hexdigest(message.payload) != message.digest:
        raise ContributionDamaged("its bytes are not those that were sent")
    flat = torch.from_numpy(np.frombuffer(message.payload, dtype="<f4").copy())
    return Computed(flat, message.weight_sum, message.stats)


def _check_ids(its: BatchSum | GradientSum, batch: int, ids: Iterable[str]) -> None:
    if its.batch != batch or sorted(its.ids) != sorted(ids):
        raise ContributionDamaged(f"holds {len(its.ids)} micro-steps of batch {its.batch}, others were expected")


def counts(step: MicroStep, computed: Sequence[PackedExecution], base_step: int) -> dict[str, float]:
    """What can be counted without the model. `computed` are the executions that go through it."""
    return {
        "micro_steps": 1.0,
        "executions": float(len(step.executions)),
        "zero_advantage": float(len(step.executions) - len(computed)),
        "owned_tokens": float(sum(int(packed.owned.sum()) for packed in step.executions)),
        "packed_tokens": float(sum(map(len, step.executions))),
        "computed_packed_tokens": float(sum(map(len, computed))),
        "replayed": float(sum(int((packed.owned & packed.replayed()).sum()) for packed in computed)),
        "staleness": float(sum(base_step - packed.dispatched_step for packed in step.executions)),
        "context_mismatches": float(step.context_mismatches()),
    }


def metrics(stats: Mapping[str, float]) -> dict[str, float]:
    """Means for `step.done` from the sums of a batch."""

    def mean(total: str, count: str) -> float:
        return stats.get(total, 0.0) / max(stats.get(count, 0.0), 1.0)

    return {
        "loss": mean("loss", "executions"),
        "clip_fraction": mean("clipped", "computed_tokens"),
        "clip_fraction_d0": mean("clipped_d0", "computed_tokens_d0"),
        "ratio_mean": mean("ratio", "computed_tokens"),
        "sequence_ratio_mean": mean("sequence_ratio", "computed_tokens"),
        "logprob_gap": mean("logprob_gap", "computed_tokens"),
        "replayed_share": mean("replayed", "computed_tokens"),
        "entropy": mean("entropy", "computed_tokens"),
        "kl": mean("kl", "computed_tokens"),
        "staleness_mean": mean("staleness", "executions"),
        "owned_tokens": stats.get("owned_tokens", 0.0),
        "packed_tokens": stats.get("packed_tokens", 0.0),
        "zero_advantage": stats.get("zero_advantage", 0.0),
        "micro_steps": stats.get("micro_steps", 0.0),
        "micro_step_s": mean("compute_s", "micro_steps"),
        "context_mismatches": stats.get("context_mismatches", 0.0),
        "tokens_per_s": stats.get("computed_packed_tokens", 0.0) / max(stats.get("compute_s", 0.0), 1e-9),
    }
