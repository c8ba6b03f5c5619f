"""The stand-alone intake: acknowledged is on disk, twice is once, frozen is frozen, bytes are bounded."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import msgpack
import numpy as np
import pytest
from trajbuild import make_call, random_execution

from trajtools.load import load
from trajtools.trajd.intake import HEAD, Intake, Store, call_frame, pack_frame


def unpacked(frame):
    head, _, _ = HEAD.unpack(frame[: HEAD.size])
    return msgpack.unpackb(frame[HEAD.size : HEAD.size + head]), frame[HEAD.size + head :]


def take(store, frame):
    return store.take(*unpacked(frame))


class Client:
    def __init__(self, reader, writer):
        self._reader, self._writer = reader, writer

    async def ask(self, frame):
        self._writer.write(frame)
        await self._writer.drain()
        return await self.answer()

    async def answer(self):
        head, _, _ = HEAD.unpack(await self._reader.readexactly(HEAD.size))
        return msgpack.unpackb(await self._reader.readexactly(head))

    def send(self, frame):
        self._writer.write(frame)


async def started(folder, **options):
    intake = Intake(folder, **options)
    path = folder / "socket"
    server = await asyncio.start_unix_server(intake.serve, path)
    writing = asyncio.ensure_future(intake.write())

    async def stop():
        server.close()
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        intake.close()

    async def client():
        return Client(*await asyncio.open_unix_connection(path))

    return intake, client, stop


async def test_what_is_acknowledged_is_in_a_run_file_that_every_tool_reads(tmp_path):
    calls = random_execution(np.random.default_rng(3), calls=30)
    _, client, stop = await started(tmp_path)
    one = await client()
    for call in calls:
        answer = await one.ask(call_frame(call))
        assert answer == {"ok": True, "call": call.call, "state": "stored"}
        assert call.call in load(tmp_path).executions["e"].forest  # before anything else is said
    await stop()
    [execution] = load(tmp_path).executions.values()
    assert len(execution.forest) == 30


async def test_a_call_twice_is_one_and_another_payload_under_its_id_is_refused(tmp_path):
    _, client, stop = await started(tmp_path)
    one = await client()
    assert (await one.ask(call_frame(make_call("a"))))["state"] == "stored"
    assert (await one.ask(call_frame(make_call("a"))))["state"] == "duplicate"
    again = await one.ask(call_frame(make_call("a", completion=(9, 9))))
    assert not again["ok"] and "conflict" in again["why"]
    await stop()


async def test_a_restart_knows_the_calls_and_cuts_a_torn_tail(tmp_path):
    intake, client, stop = await started(tmp_path)
    one = await client()
    whole = [1, 2, 3, 4, 5]
    await one.ask(call_frame(make_call("a")))
    await one.ask(call_frame(make_call("b", [*whole, 6]), base="a", keep=5))
    await stop()
    with intake.path.open("ab") as file:
        file.write(b'{"k":"call","exec":"e","call":"c","pro')
    _, client, stop = await started(tmp_path)
    two = await client()
    assert (await two.ask(call_frame(make_call("b", [*whole, 6]))))["state"] == "duplicate"
    assert (await two.ask(call_frame(make_call("c", [*whole, 6, 4, 5, 7]), base="b", keep=8)))["state"] == "stored"
    await stop()
    recording = load(tmp_path)
    assert sorted(m.id for m in recording.executions["e"].forest.marks()) == ["a", "b", "c"]
    assert not any(report.bad or report.torn for report in recording.reports.values())


def test_a_frozen_execution_says_whether_it_is_complete_and_refuses_late_calls():
    store = Store()
    take(store, pack_frame({"op": "record", "record": {"k": "intent", "exec": "e", "call": "lost"}}))
    take(store, call_frame(make_call("a")))
    frozen, line = take(store, pack_frame({"op": "freeze", "exec": "e"}))
    assert frozen["ok"] and frozen["incomplete"] and frozen["calls"] == 1 and b"frozen" in line
    again, line = take(store, pack_frame({"op": "freeze", "exec": "e"}))
    assert again == frozen and not line
    late, note = take(store, call_frame(make_call("b")))
    assert late["why"] == "frozen" and b"late call refused" in note


@pytest.mark.parametrize(
    "head",
    [
        {"op": "dance"},
        {"op": "call"},
        {"op": "call", "about": {"exec": "e", "call": "x"}, "sizes": [1, 1, 1]},
        {"op": "call", "about": {"exec": "e", "call": "x"}, "sizes": [0, 0, 5]},
        {"op": "call", "about": {"exec": "e", "call": "x"}, "sizes": [0, 0, -1], "base": "gone", "keep": 3},
        {"op": "record", "record": {"k": "call"}},
        {"op": "freeze", "exec": "nobody"},
    ],
)
def test_a_wrong_frame_is_answered_with_no_and_nothing_is_written(head):
    answer, line = Store().take(head, b"")
    assert not answer["ok"] and answer["why"] and not line


async def test_a_broken_frame_ends_the_connection_and_stores_nothing(tmp_path):
    intake, client, stop = await started(tmp_path)
    one = await client()
    frame = bytearray(call_frame(make_call("a")))
    frame[-1] ^= 1
    one.send(bytes(frame))
    with pytest.raises(asyncio.IncompleteReadError):
        await one.answer()
    assert intake.waiting_bytes == 0
    await stop()
    assert "e" not in load(tmp_path).executions


async def test_no_more_than_the_limit_waits_for_the_disk(tmp_path):
    intake, client, stop = await started(tmp_path, limit_bytes=50_000)
    clients = [await client() for _ in range(12)]
    prompt = np.arange(4_000)
    asked = [one.ask(call_frame(make_call(f"c{i}", prompt + i))) for i, one in enumerate(clients)]
    answers = await asyncio.gather(*asked)
    assert all(answer["ok"] for answer in answers)
    assert 16_000 <= intake.peak_bytes <= 50_000 and intake.waiting_bytes == 0
    await stop()


async def test_without_the_token_nothing_is_taken(tmp_path):
    _, client, stop = await started(tmp_path, token="secret")
    one = await client()
    assert not (await one.ask(call_frame(make_call("a"))))["ok"]
    two = await client()
    assert (await two.ask(pack_frame({"op": "hello", "token": "secret"})))["ok"]
    assert (await two.ask(call_frame(make_call("a"))))["ok"]
    await stop()


async def test_a_killed_intake_has_on_disk_what_it_acknowledged(tmp_path):
    socket = tmp_path / "s"
    command = [sys.executable, "-m", "gyre_cli.trajd", "intake", str(tmp_path / "calls"), "--listen", f"unix:{socket}"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE)  # noqa: ASYNC220
    await asyncio.to_thread(child.stdout.readline)
    one = Client(*await asyncio.open_unix_connection(socket))
    acknowledged = [(await one.ask(call_frame(make_call(f"c{i}", range(i + 3)))))["call"] for i in range(20)]
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()
    [execution] = load(tmp_path / "calls").executions.values()
    assert {m.id for m in execution.forest.marks()} >= set(acknowledged)
