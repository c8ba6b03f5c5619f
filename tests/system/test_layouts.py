"""A whole run with cells of several trainer ranks in bf16; one that is killed, a stop, and going on with another layout
in fp32."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from gyre_base.rundir import RunDir
from tests.system.running import RAMBLING, Run

pytestmark = pytest.mark.slow
STEPS = 6


def served(folder: Path) -> str:
    """The type of the weights that an engine loads."""
    with open(folder / "model.safetensors", "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    (kind,) = {spec["dtype"] for name, spec in header.items() if name != "__metadata__"}
    return str(kind)


@pytest.mark.timeout(900)
def test_a_run_with_two_bf16_ranks_per_cell_survives_one_and_goes_on_with_one_in_fp32(
    tmp_path: Path, random_model: Path
) -> None:
    changes = {"cluster__cells": 2, "scheduler__steps": STEPS, "trainer__tensor_parallel": 2, "trainer__dtype": "bf16"}
    with Run(tmp_path, random_model, RAMBLING, **changes, trainer__checkpoint_every_steps=1) as run:
        run.start()
        run.until(lambda s: s["step"] >= 1)
        (row,) = run.rows("celld-c1")
        assert len(row["rank_pids"]) == 2 and row["rank_pid"] == row["rank_pids"][0]
        life = run.life("rank-c1")
        run.kill("rank-c1.1")  # celld ends the other one too, and starts both
        run.until_reborn("rank-c1", life)
        run.until_reborn("rank-c1.1", life)
        run.until(lambda s: s["step"] >= 2)
        assert run.process is not None
        run.process.send_signal(signal.SIGTERM)
        assert run.wait(120) == 1
        assert run.left() == []

        assert {served(folder) for folder in (run.root / "weights").glob("*/*")} == {"BF16"}

        made = RunDir(run.root)
        resolved = json.loads(made.path("run.json").read_text())
        resolved["trainer"] |= {"tensor_parallel": 1, "dtype": "fp32"}
        made.write_atomic("run.json", json.dumps(resolved))
        summary = run.start().finish(600)
        assert run.left() == []
        assert set(run.batches()) == set(range(STEPS))
        assert (summary["steps"], summary["tokens_trained_twice"], summary["context_mismatches"]) == (STEPS, 0, 0)
        assert summary["weights_sum_min"] == pytest.approx(1, abs=1e-9)
        assert summary["weights_sum_max"] == pytest.approx(1, abs=1e-9)
        assert summary["executions"]["train"] == {"scored": STEPS * 2 * 4}
        gaps = [step["metrics"]["logprob_gap"] for step in run.journal("cellctl") if step["tag"] == "step.done"]
        assert 1e-5 < gaps[0] < 0.02  # the engine computes in fp32 with the same bf16 weights
        faults = [event for event in run.journal("cellctl") if event["tag"] == "cell.fault"]
        assert any(fault["what"] == "rank" and "rank-c1.1 ended with code -9" in fault["detail"] for fault in faults)
