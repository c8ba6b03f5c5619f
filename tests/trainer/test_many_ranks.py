"""Real processes that share layers, what is in a layer, the tokens or the experts train like one."""

from __future__ import annotations

import asyncio

import pytest
import torch

from tests.trainer import layout_rank
from tests.trainer.cells import a_model, ranks


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("tied", {"pp": 2}),
        ("untied", {"pp": 2}),
        ("tied", {"tp": 2, "pp": 2}),
        ("experts", {"pp": 3}),
        ("untied", {"cp": 3}),
        ("tied", {"tp": 2, "cp": 2}),
        ("tied", {"pp": 2, "cp": 2}),
        ("experts", {"cp": 4, "ep": 2}),
        ("experts", {"pp": 3, "cp": 2, "ep": 2}),
    ],
    ids=lambda value: value if isinstance(value, str) else "".join(f"{name}{size}" for name, size in value.items()),
)
def test_a_cell_of_many_ranks_trains_like_one(tmp_path, policy, reference, kind, layout):
    from celld.trainer.model import Policy, read_config, read_tensors

    model = a_model(tmp_path / "model", reference, kind)
    with ranks("tests.trainer.layout_rank", model, tmp_path, layout) as outputs:
        alone = Policy(read_config(model))  # the fixture `policy` has joined the process group of this process
        alone.load(read_tensors(model))
        whole = asyncio.run(layout_rank.train(alone))
        assert ("lm_head.weight" in whole["weights"]) is (kind == "untied")

    size = len(outputs)
    for number, output in enumerate(outputs):
        rank = torch.load(output, weights_only=True)
        assert rank["norms"] == pytest.approx(whole["norms"], rel=1e-5)
        for name, bound in (("weights", 1e-5), ("moments", 1e-4)):
            assert_close(rank[name], whole[name], bound, name)
        layout_rank.assert_shared(rank["stepped"], whole["stepped"], layout)
        last = number >= size - size // layout.get("pp", 1)
        for which, (mine, theirs) in enumerate(zip(rank["forests"], whole["forests"], strict=True)):
            assert_close(mine[1], theirs[1], 1e-5, which)
            assert ("loss" in mine[0]) is last  # only there the loss is known; what is counted is known everywhere
            counted = {name: n for name, n in theirs[0].items() if name in mine[0] and name != "compute_s"}
            assert {name: mine[0][name] for name in counted} == pytest.approx(counted, rel=1e-4, abs=1e-5)
    copies = [torch.load(output, weights_only=True)["weights"] for output in outputs]
    assert all(torch.equal(copies[0][name], other[name]) for other in copies for name in copies[0])


def assert_close(mine, theirs, bound, what) -> None:
    """Tensor by tensor; one that is nothing beside the others may be any other nothing."""
    assert sorted(mine) == sorted(theirs)
    whole = torch.cat([tensor.flatten() for tensor in theirs.values()]).norm()
    for name, tensor in theirs.items():
        assert (mine[name] - tensor).norm() <= bound * tensor.norm() + 1e-6 * whole, (what, name)
