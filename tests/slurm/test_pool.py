"""The pool of executors on a real CPU partition: arrays, and places that are filled and given back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.slurm.minislurm import Cluster
from tests.slurm.running import JobRun, setting, whole

pytest.importorskip("submitit")
LONG = 8


def test_several_executors_are_one_array_and_a_cancelled_one_comes_back(
    quiet_slurm: Cluster, tmp_path: Path, model: Path
) -> None:
    tree = setting(
        scheduler__steps=LONG,
        cluster__executors=2,
        cluster__executor_partition="cpu",
        cluster__executor_options=["mem=400M", "cpus_per_task=1"],
    )
    with JobRun(quiet_slurm, tmp_path, model, tree) as run:
        run.submit()
        run.until(lambda s: s["step"] >= 1)
        jobs = json.loads((run.root / "pool.json").read_text())
        assert set(jobs) == {"ex0", "ex1"}
        assert {job.partition("_")[0] for job in jobs.values()} == {jobs["ex0"].partition("_")[0]}
        assert [job.partition("_")[2] for job in jobs.values()] == ["0", "1"]
        life = run.life("ex1")
        quiet_slurm.run("scancel", jobs["ex1"])
        run.wait_for(lambda: run.life("ex1") > life, 90)
        whole(run.finish(240), LONG)
        assert run.batches() == list(range(LONG))
        run.until_nothing_is_left()
