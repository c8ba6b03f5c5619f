"""A run directory with a real executor process, a cellctl that the test plays, and a proxyd that answers by script."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from gyre_base import bus, config
from gyre_base import messages as m
from gyre_base.keys import make_keys
from gyre_base.rundir import EndpointFile, RunDir
from gyre_base.vocabulary import Purpose

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
Script = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]


def make_run(root: Path, **tasks: Any) -> RunDir:
    """A run whose harness is agent.py."""
    run = RunDir.create(root)
    tree = {
        "tasks": {
            "harness": ["{python}", "-I", "-S", str(HERE / "agent.py")],
            "train": str(HERE / "tasks.jsonl"),
            "evaluation_limit_s": 5.0,
            "concurrent_per_executor": 16,
            **tasks,
        }
    }
    run.write_atomic("run.json", config.to_json(config.from_tree(tree)))
    make_keys(run)
    return run


def task(*steps: Any, mode: str = "honest", **evaluator: Any) -> dict[str, Any]:
    return {
        "id": "t",
        "instruction": json.dumps(steps),
        "workspace": {"readme.md": "hello", "src/deep/file.txt": "x"},
        "evaluator": {"command": ["python", "-I", "-S", "judge.py"], "tests": {"mode": mode}, **evaluator},
    }


class Cellctl:
    """The test's own cellctl: says welcome, gives orders, notes outcomes."""

    def __init__(self, run: RunDir, *, notes: bool = True) -> None:
        self.run, self.notes = run, notes
        self.hellos: list[m.Hello] = []
        self.goodbyes: list[m.Goodbye] = []
        self.heartbeats = 0
        self.outcomes: dict[str, m.ExecutionFinished] = {}
        self.said: list[m.ExecutionFinished] = []
        self._peer = b""
        self._server: bus.Server | None = None
        self._task: asyncio.Task[None] | None = None
        self._news = asyncio.Event()

    async def start(self) -> None:
        life = self.run.next_life("cellctl")
        self._server = bus.Server(
            self.run, make_keys(self.run), kind="cellctl", name="cellctl", life=life, bind="127.0.0.1"
        )
        self._server.start()
        self.life = life
        self._task = asyncio.create_task(self._serve(self._server))

    async def stop(self) -> None:
        assert self._task is not None and self._server is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._server.close(retract=False)  # a later life may have published its own

    async def _serve(self, server: bus.Server) -> None:
        async for received in server:
            match received.message:
                case m.Hello() as hello:
                    self._peer = received.peer
                    self.hellos.append(hello)
                    await server.send(received.peer, m.Welcome(life=self.life), received.correlation)
                case m.Heartbeat():
                    self.heartbeats += 1
                case m.Goodbye() as goodbye:
                    self.goodbyes.append(goodbye)
                case m.ExecutionFinished() as finished:
                    self.said.append(finished)
                    self.outcomes[finished.execution] = finished
                    if self.notes:
                        await server.send(received.peer, m.ExecutionNoted(execution=finished.execution))
            self._news.set()

    async def until(self, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                self._news.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), 0.05)

    async def order(self, name: str, body: dict[str, Any], limit_s: float = 30.0, attempt: int = 0) -> None:
        await self.until(lambda: bool(self.hellos))
        await self.say(
            m.ExecutionOrder(
                execution=name, group="g", task=body, attempt=attempt, purpose=Purpose.TRAIN, limit_s=limit_s
            )
        )

    async def say(self, message: Any) -> None:
        assert self._server is not None
        await self._server.send(self._peer, message)

    async def outcome(self, name: str, timeout_s: float = 60.0) -> m.ExecutionFinished:
        await self.until(lambda: name in self.outcomes, timeout_s)
        return self.outcomes[name]


async def answer_ok(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """A short plain answer."""
    return web.json_response({"choices": [{"message": {"role": "assistant", "content": "ok"}}]})


class Proxyd:
    """Answers by `script`; remembers every request as (call id, headers, body)."""

    def __init__(self, run: RunDir, script: Script = answer_ok) -> None:
        self.run, self.script = run, script
        self.requests: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.paths: list[str] = []
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{tail:.*}", self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=0.01)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
        life = self.run.next_life("proxyd-0")
        self.run.publish(
            EndpointFile(
                "proxyd-0", "proxyd", "tcp://127.0.0.1:1", life, os.getpid(), {"http": f"http://127.0.0.1:{port}"}
            )
        )

    async def stop(self) -> None:
        """Dies: open connections are cut, nothing is retracted."""
        assert self._runner is not None
        for site in list(self._runner.sites):
            await site.stop()
        server = self._runner.server
        for connection in list(server.connections if server else []):
            if connection.transport is not None:
                connection.transport.abort()
        await self._runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        body = json.loads(raw) if raw else {}
        self.requests.append((request.headers.get("X-Gyre-Call", ""), dict(request.headers), body))
        self.paths.append(request.path_qs)
        return await self.script(request, body)


class ExecutorProcess:
    """`python -m gyre_exec.daemon`."""

    def __init__(self, run: RunDir, name: str = "ex0") -> None:
        self.run = run
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gyre_exec.daemon", "--run", str(run.root), "--name", name],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def guard(self) -> int:
        """The process that ends the others if this one is killed."""
        below = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        (found,) = [pid for pid in below if b"guard.py" in Path("/proc", pid, "cmdline").read_bytes()]
        return int(found)

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async def stop(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = await asyncio.to_thread(self.process.wait, 20)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


@contextlib.asynccontextmanager
async def rig(
    root: Path, script: Script = answer_ok, **tasks: Any
) -> AsyncIterator[tuple[Cellctl, Proxyd, ExecutorProcess]]:
    """All three, up and introduced."""
    run = make_run(root, **tasks)
    cellctl, proxyd = Cellctl(run), Proxyd(run, script)
    await cellctl.start()
    await proxyd.start()
    executor = ExecutorProcess(run)
    try:
        await cellctl.until(lambda: bool(cellctl.hellos), 30.0)
        yield cellctl, proxyd, executor
    finally:
        await executor.stop()
        await proxyd.stop()
        await cellctl.stop()


def processes_of(run: RunDir) -> list[int]:
    """Every living process whose environment names this run's executions."""
    marker = str(run.path("executions")).encode() + b"/"
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if marker in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
    return found


async def nothing_left(run: RunDir, timeout_s: float = 5.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while processes_of(run):
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.05)
    return True
