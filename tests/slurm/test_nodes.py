"""Nodes that are lost, cut off, or given back while the run goes on."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.slurm.minislurm import Cluster
from tests.slurm.running import JobRun, emulated, setting, whole
from tests.system.running import command

LONG = 30  # optimizer steps, of 1 to 2 s: Slurm needs time to miss a node


def outcomes(run: JobRun) -> dict[str, int]:
    counted: dict[str, int] = {}
    for event in run.journal("cellctl"):
        if event["tag"] == "execution.finished":
            counted[event["outcome"]] = counted.get(event["outcome"], 0) + 1
    return counted


def node_processes(slurm: Cluster, node: str) -> list[str]:
    """Command lines of gyre's processes on a node."""
    found = []
    for pid in slurm.pids(node):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if "celld" in words and "srun" not in words:
            found.append(words)
    return found


def worker_of(run: JobRun) -> str:
    return run.node_of("celld-c1")


@pytest.mark.slurm_slice
def test_a_worker_node_crashes_and_the_rest_goes_on_with_every_execution_unharmed(
    quiet_slurm: Cluster, tmp_path: Path, model: Path
) -> None:
    with JobRun(quiet_slurm, tmp_path, model, setting(cluster__cells=3, scheduler__steps=LONG)) as run:
        run.submit()
        run.until(lambda s: s["step"] >= 2)
        node = worker_of(run)
        quiet_slurm.crash(node)
        run.until(lambda s: s["roles"]["c1"] == "down", 40)  # by heartbeats: Slurm does not know yet
        quiet_slurm.run(
            "scontrol", "update", f"nodename={node}", "state=down", "reason=lost"
        )  # what it finds in minutes
        status = run.until(lambda s: s["lost_cells"] == ["c1"], 60)
        assert len(status["job_nodes"]) == 2
        summary = run.finish()
        whole(summary, LONG)
        assert run.batches() == list(range(LONG))
        assert run.restarts() == 0, "the job went on, it did not start anew"
        assert set(outcomes(run)) == {"scored"}, "no execution came to harm"
        assert summary["executions_interrupted"] == 0


def test_a_node_cut_off_the_network_fences_itself_and_nothing_is_done_twice(
    quiet_slurm: Cluster, tmp_path: Path, no_model: Path
) -> None:
    with JobRun(quiet_slurm, tmp_path, no_model, emulated(tmp_path, cluster__cells=3, scheduler__steps=LONG)) as run:
        run.submit()
        run.until(lambda s: s["step"] >= 2)
        node = worker_of(run)
        assert node_processes(quiet_slurm, node)
        quiet_slurm.cut(node)
        run.wait_for(
            lambda: not node_processes(quiet_slurm, node), 60
        )  # while the cable is out: it heard no one's word
        log = (run.root / "log" / "celld-c1.log").read_text()
        assert "dead-man switch" in log and "cut off" in log
        assert "requeued" not in log
        quiet_slurm.mend(node)
        whole(run.finish(), LONG)
        assert run.batches() == list(range(LONG))
        assert run.restarts() == 0


def test_the_batch_host_is_lost_and_the_dead_man_switch_requeues_the_job(
    quiet_slurm: Cluster, tmp_path: Path, model: Path
) -> None:
    tree = setting(scheduler__steps=LONG, trainer__checkpoint_every_steps=2)
    with JobRun(quiet_slurm, tmp_path, model, tree) as run:
        run.submit()
        run.until(lambda s: s["step"] >= 3)
        host = run.record()["BatchHost"]
        assert run.node_of("cellctl") == host != worker_of(run)
        quiet_slurm.crash(host)
        run.wait_for(lambda: run.restarts() == 1, 90)
        log = (run.root / "log" / "celld-c1.log").read_text()
        assert "the supervisor is gone" in log and f"requeued job {run.job}" in log
        quiet_slurm.start(host)
        whole(run.finish(), LONG)
        batches = run.batches()
        assert sorted(set(batches)) == list(range(LONG))  # the core took what was not saved along: that is done again
        assert len(batches) <= LONG + 2


def test_a_drained_node_is_given_back_with_scontrol_and_the_run_goes_on(
    quiet_slurm: Cluster, tmp_path: Path, no_model: Path
) -> None:
    with JobRun(quiet_slurm, tmp_path, no_model, emulated(tmp_path, cluster__cells=3, scheduler__steps=LONG)) as run:
        run.submit()
        run.until(lambda s: s["step"] >= 1)
        drain_when_it_serves(run, "c2")
        status = run.until(lambda s: s["roles"]["c2"] == "down", 60)
        assert status["drained_cells"] == ["c2"]
        given, kept = run.node_of("celld-c2"), [run.node_of("celld-c0"), run.node_of("celld-c1")]
        quiet_slurm.run("scontrol", "update", f"JobId={run.job}", f"NodeList={','.join(kept)}", cwd=tmp_path)
        run.until(lambda s: s["lost_cells"] == ["c2"], 40)
        run.wait_for(lambda: not node_processes(quiet_slurm, given), 30)
        summary = run.finish()
        whole(summary, LONG)
        assert (run.batches(), run.restarts()) == (list(range(LONG)), 0)
        assert set(outcomes(run)) == {"scored"}


def drain_when_it_serves(run: JobRun, cell: str) -> None:
    deadline = time.monotonic() + 60
    while (said := command("cellctl", "drain", cell, run=run.root)).returncode:
        assert said.returncode == 4 and "only a cell that serves" in said.stderr, said.stderr
        assert time.monotonic() < deadline, said.stderr
        time.sleep(0.1)
