"""The shell around the scheduler: sockets in, journal, messages out. Decides nothing."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import orjson

from cellctl import durations, view
from cellctl.alarms import PeerMoves, PeerStalled, StacksKept
from cellctl.core import Restart, Scheduler, Start
from cellctl.liveness import Liveness
from gyre_base import config as configuration
from gyre_base import journal as journals
from gyre_base import messages as m
from gyre_base import wire
from gyre_base.bus import Received, Server
from gyre_base.daemon import Answer, PeerLost, Send, Shell, WakeAt, log_to, stop_on_signals
from gyre_base.keys import load_keys
from gyre_base.rundir import RunDir
from gyre_base.stacks import examine
from gyre_base.tasklist import entries

log = logging.getLogger(__name__)
DURABLE = (m.ExecutionFinished, m.StepDone, m.GroupPacked, Start)
SAMPLE_S = 0.25
BATCH = 256  # events that share one wait for the disk
VIEWS = ("status", "explain", "results", "timeline")


class CellctlShell(Shell):
    """Peers are known as `kind:name`; the newest life of a name wins."""

    core: Scheduler

    def __init__(
        self,
        core: Scheduler,
        journal: journals.Journal,
        server: Server,
        run: RunDir,
        life: int,
        liveness: Liveness,
    ) -> None:
        super().__init__(core, journal)
        self._server, self._run, self._life = server, run, life
        self._routes: dict[str, bytes] = {}
        self.liveness = liveness
        self._pids: dict[str, int] = {}
        self._asker: Received | None = None
        self._incoming: asyncio.Queue[Received] = asyncio.Queue(maxsize=4 * BATCH)
        self._decided: list[tuple[Any, Received | None]] = []
        self._must_sync = False
        self._leavers: list[str] = []
        self._tasks_by_id: dict[str, dict[str, Any]] = {}
        self._timeline = open(run.path("metrics", "timeline.jsonl"), "ab", buffering=0)  # noqa: SIM115
        self._last_sample: dict[str, Any] = {}
        self._sampled: tuple[Any, float] = (None, 0.0)
        self._one_at_a_time = asyncio.Lock()

    def know_tasks(self, tasks: dict[str, dict[str, Any]]) -> None:
        """Task payloads by id: the core and the journal only carry ids."""
        self._tasks_by_id = tasks

    def expect(self, peers: list[str]) -> None:
        """After a restart: these peers are lost unless they say hello in time."""
        for peer in peers:
            self.liveness.heard(peer, self.clock.now())

    async def listen(self) -> None:
        """All that comes in, in order, up to a bound; beyond it ZeroMQ holds the rest. A heartbeat does not queue:
        while the
        disk is slow and events wait for it, nobody is to be given up for that."""
        async for received in self._server:
            match received.message:
                case m.Heartbeat():
                    await self._beat(received, received.message)
                case m.Stacks(text=text):
                    self._keep_stacks(received.peer, text)
                case _:
                    await self._incoming.put(received)

    async def work(self) -> None:
        """Whatever has come in is one batch: decided one by one, on disk once, then carried out."""
        while True:
            batch = [await self._incoming.get()]
            while len(batch) < BATCH and not self._incoming.empty():
                batch.append(self._incoming.get_nowait())
            async with self._one_at_a_time:
                for received in batch:
                    await self._take(received)
                await self._carry_out()

    async def _take(self, received: Received) -> None:
        """Questions are answered here from the state, orders go through the core."""
        message = received.message
        match message:
            case m.Hello(kind=kind, name=name, pid=pid):
                self._routes[f"{kind}:{name}"] = received.peer
                self._pids[f"{kind}:{name}"] = pid
                self.liveness.heard(f"{kind}:{name}", self.clock.now())
                await self._server.send(received.peer, m.Welcome(life=self._life), received.correlation)
                self._decide(message, None)
            case m.StatusRequest():
                reply = m.StatusReply(rows=tuple(self._rows(message)))
                await self._server.send(received.peer, reply, received.correlation)
            case _:
                self._decide(message, received)

    async def _beat(self, received: Received, beat: m.Heartbeat) -> None:
        """A peer that we do not know (we restarted, or gave it up), or that holds other executions than we think, is
        asked to say hello: that makes both lists one."""
        peer, now = f"{beat.kind}:{beat.name}", self.clock.now()
        if peer not in self._routes:
            await self._server.send(received.peer, m.Welcome(life=self._life))
            return
        if beat.kind != "executor":
            if self.liveness.beat(peer, beat.progress, beat.work, now):
                self._spawn_step(PeerMoves(kind=beat.kind, name=beat.name))
            return
        self.liveness.heard(peer, now)
        executor = self.core.executors.get(beat.name)
        if executor is not None and self.liveness.disagrees(peer, beat.work, executor.held):
            log.warning("%s holds %d executions, not %d; both lists are compared", peer, beat.work, executor.held)
            await self._server.send(received.peer, m.Welcome(life=self._life))

    def _spawn_step(self, event: Any) -> None:
        """Into the ordered stream, without holding up the heartbeats."""
        self.spawn(self.step(event))

    def _keep_stacks(self, route: bytes, text: str) -> None:
        """Into a file of its own; `status` names it."""
        peer = next((known for known, its in self._routes.items() if its == route), "")
        alarm = self.core.alarms.get(peer)
        if alarm is not None:
            path = self._run.path("log", f"stalled-{peer.replace(':', '-')}-{int(alarm.since)}.txt")
            path.write_text(text)
            log.critical("%s %s; its stacks are in %s", peer, alarm.what, path)
            self._spawn_step(StacksKept(peer=peer, file=str(path.relative_to(self._run.root))))

    def _rows(self, request: m.StatusRequest) -> list[dict[str, Any]]:
        now = self.clock.now()
        match request.what:
            case "explain":
                return view.explain(self.core, request.argument, now)
            case "results":
                return view.results(self.core)
            case "timeline":
                return [view.timeline_row(self.core, now)]
            case "status":
                return view.status(self.core, now)
        return [{"error": f"no view is called {request.what!r}: {', '.join(VIEWS)}"}]

    async def watch_peers(self) -> None:
        """Silence is a loss; Slurm would notice minutes later. Work without progress is an alarm. While this process
        stood still itself it could hear nobody: that time is held against no peer."""
        before = self.clock.now()
        while True:
            await asyncio.sleep(self.heartbeat_s)
            now = self.clock.now()
            stood_s = max(0.0, now - before - self.heartbeat_s)
            before = now
            self.liveness.we_stood_still(stood_s, now)
            for peer, seconds in self.liveness.silent(now):
                self._routes.pop(peer, None)
                kind, _, name = peer.partition(":")
                why = f"silent for {seconds:.0f} s" + await self._seen_from_outside(peer)
                await self.step(PeerLost(kind=kind, name=name, why=why))
            for stall in self.liveness.stalled(now):
                kind, _, name = stall.peer.partition(":")
                await self.step(PeerStalled(kind=kind, name=name, work=stall.work, seconds=stall.seconds))

    async def _seen_from_outside(self, peer: str) -> str:
        """Where its process stands, if it is one of this machine; its stacks go into the log."""
        kind, _, name = peer.partition(":")
        file = name if kind in ("executor", "trajd") else f"{kind}-{name}"
        dump = self._run.path("log", f"{file}.stacks")
        found = await asyncio.to_thread(examine, self._pids.get(peer, 0), self._run.root, dump)
        state, _, text = found.partition("\n")
        if text:
            log.critical("%s is silent; what it does:\n%s", peer, text)
        return f"; {state}" if state else ""

    async def drain_timers(self) -> None:
        """Ticks that the core asked for."""
        while True:
            await self.step(await self.inbox.get())

    async def step(self, event: Any) -> None:
        async with self._one_at_a_time:  # effects of one event go out before the next is decided
            self._decide(event, None)
            await self._carry_out()

    def _decide(self, event: Any, asker: Received | None) -> None:
        """Through the core and into the journal; its commands wait until the journal is on disk."""
        now = self.clock.now()
        commands = self.core.handle(event, now)
        assert self.journal is not None
        self.journal.write(now, event, commands)
        self._must_sync = self._must_sync or isinstance(event, DURABLE)
        self._decided.extend((command, asker) for command in commands)
        if isinstance(event, m.Goodbye):
            self._leavers.append(f"{event.kind}:{event.name}")
        self._sample()

    async def _carry_out(self) -> None:
        decided, self._decided = self._decided, []
        if self._must_sync and self.journal is not None:
            self._must_sync = False
            await asyncio.get_running_loop().run_in_executor(None, self.journal.sync)
        for command, asker in decided:
            if isinstance(command, WakeAt):
                self._wake_at(command.at, self.clock.now())
            else:
                self._asker = asker
                await self.perform(command)
        for peer in self._leavers:
            self._routes.pop(peer, None)
            self.liveness.forget(peer)
        self._leavers.clear()

    def _sample(self) -> None:
        """One row when a role, the phase or the step changes; else at most one per `SAMPLE_S` when the level does."""
        core, now = self.core, self.clock.now()
        shape = (core.changes, core.phase, core.version)
        if shape == self._sampled[0] and now - self._sampled[1] < SAMPLE_S:
            return
        self._sampled = (shape, now)
        row = view.timeline_row(core, now)
        if {**row, "at": 0} != {**self._last_sample, "at": 0}:
            self._timeline.write(orjson.dumps(row) + b"\n")
            self._last_sample = row

    async def perform(self, command: Any) -> None:
        match command:
            case Answer(message=message):
                if self._asker is not None:
                    await self._server.send(self._asker.peer, message, self._asker.correlation)
            case Send(to=to, message=message):
                for route in self._routes_to(to):
                    await self._server.send(route, self._whole(message))

    def _routes_to(self, to: str) -> list[bytes]:
        kind, _, name = to.partition(":")
        if name == "*":
            return [route for peer, route in self._routes.items() if peer.startswith(f"{kind}:")]
        route = self._routes.get(to)
        return [route] if route is not None else []

    def _whole(self, message: Any) -> Any:
        if not isinstance(message, m.ExecutionOrder):
            return message
        task = self._tasks_by_id[message.task["id"]]
        return m.ExecutionOrder(**{**message.__dict__, "task": task})


def restore(path: Path) -> Scheduler:
    """A scheduler as its journal left it. An empty or missing journal gives a new one."""
    core = Scheduler()
    if path.exists():
        for entry in journals.read(path):
            core.handle(wire.from_json(entry.event), entry.at)
    return core


async def run_cellctl(run_dir: str) -> None:
    """Serve one run until TERM. A second start continues from the journal."""
    run = RunDir.open(run_dir)
    log_to(run.path("log", "cellctl.log"), name="cellctl")
    with run.lock("cellctl"):
        await _serve(run)


async def _serve(run: RunDir) -> None:
    keys = load_keys(run)
    config = configuration.from_json(run.path("run.json").read_text())
    life = run.next_life("cellctl")
    path = run.path("journal", "cellctl.jsonl")
    journals.mend_tail(path)
    core = restore(path)
    server = Server(run, keys, kind="cellctl", name="cellctl", life=life, bind=config.cluster.bind)
    liveness = Liveness(config.cluster.peer_timeout_s, config.cluster.stall_s)
    shell = CellctlShell(core, journals.Journal(path), server, run, life, liveness)
    shell.heartbeat_s = config.cluster.heartbeat_s
    train, heldout = entries(config.tasks.train), entries(config.tasks.heldout)
    shell.know_tasks({**train, **heldout})
    stop_on_signals(shell.stopping)
    server.start()
    if core.phase == "new":
        tree = orjson.loads(configuration.to_json(config))
        known = durations.read(Path(config.scheduler.forecast_from)) if config.scheduler.forecast_from else {}
        seconds = {task: tuple(h * 3600.0 for h in hours) for task, hours in known.items()}
        await shell.step(Start(config=tree, train=tuple(train), heldout=tuple(heldout), durations_s=seconds))
    else:
        shell.expect([f"executor:{name}" for name in core.executors])
        await shell.step(Restart(life=life))
    log.info("cellctl life %d listens on %s, phase %s", life, server.address, core.phase)
    for work in (shell.listen(), shell.work(), shell.watch_peers(), shell.drain_timers()):
        shell.spawn(work)
    try:
        await shell.stopping.wait()
    finally:
        await shell.cancel_tasks()
        assert shell.journal is not None
        shell.journal.close()
        server.close()
