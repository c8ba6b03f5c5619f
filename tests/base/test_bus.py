"""Real sockets with CURVE: who is let in, what a question survives."""

from __future__ import annotations

import asyncio
import json

import pytest
import zmq
import zmq.asyncio

from gyre_base import messages as m
from gyre_base import wire
from gyre_base.bus import Client, NoAnswer, Server
from gyre_base.keys import load_keys, make_keys
from gyre_base.rundir import RunDir, RunDirError, RunLocked


@pytest.fixture
def run(tmp_path):
    made = RunDir.create(tmp_path / "a run")
    made.write_atomic("run.json", "{}")
    return made


async def echo(server: Server) -> None:
    async for received in server:
        await server.send(received.peer, m.Done(note=received.message.kind), received.correlation)


async def test_a_question_is_answered(run):
    keys = make_keys(run)
    server = Server(run, keys, kind="x", name="x", life=1, bind="127.0.0.1")
    server.start()
    task = asyncio.create_task(echo(server))
    client = Client(run, keys, "x", identity="t:1")
    answer = await client.ask(m.Heartbeat(kind="me", name="n", life=1))
    assert answer == m.Done(note="me")
    task.cancel()
    client.close()
    server.close()


async def test_a_server_hears_whatever_others_of_its_process_closed_just_before(run):
    """Descriptors are used again at once: what a closed server still lets go of must not be the new one's."""
    keys = make_keys(run)
    others = [Server(run, keys, kind="x", name=f"x{n}", life=1, bind="127.0.0.1") for n in range(3)]
    for other in others:
        other.start()
    await asyncio.sleep(0.05)
    for other in reversed(others):
        other.close()
    server = Server(run, keys, kind="x", name="x", life=1, bind="127.0.0.1")
    server.start()
    task = asyncio.create_task(echo(server))
    client = Client(run, keys, "x", identity="t:1")
    assert await client.ask(m.Heartbeat(kind="me", name="n", life=1)) == m.Done(note="me")
    task.cancel()
    client.close()
    server.close()


async def test_a_question_outlives_the_death_and_move_of_the_server(run):
    keys = make_keys(run)
    client = Client(run, keys, "x", identity="t:1")
    question = asyncio.create_task(
        client.ask(m.Heartbeat(kind="me", name="n", life=1), timeout_s=20, again_every_s=0.2)
    )
    await asyncio.sleep(0.3)
    first = Server(run, keys, kind="x", name="x", life=1, bind="127.0.0.1")
    first.start()
    await asyncio.sleep(0.3)
    first.close(retract=False)
    second = Server(run, keys, kind="x", name="x", life=2, bind="127.0.0.1")
    second.start()
    task = asyncio.create_task(echo(second))
    assert (await question) == m.Done(note="me")
    task.cancel()
    client.close()
    second.close()


async def test_nobody_answers_after_the_time_is_up(run):
    client = Client(run, make_keys(run), "nobody")
    with pytest.raises(NoAnswer, match="nobody does not answer"):
        await client.ask(m.StatusRequest(), timeout_s=0.3)
    client.close()


@pytest.mark.parametrize("intruder", ["plain", "own key"])
async def test_a_peer_without_the_runs_key_is_not_heard(run, intruder):
    keys = make_keys(run)
    server = Server(run, keys, kind="x", name="x", life=1, bind="127.0.0.1")
    server.start()
    heard: list[object] = []

    async def listen() -> None:
        async for received in server:
            heard.append(received)

    task = asyncio.create_task(listen())
    socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
    socket.linger = 0
    if intruder == "own key":
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        socket.curve_serverkey = keys.server_public
    socket.connect(server.address)
    await socket.send_multipart(wire.encode(m.StatusRequest()), flags=zmq.NOBLOCK) if intruder == "own key" else None
    await asyncio.sleep(0.4)
    assert not heard
    task.cancel()
    socket.close()
    server.close()


async def test_keys_that_others_can_read_are_refused(run):
    make_keys(run)
    path = run.path("keys", "keys.json")
    path.chmod(0o644)
    with pytest.raises(PermissionError, match="chmod 600"):
        load_keys(run)
    assert json.loads(path.read_text())["admin"]


def test_a_token_fits_one_execution_only(run):
    keys = make_keys(run)
    assert keys.accepts("e1", keys.token("e1"))
    assert not keys.accepts("e2", keys.token("e1"))


def test_lives_only_grow_and_one_process_holds_a_daemon(run):
    assert [run.next_life("d") for _ in range(3)] == [1, 2, 3]
    with run.lock("d"), pytest.raises(RunLocked, match="pid"), run.lock("d"):
        pass


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(RunDirError, match=r"no run\.json"):
        RunDir.open(tmp_path)
