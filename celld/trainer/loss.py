"""The loss of DESIGN 8, as plain functions of log-probabilities.

For an execution with advantage A, kept paths k, tokens O_k that k owns, T_e owned tokens in all, behaviour logprobs
b_t:

    r_t  = min(exp(logp_t - b_t), cap)
    s_k  = exp(mean of log r_t over all trainable tokens on the path of k)
    loss = - (1 / T_e) * sum over k, over t in O_k, of min(s_k A, clip(s_k, low, high) A)

r_t and s_k carry no gradient of their own. It flows through each owned token's logp, the token form of GSPO: the ratio
in the bracket is s_k * exp(logp_t - stopgrad(logp_t)), of value s_k and gradient s_k * grad logp_t. So a clipped path
adds nothing.

**Our reading.** The QwenGyre paper gives the token bound, the sequence bound and the two means, but not how they
compose.
- `behaviour` (default): as above; s_k compares with what the engine sampled from, so it holds staleness and train/serve
  mismatch together, and the cap bounds what one token may add to s_k.
- `proximal`: s_k compares with logprobs recomputed at the version before the batch, and min(exp(proximal_t - b_t), cap)
  is a truncated correction that multiplies the token's term. With one optimizer step per batch the recomputed logprobs
  are those of the weights in hand, so s_k is 1 and only the correction acts.

Sums, never means: ranks add up, the core divides by the executions of the batch. Every owned token weighs 1/T_e, tokens
of other paths weigh nothing here. An execution of advantage 0 has loss and gradient exactly 0, need not be computed,
and counts.

Shapes: N targets (trainable tokens), M pairs (path, target on it), K kept paths of all executions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gyre_base.microstep import PackedExecution

READINGS = ("behaviour", "proximal")
NOBODY = -1


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """Bounds and reading. `owned_only` takes s over owned tokens only: an ablation."""

    ratio_cap: float = 5.0
    clip_low: float = 0.995
    clip_high: float = 1.005
    reading: str = "behaviour"
    owned_only: bool = False

    def __post_init__(self) -> None:
        if self.reading not in READINGS:
            raise ValueError(f"reading must be one of {', '.join(READINGS)}, not {self.reading!r}")


@dataclass(frozen=True, eq=False)
class Targets:
    """What of a packed sequence the loss needs. `rows_N` is the packed index whose output predicts target n."""

    rows_N: Tensor
    tokens_N: Tensor
    behaviour_N: Tensor
    owner_N: Tensor  # the path that owns the target, NOBODY if none does
    weight_N: Tensor  # 1 / T_e if owned, else 0
    pair_path_M: Tensor
    pair_target_M: Tensor
    advantage_K: Tensor
    staleness_K: Tensor

    def to(self, device: torch.device) -> Targets:
        return Targets(**{name: value.to(device) for name, value in self.__dict__.items()})

    @property
    def owned_N(self) -> Tensor:
        return self.owner_N != NOBODY


def targets(executions: Sequence[PackedExecution], base_step: int) -> Targets:
    """Targets of several executions packed one after another. `base_step` is the step the batch trains from."""
    parts: dict[str, list[np.ndarray]] = {name: [] for name in ("rows", "tokens", "b", "owner", "weight", "path", "at")}
    advantages: list[float] = []
    staleness: list[int] = []
    offset = found = 0
    for packed in executions:
        index = np.flatnonzero(packed.trainable)
        number = np.full(len(packed), -1, dtype=np.int64)
        number[index] = np.arange(found, found + len(index))
        owner = np.full(len(packed), NOBODY, dtype=np.int64)
        for path in packed.paths:
            on_path = np.concatenate([number[slice(*packed.segments[s, :2])] for s in path.segments])
            on_path = on_path[on_path >= 0]
            parts["path"].append(np.full(len(on_path), len(advantages), dtype=np.int64))
            parts["at"].append(on_path)
            for start, end in path.owned:
                owner[start:end] = len(advantages)
            advantages.append(packed.advantage)
            staleness.append(base_step - packed.dispatched_step)
        parts["rows"].append(packed.predecessor[index].astype(np.int64) + offset)
        parts["tokens"].append(packed.tokens[index].astype(np.int64))
        parts["b"].append(packed.logprob[index])
        parts["owner"].append(owner[index])
        parts["weight"].append((packed.owned[index] / max(packed.total_owned, 1)).astype(np.float32))
        offset, found = offset + len(packed), found + len(index)
    joined = {name: torch.from_numpy(np.concatenate(values)) for name, values in parts.items()}
    return Targets(
        rows_N=joined["rows"],
        tokens_N=joined["tokens"],
        behaviour_N=joined["b"],
        owner_N=joined["owner"],
        weight_N=joined["weight"],
        pair_path_M=joined["path"],
        pair_target_M=joined["at"],
        advantage_K=torch.tensor(advantages, dtype=torch.float32),
        staleness_K=torch.tensor(staleness, dtype=torch.int64),
    )


def weight_sum(executions: Sequence[PackedExecution]) -> float:
    """Sum over executions of owned tokens here / T_e, in float64: 1 per execution that is here whole."""
    return sum(int(p.owned.sum()) / p.total_owned for p in executions if p.total_owned)


def sequence_log_ratio(log_r_N: Tensor, goal: Targets, *, owned_only: bool) -> Tensor:
    """log s [K]: the mean of log r over the trainable tokens of each path; 0 for a path that has none."""
    path_M, target_M = goal.pair_path_M, goal.pair_target_M
    if owned_only:
        own_M = goal.owner_N[target_M] == path_M
        path_M, target_M = path_M[own_M], target_M[own_M]
    total_K = torch.zeros_like(goal.advantage_K).index_add_(0, path_M, log_r_N[target_M])
    count_K = torch.bincount(path_M, minlength=len(total_K)).clamp(min=1)
    return total_K / count_K


def loss_sum(
    logp_N: Tensor, goal: Targets, options: LossOptions, proximal_N: Tensor | None = None
) -> tuple[Tensor, dict[str, float]]:
    """(sum over executions of their 1/T_e loss, statistics as sums over owned tokens).

    `proximal_N` (reading `proximal`) defaults to the present log-probabilities.
    """
    fixed_N, cap = logp_N.detach(), float(np.log(options.ratio_cap))
    if options.reading == "proximal":
        proximal_N = fixed_N if proximal_N is None else proximal_N
        compared_N, correction_N = fixed_N - proximal_N, (proximal_N - goal.behaviour_N).clamp(max=cap).exp()
    else:
        compared_N, correction_N = (fixed_N - goal.behaviour_N).clamp(max=cap), torch.ones_like(fixed_N)
    s_K = sequence_log_ratio(compared_N, goal, owned_only=options.owned_only).exp()
    owned_N = goal.owned_N
    owner_O, logp_O = goal.owner_N[owned_N], logp_N[owned_N]
    advantage_O = goal.advantage_K[owner_O]
    ratio_O = s_K[owner_O] * (logp_O - logp_O.detach()).exp()
    bounded_O = ratio_O.clamp(options.clip_low, options.clip_high)
    gain_O = torch.minimum(ratio_O * advantage_O, bounded_O * advantage_O)
    loss = -(gain_O * correction_N[owned_N] * goal.weight_N[owned_N]).sum()
    return loss, _statistics(loss, fixed_N, s_K, goal, options)


def _statistics(loss: Tensor, logp_N: Tensor, s_K: Tensor, goal: Targets, options: LossOptions) -> dict[str, float]:
    """Sums over owned tokens; `*_d0` are those of executions dispatched at the very version that is trained from.

    `kl` estimates KL(behaviour, policy) from the behaviour's samples: r - 1 - log r, never negative (J. Schulman,
    "Approximating KL divergence", 2020); r is capped as in the loss.
    """
    owned_N = goal.owned_N
    owner_O, gap_O = goal.owner_N[owned_N], (logp_N - goal.behaviour_N)[owned_N]
    too_high_K = (s_K > options.clip_high) & (goal.advantage_K > 0)
    too_low_K = (s_K < options.clip_low) & (goal.advantage_K < 0)
    capped_O = gap_O.clamp(max=float(np.log(options.ratio_cap)))
    clipped_O, fresh_O = (too_high_K | too_low_K)[owner_O], (goal.staleness_K <= 0)[owner_O]
    return {
        "loss": float(loss.detach()),
        "computed_tokens": float(len(owner_O)),
        "computed_tokens_d0": float(fresh_O.sum()),
        "clipped": float(clipped_O.sum()),
        "clipped_d0": float((clipped_O & fresh_O).sum()),
        "ratio": float(capped_O.exp().sum()),
        "kl": float((capped_O.exp() - 1 - capped_O).sum()),
        "sequence_ratio": float(s_K[owner_O].sum()),
        "logprob_gap": float(gap_O.abs().sum()),
    }
