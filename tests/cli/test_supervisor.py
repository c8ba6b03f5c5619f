"""What the supervisor of one machine does with a daemon that ends, without the daemons of a run."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from celld.agent.children import ENGINES, engine_command, rank_command
from celld.sglang import launch
from gyre_base.config import CHOICES, Config, from_tree
from gyre_base.rundir import RunDir
from gyre_cli.supervisor import Daemon, RunFailed, Supervisor, executors, kind_of, kind_of_child
from tests.cli.conftest import until

SLEEPER = ["sleep", "600"]


class Alone(Supervisor):
    """A run that is done at once; its one daemon sleeps."""

    async def _watch(self) -> None:
        self.finished = True


def alone(folder: Path, at_end, command: list[str]) -> Alone:
    supervisor = Alone(RunDir.create(folder / "run"), Config(), lambda rows: None, at_end)
    supervisor._daemons = [Daemon("cellctl", command)]
    return supervisor


async def test_a_daemon_that_dies_while_the_report_is_written_comes_back(tmp_path):
    async def report() -> None:
        (daemon,) = supervisor._daemons
        first = daemon.process.pid
        os.kill(first, signal.SIGKILL)
        async with asyncio.timeout(20):
            while daemon.process.pid == first:  # noqa: ASYNC110 - the supervisor has no event for it
                await asyncio.sleep(0.05)

    supervisor = alone(tmp_path, report, SLEEPER)
    assert await supervisor.serve()
    assert supervisor.restarts == {"cellctl": 1}


async def test_a_report_that_fails_is_told_and_nothing_is_left_running(tmp_path):
    async def report() -> None:
        raise OSError("the disk is full")

    supervisor = alone(tmp_path, report, SLEEPER)
    with pytest.raises(OSError, match="the disk is full"):
        await supervisor.serve()
    (daemon,) = supervisor._daemons
    until(lambda: daemon.process.returncode is not None)


async def test_a_daemon_that_refuses_its_settings_is_not_started_again(tmp_path):
    async def report() -> None:
        await asyncio.sleep(30)

    supervisor = alone(tmp_path, report, ["sh", "-c", "echo 'error: no such place' >&2; exit 2"])
    with pytest.raises(RunFailed, match="cellctl: no such place") as failed:
        await supervisor.serve()
    assert (failed.value.code, supervisor.restarts) == (2, {})


@pytest.mark.parametrize("kind", CHOICES["engine.kind"])
def test_cpu_time_of_engines_and_ranks_is_told_apart_for_every_kind_of_engine(tmp_path, kind):
    run, config = RunDir.create(tmp_path / "run"), from_tree({"engine": {"kind": kind}})
    assert kind_of_child(rank_command(run, config, "c0")) == "rank"
    if kind in ENGINES:
        engine = engine_command(run, config, "c0", tmp_path, "0.0", tmp_path / "port", 0)
    else:
        engine = launch.command("/env/bin/python", tmp_path / "engine.yaml")
    assert kind_of_child(engine) == "engine"


@pytest.mark.parametrize(
    ("cluster", "kinds"),
    [({}, {"executor"}), ({"executors": 2}, {"executor"}), ({"executors_max": 4}, {"executor pool"})],
)
def test_a_pool_of_executors_is_not_counted_as_one_of_them(tmp_path, cluster, kinds):
    run, config = RunDir.create(tmp_path / "run"), from_tree({"cluster": cluster})
    assert {kind_of(daemon.name) for daemon in executors(run, ["python"], config)} == kinds


def test_every_other_daemon_is_counted_by_its_name(tmp_path):
    run = RunDir.create(tmp_path / "run")
    alone = Supervisor(run, Config(), lambda rows: None)
    assert {kind_of(daemon.name) for daemon in alone.table()} == {"cellctl", "trajd", "proxyd", "celld", "executor"}


async def test_children_of_children_count_as_the_engine_that_started_them(tmp_path):
    """As a real engine's scheduler and detokenizer do."""
    burn = "import time\nend = time.process_time() + 0.4\nwhile time.process_time() < end: pass\n"
    inner = f"{burn}time.sleep(600)"
    outer = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {inner!r}]); time.sleep(600)"
    agent = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {outer!r}]); time.sleep(600)"
    supervisor = alone(tmp_path, None, [sys.executable, "-c", agent])
    supervisor._daemons[0].name = "celld-c0"
    await supervisor._start(supervisor._daemons[0])
    pid = supervisor._daemons[0].process.pid
    try:
        async with asyncio.timeout(30):
            while supervisor.cpu_seconds().get("engine", 0.0) < 0.4:  # noqa: ASYNC110 - it works in its own time
                await asyncio.sleep(0.05)
        assert "rank" not in supervisor.cpu_seconds()
    finally:
        os.killpg(pid, signal.SIGKILL)
        await supervisor._daemons[0].process.wait()
