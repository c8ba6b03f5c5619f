"""Two real processes with half the heads each train like one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from celld.tiny import model as tiny
from tests.trainer import tp_rank


@pytest.mark.timeout(120)
def test_tensor_parallel_two_trains_like_one(tmp_path, policy, reference):
    tiny.save(reference, tmp_path / "model")
    outputs = [tmp_path / f"rank{r}" for r in range(2)]
    command = [sys.executable, "-m", "tests.trainer.tp_rank", str(tmp_path / "model"), str(tmp_path / "store")]
    root = Path(__file__).parents[2]
    processes = [
        subprocess.Popen([*command, str(rank), "2", str(output)], cwd=root) for rank, output in enumerate(outputs)
    ]
    whole = tp_rank.train(policy)
    policy.load(dict(reference.state_dict()))
    assert [process.wait(timeout=100) for process in processes] == [0, 0]
    ranks = [torch.load(output, weights_only=True) for output in outputs]

    for rank in ranks:
        assert rank["losses"] == pytest.approx(whole["losses"], rel=1e-5)
        assert rank["norms"] == pytest.approx(whole["norms"], rel=1e-5)
        assert rank["entropy"] == pytest.approx(whole["entropy"], rel=1e-5)
        for name, gradient in whole["first"].items():  # without the rule for the norms of q and k this fails
            assert (rank["first"][name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-7, name
        for name, weight in whole["weights"].items():
            torch.testing.assert_close(rank["weights"][name], weight, rtol=1e-4, atol=1e-4)
    copies = ranks[0]["copies"]
    assert any("q_layernorm" in name for name in copies)
    assert all(torch.equal(copies[name], ranks[1]["copies"][name]) for name in copies)
