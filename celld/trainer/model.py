"""megatron-core's GPTModel from a Hugging Face Qwen3 directory, computing log-probabilities over packed forests.

Owns construction, the weight mapping in both directions, and the flat fp32 gradient buffer. Never steps an optimizer,
never talks. Invariant: `load` then `hf_tensors` gives the same bits; logits equal those of the same weights in
transformers. Construction stays behind `Policy`, since megatron may replace GPTModel by another class.

Shapes: T packed tokens, N targets, V vocabulary (V/tp per rank), H query heads, K key/value heads, E head size, D
width.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors.torch import load_file
from torch import Tensor, nn

from celld.trainer import cpu, tree
from celld.weights import Array


class ModelError(ValueError):
    """A model directory that can't be trained exactly; says which entry."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The entries of a Qwen3 config.json that decide the network."""

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
    tie_word_embeddings: bool

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> Shape:
        if config.get("model_type") != "qwen3":
            raise ModelError(f"model_type is {config.get('model_type')!r}, only dense qwen3 is trained")
        for key in ("attention_bias", "use_sliding_window", "rope_scaling"):
            if config.get(key):
                raise ModelError(f"{key} is not supported")
        values = {**config, **(config.get("rope_parameters") or {})}  # transformers 5 moved rope_theta in there
        values.setdefault("tie_word_embeddings", False)
        missing = [name for name in cls.__dataclass_fields__ if name not in values]
        if missing:
            raise ModelError(f"config.json lacks {', '.join(missing)}")
        return cls(**{name: values[name] for name in cls.__dataclass_fields__})


class _TreeAttention(MegatronModule):  # type: ignore[misc]  # megatron is untyped
    """megatron's place for attention, filled by `tree.attend`; the plan is set before each forward pass."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config=config)
        self.plan: tree.TreePlan | None = None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """[T, 1, heads, E] each -> [T, 1, H * E]."""
        assert self.plan is not None, "set the plan first"
        mixed_THE = tree.attend(query[:, 0], key[:, 0], value[:, 0], self.plan)
        return mixed_THE.flatten(1)[:, None]


class Policy:
    """The trained network of one rank (one tensor-parallel shard)."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.shape = Shape.from_hf(config)
        self.tp, self.tp_rank = mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()
        self.module = _build(self.shape, self.tp).to(cpu.device())
        self._attention = [m for m in self.module.modules() if isinstance(m, _TreeAttention)]
        self._rows_N: Tensor | None = None
        self.module.output_layer.register_forward_pre_hook(self._only_wanted_rows)
        self.parameters: dict[str, nn.Parameter] = dict(self.module.named_parameters())
        self.gradient = torch.zeros(sum(p.numel() for p in self.parameters.values()), device=cpu.device())
        self._view_gradients()

    def logprobs(
        self, plan: tree.TreePlan, rows_N: Tensor, targets_N: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """(log-probability [N] of token `targets_N` after packed position `rows_N`, entropy [N] without gradient)."""
        return _log_softmax_at(self.logits(plan, rows_N) / temperature, targets_N, self.tp_rank)

    def logits(self, plan: tree.TreePlan, rows_N: Tensor) -> Tensor:
        """This rank's vocabulary slice [N, V/tp] at packed positions `rows_N`; no other row meets the costly matrix."""
        for module in self._attention:
            module.plan = plan
        self.module.rotary_pos_emb.position_T = plan.position_T
        self._rows_N = rows_N
        logits_1NV = self.module(input_ids=plan.tokens_T[None], position_ids=plan.position_T[None], attention_mask=None)
        logits_NV: Tensor = logits_1NV[0]
        return logits_NV

    def finish_gradient(self) -> None:
        """Sum what the tensor-parallel ranks hold in part: the norms of queries and keys see only a rank's own heads.

        Without this nothing fails and losses look right, but the ranks' copies of those weights drift apart.
        """
        if self.tp > 1:
            for name, parameter in self.parameters.items():
                if name.endswith(("q_layernorm.weight", "k_layernorm.weight")):
                    dist.all_reduce(parameter.grad, group=mpu.get_tensor_model_parallel_group())

    def gradient_norm(self) -> float:
        """Of the whole gradient: parts of other ranks count, copies count once."""
        if self.tp == 1:
            return float(self.gradient.norm())
        split = [p.grad for name, p in self.parameters.items() if name.endswith(_SPLIT)]
        whole = [p.grad for name, p in self.parameters.items() if not name.endswith(_SPLIT)]
        squares = torch.stack([g.square().sum() for g in split if g is not None]).sum()
        dist.all_reduce(squares, group=mpu.get_tensor_model_parallel_group())
        return float((squares + sum(g.square().sum() for g in whole if g is not None)).sqrt())

    def zero_gradient(self) -> None:
        self.gradient.zero_()

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take this rank's part of Hugging Face tensors. Raises ModelError if one is missing or misshapen."""
        parts = self.from_hf_tensors(tensors)
        for name, parameter in self.parameters.items():
            if parts[name].shape != parameter.shape:
                need, got = tuple(parameter.shape), tuple(parts[name].shape)
                raise ModelError(f"{name}: weights of shape {got}, need {need}")
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(parts[name])

    def hf_tensors(self, values: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """The weights (or `values` of the same names and shapes), whole, under Hugging Face names in a fixed order.

        Collective over tensor-parallel ranks.
        """
        tensors: dict[str, Tensor] = {}
        for name, part in (self.parameters if values is None else values).items():
            tensors.update(to_hf(name, _unshard(name, part.detach(), self.tp), self.shape))
        return dict(sorted(tensors.items()))

    def from_hf_tensors(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Inverse of `hf_tensors`: this rank's parts by parameter name. Raises ModelError if one is missing."""
        parts = {}
        for name in self.parameters:
            try:
                parts[name] = _shard(name, from_hf(name, tensors, self.shape), self.tp, self.tp_rank)
            except KeyError as error:
                raise ModelError(f"the weights lack {error}") from None
        return parts

    def load_arrays(self, arrays: Mapping[str, Array]) -> None:
        """`load` from read-only arrays (a snapshot, a checkpoint)."""
        self.load({name: torch.from_numpy(array.copy()) for name, array in arrays.items()})

    def hf_arrays(self) -> dict[str, Array]:
        """`hf_tensors` of the weights, for a snapshot or a checkpoint."""
        return {name: tensor.cpu().numpy() for name, tensor in self.hf_tensors().items()}

    def _only_wanted_rows(self, _module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden_T1D, *rest = args
        return (hidden_T1D[self._rows_N], *rest)

    def _view_gradients(self) -> None:
        at = 0
        for parameter in self.parameters.values():
            parameter.grad = self.gradient[at : at + parameter.numel()].view_as(parameter)
            at += parameter.numel()


def read_config(directory: str | Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((Path(directory) / "config.json").read_text())
    except FileNotFoundError:
        raise ModelError(f"no config.json in {directory}; set model.path to a Hugging Face model directory") from None
    return config


def read_tensors(directory: str | Path) -> dict[str, Tensor]:
    """All tensors of a Hugging Face directory, one file or several."""
    files = sorted(Path(directory).glob("model*.safetensors"))
    if not files:
        raise ModelError(f"no model.safetensors in {directory}")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def _build(shape: Shape, tp: int) -> GPTModel:
    config = TransformerConfig(
        num_layers=shape.num_hidden_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.intermediate_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_key_value_heads,
        kv_channels=shape.head_dim,
        layernorm_epsilon=shape.rms_norm_eps,
        tensor_model_parallel_size=tp,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        qk_layernorm=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        perform_initialization=False,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        **cpu.config_flags(),
    )
    spec = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = _TreeAttention
    module = GPTModel(
        config,
        spec,
        vocab_size=shape.vocab_size,
        max_sequence_length=shape.max_position_embeddings,
        parallel_output=True,
        share_embeddings_and_output_weights=shape.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,
    )
    module.rotary_pos_emb = cpu.DepthRotary(
        shape.head_dim, rotary_percent=1.0, rotary_base=shape.rope_theta, use_cpu_initialization=cpu.on_cpu()
    )
    return module


def _log_softmax_at(logits_NV: Tensor, targets_N: Tensor, tp_rank: int) -> tuple[Tensor, Tensor]:
    """log_softmax at the targets, and the entropy, over a vocabulary that may be split among ranks."""
    highest_N = logits_NV.detach().amax(-1)
    if dist.get_world_size(mpu.get_tensor_model_parallel_group()) > 1:
        dist.all_reduce(highest_N, op=dist.ReduceOp.MAX, group=mpu.get_tensor_model_parallel_group())
    shifted_NV = logits_NV - highest_N[:, None]
    weight_NV = shifted_NV.exp()
    total_N = reduce_from_tensor_model_parallel_region(weight_NV.sum(-1))
    local_N = targets_N - tp_rank * logits_NV.shape[-1]
    mine_N = (local_N >= 0) & (local_N < logits_NV.shape[-1])
    at_target_N = shifted_NV.gather(-1, (local_N * mine_N)[:, None])[:, 0] * mine_N
    logp_N = reduce_from_tensor_model_parallel_region(at_target_N) - total_N.log()
    with torch.no_grad():
        mean_N = reduce_from_tensor_model_parallel_region((weight_NV * shifted_NV).sum(-1)) / total_N
        return logp_N, total_N.log() - mean_N


# ---- weights: megatron's name -> what it is made of, and how it is split ---------------------------------------------

_PLAIN = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}
_QKV, _GATE_UP = "self_attention.linear_qkv.weight", "mlp.linear_fc1.weight"
_SPLIT_COLUMNS = ("linear_proj.weight", "linear_fc2.weight")
_SPLIT_ROWS = ("word_embeddings.weight", "output_layer.weight", "linear_qkv.weight")
_SPLIT = (*_SPLIT_COLUMNS, *_SPLIT_ROWS, _GATE_UP)


def _split_name(name: str) -> tuple[str, str]:
    """(prefix of the layer in Hugging Face names, rest of megatron's name)."""
    if not name.startswith("decoder.layers."):
        return "", name
    number, rest = name.removeprefix("decoder.layers.").split(".", 1)
    return f"model.layers.{number}.", rest


def from_hf(name: str, tensors: dict[str, Tensor], shape: Shape) -> Tensor:
    prefix, rest = _split_name(name)
    if rest == _QKV:  # per key/value head: its query heads, then its key, then its value
        groups = shape.num_key_value_heads
        parts = [tensors[f"{prefix}self_attn.{part}_proj.weight"] for part in "qkv"]
        grouped = [part.view(groups, -1, shape.hidden_size) for part in parts]
        return torch.cat(grouped, dim=1).reshape(-1, shape.hidden_size)
    if rest == _GATE_UP:
        return torch.cat([tensors[f"{prefix}mlp.{part}_proj.weight"] for part in ("gate", "up")])
    return tensors[prefix + _PLAIN[rest]]


def to_hf(name: str, whole: Tensor, shape: Shape) -> Iterable[tuple[str, Tensor]]:
    prefix, rest = _split_name(name)
    if rest == _QKV:
        groups, heads = shape.num_key_value_heads, shape.num_attention_heads // shape.num_key_value_heads
        grouped = whole.view(groups, heads + 2, shape.head_dim, shape.hidden_size)
        parts = (grouped[:, :heads], grouped[:, heads : heads + 1], grouped[:, heads + 1 :])
        names = [f"{prefix}self_attn.{part}_proj.weight" for part in "qkv"]
        return [(n, p.reshape(-1, shape.hidden_size)) for n, p in zip(names, parts, strict=True)]
    if rest == _GATE_UP:
        gate, up = whole.chunk(2)
        return [(f"{prefix}mlp.gate_proj.weight", gate), (f"{prefix}mlp.up_proj.weight", up)]
    return [(prefix + _PLAIN[rest], whole)]


def _shard(name: str, whole: Tensor, tp: int, rank: int) -> Tensor:
    if name.endswith(_SPLIT_COLUMNS):
        return whole.chunk(tp, dim=1)[rank]
    if name.endswith(_SPLIT_ROWS):
        return whole.chunk(tp)[rank]
    if name.endswith(_GATE_UP):
        return torch.cat([half.chunk(tp)[rank] for half in whole.chunk(2)])
    return whole


def _unshard(name: str, part: Tensor, tp: int) -> Tensor:
    if tp == 1 or not name.endswith(_SPLIT):
        return part
    parts = [torch.empty_like(part) for _ in range(tp)]
    dist.all_gather(parts, part.contiguous(), group=mpu.get_tensor_model_parallel_group())
    if name.endswith(_SPLIT_COLUMNS):
        return torch.cat(parts, dim=1)
    if name.endswith(_SPLIT_ROWS):
        return torch.cat(parts)
    halves = [p.chunk(2) for p in parts]
    return torch.cat([torch.cat([h[side] for h in halves]) for side in (0, 1)])
