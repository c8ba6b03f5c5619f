"""What is asked of an engine, and of a model, before the experts of its tokens are believed."""

from __future__ import annotations

import base64
from pathlib import Path

import numpy as np
import pytest

from celld.engine_client import EngineClient, EngineUnsuitable, _routing_remedies
from celld.sglang import launch
from gyre_base.config import ConfigError
from gyre_base.routing import RoutingShape
from tests.engine.process import EngineProcess

SHAPE = RoutingShape(sparse=(True, True), chosen=2, experts=8)
pytestmark = pytest.mark.timeout(60)


async def test_an_engine_that_says_no_experts_is_not_taken_for_routing(models: tuple[Path, Path]):
    with EngineProcess(models[0]) as process:
        async with EngineClient(process.url) as client:
            with pytest.raises(EngineUnsuitable, match="--enable-return-routed-experts"):
                await client.probe(routing=SHAPE)


@pytest.mark.parametrize("rows", [4, 3])
def test_rows_of_another_shape_are_not_taken_for_routing(rows: int):
    said = base64.b64encode(np.tile(np.array([3, 4], "<i4"), (rows, 2, 1)).tobytes()).decode()
    found = _routing_remedies([{"meta_info": {"routed_experts": said}}], SHAPE)
    assert len(found) == (rows != 4)
    assert _routing_remedies([{"meta_info": {}}], None) == []


def test_a_model_that_sglang_would_serve_as_another_is_refused():
    model = {"model_type": "qwen3_moe", "num_hidden_layers": 3, "num_experts": 8, "num_experts_per_tok": 2}
    launch.check_model(model)
    launch.check_model({"model_type": "qwen3", "num_hidden_layers": 3, "tie_word_embeddings": True})
    for other, why in (
        ({"mlp_only_layers": [1]}, "every layer"),
        ({"decoder_sparse_step": 2}, "every layer"),
        ({"tie_word_embeddings": True}, "no output matrix"),
    ):
        with pytest.raises(ConfigError, match=why):
            launch.check_model(model | other)


def test_an_engine_is_started_to_say_experts_only_if_it_is_to():
    settings = {"model": Path("m"), "host": "h", "port": 1, "served_name": "s", "weight_version": "0.0"}
    assert launch.SGLangSettings(**settings, routed_experts=True).options()["enable-return-routed-experts"] is True
    assert "enable-return-routed-experts" not in launch.SGLangSettings(**settings).options()
