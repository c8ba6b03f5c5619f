"""A mixture of experts trains like its plain twin: weights, logits, packed loss and gradients."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.transformer.spec_utils import ModuleSpec

from celld.trainer import layers, tree
from celld.trainer import loss as losses
from celld.trainer.mapping import ModelError, Shape
from tests.trainer import experts
from tests.trainer.forests import random_micro_step
from tests.trainer.test_tree_and_loss import assert_same_gradient, flattened_loss, packed_loss


def test_weights_come_back_bit_for_bit_under_the_names_of_the_hub(mixture):
    mine, twin = mixture
    back, theirs = mine.hf_tensors(), dict(twin.state_dict())
    assert list(back) == sorted(theirs)
    assert "model.layers.2.mlp.experts.4.down_proj.weight" in back and "model.layers.1.mlp.up_proj.weight" in back
    assert all(torch.equal(back[name], theirs[name]) for name in theirs)


def test_experts_fused_into_one_tensor_are_read_too(mixture):
    mine, twin = mixture
    theirs = dict(twin.state_dict())
    fused = {name: tensor for name, tensor in theirs.items() if ".experts." not in name}
    for layer in (0, 2):
        at = f"model.layers.{layer}.mlp.experts."
        each = [{p: theirs[f"{at}{e}.{p}_proj.weight"] for p in ("gate", "up", "down")} for e in range(experts.COUNT)]
        fused[f"{at}gate_up_proj"] = torch.stack([torch.cat([e["gate"], e["up"]]) for e in each])
        fused[f"{at}down_proj"] = torch.stack([e["down"] for e in each])
    mine.load({name: torch.zeros_like(tensor) for name, tensor in theirs.items()})
    mine.load(fused)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in mine.hf_tensors().items())


def test_logits_equal_those_of_the_plain_torch_model(mixture):
    mine, twin = mixture
    plan = tree.plan(random_micro_step(5, 1, segments=1, longest=60).executions)
    with torch.no_grad():
        ours, theirs = mine.logits(plan, torch.arange(len(plan))), twin(plan.tokens_T[None])[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max()))


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), executions=st.integers(1, 4), segments=st.integers(1, 9))
def test_packed_loss_and_gradients_equal_the_flattened_form(mixture, seed, executions, segments):
    mine, twin = mixture
    steps = random_micro_step(seed, executions, segments=segments, longest=15).executions
    options = losses.LossOptions(clip_low=0.2, clip_high=4.0)
    mine.zero_gradient()
    twin.zero_grad()
    packed, _ = packed_loss(mine, steps, options)
    packed.backward()
    flat = flattened_loss(twin, steps, options)
    flat.backward()
    torch.testing.assert_close(packed.detach(), flat.detach(), rtol=1e-5, atol=1e-5)
    assert_same_gradient(mine, twin)


def test_the_inside_of_an_mlps_spec_is_found_in_every_megatron():
    inside = object()
    assert layers._submodules(ModuleSpec(module=object, submodules=inside)) is inside  # 0.16
    assert layers._submodules(partial(object, submodules=inside)) is inside  # 0.19
    assert layers._submodules(partial(object)) is None


def test_which_layers_have_experts_follows_transformers():
    config = experts.config_of() | {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    assert Shape.from_hf(config).sparse_layers == [0, 1, 0, 0]
    assert Shape.from_hf(config | {"model_type": "qwen3"}).sparse_layers == [0, 0, 0, 0]
    renamed = {("num_local_experts" if key == "num_experts" else key): value for key, value in config.items()}
    assert Shape.from_hf(renamed) == Shape.from_hf(config)
    del config["moe_intermediate_size"]
    with pytest.raises(ModelError, match="moe_intermediate_size"):
        Shape.from_hf(config)
