"""AdamW behind a small interface: clip, step, and state under Hugging Face names. Sharding it is a later matter.

Owns moments, the fp32 masters of bf16 weights, and the learning rate of a step. Never talks, never reads the gradient
of another rank. Invariants: the state it gives, loaded into a fresh one over the same weights, continues bit for bit;
the policy's weights are the masters, rounded to its type.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from celld.trainer import dtypes
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
    """Over the policy's parameters, whose `.grad` are views of its flat gradient. Norm weights do not decay.

    It steps in fp32: bf16 has 8 bits, and a step of Adam changes a weight by about `lr`, so a weight of 0.1 would stay
    where it is for ever at lr 1e-4. The masters of an fp32 policy are its own parameters.
    """

    def __init__(self, policy: Policy, config: TrainerConfig) -> None:
        self._policy, self._clip = policy, config.grad_clip
        self._masters = {name: _master(parameter) for name, parameter in policy.parameters.items()}
        parameters = list(self._masters.values())
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
        self._round()
        return norm

    @torch.no_grad()
    def _round(self) -> None:
        for name, parameter in self._policy.parameters.items():
            if self._masters[name] is not parameter:
                parameter.copy_(self._masters[name])

    def masters(self) -> dict[str, Array]:
        """The fp32 weights of a bf16 policy, else nothing. Collective over the ranks of the cell."""
        if self._policy.dtype == torch.float32:
            return {}
        whole = self._policy.hf_tensors(dict[str, Tensor](self._masters))
        return {name: dtypes.to_array(tensor) for name, tensor in whole.items()}

    @torch.no_grad()
    def start_from(self, weights: Mapping[str, Array]) -> None:
        """What the policy has loaded, as exact as it came."""
        parts = self._policy.from_hf_tensors({name: dtypes.to_tensor(array) for name, array in weights.items()})
        for name, master in self._masters.items():
            master.copy_(parts[name])

    def hf_arrays(self) -> dict[str, Array]:
        """`moment.name` -> array; zeros before the first step. Collective over the ranks of the cell."""
        held, arrays = self._adam.state, {}
        for moment in MOMENTS:
            values = {name: held[p][moment] if p in held else torch.zeros_like(p) for name, p in self._masters.items()}
            whole = self._policy.hf_tensors(values)
            arrays.update({f"{moment}.{name}": dtypes.to_array(tensor) for name, tensor in whole.items()})
        return arrays

    def load(self, arrays: Mapping[str, Array], steps: int) -> None:
        """Inverse of `hf_arrays`."""
        self.steps = steps
        for moment in MOMENTS:
            named = {n.removeprefix(f"{moment}."): a for n, a in arrays.items() if n.startswith(f"{moment}.")}
            parts = self._policy.from_hf_tensors({name: dtypes.to_tensor(a) for name, a in named.items()})
            for name, master in self._masters.items():
                state = self._adam.state[master]
                state["step"] = torch.tensor(float(steps))
                state[moment] = parts[name].clone().to(master.device)


def _master(parameter: nn.Parameter) -> nn.Parameter:
    """With the parameter's gradient, which is fp32 in any case."""
    if parameter.dtype == torch.float32:
        return parameter
    master = nn.Parameter(parameter.detach().float())
    master.grad = parameter.grad
    return master
