"""A small Qwen3-shaped decoder in plain torch: the quickstart's policy, and the reference for its trainer and engine.

Owns the forward pass over whole sequences and the Hugging Face directory layout (config.json + model.safetensors).
Never samples, never keeps a KV cache, never trains: those read this module's weights through its small methods.
Invariant: parameter names and numerics are those of transformers' Qwen3ForCausalLM with tied embeddings, so the same
file loads into transformers, SGLang and megatron-core.

Shapes: B rows, T tokens, S key tokens, D hidden size, H query heads, K key/value heads, E head dimension, V vocabulary.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, kw_only=True)
class TinyConfig:
    """The part of a Qwen3 `config.json` that shapes the network; the defaults are the quickstart's."""

    vocab_size: int = 992
    hidden_size: int = 128
    intermediate_size: int = 384
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    initializer_range: float = (
        0.06  # at 0.02 tied embeddings of this size take three times as long to leave uniform guesses
    )
    eos_token_id: int | None = None
    pad_token_id: int | None = None

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("num_attention_heads must be a multiple of num_key_value_heads")
        if self.head_dim % 2:
            raise ValueError("head_dim must be even: rotary embedding turns pairs")

    def to_hf(self) -> dict[str, Any]:
        """The Hugging Face config.json object; `from_hf` is its inverse."""
        own = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "sliding_window": None,
            "tie_word_embeddings": True,
            "torch_dtype": "float32",
            "use_cache": True,
            "use_sliding_window": False,
            **own,
        }

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> TinyConfig:
        """Read a Qwen3 config.json; what this module can't compute exactly is refused."""
        if config.get("model_type") != "qwen3":
            raise ValueError(f"not a Qwen3 config: model_type is {config.get('model_type')!r}")
        if not config.get("tie_word_embeddings", False):
            raise ValueError("only tied embeddings are supported (tie_word_embeddings: true)")
        for key in ("attention_bias", "use_sliding_window", "rope_scaling"):
            if config.get(key):
                raise ValueError(f"{key} is not supported")
        known = {name: config[name] for name in cls.__dataclass_fields__ if name in config}
        rope = config.get("rope_parameters") or {}  # transformers 5 moved rope_theta in here
        if "rope_theta" in rope:
            known["rope_theta"] = rope["rope_theta"]
        return cls(**known)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, in float32 as Hugging Face does."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def rope_angles(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin, each [*positions.shape, E], for integer positions of any shape."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angles = positions.float()[..., None] * theta**-exponents
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn x [..., T, E] by angles that broadcast against it (half-rotation: pairs are E/2 apart)."""
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin


class Attention(nn.Module):
    """Grouped-query attention with per-head norms of queries and keys."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def project(self, x_BTD: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, H, T, E], keys and values [B, K, T, E]; queries and keys are normed and turned."""
        rows, tokens = x_BTD.shape[:2]
        q = self.q_norm(self.q_proj(x_BTD).view(rows, tokens, self.heads, self.head_dim)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x_BTD).view(rows, tokens, self.kv_heads, self.head_dim)).transpose(1, 2)
        v = self.v_proj(x_BTD).view(rows, tokens, self.kv_heads, self.head_dim).transpose(1, 2)
        return apply_rope(q, cos, sin), apply_rope(k, cos, sin), v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """Mix values: q [B, H, T, E], k and v [B, K, S, E], mask True where a key may be seen; None means causal."""
        repeats = self.heads // self.kv_heads
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return self.merge(mixed)

    def merge(self, mixed: Tensor) -> Tensor:
        """Heads [B, H, T, E] back to the residual width [B, T, D]."""
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out

    def forward(self, x_BTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self.attend(*self.project(x_BTD, cos, sin))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """Pre-norm attention and MLP, each on the residual."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x_BTD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), cos, sin)
        out: Tensor = x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))
        return out


class Decoder(nn.Module):
    """What Hugging Face calls `model`: embeddings, layers, final norm."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, ids_BT: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x_BTD: Tensor = self.embed_tokens(ids_BT)
        for layer in self.layers:
            x_BTD = layer(x_BTD, cos, sin)
        out: Tensor = self.norm(x_BTD)
        return out


class TinyQwen3(nn.Module):
    """The whole causal language model; logits share the embedding matrix."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Logits [B, T, V] for integer ids [B, T]; position i sees positions 0..i. Pad rows on the right."""
        return self.logits(self.hidden(ids_BT))

    def hidden(self, ids_BT: Tensor) -> Tensor:
        """Final normed states [B, T, D]: a trainer picks its target positions before the costly logits."""
        cos, sin = self.angles(torch.arange(ids_BT.shape[1], device=ids_BT.device))
        states: Tensor = self.model(ids_BT, cos, sin)
        return states

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Rotary cos and sin for integer positions."""
        return rope_angles(positions, self.config.head_dim, self.config.rope_theta)

    def logits(self, hidden: Tensor) -> Tensor:
        """Vocabulary scores [..., V] of final states [..., D]."""
        return F.linear(hidden, self.model.embed_tokens.weight)

    def initialise(self, seed: int) -> TinyQwen3:
        """Random weights that depend on the seed alone: normal matrices, unit norms."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():  # a norm's weight is one-dimensional and starts at 1
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=self.config.initializer_range, generator=generator)
            else:
                nn.init.ones_(parameter)
        return self


def save(model: TinyQwen3, directory: str | Path) -> None:
    """Write config.json and model.safetensors; other files of the directory (tokenizer) are left alone."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model.config.to_hf(), indent=2, sort_keys=True) + "\n")
    tensors = {name: value.detach().contiguous() for name, value in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def load(directory: str | Path) -> TinyQwen3:
    """Read a directory written by `save` or by transformers."""
    folder = Path(directory)
    config = TinyConfig.from_hf(json.loads((folder / "config.json").read_text()))
    model = TinyQwen3(config)
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("lm_head.weight", None)  # some writers store the tied matrix twice
    model.load_state_dict(tensors)
    return model
