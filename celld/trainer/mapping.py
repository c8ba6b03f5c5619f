"""Hugging Face Qwen3 (dense and mixture of experts) and megatron-core's names of the same weights, in both directions.

Owns the entries of config.json that decide the network, what each of megatron's weights is made of, and how it is split
among tensor-parallel ranks. Pure: no module, no collective. Invariant: `to_hf` of `from_hf` gives the same bits under
the names of the hub, which transformers and SGLang read; experts fused into one tensor, as transformers 5 holds them in
memory, are read too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

import torch
from torch import Tensor


class ModelError(ValueError):
    """A model directory that can't be trained exactly; says which entry."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The entries of a Qwen3 config.json that decide the network; from `num_experts` on those of qwen3_moe."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool = False
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> Shape:
        kind = config.get("model_type")
        if kind not in ("qwen3", "qwen3_moe"):
            raise ModelError(f"model_type is {kind!r}, only qwen3 and qwen3_moe are trained")
        for key in ("attention_bias", "use_sliding_window", "rope_scaling"):
            if config.get(key):
                raise ModelError(f"{key} is not supported")
        rope = config.get("rope_parameters") or {}  # transformers 5 moved rope_theta in there
        if rope.get("rope_type", "default") != "default":
            raise ModelError(f"rope_type {rope['rope_type']!r} is not supported")
        values = {**config, **rope}
        needed = [field.name for field in fields(cls) if field.default is MISSING]
        if kind == "qwen3_moe":
            values.setdefault("num_experts", config.get("num_local_experts"))  # transformers 5 renamed it
            values["mlp_only_layers"] = tuple(config.get("mlp_only_layers") or ())
            needed += ["num_experts", "num_experts_per_tok", "moe_intermediate_size"]
        missing = [name for name in needed if values.get(name) is None]
        if missing:
            raise ModelError(f"config.json lacks {', '.join(missing)}")
        known = [field.name for field in fields(cls) if kind == "qwen3_moe" or field.name not in _EXPERT_FIELDS]
        return cls(**{name: values[name] for name in known if name in values})

    @property
    def sparse_layers(self) -> list[int]:
        """1 per layer whose MLP is a mixture of experts, else 0."""
        return [
            int(bool(self.num_experts) and n not in self.mlp_only_layers and (n + 1) % self.decoder_sparse_step == 0)
            for n in range(self.num_hidden_layers)
        ]


_EXPERT_FIELDS = {
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "norm_topk_prob",
    "decoder_sparse_step",
    "mlp_only_layers",
}


# ---- megatron's name -> what it is made of ---------------------------------------------------------------------------

_PLAIN = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.router.weight": "mlp.gate.weight",
}
_QKV, _GATE_UP, _DOWN = "self_attention.linear_qkv.weight", "linear_fc1.weight", "linear_fc2.weight"
_EXPERTS = "mlp.experts.local_experts."


def _split_name(name: str) -> tuple[str, str]:
    """(prefix of the layer in Hugging Face names, rest of megatron's name)."""
    if not name.startswith("decoder.layers."):
        return "", name
    number, rest = name.removeprefix("decoder.layers.").split(".", 1)
    return f"model.layers.{number}.", rest


def is_expert(name: str) -> bool:
    """Whether megatron's weight `name` is one expert's."""
    return _EXPERTS in name


def of_rank(name: str, first: int) -> str:
    """The name that an expert's weight would have if one rank had all: megatron counts a rank's experts, from `first`
    on, from 0."""
    before, experts, rest = name.partition(_EXPERTS)
    number, dot, rest = rest.partition(".")
    return f"{before}{experts}{int(number) + first}{dot}{rest}" if experts else name


def _mlp(prefix: str, rest: str) -> tuple[str, int | None]:
    """(prefix of the MLP in Hugging Face names, its number if it is an expert)."""
    if not rest.startswith(_EXPERTS):
        return f"{prefix}mlp.", None
    number = int(rest.removeprefix(_EXPERTS).split(".", 1)[0])
    return f"{prefix}mlp.experts.{number}.", number


def from_hf(name: str, tensors: Mapping[str, Tensor], shape: Shape) -> Tensor:
    """The whole weight `name` of megatron. Raises KeyError with the Hugging Face name that is missing."""
    prefix, rest = _split_name(name)
    if rest == _QKV:  # per key/value head: its query heads, then its key, then its value
        groups = shape.num_key_value_heads
        parts = [tensors[f"{prefix}self_attn.{part}_proj.weight"] for part in "qkv"]
        grouped = [part.view(groups, -1, shape.hidden_size) for part in parts]
        return torch.cat(grouped, dim=1).reshape(-1, shape.hidden_size)
    if rest.endswith((_GATE_UP, _DOWN)):
        mlp, expert = _mlp(prefix, rest)
        fused = f"{prefix}mlp.experts.{'gate_up' if rest.endswith(_GATE_UP) else 'down'}_proj"
        if expert is not None and fused in tensors:
            return tensors[fused][expert]
        if rest.endswith(_DOWN):
            return tensors[f"{mlp}down_proj.weight"]
        return torch.cat([tensors[f"{mlp}{part}_proj.weight"] for part in ("gate", "up")])
    return tensors[prefix + _PLAIN[rest]]


def to_hf(name: str, whole: Tensor, shape: Shape) -> Iterable[tuple[str, Tensor]]:
    """Inverse of `from_hf`: (Hugging Face name, weight) of each part."""
    prefix, rest = _split_name(name)
    if rest == _QKV:
        groups, heads = shape.num_key_value_heads, shape.num_attention_heads // shape.num_key_value_heads
        grouped = whole.view(groups, heads + 2, shape.head_dim, shape.hidden_size)
        parts = (grouped[:, :heads], grouped[:, heads : heads + 1], grouped[:, heads + 1 :])
        names = [f"{prefix}self_attn.{part}_proj.weight" for part in "qkv"]
        return [(n, p.reshape(-1, shape.hidden_size)) for n, p in zip(names, parts, strict=True)]
    if rest.endswith(_GATE_UP):
        gate, up = whole.chunk(2)
        mlp, _ = _mlp(prefix, rest)
        return [(f"{mlp}gate_proj.weight", gate), (f"{mlp}up_proj.weight", up)]
    if rest.endswith(_DOWN):
        return [(f"{_mlp(prefix, rest)[0]}down_proj.weight", whole)]
    return [(prefix + _PLAIN[rest], whole)]


# ---- how a weight is split among tensor-parallel ranks ---------------------------------------------------------------

_SPLIT_COLUMNS = ("linear_proj.weight", _DOWN)
_SPLIT_ROWS = ("word_embeddings.weight", "output_layer.weight", "linear_qkv.weight")
SPLIT = (*_SPLIT_COLUMNS, *_SPLIT_ROWS, _GATE_UP)


def shard(name: str, whole: Tensor, tp: int, rank: int) -> Tensor:
    """The part of `rank`."""
    if name.endswith(_SPLIT_COLUMNS):
        return whole.chunk(tp, dim=1)[rank]
    if name.endswith(_SPLIT_ROWS):
        return whole.chunk(tp)[rank]
    if name.endswith(_GATE_UP):
        return torch.cat([half.chunk(tp)[rank] for half in whole.chunk(2)])
    return whole


def unshard(name: str, parts: list[Tensor]) -> Tensor:
    """Inverse of `shard`, from the parts of all ranks; of a weight that is not split each has the whole."""
    if len(parts) == 1 or not name.endswith(SPLIT):
        return parts[0]
    if name.endswith(_SPLIT_COLUMNS):
        return torch.cat(parts, dim=1)
    if name.endswith(_SPLIT_ROWS):
        return torch.cat(parts)
    halves = [p.chunk(2) for p in parts]
    return torch.cat([torch.cat([h[side] for h in halves]) for side in (0, 1)])
