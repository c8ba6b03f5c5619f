"""A small Qwen3 mixture of experts in plain torch, under the hub's names: the twin of the trainer's in tests.

Rows of layers alternate: the first and last have experts, the one between is dense (`mlp_only_layers`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from celld.tiny.model import MLP, TinyConfig, TinyQwen3
from tests.trainer.conftest import SMALL, unlike_norms

SHAPE = dataclasses.replace(SMALL, num_hidden_layers=3)
WIDTH, COUNT, CHOSEN = 24, 6, 2


class Experts(nn.Module):
    """Softmax over all, the best of them, their weights normalised or not."""

    def __init__(self, config: TinyConfig, *, normalised: bool) -> None:
        super().__init__()
        self.normalised = normalised
        self.gate = nn.Linear(config.hidden_size, COUNT, bias=False)
        self.experts = nn.ModuleList(MLP(dataclasses.replace(config, intermediate_size=WIDTH)) for _ in range(COUNT))

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.gate(x).softmax(-1).topk(CHOSEN)
        if self.normalised:
            weight = weight / weight.sum(-1, keepdim=True)
        share = torch.zeros(*x.shape[:-1], COUNT).scatter(-1, chosen, weight)
        return sum(share[..., n : n + 1] * expert(x) for n, expert in enumerate(self.experts))


def config_of(*, normalised: bool = True, shape: TinyConfig = SHAPE) -> dict[str, Any]:
    """The config.json of `twin`."""
    return shape.to_hf() | {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": COUNT,
        "num_experts_per_tok": CHOSEN,
        "moe_intermediate_size": WIDTH,
        "norm_topk_prob": normalised,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
    }


def twin(*, normalised: bool = True, shape: TinyConfig = SHAPE) -> TinyQwen3:
    """Random weights, norms that are not all one."""
    model = TinyQwen3(shape)
    for layer in (model.model.layers[0], model.model.layers[2]):
        layer.mlp = Experts(shape, normalised=normalised)
    return unlike_norms(model.initialise(5))
