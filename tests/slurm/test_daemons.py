"""Daemons that die, and a controller that is away."""

from __future__ import annotations

import time
from pathlib import Path

from tests.slurm.minislurm import Cluster
from tests.slurm.running import JobRun, emulated, setting, whole

LONG = 14
AWAY_S = 60.0


def test_one_daemon_killed_on_each_kind_of_node_is_started_again(
    quiet_slurm: Cluster, tmp_path: Path, model: Path
) -> None:
    with JobRun(quiet_slurm, tmp_path, model, setting(scheduler__steps=LONG)) as run:
        run.submit()
        run.until(lambda s: s["step"] >= 1)
        for name in ("proxyd-0", "celld-c1", "cellctl"):  # the first node's services, the worker's step
            life = run.life(name)
            run.kill(name)
            run.until_reborn(name, life, 90)
        whole(run.finish(), LONG)
        assert run.batches() == list(range(LONG))
        assert run.restarts() == 0
        assert "daemons that were started again" in run.err()


def test_a_controller_that_is_away_for_a_minute_changes_nothing(
    quiet_slurm: Cluster, tmp_path: Path, no_model: Path
) -> None:
    with JobRun(quiet_slurm, tmp_path, no_model, emulated(tmp_path, scheduler__steps=40)) as run:
        run.submit()
        run.until(lambda s: s["step"] >= 1)
        names = ("cellctl", "celld-c0", "celld-c1", "rank-c0", "rank-c1", "proxyd-0")
        before = {name: run.life(name) for name in names}
        quiet_slurm.kill_controller()
        gone = time.monotonic()
        while time.monotonic() - gone < AWAY_S:
            time.sleep(1.0)
        step = run.status()["step"]
        quiet_slurm.start_controller()
        assert step > 1, "it trained meanwhile"
        assert {name: run.life(name) for name in before} == before, "nothing was started again"
        assert run.state() == "RUNNING"
        quiet_slurm.run("scancel", run.job)
        run.until_nothing_is_left()


def test_a_controller_that_is_away_when_the_run_leaves_is_waited_for(
    quiet_slurm: Cluster, tmp_path: Path, no_model: Path
) -> None:
    with JobRun(quiet_slurm, tmp_path, no_model, emulated(tmp_path, scheduler__steps=LONG)) as run:
        run.submit()
        run.until(lambda s: s["step"] >= 1)
        pid, node = run.pid("supervisor"), run.node_of("supervisor")
        quiet_slurm.kill_controller()
        quiet_slurm.on_node(node, "kill", "-USR1", str(pid))
        run.wait_for(lambda: "can't requeue yet" in run.err() or "saved" in run.err(), 60)
        time.sleep(5)
        quiet_slurm.start_controller()
        run.until_life(1, 120)
        whole(run.finish(), LONG)
        assert run.batches() == list(range(LONG))
