"""The ranks of a cell as one child, with processes that only meet and wait."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import pytest

from celld.agent import children
from celld.agent.children import Ranks
from gyre_base import config as configuration
from gyre_base.rundir import EndpointFile, RunDir

RANK = """
import signal, socket, sys, time
number, (host, _, port) = int(sys.argv[2]), sys.argv[4].rpartition(":")
if number:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the leader says when
    leader = socket.create_connection((host, int(port)))
    print("met", leader.recv(9).decode(), flush=True)
    leader.recv(1)  # until the leader is gone
else:
    listening = socket.socket(fileno=int(sys.argv[6]))
    followers = [listening.accept()[0] for _ in range(2)]
    for follower in followers:
        follower.sendall(b"leader")
    print("met", flush=True)
    time.sleep(600)
"""


class Told:
    """What the agent is told of ends."""

    def __init__(self) -> None:
        self.ends: list[tuple[str, str]] = []

    def __call__(self, name: str, detail: str) -> None:
        self.ends.append((name, detail))


@pytest.fixture
async def ranks(tmp_path, monkeypatch):
    monkeypatch.setattr(children, "rank_command", lambda *_: [sys.executable, "-c", RANK])
    run, told = RunDir.create(tmp_path / "run"), Told()
    config = configuration.from_tree({"trainer": {"tensor_parallel": 3}})
    ranks = Ranks(run, "c1", told)
    await ranks.start(config)
    logs = [run.path("log", f"rank-c1{suffix}.log") for suffix in ("", ".1", ".2")]
    async with asyncio.timeout(30):
        while not all("met" in log.read_text() for log in logs):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    yield ranks, told
    await ranks.end()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(("victim", "name"), [(0, "rank-c1"), (2, "rank-c1.2")])
async def test_the_end_of_one_rank_ends_all_and_is_told_once(ranks, tmp_path, victim, name):
    (ranks, told), run = ranks, RunDir(tmp_path / "run")
    run.publish(EndpointFile("rank-c1.1", "rank", "tcp://127.0.0.1:1", 1, 1, {}))
    pids = list(ranks.stacks)
    assert len(pids) == 3 and ranks.pid == pids[0]
    os.kill(pids[1], signal.SIGSTOP)  # whatever state the others are in
    os.kill(pids[victim], signal.SIGKILL)
    async with asyncio.timeout(10):
        while not told.ends:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert not any(map(alive, pids)) and ranks.pid is None and run.endpoint("rank-c1.1") is None
    await asyncio.sleep(0.1)
    ((child, detail),) = told.ends
    assert child == "rank" and detail.startswith(f"{name} ended with code -9")


async def test_an_end_on_order_reports_nothing_and_the_leader_goes_first(ranks):
    ranks, told = ranks
    pids = list(ranks.stacks)
    await ranks.end()
    assert not any(map(alive, pids)) and told.ends == []


async def test_they_can_be_started_again(ranks):
    ranks, _ = ranks
    first = set(ranks.stacks)
    await ranks.end()
    await ranks.start(configuration.from_tree({"trainer": {"tensor_parallel": 3}}))
    assert len(ranks.stacks) == 3 and not first & set(ranks.stacks)
