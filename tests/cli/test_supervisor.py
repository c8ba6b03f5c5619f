"""What the supervisor of one machine does with a daemon that ends, without the daemons of a run."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from gyre_base.config import Config
from gyre_base.rundir import RunDir
from gyre_cli.supervisor import Daemon, RunFailed, Supervisor
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
