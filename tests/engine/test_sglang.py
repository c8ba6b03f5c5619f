"""What only two real engines with a shared store can show: `make test-sglang`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from celld.tiny.model import load
from celld.weights import Snapshot
from tests.engine.calls import Caller
from tests.engine.test_contract import prompt, worst
from tests.system.conftest import make_random
from tests.system.running import RAMBLING, Run, changed, rambling_task

pytestmark = [
    pytest.mark.skipif(os.environ.get("GYRE_ENGINE") != "sglang", reason="needs real engines: make test-sglang"),
    pytest.mark.timeout(900),
]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
async def test_weights_of_the_trainer_are_served_bit_by_bit(
    engine: Caller, models: tuple[Path, Path], tmp_path: Path, dtype: str
):
    """Changed in megatron, written as a snapshot, served: the answers are those of a plain forward pass."""
    from celld.trainer import cpu
    from celld.trainer.dtypes import DTYPES
    from celld.trainer.model import Policy, read_tensors

    cpu.start_parallel()
    config = json.loads((models[0] / "config.json").read_text())
    policy = Policy(config, dtype=DTYPES[dtype])
    policy.load(read_tensors(models[0]))
    generator = torch.Generator().manual_seed(5 if dtype == "fp32" else 6)
    with torch.no_grad():
        for parameter in policy.parameters.values():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    folder = Snapshot.of("0.1", policy.hf_arrays()).write_hf(tmp_path / "0.1", config)
    before = await engine.control.checksums()
    await engine.control.update_weights(folder, "0.1")
    assert await engine.control.checksums() != before
    ids = prompt(60, seed=23)
    answer = await engine.generate(ids, temperature=1.0, max_new_tokens=40)
    assert answer["meta_info"]["weight_versions"] == [{"version": "0.1", "start": 0, "end": 40}]
    assert worst(load(folder).eval(), ids, answer) <= 1e-4


def test_a_run_with_real_engines_trains_and_moves_calls(tmp_path: Path):
    """All daemons, two cells that turn, real engines with a shared store, real ranks."""
    model = tmp_path / "model"
    make_random(model)
    setting = changed(RAMBLING, cluster__cells=2, engine__kind="sglang", engine__device="cpu", engine__kv_store=True)
    setting["engine"]["python"] = os.environ["GYRE_SGLANG_PYTHON"]
    setting["cluster"]["peer_timeout_s"] = 60.0
    setting["scheduler"]["steps"] = 2
    with Run(tmp_path, model, setting) as run:
        tasks = [rambling_task(f"train-{i}", turns=(1, 4)[i % 2]) for i in range(4)]  # the long ones are left when
        (tmp_path / "train.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))  # a cell turns
        summary = run.start().finish(800)
        assert not run.left()
    assert summary["steps"] == 2
    assert summary["executions_interrupted"] == 0
    assert summary["context_mismatches"] == 0
    assert summary["tokens_trained_twice"] == 0
    assert summary["calls_moved"] > 0
