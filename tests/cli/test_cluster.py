"""Where the supervisor of a Slurm job puts cells, and how a step is said."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre_base import messages as m
from gyre_base.allocation import Allocation, own_address, own_gpus
from gyre_base.bus import Received
from gyre_base.config import Config, ConfigError
from gyre_base.rundir import RunDir
from gyre_cli.cluster import ClusterSupervisor, place, step_command


@given(nodes=st.integers(1, 40), more=st.integers(0, 60))
def test_cells_are_spread_evenly_in_their_order_with_the_core_on_the_first_node(nodes, more):
    names = [f"n{i}" for i in range(nodes)]
    placed = place(nodes + more, names)
    assert placed["c0"] == "n0"
    assert set(placed.values()) == set(names)
    count = Counter(placed.values())
    assert max(count.values()) - min(count.values()) <= 1
    assert [names.index(node) for node in placed.values()] == sorted(names.index(n) for n in placed.values())


def test_a_node_without_a_cell_is_refused_with_what_to_do():
    with pytest.raises(ConfigError, match=r"set cluster\.cells = 3"):
        place(2, ["a", "b", "c"])


def test_a_step_shares_its_node_and_outlives_the_loss_of_another():
    words = step_command(Config(), "12", "gpu7", ["python", "-m", "x", "a b"])
    assert words[0] == "srun"
    assert {"--overlap", "--no-kill", "--jobid=12", "-N1", "-n1"} <= set(words)
    assert words[words.index("-w") + 1] == "gpu7"
    assert words[-4:] == ["python", "-m", "x", "a b"]


@given(gpus=st.integers(1, 16), cells=st.integers(1, 8))
def test_cells_of_one_node_divide_its_gpus_and_none_is_given_twice(gpus, cells):
    visible = ",".join(map(str, range(gpus)))
    shares = [own_gpus({"GYRE_GPU_SHARE": f"{i}/{cells}", "CUDA_VISIBLE_DEVICES": visible}) for i in range(cells)]
    assert ",".join(share for share in shares if share) == visible
    assert own_gpus({"CUDA_VISIBLE_DEVICES": visible}) is None
    assert own_gpus({"GYRE_GPU_SHARE": "0/2"}) is None


def test_outside_of_a_job_daemons_stay_on_the_loopback(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert own_address("auto") == "127.0.0.1"
    assert own_address("10.1.2.3") == "10.1.2.3"


def test_a_job_is_known_by_its_id_its_restarts_and_its_node():
    assert Allocation.here({"SLURM_JOB_ID": "3"}) is None  # salloc's shell on a login node is no node of the job
    words = {"SLURM_JOB_ID": "3", "SLURMD_NODENAME": "n2", "SLURM_RESTART_COUNT": "2", "SLURM_JOB_NODELIST": "n[1-2]"}
    assert Allocation.here(words) == Allocation(job="3", restarts=2, node="n2", nodelist="n[1-2]")


@pytest.fixture
def supervisor(tmp_path, monkeypatch):
    monkeypatch.setattr("gyre_cli.slurm.hostnames", lambda nodelist: ["n0", "n1", "n2"])
    allocation = Allocation(job="7", restarts=1, node="n0", nodelist="n[0-2]")
    run = RunDir.create(tmp_path / "run")
    return ClusterSupervisor(run, Config(), lambda rows: None, None, allocation)


def beat(cell: str, life: int) -> Received:
    return Received(b"", m.Heartbeat(kind="celld", name=cell, life=life), 1)


def test_a_cell_of_an_earlier_life_of_the_job_is_fenced(supervisor):
    assert isinstance(supervisor._reply(beat("c1", 1)), m.Done)
    refused = supervisor._reply(beat("c1", 0))
    assert isinstance(refused, m.Refused)
    assert "life 0 of job 7 is over" in refused.why


def test_a_cell_that_was_given_up_is_fenced_and_the_run_goes_on_with_the_others(supervisor):
    daemon = next(d for d in supervisor._daemons if d.cell == "c2")
    supervisor._lose(daemon, "n2 left the job")
    assert isinstance(supervisor._reply(beat("c2", 1)), m.Refused)
    assert isinstance(supervisor._reply(beat("c1", 1)), m.Done)
    assert not supervisor.stopping.is_set()


def test_without_its_core_or_with_too_few_cells_the_job_is_left_to_start_anew(supervisor):
    core = next(d for d in supervisor._daemons if d.cell == "c0")
    supervisor._lose(core, "n0 left the job")
    assert supervisor.stopping.is_set()
    assert "core" in supervisor.why


def test_the_first_reason_to_leave_counts_and_term_cuts_the_saving_short(supervisor):
    supervisor.leave("warned", save_first=True)
    assert supervisor._save_first
    supervisor.leave("TERM", save_first=False)
    assert (supervisor.why, supervisor._save_first) == ("warned", False)
    supervisor.leave("warned again", save_first=True)
    assert not supervisor._save_first


def test_an_order_to_stop_saves_and_does_not_requeue(supervisor):
    answer = supervisor._reply(Received(b"", m.OperatorOrder(verb="stop"), 1))
    assert isinstance(answer, m.Done)
    assert (supervisor._save_first, supervisor._comes_back, supervisor.ordered) == (True, False, True)


def test_only_an_order_that_came_first_makes_stopping_a_success(supervisor):
    supervisor.leave("TERM", save_first=False)
    supervisor._reply(Received(b"", m.OperatorOrder(verb="stop"), 1))
    assert not supervisor.ordered


def test_services_see_no_gpu_and_cells_are_steps_of_the_job(supervisor):
    services = [d for d in supervisor._daemons if not d.cell]
    assert {d.environment["CUDA_VISIBLE_DEVICES"] for d in services} == {""}
    steps = {d.cell: d for d in supervisor._daemons if d.cell}
    assert {cell: d.node for cell, d in steps.items()} == {"c0": "n0", "c1": "n1", "c2": "n2"}
    assert all(d.environment["SLURM_RESTART_COUNT"] == "1" for d in steps.values())
