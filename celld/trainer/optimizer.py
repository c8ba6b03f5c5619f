"""AdamW behind a small interface: clip, step, and state under Hugging Face names. Sharding it is a later matter.

Owns moments and the learning rate of a step. Never talks, never reads the gradient of another rank.
Invariant: the state it gives, loaded into a fresh one over the same weights, continues bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from celld.trainer.model import Policy
from celld.weights import Array
from gyre_base.config import TrainerConfig

MOMENTS = ("exp_avg", "exp_avg_sq")


def learning_rate(step: int, steps: int, config: TrainerConfig) -> float:
    """`lr` for the first half of the run, then linear to `lr_final` at its last step."""
    half = steps / 2
    if step < half:
        return config.lr
    done = min(1.0, (step - half) / max(1.0, steps - 1 - half))
    return config.lr + (config.lr_final - config.lr) * done


class AdamW:
    """Over the policy's fp32 parameters, whose `.grad` are views of its flat gradient. Norm weights do not decay."""

    def __init__(self, policy: Policy, config: TrainerConfig) -> None:
        self._policy, self._clip = policy, config.grad_clip
        parameters = list(policy.parameters.values())
        groups = [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": config.weight_decay},
            {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
        ]
        self._adam = torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2))
        self.steps = 0

    def step(self, lr: float) -> float:
        """Clip the policy's gradient by norm, step; returns the norm before clipping.

        A gradient that is not finite changes nothing but the count: one bad number must not end a run of days.
        """
        gradient = self._policy.gradient
        norm = self._policy.gradient_norm()
        self.steps += 1
        if not math.isfinite(norm):
            return norm
        if self._clip and norm > self._clip:
            gradient.mul_(self._clip / norm)
        for group in self._adam.param_groups:
            group["lr"] = lr
        self._adam.step()
        return norm

    def hf_arrays(self) -> dict[str, Array]:
        """`moment.name` -> array; zeros before the first step. Collective over tensor-parallel ranks."""
        held, arrays = self._adam.state, {}
        for moment in MOMENTS:
            values = {
                name: held[p][moment] if p in held else torch.zeros_like(p)
                for name, p in self._policy.parameters.items()
            }
            whole = self._policy.hf_tensors(values)
            arrays.update({f"{moment}.{name}": tensor.cpu().numpy() for name, tensor in whole.items()})
        return arrays

    def load(self, arrays: Mapping[str, Array], steps: int) -> None:
        """Inverse of `hf_arrays`."""
        self.steps = steps
        for moment in MOMENTS:
            named = {n.removeprefix(f"{moment}."): a for n, a in arrays.items() if n.startswith(f"{moment}.")}
            parts = self._policy.from_hf_tensors({name: torch.from_numpy(a.copy()) for name, a in named.items()})
            for name, parameter in self._policy.parameters.items():
                state = self._adam.state[parameter]
                state["step"] = torch.tensor(float(steps))
                state[moment] = parts[name].clone().to(parameter.device)
