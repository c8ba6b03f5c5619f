"""The job's time runs out, or Slurm takes the nodes: the run saves, leaves, and goes on in its next life."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.slurm.minislurm import Cluster
from tests.slurm.running import JobRun, emulated, setting, unharmed, whole

LONG = 10  # optimizer steps: the run is not over before it is told to leave


def saved_version(run: JobRun) -> str:
    """The version that the run says it saved when it left."""
    found = re.findall(r"^saved (\S+)$", run.err(), re.M)
    assert found, run.err()
    return str(found[-1])


@pytest.mark.slurm_slice
def test_warned_before_the_time_limit_it_saves_requeues_and_resumes_with_nothing_lost(
    quiet_slurm: Cluster, tmp_path: Path, model: Path
) -> None:
    with JobRun(quiet_slurm, tmp_path, model, setting(scheduler__steps=LONG, scheduler__retry_budget=0)) as run:
        run.submit()
        run.until(lambda s: s["step"] >= 2)
        quiet_slurm.run("scancel", "--signal=USR1", "--batch", run.job)  # what --signal=B:USR1 sends, without the wait
        run.until_life(1)
        saved, before = saved_version(run), run.batches()
        assert "leaving: Slurm warned us (USR1)" in run.err()
        assert len(before) >= int(saved.partition(".")[2]) > 0
        unharmed(run.finish(), LONG)
        assert run.batches() == list(range(LONG))  # no step lost, none done twice
        assert run.restarts() == 1


def test_slurms_own_warning_before_a_real_time_limit(quiet_slurm: Cluster, tmp_path: Path, no_model: Path) -> None:
    """Slurm looks about twice a minute and warns up to a minute early: here between 60 and 120 s after the start."""
    tree = emulated(tmp_path, scheduler__steps=200, cluster__save_window_s=5.0)
    with JobRun(quiet_slurm, tmp_path, no_model, tree) as run:
        run.submit(time_limit="3", signal="B:USR1@60")
        run.until_life(1, 240)
        assert "leaving: Slurm warned us (USR1)" in run.err()
        saved = int(saved_version(run).partition(".")[2])
        assert (
            len(run.batches()) >= saved > 0
        )  # a batch that was complete may still be stepped; its rank saves as it ends
        status = run.until(lambda s: s["step"] > saved + 2)
        assert status["executions"]["train"]["scored"] >= 8 * saved, "what had finished before was not done again"
        batches = run.batches()
        assert batches == list(range(len(batches)))


def test_little_time_left_by_its_own_clock_and_no_signal_at_all(
    quiet_slurm: Cluster, tmp_path: Path, no_model: Path
) -> None:
    steps = 30
    tree = emulated(tmp_path, scheduler__steps=steps, cluster__save_window_s=300.0)
    with JobRun(quiet_slurm, tmp_path, no_model, tree) as run:
        run.submit(time_limit="2", signal="")
        status = run.until(lambda s: s["left_s"])
        assert 0 < status["left_s"] < 120
        assert status["save_window_s"] == pytest.approx(60, abs=2), "at least half of a job is worked in"
        run.until_life(1, 150)
        quiet_slurm.run("scontrol", "update", f"JobId={run.job}", "TimeLimit=20")
        assert re.search(r"leaving: \d+ s are left of the job's time", run.err())
        saved = saved_version(run)
        run.until(lambda s: s["left_s"] and s["left_s"] > 600)  # a limit that was moved is seen
        assert int(saved.partition(".")[2]) > 0
        whole(run.finish(), steps)
        assert run.batches() == list(range(steps))


@pytest.mark.parametrize("partition", ["spot", "spot-cancel"])
def test_preempted_it_saves_in_the_grace_time_and_goes_on_later(
    quiet_slurm: Cluster, tmp_path: Path, no_model: Path, partition: str
) -> None:
    """The steps get TERM, the batch script hears nothing; in spot-cancel Slurm would cancel the job in the end."""
    with JobRun(
        quiet_slurm, tmp_path, no_model, emulated(tmp_path, scheduler__steps=LONG, scheduler__retry_budget=0)
    ) as run:
        run.submit("-p", partition)
        run.until(lambda s: s["step"] >= 2)
        quiet_slurm.run("sbatch", "-p", "main", "-N4", "--exclusive", "-o/dev/null", "--wrap", "sleep 5", cwd=tmp_path)
        run.until_life(1, 120)
        assert "leaving: Slurm preempts the job" in run.err()
        unharmed(run.finish(), LONG)
        assert run.batches() == list(range(LONG))
        assert run.restarts() == 1


def test_preempted_on_a_site_that_sends_the_warning_signal_instead_of_term(
    quiet_slurm: Cluster, tmp_path: Path, no_model: Path
) -> None:
    with (
        quiet_slurm.changed(SlurmctldParameters="preempt_send_user_signal"),
        JobRun(quiet_slurm, tmp_path, no_model, emulated(tmp_path, scheduler__steps=LONG)) as run,
    ):
        run.submit("-p", "spot")
        run.until(lambda s: s["step"] >= 2)
        quiet_slurm.run("sbatch", "-p", "main", "-N4", "--exclusive", "-o/dev/null", "--wrap", "sleep 5", cwd=tmp_path)
        run.until_life(1, 120)
        assert "leaving: Slurm warned us (USR1)" in run.err()
        assert saved_version(run)
        whole(run.finish(), LONG)
        assert run.batches() == list(range(LONG))


@pytest.mark.slurm_slice
def test_scancel_leaves_no_process_and_no_lock_and_does_not_requeue(
    quiet_slurm: Cluster, tmp_path: Path, no_model: Path
) -> None:
    with JobRun(quiet_slurm, tmp_path, no_model, emulated(tmp_path, scheduler__steps=LONG)) as run:
        run.submit()
        run.until(lambda s: s["step"] >= 1 and s["water_level"] > 2)
        done = len(run.batches())
        quiet_slurm.run("scancel", run.job)
        run.wait_for(lambda: run.state() == "CANCELLED", 60)
        run.until_nothing_is_left()
        run.submit()  # the same script goes on from the directory
        whole(run.finish(), LONG)
        assert run.batches() == list(range(LONG)) and done >= 1


def test_gyre_stop_from_the_login_node_stops_the_job_and_does_not_requeue(
    quiet_slurm: Cluster, tmp_path: Path, no_model: Path
) -> None:
    from tests.system.running import command

    with JobRun(quiet_slurm, tmp_path, no_model, emulated(tmp_path, scheduler__steps=LONG)) as run:
        run.submit()
        run.until(lambda s: s["step"] >= 1)
        done = command("gyre", "stop", run=run.root, timeout_s=90)
        assert (done.returncode, done.stdout.strip()) == (0, "stopped")
        run.wait_for(lambda: run.state() not in ("RUNNING", "COMPLETING"), 30)
        assert run.state() == "COMPLETED", run.record()  # what was asked for was done: no mail about a failed job
        run.until_nothing_is_left()
        assert run.restarts() == 0
        assert "stopped by order" in run.err()
