"""A peer that heartbeats but gets nothing done, one that is stopped, one that lost a word: real processes, real
sockets.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellctl import daemon as daemons
from cellctl import view
from cellctl.core import Scheduler, Start
from cellctl.liveness import HELD_BEATS, Liveness
from gyre_base import messages as m
from gyre_base.bus import Client, Server
from gyre_base.journal import Journal, read
from gyre_base.keys import make_keys
from gyre_base.rundir import RunDir

PEER = textwrap.dedent(
    """
    import asyncio, os, sys
    from gyre_base import messages as m
    from gyre_base.bus import Client
    from gyre_base.daemon import log_to
    from gyre_base.keys import load_keys
    from gyre_base.rundir import RunDir

    async def waits_for_an_engine_that_never_answers():
        await asyncio.Event().wait()

    async def main():
        run = RunDir.open(sys.argv[1])
        log_to(run.path("log", "trajd.log"), name="trajd")
        stuck = asyncio.create_task(waits_for_an_engine_that_never_answers())
        client = Client(run, load_keys(run), "cellctl", identity="trajd:trajd:1")
        await client.ask(m.Hello(kind="trajd", name="trajd", life=1, pid=os.getpid()))
        while True:
            await client.send(m.Heartbeat(kind="trajd", name="trajd", life=1, progress=7, work=int(sys.argv[2])))
            await asyncio.sleep(0.05)

    asyncio.run(main())
    """
)


@pytest.fixture
async def cellctl(tmp_path):
    """A real shell with short patience, and a way to start its peer."""
    run = RunDir.create(tmp_path / "run")
    run.write_atomic("run.json", "{}")
    keys = make_keys(run)
    server = Server(run, keys, kind="cellctl", name="cellctl", life=1, bind="127.0.0.1")
    journal = Journal(run.path("journal", "cellctl.jsonl"))
    shell = daemons.CellctlShell(Scheduler(), journal, server, run, 1, Liveness(1.5, 0.5))
    shell.heartbeat_s = 0.05
    server.start()
    for work in (shell.listen(), shell.work(), shell.watch_peers(), shell.drain_timers()):
        shell.spawn(work)
    await shell.step(Start(config={"cluster": {"cells": 1}}, train=("t",), heldout=()))
    peers: list[subprocess.Popen[bytes]] = []

    def start(work: int) -> subprocess.Popen[bytes]:
        peers.append(subprocess.Popen([sys.executable, "-c", PEER, str(run.root), str(work)]))
        return peers[-1]

    yield shell, run, keys, start
    for peer in peers:
        peer.kill()
        peer.wait()
    await shell.cancel_tasks()
    journal.close()
    server.close()


async def until(found, seconds: float = 20.0):
    for _ in range(int(seconds / 0.05)):
        if value := found():
            return value
        await asyncio.sleep(0.05)
    raise AssertionError("it did not come")


async def test_a_peer_with_work_and_no_progress_raises_an_alarm_that_shows_where_it_hangs(cellctl):
    shell, run, _, start = cellctl
    start(work=3)
    alarm = await until(lambda: shell.core.alarms.get("trajd:trajd"))
    await until(lambda: alarm.stacks)
    assert "has 3 in hand and got nothing done" in alarm.what
    assert "waits_for_an_engine_that_never_answers" in (run.root / alarm.stacks).read_text()
    rows = view.status(shell.core, shell.clock.now())
    assert [row["stacks"] for row in rows if row.get("alarm") == "trajd:trajd"] == [alarm.stacks]


async def test_an_idle_peer_raises_none(cellctl):
    shell, _, _, start = cellctl
    start(work=0)
    await until(lambda: "trajd:trajd" in shell.core.present)
    await asyncio.sleep(1.0)
    assert shell.core.alarms == {}


async def test_a_stopped_process_is_lost_and_the_alarm_says_that_it_is_stopped(cellctl):
    shell, _, _, start = cellctl
    peer = start(work=0)
    await until(lambda: "trajd:trajd" in shell.core.present)
    os.kill(peer.pid, signal.SIGSTOP)
    alarm = await until(lambda: shell.core.alarms.get("trajd:trajd"))
    assert f"process {peer.pid} is in state T (stopped)" in alarm.what


async def test_alarms_are_in_the_journal(cellctl):
    shell, run, _, start = cellctl
    start(work=1)
    await until(lambda: any(a.stacks for a in shell.core.alarms.values()))
    tags = [entry.event["tag"] for entry in read(run.path("journal", "cellctl.jsonl"))]
    assert tags.index("cellctl.stalled") < tags.index("cellctl.stacks-kept")


async def test_an_executor_that_holds_other_executions_than_we_think_is_asked_for_its_list(cellctl):
    shell, run, keys, _ = cellctl
    client = Client(run, keys, "cellctl", identity="executor:ex0:1")
    await client.ask(m.Hello(kind="executor", name="ex0", life=1, pid=0, slots=4))
    for _ in range(HELD_BEATS):
        await client.send(m.Heartbeat(kind="executor", name="ex0", life=1, work=1))  # an order of which we know nothing
    assert isinstance(await asyncio.wait_for(client.inbox.get(), 10.0), m.Welcome)
    await client.ask(m.Hello(kind="executor", name="ex0", life=1, pid=0, slots=4, holds=("g00000-00.0",)))
    cancelled = await asyncio.wait_for(client.inbox.get(), 10.0)
    assert cancelled == m.CancelExecution(execution="g00000-00.0", why="superseded")
    assert shell.core.executors["ex0"].held == 0
    client.close()


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.floats(0.1, 5.0)), max_size=40))
def test_a_stall_is_told_once_and_only_after_work_without_progress_for_long_enough(beats):
    liveness = Liveness(silent_s=1e9, stall_s=10.0)
    now, count, moved, told = 0.0, 0, 0.0, False
    for step, work, pause in beats:
        now += pause
        count += step
        first = "p" not in liveness.peers
        recovered = liveness.beat("p", count, work, now)
        if step or not work or first:
            assert recovered == told
            moved, told = now, False
        stalls = liveness.stalled(now)
        is_due = bool(work) and now - moved > 10.0 and not told
        assert [s.peer for s in stalls] == (["p"] if is_due else [])
        told = told or is_due


def test_counts_that_move_are_words_on_their_way_and_only_a_standing_difference_is_a_lost_one():
    liveness = Liveness(silent_s=20.0, stall_s=60.0)
    liveness.heard("p", 0.0)
    assert not any(liveness.disagrees("p", theirs, theirs + 1) for theirs in range(10))
    assert [liveness.disagrees("p", 3, 4) for _ in range(HELD_BEATS)] == [False] * (HELD_BEATS - 1) + [True]
    assert not any(liveness.disagrees("p", 4, 4) for _ in range(10))


def test_the_time_in_which_we_stood_still_counts_for_nobody():
    liveness = Liveness(silent_s=20.0, stall_s=60.0)
    liveness.beat("p", 1, 1, 0.0)
    liveness.we_stood_still(500.0, 500.0)
    assert liveness.silent(510.0) == []
    assert liveness.stalled(510.0) == []
    assert [peer for peer, _ in liveness.silent(530.0)] == ["p"]


def test_stacks_of_a_blocked_process_come_from_outside(tmp_path: Path):
    from gyre_base.stacks import examine

    script = (
        "import sys, time; from gyre_base.stacks import dump_on_signal\n"
        "dump_on_signal(open(sys.argv[1], 'a'))\n"
        "def blocks():\n    print('up', flush=True); time.sleep(60)\n"
        "blocks()"
    )
    dump = tmp_path / "it.stacks"
    with subprocess.Popen([sys.executable, "-c", script, str(dump)], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"up\n"
            found = examine(process.pid, tmp_path, dump)
            assert "in blocks" in found and f"process {process.pid} is in state" in found
            assert examine(process.pid, tmp_path / "elsewhere", dump) == ""
        finally:
            process.kill()


def test_a_loop_that_stands_still_leaves_its_stacks_in_the_log(caplog):
    import time

    from gyre_base.stacks import LoopWatch

    def blocks_the_loop() -> None:
        time.sleep(1.0)

    async def main() -> LoopWatch:
        watch = LoopWatch(lag_s=0.2)
        watch.start(asyncio.get_running_loop())
        await asyncio.sleep(0.3)
        blocks_the_loop()
        await asyncio.sleep(0.3)
        watch.end()
        return watch

    watch = asyncio.run(main())
    assert watch.longest_s >= 1.0
    assert "blocks_the_loop" in caplog.text and "the loop turns again" in caplog.text
