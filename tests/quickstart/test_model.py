"""The small model: causal, equal to a step-by-step computation, and a Hugging Face directory on disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from celld.tiny.model import TinyConfig, TinyQwen3, load, save

SHAPE = TinyConfig(
    vocab_size=50,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    initializer_range=0.2,
)


def model(seed: int = 0) -> TinyQwen3:
    made = TinyQwen3(SHAPE).initialise(seed)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in made.named_parameters():
        if "norm" in name:  # ones would hide a norm that is left out
            parameter.data = 1 + 0.3 * torch.randn(parameter.shape, generator=generator)
    return made.eval()


def step_by_step(policy: TinyQwen3, ids: list[int]) -> Tensor:
    """Logits [T, V] with one token at a time and keys and values kept, straight from the module's small methods."""
    kept: list[tuple[Tensor, Tensor]] = []
    rows = []
    for position, token in enumerate(ids):
        cos, sin = policy.angles(torch.tensor([position]))
        x = policy.model.embed_tokens(torch.tensor([[token]]))
        for number, layer in enumerate(policy.model.layers):
            q, k, v = layer.self_attn.project(layer.input_layernorm(x), cos, sin)
            if position:
                k, v = torch.cat((kept[number][0], k), 2), torch.cat((kept[number][1], v), 2)
                kept[number] = (k, v)
            else:
                kept.append((k, v))
            everything = torch.ones(1, k.shape[2], dtype=torch.bool)
            x = x + layer.self_attn.attend(q, k, v, everything)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        rows.append(policy.logits(policy.model.norm(x))[0, 0])
    return torch.stack(rows)


def by_hand(policy: TinyQwen3, ids: list[int]) -> Tensor:
    """Logits [T, V] from the published formulas and the state dict alone, in float64, one head at a time."""
    weights = {name: value.double() for name, value in policy.state_dict().items()}
    half, theta = SHAPE.head_dim // 2, SHAPE.rope_theta

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + SHAPE.rms_norm_eps).sqrt() * weights[name]

    def turn(x: Tensor) -> Tensor:  # pairs (i, i + E/2) turn by position / theta^(2i/E)
        angle = torch.arange(len(ids)).double()[:, None] * theta ** (-torch.arange(half).double() / half)
        a, b = x[:, :half], x[:, half:]
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), 1)

    x = weights["model.embed_tokens.weight"][ids]
    future = torch.ones(len(ids), len(ids)).triu(1).bool()
    for number in range(SHAPE.num_hidden_layers):
        at = f"model.layers.{number}."
        inner = norm(x, at + "input_layernorm.weight")
        heads = []
        for head in range(SHAPE.num_attention_heads):
            own = slice(head * SHAPE.head_dim, (head + 1) * SHAPE.head_dim)
            shared = head // (SHAPE.num_attention_heads // SHAPE.num_key_value_heads)
            other = slice(shared * SHAPE.head_dim, (shared + 1) * SHAPE.head_dim)
            q = turn(norm(inner @ weights[at + "self_attn.q_proj.weight"][own].T, at + "self_attn.q_norm.weight"))
            k = turn(norm(inner @ weights[at + "self_attn.k_proj.weight"][other].T, at + "self_attn.k_norm.weight"))
            scores = (q @ k.T / SHAPE.head_dim**0.5).masked_fill(future, -torch.inf)
            heads.append(scores.softmax(1) @ (inner @ weights[at + "self_attn.v_proj.weight"][other].T))
        x = x + torch.cat(heads, 1) @ weights[at + "self_attn.o_proj.weight"].T
        inner = norm(x, at + "post_attention_layernorm.weight")
        gate, up = inner @ weights[at + "mlp.gate_proj.weight"].T, inner @ weights[at + "mlp.up_proj.weight"].T
        x = x + (gate * gate.sigmoid() * up) @ weights[at + "mlp.down_proj.weight"].T
    return norm(x, "model.norm.weight") @ weights["model.embed_tokens.weight"].T


IDS = st.lists(st.integers(0, SHAPE.vocab_size - 1), min_size=1, max_size=12)


@settings(max_examples=10, deadline=None)
@given(IDS, st.integers(0, 3))
@torch.no_grad()
def test_whole_sequence_equals_token_by_token(ids: list[int], seed: int) -> None:
    policy = model(seed)
    torch.testing.assert_close(policy(torch.tensor([ids]))[0], step_by_step(policy, ids), atol=1e-4, rtol=1e-4)


@settings(max_examples=10, deadline=None)
@given(IDS, st.integers(0, 3))
@torch.no_grad()
def test_it_computes_the_published_formulas(ids: list[int], seed: int) -> None:
    policy = model(seed)
    torch.testing.assert_close(policy(torch.tensor([ids]))[0].double(), by_hand(policy, ids), atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_row_does_not_depend_on_its_neighbours_or_on_padding_at_its_right() -> None:
    policy = model()
    alone = policy(torch.tensor([[5, 6, 7]]))[0]
    padded = policy(torch.tensor([[5, 6, 7, 0, 0], [1, 2, 3, 4, 5]]))[0, :3]
    torch.testing.assert_close(alone, padded)


@torch.no_grad()
def test_a_saved_directory_loads_to_the_same_model_and_names_are_those_of_hugging_face(tmp_path: Path) -> None:
    policy = model()
    save(policy, tmp_path)
    again = load(tmp_path)
    assert again.config == policy.config
    assert torch.equal(again(torch.tensor([[1, 2, 3]])), policy(torch.tensor([[1, 2, 3]])))
    layer = {
        *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
        *(f"self_attn.{name}_norm.weight" for name in "qk"),
        *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
    }
    names = {f"model.layers.{number}.{name}" for number in range(2) for name in layer}
    assert set(policy.state_dict()) == {*names, "model.embed_tokens.weight", "model.norm.weight"}
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["Qwen3ForCausalLM"]


def test_a_tied_matrix_stored_twice_and_the_newer_place_of_rope_theta_are_read(tmp_path: Path) -> None:
    policy = model()
    save(policy, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": config.pop("rope_theta") * 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = {**policy.state_dict(), "lm_head.weight": policy.model.embed_tokens.weight.detach().clone()}
    save_file(weights, tmp_path / "model.safetensors")
    assert load(tmp_path).config.rope_theta == 2 * SHAPE.rope_theta


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"model_type": "llama"}, "not a Qwen3 config"),
        ({"tie_word_embeddings": False}, "tied"),
        ({"attention_bias": True}, "attention_bias"),
        ({"num_key_value_heads": 3}, "multiple"),
    ],
)
def test_a_config_it_cannot_compute_exactly_is_refused(change: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        TinyConfig.from_hf({**SHAPE.to_hf(), **change})
