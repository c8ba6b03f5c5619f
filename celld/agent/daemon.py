"""The shell around a cell's agent: starts the children, does the switches, talks to cellctl."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from celld.agent import core as c
from celld.agent.children import Child, Ranks, engine_command, sglang_settings
from celld.agent.deadman import DeadMan, Verdict, read_beat, requeue
from celld.agent.memory import Account, Books
from celld.agent.switching import Switcher
from celld.agent.vitals import Vitals
from celld.engine_client import EngineClient, EngineError
from celld.sglang.launch import command as sglang_command
from celld.transfer.bulk import open_bulk
from celld.weights import WeightsError, transport_to
from gyre_base import config as configuration
from gyre_base import messages as m
from gyre_base.allocation import Allocation, own_address
from gyre_base.bus import Client, NoAnswer, Server
from gyre_base.config import Config
from gyre_base.daemon import Send, Shell, log_to, stop_on_signals
from gyre_base.journal import Journal, mend_tail
from gyre_base.keys import Keys, load_keys
from gyre_base.routing import shape_of
from gyre_base.rundir import RunDir
from gyre_base.stacks import examine
from gyre_base.vocabulary import Role

log = logging.getLogger(__name__)
CHILD_START_S = 180.0  # torch and megatron on a busy machine
ENGINE_START_S = 1800.0  # a large model from a busy file system
PROBE_EVERY_S = 5.0
ENDING_S = 3.0  # the supervisor is told that Slurm ends us; within this it answers, or it ends too
SILENT_PROBES = 6  # engine probes without an answer before it counts as stalled


class AgentShell(Shell):
    """One cell."""

    core: c.Agent

    def __init__(self, run: RunDir, keys: Keys, config: Config, cell: str, life: int, server: Server) -> None:
        path = run.path("journal", f"celld-{cell}.jsonl")
        mend_tail(path)
        super().__init__(c.Agent(cell=cell), Journal(path))
        self._run, self._keys, self._config, self._cell, self._life = run, keys, config, cell, life
        self._routing = shape_of(config)
        self._server = server
        self._cellctl = Client(run, keys, "cellctl", identity=f"celld:{cell}:{life}")
        self._rank = Client(run, keys, f"rank-{cell}")
        self._transport = transport_to(run, keys, "rank-c0", open_bulk(config.cluster))
        folder = run.path("weights", cell)
        folder.mkdir(mode=0o700, exist_ok=True)
        model_config = json.loads((Path(config.model.path) / "config.json").read_text())
        self._switcher = Switcher(self._rank, self._transport, folder, model_config)
        self._engine_process = Child("engine", run.path("log", f"engine-{cell}.log"), self._child_died)
        self._ranks = Ranks(run, cell, self._child_died)
        self._children: dict[str, Child | Ranks] = {"engine": self._engine_process, "rank": self._ranks}
        self._books = Books(config, cell)
        self._memory: Account | None = None  # as of the last switch
        self._launching: set[str] = set()
        self._engine: EngineClient | None = None
        self._vitals = Vitals(config.cluster.stall_s)
        self.heartbeat_s = config.cluster.heartbeat_s
        self._probe_s = min(PROBE_EVERY_S, config.cluster.peer_timeout_s / 2)
        self._switch: asyncio.Task[None] | None = None
        self._allocation = Allocation.here()
        self._supervisor = Client(run, keys, "supervisor", identity=f"celld:{cell}:{life}")
        self.signalled = False  # told to end by a signal: in a job that is Slurm's word, the supervisor sends a message
        self.orphaned = False

    def _child_died(self, child: str, detail: str) -> None:
        if child not in self._launching:  # else the launch sees it and says so, once
            self.post(c.ChildDied(child=child, detail=detail))

    # ---- effects ----------------------------------------------------------------------------------------------------

    async def perform(self, command: Any) -> None:
        match command:
            case Send(message=message):
                await self._cellctl.send(message)
            case c.Launch(child=child):
                self._stop_switch()
                self.spawn(self._launch(child))
            case c.End(child=child):
                await self._children[child].end()
            case c.Switch():
                self._stop_switch()
                self._switch = asyncio.get_running_loop().create_task(self._do_switch(command))
                self._switch.add_done_callback(self._ended)  # what it did not foresee must not leave the cell turning
            case c.Save():
                self.spawn(self._save(command.why))

    def _stop_switch(self) -> None:
        if self._switch is not None:
            self._switch.cancel()
            self._switch = None

    async def _launch(self, child: str) -> None:
        if child in self._launching:
            return
        self._launching.add(child)
        try:
            if child == "rank":
                await self._launch_rank()
            else:
                await self._launch_engine()
        except (EngineError, NoAnswer, WeightsError, OSError) as error:
            log.error("the %s did not come up: %s", child, error)
            await self._children[child].end()
            await asyncio.sleep(1.0)
            self.post(c.ChildDied(child=child, detail=f"did not come up: {error}"))
        finally:
            self._launching.discard(child)

    async def _launch_rank(self) -> None:
        await self._ranks.end()
        await self._ranks.start(self._config)
        state = await self._rank.ask(m.StopTraining(epoch=0), timeout_s=CHILD_START_S)
        self.post(c.ChildUp(child="rank", version=state.version))

    async def _launch_engine(self) -> None:
        with contextlib.suppress(NoAnswer):  # after a fault the rank may still be claiming
            if self._rank_is_up():
                await self._rank.ask(m.StopTraining(epoch=self.core.epoch), timeout_s=20.0)
        version, folder = await self._pull_patiently()
        port_file = self._run.path("endpoints", f".engine-{self._cell}.port")
        port_file.unlink(missing_ok=True)
        seed = self._config.scheduler.seed * 1000 + int(self._cell.removeprefix("c"))
        if self._config.engine.kind == "sglang":
            url = await self._start_sglang(folder, version, seed)
        else:
            command = engine_command(self._run, self._config, self._cell, folder, version, port_file, seed)
            await self._engine_process.start(command)
            url = f"http://{own_address(self._config.cluster.bind)}:{await self._port(port_file)}"
        if self._engine is not None:
            await self._engine.close()
        self._engine = EngineClient(url, admin_key=self._keys.admin, api_key=self._keys.admin)
        await self._serving(self._engine)
        await self._engine.probe(
            need_release=(self._config.engine.kind, self._config.engine.device) != ("sglang", "cpu"),
            routing=self._routing,
        )
        self.post(c.ChildUp(child="engine", version=version, url=url))

    async def _start_sglang(self, folder: Path, version: str, seed: int) -> str:
        """The real engine's base URL; it may not answer yet."""
        settings = sglang_settings(self._run, self._config, self._keys, self._cell, folder, version, seed)
        file = self._run.path("keys", f"engine-{self._cell}.yaml")  # it holds the admin key
        settings.write(file)
        python = self._config.engine.python or sys.executable
        await self._engine_process.start(sglang_command(python, file), settings.environment(os.environ))
        return f"http://{settings.host}:{settings.port}"

    async def _serving(self, engine: EngineClient) -> None:
        """Wait for its first answer, but not for one that has died."""
        deadline = asyncio.get_running_loop().time() + ENGINE_START_S
        while not await engine.alive():
            if self._children["engine"].pid is None:
                raise OSError(f"the engine ended while starting; see log/engine-{self._cell}.log")
            if asyncio.get_running_loop().time() > deadline:
                raise OSError(f"the engine did not answer within {ENGINE_START_S:g} s; see log/engine-{self._cell}.log")
            await asyncio.sleep(0.1)

    def _rank_is_up(self) -> bool:
        return "rank" in self.core.up and self._children["rank"].pid is not None

    async def _pull_patiently(self) -> tuple[str, Path]:
        """The core's rank may still be loading."""
        for _ in range(int(CHILD_START_S)):
            with contextlib.suppress(NoAnswer, WeightsError):
                return await self._switcher.pull()
            await asyncio.sleep(0.5)
        raise NoAnswer("rank-c0 has no weights to give")

    async def _port(self, port_file: Path) -> int:
        for _ in range(int(CHILD_START_S / 0.1)):
            if port_file.exists() and (text := port_file.read_text().strip()):
                return int(text)
            if self._children["engine"].pid is None:
                raise OSError(f"the engine ended while starting; see log/engine-{self._cell}.log")
            await asyncio.sleep(0.1)
        raise OSError("the engine did not say its port")

    async def _do_switch(self, order: c.Switch) -> None:
        assert self._engine is not None, "a switch before the engine was up"
        try:
            if order.to is Role.TRAIN:
                account = await asyncio.to_thread(self._account, Role.TRAIN)
                if account is not None and not account.fits:
                    log.critical("switch to train (epoch %d) refused: %s", order.epoch, account.why())
                    self.post(c.SwitchRefused(epoch=order.epoch, why=account.why()))
                    return
                version, phases = await self._switcher.to_train(self._engine, order.epoch)
            else:
                version, phases = await self._switcher.to_rollout(
                    self._engine, order.epoch, order.version, update_only=order.update_only
                )
        except (EngineError, NoAnswer, RuntimeError, OSError) as error:
            log.error("switch to %s (epoch %d) failed: %s", order.to.value, order.epoch, error)
            child = "rank" if isinstance(error, NoAnswer) else "engine"
            await self._children[child].end()
            self.post(c.SwitchFailed(epoch=order.epoch, child=child, detail=str(error)))
            return
        self._memory = await asyncio.to_thread(self._account, order.to)
        self.post(c.Switched(to=order.to, epoch=order.epoch, version=version, phases_s=phases))

    def _account(self, role: Role) -> Account | None:
        return self._books.account(role, {name: child.stacks for name, child in self._children.items()})

    async def _save(self, why: str) -> None:
        with contextlib.suppress(NoAnswer):
            saved = await self._rank.ask(m.SaveCheckpoint(why=why), timeout_s=120.0)
            if isinstance(saved, m.CheckpointSaved):
                self.post(c.Saved(version=saved.version, path=saved.path, seconds=saved.seconds))

    # ---- background -------------------------------------------------------------------------------------------------

    async def hear_cellctl(self) -> None:
        """Orders and welcomes; a welcome that was not asked for means that cellctl does not know us."""
        await self._greet()
        while True:
            message = await self._cellctl.inbox.get()
            if isinstance(message, m.Welcome):
                await self._greet()
            else:
                self.post(message)

    async def _greet(self) -> None:
        hello = m.Hello(kind="celld", name=self._cell, life=self._life, pid=os.getpid())
        while True:
            with contextlib.suppress(NoAnswer):
                await self._cellctl.ask(hello, timeout_s=30.0)
                self.post(c.Welcomed())
                return

    async def beat(self) -> None:
        while True:
            progress, work = self._vitals.progress, self._vitals.work
            beat = m.Heartbeat(kind="celld", name=self._cell, life=self._life, progress=progress, work=work)
            await self._cellctl.send(beat)
            await asyncio.sleep(self.heartbeat_s)

    async def watch_children(self) -> None:
        """Liveness by tokens and micro-steps within a bounded time, not by an open socket: a child that says nothing,
        or that has work and gets nothing done, is as good as dead and started anew.
        """
        while True:
            await asyncio.sleep(self._probe_s)
            await asyncio.gather(self._watch("engine", self._tokens), self._watch("rank", self._micro_steps))

    async def _watch(self, child: str, ask: Callable[[], Awaitable[tuple[int, int] | None]]) -> None:
        pid = self._children[child].pid
        found = await ask() if child in self.core.up else None
        if child not in self.core.up or self._children[child].pid != pid:  # what was heard is of one that is gone
            self._vitals.forget(child)
        elif found is None:
            if self._vitals.silent(child) >= SILENT_PROBES:
                await self._end_stalled(child, f"no answer to {SILENT_PROBES} probes")
        elif stalled_s := self._vitals.look(child, *found, asyncio.get_running_loop().time()):
            await self._end_stalled(child, f"{found[1]} in hand and nothing done for {stalled_s:.0f} s")

    async def _tokens(self) -> tuple[int, int] | None:
        """(generated so far, requests that run); None if it does not answer."""
        assert self._engine is not None
        if not await self._engine.alive(self._probe_s):
            return None
        with contextlib.suppress(EngineError):  # it answers, but tells no metrics
            loads, tokens = await self._engine.loads(), await self._engine.tokens()
            return (0, 0) if tokens is None else (tokens, loads.running)
        return 0, 0

    async def _micro_steps(self) -> tuple[int, int] | None:
        """(committed so far, whether one is in hand); None if it does not answer."""
        with contextlib.suppress(NoAnswer):
            reply = await self._rank.ask(m.StatusRequest(), timeout_s=self._probe_s)
            row = reply.rows[0]
            return int(row["micro_steps"]), int(row["computing"])
        return None

    async def _end_stalled(self, child: str, why: str) -> None:
        """Its stacks into our log, then its end; the core starts another."""
        looks = [asyncio.to_thread(examine, pid, self._run.root, f) for pid, f in self._children[child].stacks.items()]
        found = "\n".join(word for word in await asyncio.gather(*looks) if word)
        log.critical("the %s is stalled: %s; %s", child, why, found or "its process can't be seen")
        self._vitals.forget(child)
        await self._children[child].end()
        self._child_died(child, f"{why}; {found.partition(chr(10))[0]}".rstrip("; "))

    async def heed_supervisor(self) -> None:
        """In a Slurm job: the dead-man switch. Whoever is fenced or orphaned stops its work and ends."""
        if self._allocation is None:
            return
        loop = asyncio.get_running_loop()
        switch = DeadMan(self._config.cluster.dead_man_s, heard_at=loop.time(), looked_at=loop.time())
        beat = m.Heartbeat(kind="celld", name=self._cell, life=self._allocation.restarts)
        while True:
            with contextlib.suppress(NoAnswer):
                answer = await self._supervisor.ask(beat, timeout_s=self.heartbeat_s)
                if isinstance(answer, m.Refused):
                    return self._stop_work(f"fenced: {answer.why}")
                switch.heard(loop.time())
            with contextlib.suppress(TimeoutError):
                word = await asyncio.wait_for(asyncio.to_thread(read_beat, self._run), self.heartbeat_s)
                switch.saw(word, loop.time())
            match switch.verdict(loop.time(), 3 * self.heartbeat_s):
                case Verdict.CUT:
                    return self._stop_work("the supervisor lives and can't be reached: this node is cut off")
                case Verdict.ORPHANED:
                    self.orphaned = True
                    return self._stop_work("the supervisor is gone")
            await asyncio.sleep(self.heartbeat_s)

    def _stop_work(self, why: str) -> None:
        log.error("dead-man switch: %s; this cell stops its work", why)
        self.stopping.set()

    async def answer_people(self) -> None:
        async for received in self._server:
            if isinstance(received.message, m.StatusRequest):
                await self._server.send(received.peer, m.StatusReply(rows=(self._row(),)), received.correlation)
            elif isinstance(received.message, m.OperatorOrder) and received.message.verb == "stop":
                await self._server.send(received.peer, m.Done(note="stopping"), received.correlation)
                self.stopping.set()
            elif isinstance(received.message, m.OperatorOrder):
                refusal = m.Refused(why=f"a cell takes no order {received.message.verb!r}; say it to cellctl")
                await self._server.send(received.peer, refusal, received.correlation)

    def _row(self) -> dict[str, Any]:
        agent = self.core
        return {
            "cell": self._cell,
            "role": agent.role.value,
            "epoch": agent.epoch,
            "version": agent.version,
            "engine": self._config.engine.kind,
            "engine_pid": self._children["engine"].pid,
            "rank_pid": self._ranks.pid,
            "rank_pids": list(self._ranks.stacks),
            "transport": self._transport.name,
            "faults": agent.faults,
            "phases_s": agent.phases_s,
            "refused": agent.refused,
            "memory": self._memory.row() if self._memory is not None else None,
            "url": agent.url,
        }

    async def close(self) -> None:
        """Children first; then the connections."""
        self._stop_switch()
        if self.signalled and self._allocation is not None:
            with contextlib.suppress(NoAnswer):
                await self._supervisor.ask(m.CellEnding(cell=self._cell, why="TERM"), timeout_s=ENDING_S)
        for name in ("engine", "rank"):
            await self._children[name].end()
        await self._cellctl.send(m.Goodbye(kind="celld", name=self._cell, life=self._life))
        if self._engine is not None:
            await self._engine.close()
        if self.orphaned and self._allocation is not None:
            log.error("dead-man switch: %s", await requeue(self._run, self._allocation))
        for connection in (self._cellctl, self._supervisor, self._rank, self._transport):
            connection.close()
        assert self.journal is not None
        self.journal.close()


async def run_agent(run_dir: str, cell: str) -> None:
    """Serve one cell until TERM. Raises RunDirError, RunLocked."""
    run = RunDir.open(run_dir)
    log_to(run.path("log", f"celld-{cell}.log"), name=f"celld-{cell}")
    with run.lock(f"celld-{cell}"):
        await _serve(run, cell)


async def _serve(run: RunDir, cell: str) -> None:
    keys = load_keys(run)
    config = configuration.from_json(run.path("run.json").read_text())
    known = [f"c{i}" for i in range(config.cluster.cells)]
    if cell not in known:
        raise configuration.ConfigError(
            f"no cell is called {cell!r}: {', '.join(known)} (cluster.cells = {len(known)})"
        )
    life = run.next_life(f"celld-{cell}")
    server = Server(run, keys, kind="celld", name=f"celld-{cell}", life=life, bind=config.cluster.bind)
    shell = AgentShell(run, keys, config, cell, life, server)
    stop_on_signals(shell.stopping, lambda: setattr(shell, "signalled", True))
    server.start()
    works = (
        shell.hear_cellctl(),
        shell.beat(),
        shell.watch_children(),
        shell.answer_people(),
        shell.heed_supervisor(),
    )
    for work in works:
        shell.spawn(work)
    shell.post(c.Start())
    try:
        await shell.run()
    finally:
        await shell.close()
        server.close()
