"""Walled workspaces for real: what an agent sees, that its calls arrive, that nothing outlives it. Skipped where a
program is missing; `tools/install.sh` brings bubblewrap where it may.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gyre_base.vocabulary import Outcome
from gyre_exec import child as children
from gyre_exec.workspace_kinds import NETNS
from tests.exec.rig import ROOT, Proxyd, nothing_left, rig, task

WRITE = ("write", "answer", "seven77")


def works(*words: str) -> bool:
    """Whether this machine lets us do that."""
    if words[0].startswith("/"):
        return Path(words[0]).exists() and subprocess.run(words, capture_output=True, timeout=60).returncode == 0
    return shutil.which(words[0]) is not None and subprocess.run(words, capture_output=True, timeout=60).returncode == 0


BWRAP = ("bwrap", "--unshare-user", "--unshare-pid", "--ro-bind", "/", "/", "--proc", "/proc", "true")
needs_bwrap = pytest.mark.skipif(
    not works(*BWRAP), reason="bubblewrap is not installed or may not make namespaces here (apt-get install bubblewrap)"
)


@needs_bwrap
async def test_an_agent_in_bwrap_sees_its_workspace_and_reaches_its_model_and_nothing_else(tmp_path: Path) -> None:
    env = {"TRANSCRIPT": "{transcript}"}
    async with rig(tmp_path, workspace="bwrap", keep_workspaces=True, harness_env=env) as (cellctl, proxyd, executor):
        steps = ["call", "hi"], ["stream", "ho"], ["look", "look.json"], ["say", "transcript", "{}"], WRITE
        await cellctl.order("e1", task(*steps))
        done = await cellctl.outcome("e1")
        assert (done.outcome, done.score, done.calls, done.harness_errors) == (Outcome.SCORED, 0.7, 2, 0), done
        assert proxyd.paths == ["/x/e1/v1/chat/completions"] * 2
        folder = executor.run.path("executions", "e1")
        seen: dict[str, Any] = json.loads((folder / "workspace" / "look.json").read_text())
        assert (seen["interfaces"], seen["reached"]) == (["lo"], ["ConnectionRefusedError", "OSError"])
        assert (seen["uid"], seen["cwd"], seen["writable"]) == (1000, "/workspace", [])
        assert seen["environment"]["HOME"] == "/workspace" and "GYRE_FOLDER" not in seen["environment"]
        assert len(seen["processes"]) == 2, "bubblewrap's own first process and the agent"
        assert not [text for text in seen["environment"].values() if str(tmp_path) in text]
        assert "/workspace/src/deep/file.txt" in seen["files"]
        hidden = [f for f in seen["files"] if str(tmp_path) in f or f.endswith(("/shadow", "tasks.jsonl", "judge.py"))]
        assert hidden == [] and not any(f.endswith("/mode") for f in seen["files"])
        await cellctl.until(lambda: (folder / "transcript.json.zst").exists())


@needs_bwrap
async def test_the_limit_warns_what_runs_within_the_walls_and_then_ends_all_of_it(tmp_path: Path) -> None:
    async with rig(tmp_path, workspace="bwrap", grace_s=0.5) as (cellctl, _proxyd, executor):
        polite = task(["call", "x"], ["warned", "answer"], ["sleep", 60])
        await cellctl.order("polite", polite, limit_s=4.0)
        await cellctl.order("deaf", task(["call", "x"], ["stubborn"], ["fork"], ["escape"], WRITE, ["sleep", 60]), 4.0)
        await cellctl.order("quick", task(["call", "x"], ["fork"], ["escape"], WRITE))
        heard, deaf, quick = [await cellctl.outcome(name) for name in ("polite", "deaf", "quick")]
        assert (heard.outcome, heard.score, heard.exit_code) == (Outcome.PARTIAL, 0.6, 0)
        assert (deaf.outcome, deaf.score) == (Outcome.PARTIAL, 0.7) and deaf.exit_code != 0
        assert quick.outcome is Outcome.SCORED
        assert await nothing_left(executor.run)
        await cellctl.until(lambda: children.descendants(executor.process.pid) == [executor.guard()])


@needs_bwrap
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_walls_fall_with_their_executor(tmp_path: Path, number: int) -> None:
    async with rig(tmp_path, workspace="bwrap") as (cellctl, _proxyd, executor):
        for place in range(4):
            await cellctl.order(f"e{place}", task(["stubborn"], ["escape"], ["say", "stdout", "up"], ["sleep", 60]))
        await cellctl.until(lambda: len(children.descendants(executor.process.pid)) == 4 * 4 + 1)
        below = children.descendants(executor.process.pid)
        await executor.stop(number)
        assert await nothing_left(executor.run)
        async with asyncio.timeout(5):
            while any(Path(f"/proc/{pid}").exists() for pid in below):  # noqa: ASYNC110 - processes tell no event
                await asyncio.sleep(0.02)


@needs_bwrap
async def test_an_image_that_is_not_there_is_our_failure_with_what_to_do(tmp_path: Path) -> None:
    async with rig(tmp_path, workspace="bwrap", images=str(tmp_path / "images")) as (cellctl, _proxyd, _executor):
        body = task(["call", "x"], WRITE) | {"needs": {"image": "debian:12"}}
        await cellctl.order("e1", body)
        done = await cellctl.outcome("e1")
        assert done.outcome is Outcome.INFRA_FAILED and f"put it at {tmp_path}/images/debian_12" in done.error


@needs_bwrap
async def test_a_task_may_ask_for_the_network_and_an_image_directory_is_the_root(tmp_path: Path) -> None:
    image = rootfs(tmp_path / "images" / "tiny_1")
    (image / "etc" / "release").write_text("tiny")
    visible = ["/usr"]
    settings: dict[str, Any] = {"images": str(tmp_path / "images"), "visible": visible, "keep_workspaces": True}
    async with rig(tmp_path / "run", workspace="bwrap", **settings) as (cellctl, _proxyd, executor):
        body = task(["call", "x"], ["look", "look.json"], WRITE)
        await cellctl.order("e1", body | {"needs": {"image": "tiny:1", "workdir": "/app", "network": True}})
        done = await cellctl.outcome("e1")
        assert (done.outcome, done.calls) == (Outcome.SCORED, 1), done
        place = executor.run.path("executions", "e1", "workspace")
        seen: dict[str, Any] = json.loads((place / "look.json").read_text())
        assert (place / "given").read_text() == "by the image" and seen["cwd"] == "/app"
        assert "/etc/release" in seen["files"] and "/etc/ld.so.cache" not in seen["files"]
        assert seen["interfaces"] == sorted(p.name for p in Path("/sys/class/net").iterdir())


APPTAINER = shutil.which("apptainer") or str(ROOT / ".apptainer" / "bin" / "apptainer")
needs_apptainer = pytest.mark.skipif(
    not works(APPTAINER, "--version"), reason="apptainer is not installed (make apptainer, as root on Debian)"
)


def rootfs(place: Path) -> Path:
    """An image directory that shows this machine's programs; /usr itself comes by tasks.visible."""
    for name in ("bin", "lib", "lib64"):
        if Path("/", name).is_symlink():
            place.mkdir(parents=True, exist_ok=True)
            (place / name).symlink_to(Path("/", name).readlink())
    for name in ("etc", "usr", "app", "dev", "proc", "sys", "tmp", "root"):
        (place / name).mkdir()
    (place / "etc" / "passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (place / "etc" / "group").write_text("root:x:0:\n")
    (place / "app" / "given").write_text("by the image")
    return place


@needs_apptainer
async def test_apptainer_is_the_same_workspace_behind_other_walls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{Path(APPTAINER).parent}:{os.environ['PATH']}")
    settings: dict[str, Any] = {"image": str(rootfs(tmp_path / "image")), "visible": ["/usr"], "keep_workspaces": True}
    async with rig(tmp_path / "run", workspace="apptainer", grace_s=0.5, **settings) as (cellctl, proxyd, executor):
        steps = ["call", "hi"], ["stream", "ho"], ["look", "look.json"], WRITE
        await cellctl.order("e1", task(*steps) | {"needs": {"workdir": "/app"}})
        await cellctl.order("late", task(["call", "x"], ["warned", "answer"], ["fork"], ["escape"], ["sleep", 60]), 5.0)
        done, late = await cellctl.outcome("e1", 60.0), await cellctl.outcome("late", 60.0)
        assert (done.outcome, done.score, done.calls, done.harness_errors) == (Outcome.SCORED, 0.7, 2, 0), done
        assert (late.outcome, late.score) == (Outcome.PARTIAL, 0.6), late
        assert sorted(proxyd.paths) == ["/x/e1/v1/chat/completions"] * 2 + ["/x/late/v1/chat/completions"]
        place = executor.run.path("executions", "e1", "workspace")
        seen: dict[str, Any] = json.loads((place / "look.json").read_text())
        assert (seen["interfaces"], seen["cwd"]) == (["lo"], "/app")
        assert seen["writable"] == ["/dev"], "a small one of its own"
        assert (place / "given").read_text() == "by the image"
        assert not [f for f in seen["files"] if str(executor.run.root) in f or f.endswith(("tasks.jsonl", "judge.py"))]
        assert not [k for k in seen["environment"] if k == "GYRE_FOLDER"]
        assert await nothing_left(executor.run)
        await cellctl.until(lambda: children.descendants(executor.process.pid) == [executor.guard()])


@needs_bwrap  # the same right to make namespaces
async def test_where_the_executor_is_no_ancestor_connections_are_forwarded_to_its_socket(tmp_path: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readline()
        writer.write(b"%d:" % len(await reader.readexactly(int(head))) + b"x" * 3_000_000)
        writer.close()

    relay = tmp_path / "r.sock"
    server = await asyncio.start_unix_server(answer, str(relay))
    script = (
        "exec 3<>/dev/tcp/127.0.0.1/4000; echo 2000000 >&3; head -c 2000000 /dev/zero >&3; cat <&3; ls /sys/class/net"
    )
    words = (sys.executable, "-I", "-S", NETNS, "--network", "4000", "--relay", str(relay), "--", "bash", "-c", script)
    process = await asyncio.create_subprocess_exec(*words, stdout=subprocess.PIPE, start_new_session=True)
    out, _ = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 0 and out.startswith(b"2000000:x") and out.count(b"x") == 3_000_000
    with pytest.raises(ProcessLookupError):  # the forwarder went with the program
        for _ in range(100):
            os.killpg(process.pid, 0)
            await asyncio.sleep(0.02)
    server.close()


@needs_bwrap
async def test_ten_walled_executions_do_not_notice_that_proxyd_dies_and_moves(tmp_path: Path) -> None:
    async with rig(tmp_path, workspace="bwrap") as (cellctl, proxyd, executor):
        for number in range(10):
            steps = ["call", "a"], ["sleep", 1.0], ["stream", "b"], ["call", "c"], WRITE
            await cellctl.order(f"e{number}", task(*steps))
        await cellctl.until(lambda: len(proxyd.requests) >= 10)
        await proxyd.stop()
        await asyncio.sleep(1.0)
        another = Proxyd(executor.run)
        await another.start()
        for number in range(10):
            done = await cellctl.outcome(f"e{number}", 40.0)
            assert (done.outcome, done.harness_errors, done.calls) == (Outcome.SCORED, 0, 3), done
        await another.stop()
