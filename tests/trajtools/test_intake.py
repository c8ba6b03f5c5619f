"""The stand-alone intake: acknowledged is on disk, twice is once, frozen is frozen, bytes are bounded."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import msgpack
import numpy as np
import orjson
import pytest
from click.testing import CliRunner
from trajbuild import make_call, random_execution

from gyre_base.runfile import Reward, encode, framed
from gyre_cli.trajd import main
from trajtools.load import load
from trajtools.trajd.frames import HEAD, call_frame, pack_frame
from trajtools.trajd.intake import Intake, Taken, run_intake
from trajtools.trajd.store import Store

RECORD = Path(__file__).parent / "data" / "nemogym_rollout.jsonl"


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
        file.write(framed(make_call("c", [*whole, 6, 4]))[:-5])
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


def test_a_refused_frame_leaves_no_trace_so_it_can_be_sent_again():
    store = Store()
    about = {"exec": "e", "call": "a", "level": "text"}
    refused, line = store.take({"op": "call", "about": about, "sizes": [0, 0, -1]}, b"")
    assert not refused["ok"] and "token ids" in refused["why"] and not line
    assert take(store, pack_frame({"op": "freeze", "exec": "e"}))[0]["why"] == "no execution e"
    assert take(store, call_frame(make_call("a")))[0]["state"] == "stored"


def test_a_retired_execution_is_a_name_that_is_never_taken_again():
    store = Store()
    take(store, call_frame(make_call("a")))
    early, _ = take(store, pack_frame({"op": "retire", "exec": "e"}))
    assert not early["ok"] and "freeze it first" in early["why"]
    take(store, pack_frame({"op": "freeze", "exec": "e"}))
    assert take(store, pack_frame({"op": "retire", "exec": "e"}))[0] == {"ok": True, "exec": "e", "state": "retired"}
    assert take(store, pack_frame({"op": "retire", "exec": "e"}))[0]["state"] == "duplicate"
    for frame in (call_frame(make_call("b")), pack_frame({"op": "freeze", "exec": "e"})):
        assert take(store, frame)[0]["why"] == "retired"


async def test_a_restart_knows_what_is_frozen_and_what_is_retired(tmp_path):
    _, client, stop = await started(tmp_path)
    one = await client()
    for name in ("e", "f"):
        await one.ask(call_frame(make_call("a", execution=name)))
    frozen = await one.ask(pack_frame({"op": "freeze", "exec": "e"}))
    await one.ask(pack_frame({"op": "freeze", "exec": "f"}))
    await one.ask(pack_frame({"op": "retire", "exec": "f"}))
    await stop()
    _, client, stop = await started(tmp_path)
    two = await client()
    assert await two.ask(pack_frame({"op": "freeze", "exec": "e"})) == frozen
    assert (await two.ask(call_frame(make_call("b", execution="e"))))["why"] == "frozen"
    assert (await two.ask(call_frame(make_call("b", execution="f"))))["why"] == "retired"
    await stop()


async def test_whole_prompts_are_stored_once(tmp_path):
    intake, client, stop = await started(tmp_path)
    one = await client()
    text = list(range(1000, 3000))
    for i in range(30):
        assert (await one.ask(call_frame(make_call(f"c{i}", text, (i, i), seq=i))))["ok"]
        text = [*text, i, i, 7, 8]
    await stop()
    assert intake.path.stat().st_size < 2 * 2000 * 5 + 30 * 400  # one whole prompt, a keyframe at most, thirty heads
    forest = load(intake.path).executions["e"].forest
    assert forest.prompt_tokens == sum(2000 + 4 * i for i in range(30))


async def test_one_intake_per_folder_and_per_address(tmp_path):
    _, _, stop = await started(tmp_path)
    with pytest.raises(Taken, match="another intake"):
        Intake(tmp_path)
    with pytest.raises(Taken, match="listens"):
        await run_intake(tmp_path / "other", f"unix:{tmp_path / 'socket'}", stop=asyncio.Event())
    await stop()
    stopped = asyncio.Event()
    stopped.set()
    await run_intake(tmp_path, f"unix:{tmp_path / 'socket'}", stop=stopped)  # a dead one's socket is in nobody's way


@pytest.mark.parametrize(
    "address", ["unix:", "tcp:host", "tcp:host:many", "tcp:host:70000", "udp:x:1", "unix:/" + "n" * 200]
)
def test_what_is_no_address_is_refused_with_the_form_of_one(address, tmp_path):
    for words in (["intake", str(tmp_path), "--listen", address], ["send", str(RECORD), "--to", address]):
        said = CliRunner().invoke(main, words)
        assert said.exit_code == 2 and said.stderr.startswith(f"error: {address}: ") and "Traceback" not in said.stderr


def test_an_intake_never_takes_the_place_of_a_file(tmp_path):
    (tmp_path / "thesis").write_text("years of work")
    said = CliRunner().invoke(main, ["intake", str(tmp_path / "calls"), "--listen", f"unix:{tmp_path / 'thesis'}"])
    assert said.exit_code == 4 and "is no socket" in said.stderr
    assert (tmp_path / "thesis").read_text() == "years of work"


@pytest.mark.parametrize("content", [b"hello\n", bytes(range(256)) * 9, b"3\n"])
def test_what_is_no_recording_is_not_sent(content, tmp_path):
    (tmp_path / "given").write_bytes(content)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "s"))
        listening.listen()
        said = CliRunner().invoke(main, ["send", str(tmp_path / "given"), "--to", f"unix:{tmp_path / 's'}"])
    assert said.exit_code == 2 and said.stderr.startswith("error: given")


def test_a_recording_is_sent_by_command_twice_with_one_result(tmp_path):
    lines = [encode(c) for i in range(3) for c in random_execution(np.random.default_rng(i), execution=f"e{i}")]
    (tmp_path / "in.jsonl").write_bytes(b"".join([*lines, encode(Reward(exec="e1", status="scored", value=0.5))]))
    (tmp_path / "token").write_text("secret\n")
    address, token = f"unix:{tmp_path / 's'}", ["--token-file", str(tmp_path / "token")]
    trajd = [sys.executable, "-m", "gyre_cli.trajd"]
    send = [*trajd, "send", str(tmp_path / "in.jsonl"), "--to", address]

    def sent(*options):
        return subprocess.run([*send, *options], capture_output=True, text=True)

    listen = [*trajd, "intake", str(tmp_path / "calls"), "--listen", address, *token]
    child = subprocess.Popen(listen, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline().strip() == address
        first, second = (sent(*token, "--freeze", "--json") for _ in range(2))
        told = orjson.loads(first.stdout)
        assert (first.returncode, told["states"]) == (0, {"stored": len(lines) + 1})
        assert (second.returncode, orjson.loads(second.stdout)) == (
            0,
            {**told, "states": {"duplicate": len(lines) + 1}},
        )
        wrong = sent()
        assert wrong.returncode == 1 and "error:" in wrong.stderr
    finally:
        child.terminate()
        child.wait()
        child.stdout.close()
    gone = sent()
    assert gone.returncode == 3 and "no intake answers" in gone.stderr
    before, after = load(tmp_path / "in.jsonl").executions, load(tmp_path / "calls").executions
    assert {n: e.forest.digest() for n, e in before.items()} == {n: e.forest.digest() for n, e in after.items()}
    assert {f["exec"]: f["digest"] for f in told["frozen"]} == {n: e.forest.digest() for n, e in before.items()}
    assert after["e1"].reward.value == 0.5
