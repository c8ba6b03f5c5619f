"""AdamW behind a small interface: clip, step, and state under Hugging Face names; ranks with copies of the same weights
share the work and the state.

Owns moments, the fp32 masters of bf16 weights, and the learning rate of a step. Never reads the gradient of another
rank. Each of the ranks that have a copy of a parameter keeps masters and moments of a part of its numbers alone, steps
these, and the others get the new weights from it (`celld.trainer.shards`). Invariants: the state it gives, loaded into
a fresh one over the same weights, continues bit for bit, on however many ranks; the policy's weights are the masters,
rounded to its type.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from celld.trainer import dtypes
from celld.trainer.model import Policy
from celld.trainer.shards import Shards
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
        self._shards = Shards({name: parameter.numel() for name, parameter in policy.parameters.items()})
        self._masters = {name: _master(policy.parameters[name], own) for name, own in self._shards.own.items()}
        decays = {name for name in self._masters if policy.parameters[name].dim() > 1}
        groups = [
            {"params": [p for name, p in self._masters.items() if name in decays], "weight_decay": config.weight_decay},
            {"params": [p for name, p in self._masters.items() if name not in decays], "weight_decay": 0.0},
        ]
        self._adam = torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2))
        self.steps = 0

    def step(self, lr: float) -> float:
        """Clip the policy's gradient by norm, step; returns the norm before clipping. Collective.

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
        self._bring()
        return norm

    @torch.no_grad()
    def _bring(self) -> None:
        """The new weights: of this rank's masters, and of the others'."""
        for name, parameter in self._policy.parameters.items():
            flat = parameter.detach().view(-1)
            if name in self._masters and parameter.dtype != torch.float32:
                flat[self._shards.own[name]] = self._masters[name]
            self._shards.complete(name, flat)

    def masters(self, *, kept: bool = True) -> dict[str, Array]:
        """The fp32 weights of a bf16 policy, else nothing. Collective like `Policy.hf_arrays`."""
        if self._policy.dtype == torch.float32:
            return {}
        return dtypes.to_arrays(self._each(dict[str, Tensor](self._masters)), kept=kept)

    @torch.no_grad()
    def start_from(self, weights: Mapping[str, Array]) -> None:
        """What the policy has loaded, as exact as it came."""
        for name, own in self._parts(weights):
            self._masters[name].copy_(own)

    def hf_arrays(self, *, kept: bool = True) -> dict[str, Array]:
        """`moment.name` -> array; zeros before the first step. Collective like `Policy.hf_arrays`."""
        held, arrays = self._adam.state, {}
        for moment in MOMENTS:
            own = {name: held[p][moment] if p in held else torch.zeros_like(p) for name, p in self._masters.items()}
            whole = dtypes.to_arrays(self._each(own), kept=kept)
            arrays.update({f"{moment}.{name}": array for name, array in whole.items()})
        return arrays

    def load(self, arrays: Mapping[str, Array], steps: int) -> None:
        """Inverse of `hf_arrays`."""
        self.steps = steps
        for moment in MOMENTS:
            named = {n.removeprefix(f"{moment}."): a for n, a in arrays.items() if n.startswith(f"{moment}.")}
            for name, own in self._parts(named):
                state = self._adam.state[self._masters[name]]
                state["step"] = torch.tensor(float(steps))
                state[moment] = own.clone().to(self._policy.gradient.device)

    def _each(self, own: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Whole, under Hugging Face names, from every rank's own numbers."""
        parameters = self._policy.parameters.items()
        return self._policy.hf_each((n, self._shards.whole(n, own.get(n)).view(p.shape)) for n, p in parameters)

    def _parts(self, arrays: Mapping[str, Array]) -> Iterator[tuple[str, Tensor]]:
        """Inverse of `_each`: this rank's own numbers of each parameter."""
        whole = {name: dtypes.to_tensor(array) for name, array in arrays.items()}
        for name, own in self._shards.own.items():
            yield name, self._policy.part(name, whole).flatten()[own]


def _master(parameter: nn.Parameter, own: slice) -> nn.Parameter:
    """With its part of the parameter's gradient, which is fp32 in any case; a view of an fp32 parameter."""
    assert parameter.grad is not None, "the policy's gradient is always there"
    master = nn.Parameter(parameter.detach().view(-1)[own].float())
    master.grad = parameter.grad.view(-1)[own]
    return master
