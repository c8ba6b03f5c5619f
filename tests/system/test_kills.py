"""Each kind of process is killed while the run trains: it finishes, nothing is trained twice, no harness notices."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.running import RAMBLING, Run

pytestmark = pytest.mark.slow
STEPS = 16


def test_a_run_survives_the_death_of_every_kind_of_process(tmp_path: Path, random_model: Path) -> None:
    with Run(tmp_path, random_model, RAMBLING, scheduler__steps=STEPS, scheduler__group_size=6) as run:
        run.start()
        run.until(lambda s: s["run"] == "training" and s["step"] >= 1)

        run.until(lambda s: s["roles"]["c1"] == "train")
        rank = run.life("rank-c1")
        run.kill("rank-c1")

        run.until(lambda s: s["water_level"] > 4 and s["roles"]["c2"] == "rollout")
        run.kill("engine-c2")
        print("engine", run.status())

        for daemon in ("proxyd", "trajd", "cellctl", "ex0"):
            run.until(lambda s: s["water_level"] > 2)
            life = run.life(daemon)
            run.kill(daemon)
            run.until_reborn(daemon, life)
            print(daemon, run.status())

        run.until_reborn("rank-c1", rank)
        life = run.life("celld-c2")
        run.kill("celld-c2")
        run.until_reborn("celld-c2", life)
        print("c2", run.status())

        run.until(lambda s: s["roles"]["c0"] == "train")
        life, step = run.life("rank-c0"), run.status()["step"]
        run.kill("rank-c0")
        run.until_reborn("rank-c0", life)
        print("rank-c0", step, run.status())

        summary = run.finish(180)
        assert summary["steps"] == STEPS
        assert (summary["tokens_trained_twice"], summary["context_mismatches"]) == (0, 0)
        assert summary["weights_sum_min"] == pytest.approx(1, abs=1e-9)
        assert summary["weights_sum_max"] == pytest.approx(1, abs=1e-9)
        assert summary["executions_interrupted"] == 0
        assert run.left() == []
