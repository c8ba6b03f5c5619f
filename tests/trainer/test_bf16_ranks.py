"""Real bf16 processes that share a network: near one rank as far as bf16 goes, of one mind bit for bit."""

from __future__ import annotations

import asyncio

import pytest
import torch

from celld.trainer.model import Policy, read_config, read_tensors
from tests.trainer import bf16_rank
from tests.trainer.cells import a_model, ranks
from tests.trainer.layout_rank import assert_shared
from tests.trainer.test_bf16 import BF16, U


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kind", "layout"), [("tied", {"tp": 2, "pp": 2}), ("experts", {"cp": 4, "ep": 2})])
def test_ranks_in_bf16_train_like_one_and_have_the_same_weights(tmp_path, policy, reference, kind, layout):
    """The sum of two ranks' states is rounded once more than one rank's own, so experts may differ here too."""
    model = a_model(tmp_path / "model", reference, kind)
    with ranks("tests.trainer.bf16_rank", model, tmp_path, layout) as outputs:
        alone = Policy(read_config(model), dtype=BF16)
        alone.load(read_tensors(model))
        whole = asyncio.run(bf16_rank.train(alone))

    found_by = [torch.load(output, weights_only=True) for output in outputs]
    bound = 25 * U if kind == "tied" else 0.25
    expected = torch.cat([tensor.flatten() for tensor in whole["gradient"].values()])
    for rank in found_by:
        assert_shared(rank["stepped"], whole["stepped"], layout)
        found = torch.cat([rank["gradient"][name].flatten() for name in whole["gradient"]])
        assert (found - expected).norm() <= bound * expected.norm()
        for name, master in rank["masters"].items():
            # not equal: the norm that clips is summed in another order
            torch.testing.assert_close(master, whole["masters"][name], rtol=1e-6, atol=1e-6)
            assert torch.equal(master, found_by[0]["masters"][name])
            assert torch.equal(master.to(BF16), rank["weights"][name])
        assert rank["weights"].keys() == rank["masters"].keys() == whole["weights"].keys()
    assert found_by[-1]["loss"] == pytest.approx(whole["loss"], rel=bound)
