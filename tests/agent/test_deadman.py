"""What a silent supervisor means to a cell."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celld.agent import deadman
from celld.agent.deadman import DeadMan, Verdict
from gyre_base.allocation import Allocation
from gyre_base.rundir import RunDir

EVERY_S, SILENCE_S = 2.0, 20.0


def watched(until_s: float, *, heard_until: float, beats_until: float, readable: bool = True) -> list[Verdict]:
    """Verdicts at 2 s steps of a supervisor that is heard and beats for so long."""
    switch, out = DeadMan(SILENCE_S, heard_at=0.0, looked_at=0.0), []
    now = 0.0
    while now < until_s:
        now += EVERY_S
        if now <= heard_until:
            switch.heard(now)
        switch.saw(f"beat {min(now, beats_until)}" if readable else None, now)
        out.append(switch.verdict(now, EVERY_S))
    return out


def test_a_supervisor_that_is_heard_is_alive_whatever_the_disk_says():
    assert set(watched(200, heard_until=200, beats_until=0)) == {Verdict.ALIVE}
    assert set(watched(200, heard_until=200, beats_until=0, readable=False)) == {Verdict.ALIVE}


def test_a_node_that_is_cut_off_stops_and_does_not_requeue():
    verdicts = watched(200, heard_until=50, beats_until=200)
    assert verdicts[:34] == [Verdict.ALIVE] * 34  # until 68 s
    assert set(verdicts[34:]) == {Verdict.CUT}


def test_a_node_that_sees_neither_supervisor_nor_disk_stops_and_does_not_requeue():
    assert watched(200, heard_until=50, beats_until=50, readable=False)[-1] is Verdict.CUT


def test_a_lost_supervisor_orphans_the_job():
    verdicts = watched(200, heard_until=50, beats_until=50)
    first = next(v for v in verdicts if v is not Verdict.ALIVE)
    assert first is Verdict.ORPHANED


@given(ends=st.integers(0, 60), gap=st.floats(30, 1000))
def test_a_cell_that_stood_still_itself_gives_the_supervisor_another_chance(ends, gap):
    switch, now = DeadMan(SILENCE_S, heard_at=0.0, looked_at=0.0), 0.0
    for _ in range(ends):
        now += EVERY_S
        switch.heard(now)
        switch.saw(f"beat {now}", now)
        switch.verdict(now, EVERY_S)
    assert switch.verdict(now + gap, EVERY_S) is Verdict.ALIVE


SCONTROL = """#!/bin/sh
cd "$(dirname "$0")"
case "$*" in
  *"show job"*)
    if [ -s away ]; then sed -i 1d away; echo "slurm_load_jobs error: Unable to contact slurm controller"; exit 1; fi
    echo "JobId=7 JobState=$(cat state) Reason=None Restarts=$(cat restarts) BatchFlag=1" ;;
  "requeue 7") echo asked >>requeued; echo PENDING >state; echo 1 >restarts ;;
esac
"""


@pytest.fixture
def controller(tmp_path, monkeypatch):
    """A folder that stands for the controller: `state`, `restarts` of job 7, a line in `away` per failing call."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "scontrol").write_text(SCONTROL)
    (folder / "scontrol").chmod(0o755)
    for name, word in {"state": "RUNNING", "restarts": "0", "away": ""}.items():
        (folder / name).write_text(word)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr(deadman, "AGAIN_S", 0.05)
    return folder


def allocation(restarts: int = 0) -> Allocation:
    return Allocation(job="7", restarts=restarts, node="n1", nodelist="n[1-4]")


def asked(controller: Path) -> int:
    path = controller / "requeued"
    return len(path.read_text().splitlines()) if path.exists() else 0


async def test_however_many_cells_are_orphaned_the_job_is_requeued_once(controller, tmp_path):
    run = RunDir.create(tmp_path / "run")
    said = await asyncio.gather(*(deadman.requeue(run, allocation()) for _ in range(4)))
    assert asked(controller) == 1
    assert sum(word == "requeued job 7" for word in said) == 1
    assert sum("not ours" in word for word in said) == 3


async def test_a_cell_of_an_earlier_life_requeues_nothing(controller, tmp_path):
    (controller / "restarts").write_text("1")
    said = await deadman.requeue(RunDir.create(tmp_path / "run"), allocation(restarts=0))
    assert (asked(controller), "not ours" in said) == (0, True)


@pytest.mark.parametrize("state", ["COMPLETING", "CANCELLED", "PENDING"])
async def test_a_job_that_ends_already_is_left_alone(controller, tmp_path, state):
    (controller / "state").write_text(state)
    await deadman.requeue(RunDir.create(tmp_path / "run"), allocation())
    assert asked(controller) == 0


async def test_a_controller_that_is_away_is_asked_again(controller, tmp_path):
    (controller / "away").write_text("1\n2\n3\n")
    assert await deadman.requeue(RunDir.create(tmp_path / "run"), allocation()) == "requeued job 7"
