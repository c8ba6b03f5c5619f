"""Executors in jobs of their own on a CPU partition."""

from __future__ import annotations

import json
from pathlib import Path

from tests.slurm.minislurm import Cluster
from tests.slurm.running import JobRun, emulated, unharmed, whole

LONG = 10


def test_executors_on_a_cpu_partition_wait_for_the_next_life_of_a_requeued_run(
    quiet_slurm: Cluster, tmp_path: Path, no_model: Path
) -> None:
    tree = emulated(
        tmp_path, scheduler__steps=LONG, cluster__executor_partition="cpu", cluster__executor_options=["mem=500M"]
    )
    with JobRun(quiet_slurm, tmp_path, no_model, tree) as run:
        run.submit()
        run.until(lambda s: s["step"] >= 2)
        assert run.node_of("ex0") == "cpu1"
        jobs, life = json.loads((run.root / "pool.json").read_text()), run.life("ex0")
        quiet_slurm.run("scancel", "--signal=USR1", "--batch", run.job)
        run.until_life(1)
        whole(run.finish(), LONG)
        assert run.batches() == list(range(LONG))
        assert life == run.life("ex0"), "the executor lived through the requeue"
        outcomes = {e["outcome"] for e in run.journal("cellctl") if e["tag"] == "execution.finished"}
        assert outcomes == {"scored"}, "and so did the executions it held"
        run.wait_for(lambda: not quiet_slurm.run("squeue", "-h", "-j", *jobs.values(), check=False), 40)
        run.until_nothing_is_left()


def test_a_preempted_executors_job_comes_back_and_its_executions_run_again_at_no_cost_of_their_budget(
    quiet_slurm: Cluster, tmp_path: Path, no_model: Path
) -> None:
    tree = emulated(
        tmp_path,
        scheduler__steps=LONG,
        scheduler__retry_budget=0,
        cluster__executor_partition="cpu",
        cluster__executor_options=["mem=500M"],
    )
    with JobRun(quiet_slurm, tmp_path, no_model, tree) as run:
        run.submit()
        run.until(lambda s: s["step"] >= 1 and s["water_level"] > 4)
        life = run.life("ex0")
        quiet_slurm.run(
            "sbatch", "-p", "cpu-high", "-N1", "--exclusive", "-o/dev/null", "--wrap", "sleep 3", cwd=tmp_path
        )
        run.wait_for(lambda: run.life("ex0") > life, 90)
        unharmed(run.finish(), LONG)
        assert run.batches() == list(range(LONG))
        assert run.restarts() == 0
        run.until_nothing_is_left()
