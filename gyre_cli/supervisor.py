"""Starts and watches the daemons of one run on one machine; `gyre_cli.cluster` is the same for a Slurm job.

Owns processes only. A daemon that ends unasked is started again (it continues from the run directory), but not for
ever. Ends when the scheduler says done, on INT/TERM, or by order (`gyre stop`): then everything is stopped in an order
in which nothing is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gyre_base import messages as m
from gyre_base.bus import Client, NoAnswer, Received, Server
from gyre_base.config import Config
from gyre_base.daemon import die_with_parent
from gyre_base.keys import Keys, load_keys
from gyre_base.rundir import RunDir
from gyre_base.shards import proxyd_names
from gyre_cli.common import NO, USAGE

RESTARTS = 5  # of one daemon within WINDOW_S; more is a fault that restarting does not cure
WINDOW_S = 120.0
STOP_GRACE_S = 20.0
LOOK_S = 0.7
POOL = "ex-pool"
RANKS = ("celld.trainer.main", "celld.emulate.trainer")
STOP_ORDER = ("ex", "celld-", "proxyd-", "trajd", "cellctl")


class RunFailed(RuntimeError):
    """A daemon keeps dying, or says that it can't run like this: its words, and the exit code."""

    def __init__(self, why: str, code: int) -> None:
        super().__init__(why)
        self.code = code


@dataclass
class Daemon:
    """One line of the table. `node` and `cell` are empty for what runs beside the supervisor."""

    name: str
    command: list[str]
    environment: dict[str, str] | None = None
    node: str = ""
    cell: str = ""
    process: asyncio.subprocess.Process | None = None
    starts: list[float] = field(default_factory=list)
    not_before: float = 0.0  # monotonic; a start that is put off

    @property
    def runs(self) -> bool:
        return self.process is not None and self.process.returncode is None


def line(run: RunDir, python: list[str], name: str, module: str, *arguments: str) -> Daemon:
    return Daemon(name, [*python, "-m", f"gyre_cli.{module}", *arguments, "--run", str(run.root)])


def services(run: RunDir, python: list[str], config: Config) -> list[Daemon]:
    """What every run has once, and its shards of proxyd, in the order of their start."""
    shards = (
        line(run, python, name, "proxyd", "run", "--shard", str(shard))
        for shard, name in enumerate(proxyd_names(config.proxyd.shards))
    )
    return [*(line(run, python, name, name, "run") for name in ("cellctl", "trajd")), *shards]


def executors(run: RunDir, python: list[str], config: Config) -> list[Daemon]:
    """A fixed number beside the supervisor, or the keeper of a pool that submits them as jobs."""
    if config.cluster.executor_partition or config.cluster.executors_max:
        return [line(run, python, POOL, "gyre", "exec", "--pool")]
    names = [f"ex{i}" for i in range(config.cluster.executors)]
    return [line(run, python, name, "gyre", "exec", "--name", name) for name in names]


def kind_of(daemon: str) -> str:
    """What a daemon's CPU time is counted as. A pool's executors are jobs of their own, which nobody here sees."""
    if daemon == POOL:
        return "executor pool"
    return "executor" if daemon.startswith("ex") else daemon.partition("-")[0]


def kind_of_child(command: list[str]) -> str:
    """The same for what celld started: a trainer's rank, else the engine, which may be anybody's program."""
    return "rank" if any(word in RANKS for word in command) else "engine"


class Supervisor:
    """`serve` runs until done or stopped; `on_status` gets the scheduler's rows about once a second.

    `at_end` runs when the run is done and the daemons still answer.
    """

    def __init__(
        self,
        run: RunDir,
        config: Config,
        on_status: Callable[[list[dict[str, Any]]], None],
        at_end: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._run, self._config, self._on_status, self._at_end = run, config, on_status, at_end
        self._daemons = self.table()
        self._keys: Keys | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.restarts: dict[str, int] = {}
        self.stopping = asyncio.Event()
        self.ordered = False  # what made it stop was a person's `gyre stop`: then stopping is its success
        self.finished = False

    def table(self) -> list[Daemon]:
        """Every daemon of the run, in the order of its start."""
        python, count = [sys.executable], self._config.cluster.cells
        cells = [line(self._run, python, f"celld-c{i}", "celld", "run", "--cell", f"c{i}") for i in range(count)]
        return [*services(self._run, python, self._config), *cells, *executors(self._run, python, self._config)]

    async def serve(self) -> bool:
        """True if the run is done, False if it was stopped before. Raises RunFailed."""
        self._heed_signals()
        with self._run.lock("supervisor"):
            server = self._listen()
            try:
                for daemon in self._daemons:
                    await self._start(daemon)
                await self._watch()
                if self.finished and self._at_end is not None:
                    await self._meanwhile(self._at_end())
            finally:
                await self._stop_all()
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)
                if server is not None:
                    server.close()
        return self.finished

    def _heed_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            loop.add_signal_handler(number, self.stopping.set)

    # ---- what others say to the supervisor --------------------------------------------------------------------------

    def _listen(self) -> Server | None:
        """The supervisor's own endpoint; none in a directory without keys (nothing in it could talk to us)."""
        if not self._run.path("keys", "keys.json").exists():
            return None
        self._keys = load_keys(self._run)
        life = self._run.next_life("supervisor")
        bind = self._config.cluster.bind
        server = Server(self._run, self._keys, kind="supervisor", name="supervisor", life=life, bind=bind)
        server.start()
        self._beside(self._answer(server))
        return server

    def _beside(self, work: Any) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(work))

    async def _answer(self, server: Server) -> None:
        async for received in server:
            await server.send(received.peer, self._reply(received), received.correlation)

    def _reply(self, received: Received) -> Any:
        match received.message:
            case m.StatusRequest():
                return m.StatusReply(rows=tuple(self._row(daemon) for daemon in self._daemons))
            case m.OperatorOrder(verb="stop"):
                self.ordered = self.ordered or not self.stopping.is_set()
                self.stopping.set()
                return m.Done(note="stopping")
            case m.Heartbeat():
                return m.Done()
            case message:
                return m.Refused(why=f"a supervisor does not take {getattr(message, 'TAG', message)!r}")

    def _row(self, daemon: Daemon) -> dict[str, Any]:
        return {
            "daemon": daemon.name,
            "node": daemon.node,
            "pid": daemon.process.pid if daemon.process is not None and daemon.runs else None,
            "restarts": self.restarts.get(daemon.name, 0),
        }

    # ---- processes --------------------------------------------------------------------------------------------------

    async def _start(self, daemon: Daemon) -> None:
        now = time.monotonic()
        daemon.starts = [s for s in daemon.starts if now - s < WINDOW_S] + [now]
        if len(daemon.starts) > RESTARTS:
            await self._keeps_ending(daemon)
            return
        output = open(self._words_of(daemon), "ab")  # noqa: SIM115 - handed to the child
        environment = os.environ if daemon.environment is None else daemon.environment
        try:
            daemon.process = await asyncio.create_subprocess_exec(
                *daemon.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=die_with_parent,
                env={**environment, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
            )
        finally:
            output.close()

    async def _keeps_ending(self, daemon: Daemon) -> None:
        log = self._run.path("log", f"{daemon.name}.log")
        raise RunFailed(
            f"{daemon.name} ended {RESTARTS} times within {WINDOW_S:g} s; its last words are in {log}", code=NO
        )

    def cpu_seconds(self) -> dict[str, float]:
        """CPU seconds so far by kind of process, of the daemons that run now and what they started."""
        import psutil

        out: dict[str, float] = {}

        def add(kind: str, seconds: float) -> None:
            out[kind] = round(out.get(kind, 0.0) + seconds, 2)

        for daemon in self._daemons:
            if daemon.process is None or daemon.process.returncode is not None:
                continue
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(daemon.process.pid)
                times, kind = process.cpu_times(), kind_of(daemon.name)
                add(kind, times.user + times.system)
                if kind == "executor":
                    add("harness and evaluator", times.children_user + times.children_system)
                for child in process.children() if kind == "celld" else ():
                    family = (child, *child.children(recursive=True))  # a real engine is several processes
                    add(kind_of_child(child.cmdline()), sum(sum(one.cpu_times()[:2]) for one in family))
        return out

    async def _watch(self) -> None:
        client = Client(self._run, load_keys(self._run), "cellctl")
        try:
            while not self.stopping.is_set() and not self.finished:
                await self._restart_dead()
                await self._look(client)
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self.stopping.wait(), LOOK_S)
        finally:
            client.close()

    async def _meanwhile(self, work: Awaitable[None]) -> None:
        """Daemons are asked until the last moment, so one that dies now comes back too."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                await self._restart_dead()
                await asyncio.wait({task}, timeout=0.5)
        finally:
            task.cancel()
        await task

    async def _restart_dead(self) -> None:
        for daemon in list(self._daemons):
            if daemon.process is not None and daemon.process.returncode is not None:
                if daemon.process.returncode == USAGE:  # a start with the same settings would end the same way
                    raise RunFailed(f"{daemon.name}: {last_line(self._words_of(daemon))}", code=USAGE)
                if time.monotonic() >= daemon.not_before and await self._may_restart(daemon):
                    self.restarts[daemon.name] = self.restarts.get(daemon.name, 0) + 1
                    await self._start(daemon)

    async def _may_restart(self, daemon: Daemon) -> bool:
        return True

    def _words_of(self, daemon: Daemon) -> Path:
        """What it prints: nothing, unless it fails before its log is open."""
        return self._run.path("log", f"{daemon.name}.out")

    async def _look(self, client: Client) -> list[dict[str, Any]]:
        """The scheduler's rows; none if it does not answer."""
        try:
            reply = await client.ask(m.StatusRequest(), timeout_s=2.0)
        except NoAnswer:
            return []
        rows = [dict(row) for row in reply.rows]
        self._on_status(rows)
        self.finished = rows[0].get("run") == "done"
        return rows

    async def _stop_all(self) -> None:
        for prefix in STOP_ORDER:
            await asyncio.gather(*(self._stop(d) for d in self._daemons if d.name.startswith(prefix)))

    async def _stop(self, daemon: Daemon) -> None:
        process = daemon.process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), STOP_GRACE_S)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


def last_line(path: Path) -> str:
    """A daemon's last words without their `error:`."""
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].removeprefix("error: ") if lines else f"no word in {path}"
