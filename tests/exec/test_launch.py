"""Executors as jobs: real ones through submitit's local executor, and what Slurm would be told."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from gyre_base import bus, config
from gyre_base import messages as m
from gyre_base.keys import make_keys
from gyre_base.rundir import RunDir, RunLocked
from gyre_exec import launch
from tests.exec.rig import ROOT, make_run

pytest.importorskip("submitit")


class Scheduler:
    """cellctl as the pool and its executors see it: welcomes, knows who has joined, says the water level."""

    def __init__(self, run: RunDir) -> None:
        self.run, self.level = run, 0
        self.held: dict[str, int] = {}
        self.hellos: list[str] = []

    async def serve(self) -> None:
        life = self.run.next_life("cellctl")
        server = bus.Server(self.run, make_keys(self.run), kind="cellctl", name="cellctl", life=life, bind="127.0.0.1")
        server.start()
        try:
            async for received in server:
                match received.message:
                    case m.Hello(name=name):
                        self.held.setdefault(name, 0)
                        self.hellos.append(name)
                        await server.send(received.peer, m.Welcome(life=life), received.correlation)
                    case m.Goodbye(name=name):
                        self.held.pop(name, None)
                    case m.StatusRequest():
                        rows = [
                            {"water_level": self.level},
                            *({"executor": n, "held": h} for n, h in self.held.items()),
                        ]
                        await server.send(received.peer, m.StatusReply(rows=tuple(rows)), received.correlation)
        finally:
            server.close()


async def until(condition: Callable[[], Any], timeout_s: float = 120.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - what is waited for happens in other processes
            await asyncio.sleep(0.05)


def start(run: RunDir) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "gyre_exec.launch", "--run", str(run.root)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@contextlib.asynccontextmanager
async def pooled(root: Path, **cluster: Any) -> AsyncIterator[tuple[Scheduler, RunDir]]:
    run = make_run(root, concurrent_per_executor=10)
    tree = json.loads(run.path("run.json").read_text())
    tree["cluster"] |= {"executors": 1, "executors_max": 3, "executor_idle_s": 0.5, **cluster}
    run.write_atomic("run.json", config.to_json(config.from_tree(tree)))
    scheduler = Scheduler(run)
    serving = asyncio.ensure_future(scheduler.serve())
    try:
        yield scheduler, run
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


def lives(run: RunDir, name: str) -> bool:
    try:
        with run.lock(name):
            return False
    except RunLocked:
        return True


def holder(run: RunDir, name: str) -> int:
    return int(run.path("lives", f"{name}.lock").read_text().partition("@")[0])


async def test_a_pool_grows_with_the_work_fills_a_lost_place_and_shrinks_when_idle(tmp_path: Path) -> None:
    async with pooled(tmp_path / "a run") as (scheduler, run):
        pool = start(run)
        try:
            await until(lambda: set(scheduler.held) == {"ex0"})
            scheduler.level = 25
            scheduler.held["ex0"] = 10
            await until(lambda: set(scheduler.held) == {"ex0", "ex1", "ex2"})
            os.kill(holder(run, "ex1"), signal.SIGKILL)  # as a lost node would
            del scheduler.held["ex1"]
            await until(lambda: scheduler.hellos.count("ex1") == 2)
            scheduler.level = 3
            await until(lambda: set(scheduler.held) == {"ex0"})
            await until(lambda: not lives(run, "ex1") and not lives(run, "ex2"))
            assert lives(run, "ex0")  # it holds something, and one is the least
        finally:
            pool.terminate()
            code = await asyncio.to_thread(pool.wait, 20)
        assert code == 0 and not lives(run, "ex0")
        assert json.loads(run.path("pool.json").read_text()) == {}
        story = [json.loads(line) for line in run.path("journal", "ex-pool.jsonl").read_text().splitlines()]
        tags = [command["tag"] for entry in story for command in entry["commands"]]
        assert tags[:3] == ["pool.submit"] * 3 and set(tags[3:]) == {"pool.leave"}


async def test_a_killed_pool_finds_its_executors_again(tmp_path: Path) -> None:
    async with pooled(tmp_path) as (scheduler, run):
        first = start(run)
        second: subprocess.Popen[bytes] | None = None
        try:
            await until(lambda: "ex0" in scheduler.held)
            first.kill()
            await asyncio.to_thread(first.wait)
            assert lives(run, "ex0")
            scheduler.level = 15
            second = start(run)
            await until(lambda: set(scheduler.held) == {"ex0", "ex1"})
            assert scheduler.hellos.count("ex0") == 1
        finally:
            first.kill()
            if second is not None:
                second.terminate()
                await asyncio.to_thread(second.wait, 20)
        assert not lives(run, "ex0") and not lives(run, "ex1")


async def test_an_executor_that_holds_something_does_not_leave_when_asked(tmp_path: Path) -> None:
    from tests.exec.rig import rig, task

    async with rig(tmp_path) as (cellctl, _proxyd, executor):
        await cellctl.order("e1", task(["call", "x"], ["sleep", 30]))
        client = bus.Client(executor.run, make_keys(executor.run), "ex0")
        await until(lambda: executor.run.path("executions", "e1").exists())
        answer = await client.ask(m.OperatorOrder(verb="leave"))
        assert isinstance(answer, m.Refused) and "1 executions are held" in answer.why
        await cellctl.say(m.CancelExecution(execution="e1", why="enough"))
        await cellctl.outcome("e1")
        deadline = time.monotonic() + 20
        while not isinstance(answer, m.Done) and time.monotonic() < deadline:
            answer = await client.ask(m.OperatorOrder(verb="leave"))
        client.close()
        assert await asyncio.to_thread(executor.process.wait, 20) == 0 and cellctl.goodbyes


def test_a_pool_whose_first_job_is_refused_ends_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = slurm(tmp_path, monkeypatch)
    tool(tmp_path, "sbatch", "echo 'sbatch: error: invalid partition specified: cpu' >&2; exit 1")

    async def keep() -> None:
        settings = config.from_json(backend.run.path("run.json").read_text())
        keeper = launch.Keeper(backend.run, settings, backend, 1)
        await keeper._perform(launch.pool.Submit(names=("ex0",)))

    with pytest.raises(launch.LaunchError, match="invalid partition specified: cpu") as caught:
        asyncio.run(keep())
    assert not isinstance(caught.value, launch.Away)


# ---- Slurm, as it would be told -----------------------------------------------------------------------------------


def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **cluster: Any) -> launch.Slurm:
    """With an srun that is only there to be found."""
    (tmp_path / "srun").write_text("")
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    tree = {"cluster": {"executor_partition": "cpu", **cluster}}
    return launch.Slurm(make_run(tmp_path / "run"), config.from_tree(tree).cluster)


def tool(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def test_what_sbatch_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("mem=16G", "time=90", "cpus_per_task=8", "account=lab", "reservation=week 3")
    backend = slurm(tmp_path, monkeypatch, executor_options=options, python=("apptainer", "exec", "a b.sif", "python3"))
    text = backend.executor()._make_submission_file_text("COMMAND", "0")
    flags = {line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")}
    wanted = {"partition=cpu", "mem=16G", "time=90", "cpus-per-task=8", "account=lab", "nodes=1", "ntasks-per-node=1"}
    assert wanted | {"requeue", "reservation='week 3'", "open-mode=append", "job-name=gyre-ex-run"} <= flags
    command = backend.executor()._submitit_command_str
    assert command.startswith("apptainer exec 'a b.sif' python3 -u -m submitit.core._submit")


def test_a_wrong_option_is_said_with_those_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = slurm(tmp_path, monkeypatch, executor_options=("time=soon",))
    tool(tmp_path, "sbatch", "echo 'sbatch: error: Invalid --time specification' >&2; exit 1")
    with pytest.raises(launch.LaunchError, match="Invalid --time specification"):
        backend.submit(["ex0"])


@pytest.mark.parametrize(
    ("listing", "states"),
    [
        ("7_0|RUNNING\n7_1|PENDING\n9|RUNNING\n", {"ex0": "running", "ex1": "pending", "ex2": "running"}),
        ("7_0|COMPLETING\n7_1|CONFIGURING\n", {"ex1": "pending"}),
        ("", {}),
    ],
)
def test_what_squeue_says_of_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listing: str, states: dict[str, str]
) -> None:
    backend = slurm(tmp_path, monkeypatch)
    tool(tmp_path, "squeue", f"printf '{listing}'")
    assert backend.states({"ex0": "7_0", "ex1": "7_1", "ex2": "9"}) == states


def test_a_controller_that_does_not_answer_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = slurm(tmp_path, monkeypatch)
    (tmp_path / "squeue").write_text(
        "#!/bin/sh\necho 'squeue: error: Unable to contact slurm controller' >&2; exit 1\n"
    )
    (tmp_path / "squeue").chmod(0o755)
    with pytest.raises(launch.LaunchError, match="Unable to contact"):
        backend.states({"ex0": "7_0"})
