"""Who counts as lost, and what a peer that was given up although it lives is told. A real shell and sockets, a clock
of our own.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cellctl import daemon as daemons
from cellctl.core import Scheduler
from cellctl.liveness import Liveness
from gyre_base import messages as m
from gyre_base.bus import Client, Server
from gyre_base.daemon import PeerLost
from gyre_base.journal import Journal
from gyre_base.keys import make_keys
from gyre_base.rundir import RunDir


class HandClock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.at = 1000.0

    def now(self) -> float:
        return self.at


@pytest.fixture
async def shell(tmp_path, monkeypatch):
    run = RunDir.create(tmp_path / "run")
    keys = make_keys(run)
    server = Server(run, keys, kind="cellctl", name="cellctl", life=1, bind="127.0.0.1")
    server.start()
    made = daemons.CellctlShell(
        Scheduler(), Journal(run.path("journal", "cellctl.jsonl")), server, run, 1, Liveness(20.0, 60.0)
    )
    made.clock, made.heartbeat_s = HandClock(), 0.02
    made.lost = []

    async def step(event: Any) -> None:
        if isinstance(event, PeerLost):
            made.lost.append(event.name)

    monkeypatch.setattr(made, "step", step)
    yield made, run, keys
    server.close()


async def test_time_in_which_we_stood_still_is_held_against_nobody(shell):
    made, _, _ = shell
    made.liveness.heard("executor:ex0", made.clock.now())
    task = asyncio.create_task(made.watch_peers())
    await asyncio.sleep(0.1)
    made.clock.at += 500.0  # the machine was asleep, and we with it
    await asyncio.sleep(0.1)
    assert made.lost == []
    for _ in range(25):  # now time passes while we look
        made.clock.at += 1.0 + made.heartbeat_s
        made.liveness.heard("celld:c0", made.clock.at)
        await asyncio.sleep(0.03)
    task.cancel()
    assert "celld:c0" in made.liveness.peers


async def test_a_heartbeat_of_a_peer_that_was_given_up_is_answered_by_a_welcome(shell):
    made, run, keys = shell
    task = asyncio.create_task(made.listen())
    client = Client(run, keys, "cellctl", identity="executor:ex0:1")
    await client.send(m.Heartbeat(kind="executor", name="ex0", life=1))
    assert await asyncio.wait_for(client.inbox.get(), 5.0) == m.Welcome(life=1)
    task.cancel()
    client.close()
