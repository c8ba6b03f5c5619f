"""A layout that a model can't be split by is refused before anything starts, with what would do."""

from __future__ import annotations

import pytest

from celld.trainer.layout import check_layout
from gyre_base import config as configuration
from gyre_base.config import ConfigError, TrainerConfig
from tests.trainer.conftest import SMALL


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_a_layout_that_divides_the_model_is_taken(tensor, pipeline):
    check_layout(TrainerConfig(tensor_parallel=tensor, pipeline_parallel=pipeline), SMALL.to_hf())


def test_stages_must_divide_the_layers():
    with pytest.raises(ConfigError, match=r"pipeline_parallel = 3 must divide .*num_hidden_layers.*; it can be 1, 2$"):
        check_layout(TrainerConfig(pipeline_parallel=3), SMALL.to_hf())


@pytest.mark.parametrize(("size", "entry"), [(3, "num_attention_heads"), (4, "num_key_value_heads")])
def test_one_that_does_not_is_refused_with_the_sizes_that_do(size, entry):
    with pytest.raises(ConfigError, match=rf"tensor_parallel = {size} must divide .*{entry}.*; it can be 1, 2$"):
        check_layout(TrainerConfig(tensor_parallel=size), SMALL.to_hf())


def test_experts_are_shared_by_ranks_that_share_the_tokens():
    model = SMALL.to_hf() | {"model_type": "qwen3_moe", "num_experts": 12}
    for tokens, experts in ((2, 2), (4, 2), (6, 6)):
        check_layout(TrainerConfig(context_parallel=tokens, expert_parallel=experts), model)
    words = r"expert_parallel = 2 must divide trainer.context_parallel \(1\).* it can be 1$"
    with pytest.raises(ConfigError, match=words):
        check_layout(TrainerConfig(expert_parallel=2), model)
    with pytest.raises(ConfigError, match=r"the model's experts \(12\); it can be 1, 2, 4$"):
        check_layout(TrainerConfig(expert_parallel=8, context_parallel=8), model)
    with pytest.raises(ConfigError, match="this model is dense"):
        check_layout(TrainerConfig(expert_parallel=2, context_parallel=2), SMALL.to_hf())


def test_any_number_of_ranks_can_share_the_tokens():
    check_layout(TrainerConfig(context_parallel=3, tensor_parallel=2), SMALL.to_hf())
    assert TrainerConfig(context_parallel=3, tensor_parallel=2, pipeline_parallel=2).ranks == 12


def test_a_mixture_of_experts_is_not_split_by_tensor():
    check_layout(TrainerConfig(), SMALL.to_hf() | {"model_type": "qwen3_moe"})
    with pytest.raises(ConfigError, match="mixture of experts"):
        check_layout(TrainerConfig(tensor_parallel=2), SMALL.to_hf() | {"model_type": "qwen3_moe"})


@pytest.mark.parametrize(
    "tree",
    [
        {"trainer": {"tensor_parallel": 0}},
        {"trainer": {"pipeline_parallel": 0}},
        {"trainer": {"tensor_parallel": 2}, "engine": {"kind": "emulate"}},
        {"trainer": {"pipeline_parallel": 2}, "engine": {"kind": "emulate"}},
        {"trainer": {"context_parallel": 2}, "engine": {"kind": "emulate"}},
    ],
)
def test_the_configuration_itself_is_checked(tree):
    with pytest.raises(ConfigError, match=r"trainer\.(tensor|pipeline)_parallel"):
        configuration.from_tree(tree)
