"""Each kind of process is killed while the run trains: it finishes, nothing is trained twice, no harness notices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gyre_base.shards import shard_of
from tests.system.running import RAMBLING, Run

pytestmark = pytest.mark.slow
STEPS = 8


def somebody_trains(status: dict[str, Any]) -> bool:
    return "train" in status["roles"].values()


def many_run(status: dict[str, Any]) -> bool:
    return bool(status["water_level"] > 3 and "rollout" in status["roles"].values())


def test_a_run_survives_the_death_of_every_kind_of_process(tmp_path: Path, random_model: Path) -> None:
    changes = {"scheduler__steps": STEPS, "scheduler__group_size": 6, "proxyd__shards": 2}
    with Run(tmp_path, random_model, RAMBLING, **changes) as run:
        run.start()
        run.until(lambda s: s["step"] >= 1)
        run.until(lambda s: s["roles"]["c1"] == "train")
        rank = run.life("rank-c1")
        run.kill("rank-c1")  # its lease and its sum go with it
        run.until(lambda s: s["water_level"] > 3 and s["roles"]["c2"] == "rollout")
        run.kill("engine-c2")  # in the middle of calls

        for daemon, moment in (
            ("proxyd-1", many_run),
            ("cellctl", many_run),
            ("trajd", somebody_trains),
            ("cellctl", somebody_trains),
            ("ex0", many_run),
        ):
            run.until(moment)
            life = run.life(daemon)
            run.kill(daemon)
            run.until_reborn(daemon, life)

        run.until_reborn("rank-c1", rank)
        life = run.life("celld-c2")
        run.kill("celld-c2")  # with it go its engine and its rank
        run.until_reborn("celld-c2", life)
        run.until(lambda s: s["roles"]["c0"] == "train")
        life = run.life("rank-c0")
        run.kill("rank-c0")  # weights go back to the last checkpoint
        run.until_reborn("rank-c0", life)

        summary = run.finish(180)
        assert run.left() == []
        assert (run.life("proxyd-0"), run.life("proxyd-1")) == (1, 2), "the other shard is not touched"
        for shard in (0, 1):
            assert {shard_of(name, 2) for name in run.executions_in_log(f"proxyd-{shard}")} == {shard}
        assert_nothing_was_lost(run, summary)


def assert_nothing_was_lost(run: Run, summary: dict[str, Any]) -> None:
    assert summary["steps"] == STEPS
    assert set(run.batches()) == set(range(STEPS))
    assert (summary["tokens_trained_twice"], summary["context_mismatches"]) == (0, 0)
    assert summary["weights_sum_min"] == pytest.approx(1, abs=1e-9)
    assert summary["weights_sum_max"] == pytest.approx(1, abs=1e-9)
    assert summary["executions_interrupted"] == 0
    assert summary["executions"]["train"] == {"scored": STEPS * 2 * 6}  # those that ex0 had with it are done again
    assert summary["executions_retried"] > 0
    cells = {event["what"] for event in run.journal("cellctl") if event["tag"] == "cell.fault"}
    assert cells >= {"engine", "rank"}
