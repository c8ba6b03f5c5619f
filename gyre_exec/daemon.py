"""The executor's shell: harness and evaluator processes, workspaces, the relay, and the line to cellctl.

No decision lives here (core.py has them). Start: `python -m gyre_exec.daemon --run DIR --name ex0`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

from gyre_base import bus, config, daemon, wire
from gyre_base import messages as m
from gyre_base.journal import Journal
from gyre_base.keys import Keys, load_keys
from gyre_base.rundir import RunDir, RunDirError
from gyre_base.shards import proxyd_name
from gyre_base.tasklist import entries
from gyre_base.vocabulary import Outcome, Purpose
from gyre_exec import child as children
from gyre_exec import events as e
from gyre_exec import keeping
from gyre_exec.core import ExecutorCore, Held, Limits
from gyre_exec.evaluator import evaluate
from gyre_exec.fields import TaskError
from gyre_exec.gitobjects import SnapshotError
from gyre_exec.harness import Adapter, adapter_for, showing
from gyre_exec.progress import Progress, Running
from gyre_exec.quota import Watch
from gyre_exec.relay import Relay
from gyre_exec.snapshot import Store
from gyre_exec.starting import Harnesses
from gyre_exec.tasks import Task, from_order
from gyre_exec.upstream import Address, Upstreams, address_of
from gyre_exec.workspace import Settings, Workspace, WorkspaceError, kinds

log = logging.getLogger(__name__)
SMALL_BYTES = 1 << 20  # a workspace up to this size is written at once, a larger one beside the loop
HELLO_S = 10.0
STDERR_CHARS = 400
ANSWER_S = 0.1  # for an answer to get out before the end
STOP_GRACE_S = 2.0


class Executor(daemon.Shell):
    """One executor process."""

    core: ExecutorCore

    def __init__(
        self, run: RunDir, settings: config.Config, keys: Keys, name: str, life: int, adapter: Adapter
    ) -> None:
        slots = settings.tasks.concurrent_per_executor
        limits = Limits(
            slots=slots,
            evaluators=max(2, os.cpu_count() or 2),
            open_call_s=settings.tasks.open_call_s,
            grace_s=settings.tasks.grace_s,
            overall_limit_s=settings.tasks.overall_limit_s,
        )
        core = ExecutorCore(limits)
        super().__init__(core, Journal(run.path("journal", f"{name}.jsonl")))
        self.run_dir, self.settings, self.keys, self.name, self.life = run, settings, keys, name, life
        self.heartbeat_s = settings.cluster.heartbeat_s
        self.adapter = adapter
        self.client = bus.Client(run, keys, "cellctl", identity=f"executor:{name}:{life}")
        self.relay = Relay(Upstreams(self._find_proxyd, settings.proxyd.shards))
        self._tasks_of: dict[str, Task] = {}
        self._workspaces: dict[str, Workspace] = {}
        self.harnesses = Harnesses(settings, keys, adapter, self.relay, self.spawn)
        self.store = Store(run.root)
        self._starts: dict[str, str] = {}  # commits of what executions were given
        self._catalogue: dict[str, dict[str, Any]] | None = None
        self._janitor: asyncio.Queue[Path] = asyncio.Queue()
        self._kind = kinds()[settings.tasks.workspace]
        self._places = places_of(settings.tasks)
        self._printed = settings.tasks.printed_mib << 20
        self._watch = Watch(
            disk_bytes=settings.tasks.disk_mib << 20,
            processes=settings.tasks.processes,
            running=self.harnesses.watched,
            over=lambda name, why: self.post(e.OverQuota(execution=name, why=why)),
            root=run.path("executions"),
        )
        limit_s = settings.tasks.evaluation_limit_s
        self._progress = Progress(settings.tasks.progress_every_s, limit_s, self._in_progress)
        self._server_seen: tuple[str, int] | None = None
        self._proxies_seen: dict[int, tuple[str, int]] = {}  # by shard: address and life

    # ---- effects --------------------------------------------------------------------------------------------------

    async def perform(self, command: Any) -> None:
        match command:
            case m.ExecutionFinished() | m.ExecutionEnded():
                await self.client.send(command)
            case e.Prepare(execution=name):
                await self._prepare(name)
            case e.Start(execution=name):
                await self._start(name)
            case e.ReadClock(execution=name):
                if name in self.harnesses.children:
                    waited_s, call_open = self.relay.clock(name)
                    self.post(e.ClockRead(execution=name, waited_s=waited_s, call_open=call_open))
            case e.StopHarness(execution=name, now=now):
                self.harnesses.stop(name, now=now)
            case e.Evaluate(execution=name, time_up=time_up):
                self.spawn(self._evaluate(name, time_up))
            case e.Settle(execution=name):
                self._settle(name)
            case e.Forget(execution=name):
                self._tasks_of.pop(name, None)
            case _:
                raise AssertionError(f"executor: no effect for {command!r}")

    def folder(self, execution: str) -> Path:
        return self.run_dir.path("executions", execution)

    async def _prepare(self, name: str) -> None:
        try:
            task = self._tasks_of[name] = self._task(self.core.held[name].order)
            place = self._workspaces[name] = self._kind(self.folder(name), self._places)
            if sum(map(len, task.workspace.values())) <= SMALL_BYTES and not task.container:
                self._make(name, place, task)
                self.post(e.Prepared(execution=name, limit_s=task.limit_s))
            else:
                self.spawn(self._prepare_beside(name, place, task))
        except (TaskError, WorkspaceError) as error:
            self._broken(name, error)

    async def _prepare_beside(self, name: str, place: Workspace, task: Task) -> None:
        try:
            await asyncio.to_thread(self._make, name, place, task)
        except WorkspaceError as error:
            self._broken(name, error)
        else:
            self.post(e.Prepared(execution=name, limit_s=task.limit_s))

    def _make(self, name: str, place: Workspace, task: Task) -> None:
        """The workspace, and its start in the store: the same for all executions of a task."""
        place.prepare(task)
        if self.settings.tasks.snapshots:
            key = (task.id, hash(tuple(task.workspace.items())))
            try:
                self._starts[name] = self.store.start(key, place.root, self._watch.disk_bytes)
            except SnapshotError as error:
                log.warning("the start of %s is not kept: %s", name, error)

    def _broken(self, name: str, error: Exception) -> None:
        outcome = Outcome.UNSCORED if isinstance(error, TaskError) else Outcome.INFRA_FAILED
        log.warning("%s can't run: %s", name, error)
        self.post(e.Broken(execution=name, outcome=outcome, why=str(error)))

    def _task(self, order: m.ExecutionOrder) -> Task:
        """The order's task; if it is only an id, the task of that id in the run's task files."""
        settings = self.settings.tasks
        source = settings.train if order.purpose is Purpose.TRAIN else settings.heldout or settings.train
        body = order.task
        if set(body) <= {"id"}:
            body = self._look_up(str(body.get("id")))
        folder = str(body.get("task_file_dir") or (Path(source).parent if source else ""))
        return from_order(body, folder=folder, where=f"order of {order.execution}")

    def _look_up(self, task: str) -> dict[str, Any]:
        if self._catalogue is None:
            self._catalogue = {}
            for path in filter(None, (self.settings.tasks.heldout, self.settings.tasks.train)):
                self._catalogue.update(_catalogue(Path(path)))
        if task not in self._catalogue:
            raise TaskError(f"no task is called {task!r} in {self.settings.tasks.train or 'tasks.train (not set)'}")
        return self._catalogue[task]

    async def _start(self, name: str) -> None:
        self.relay.open(name)
        try:
            child, err = await self.harnesses.start(name, self._tasks_of[name], self._workspaces[name])
        except (OSError, ValueError, WorkspaceError) as error:
            self.relay.close(name)
            self._broken(name, WorkspaceError(f"the harness can't be started: {error}"))
            return
        began_at = self.clock.now()
        with contextlib.suppress(OSError):
            keeping.note_pid(self.folder(name), self.name, child.pid)
        child.exited.add_done_callback(lambda exited: self._harness_ended(name, exited, err))
        self.post(e.Started(execution=name, pid=child.pid, at=began_at))

    def _in_progress(self) -> list[Running]:
        held, places, tasks = self.core.held, self._workspaces, self._tasks_of
        return [
            Running(execution=n, task=tasks[n], place=places[n], started_at=held[n].started_at)
            for n in self.harnesses.children
        ]

    def _harness_ended(self, name: str, exited: asyncio.Future[int], err: children.Sink) -> None:
        if exited.cancelled() or self.stopping.is_set():
            return
        self.harnesses.ended(name)
        account, waited_s = self.relay.close(name)
        self.post(
            e.HarnessEnded(
                execution=name,
                exit_code=exited.result(),
                waited_s=waited_s,
                calls=account.calls,
                harness_errors=account.errors,
                stderr_tail=err.tail()[-STDERR_CHARS:] if exited.result() else "",
                at=self.clock.now(),
            )
        )

    async def _evaluate(self, name: str, time_up: bool) -> None:
        task, place = self._tasks_of[name], self._workspaces[name]
        if self.settings.tasks.snapshots and name in self._starts:
            await asyncio.to_thread(self._keep, name, place, self._starts.pop(name))
        ruler = task.ruler(time_up=time_up)
        if ruler is None:
            why = "time ran out, and the task says that partial work can't be graded"
            self.post(e.Evaluated(execution=name, verdict="refused", error=why))
            return
        scorer = type(place)(folder=self.folder(name) / "scoring", settings=place.settings)
        limit_s = self.settings.tasks.evaluation_limit_s
        self.post(await evaluate(name, task, ruler, place.root, scorer, limit_s))

    def _keep(self, name: str, place: Workspace, start: str) -> None:
        """The workspace as it is about to be scored. Trouble here costs the snapshot, not the score."""
        try:
            self.store.keep(name, place.root, start, self._watch.disk_bytes)
        except SnapshotError as error:
            log.warning("no snapshot of %s: %s", name, error)

    def _settle(self, name: str) -> None:
        finished = self.core.held[name].outcome
        assert finished is not None
        self._workspaces.pop(name, None)
        self._starts.pop(name, None)
        try:
            keeping.write_outcome(self.folder(name), finished)
        except OSError as error:
            log.error("the outcome of %s is not on disk: %s", name, error)
        self._janitor.put_nowait(self.folder(name))

    async def _clean(self) -> None:
        """Workspaces go beside the loop, many in one go."""
        keep = self.settings.tasks.keep_workspaces
        while True:
            batch = [await self._janitor.get()]
            while not self._janitor.empty():
                batch.append(self._janitor.get_nowait())
            await asyncio.to_thread(_tidy_all, batch, keep, self._printed)

    # ---- the line to cellctl and proxyd ---------------------------------------------------------------------------

    def _find_proxyd(self, shard: int) -> Address | None:
        endpoint = self.run_dir.endpoint(proxyd_name(shard))
        url = endpoint.extra.get("http") if endpoint is not None else None
        return address_of(url) if url else None

    async def _say_hello(self) -> None:
        """Until cellctl answers. What we hold is counted anew each time: an old list would disown newer orders."""
        while True:
            endpoint = self.run_dir.endpoint("cellctl")
            seen = (endpoint.address, endpoint.life) if endpoint else None
            hello = m.Hello(
                kind="executor",
                name=self.name,
                life=self.life,
                pid=os.getpid(),
                slots=self.settings.tasks.concurrent_per_executor,
                holds=self.core.holds(),
                detail={"relay_port": self.relay.port},
            )
            with contextlib.suppress(bus.NoAnswer):
                answer = await self.client.ask(hello, timeout_s=HELLO_S, again_every_s=HELLO_S)
                if isinstance(answer, m.Welcome):
                    self._server_seen = seen
                    self.post(answer)
                    return
                log.warning("cellctl does not want us: %r; asking again", answer)
                await asyncio.sleep(self.heartbeat_s)

    async def _keep_in_touch(self) -> None:
        """Heartbeats; hello again when cellctl is another one; calls sent again when proxyd is."""
        await self._say_hello()
        while True:
            await asyncio.sleep(self.heartbeat_s / 2)
            endpoint = self.run_dir.endpoint("cellctl")
            if endpoint is not None and (endpoint.address, endpoint.life) != self._server_seen:
                await self._say_hello()
            progress, work = sum(self.core.finished.values()), len(self.core.held)
            beat = m.Heartbeat(kind="executor", name=self.name, life=self.life, progress=progress, work=work)
            await self.client.send(beat)
            for shard in range(self.settings.proxyd.shards):
                self._look_at_proxyd(shard)

    def _look_at_proxyd(self, shard: int) -> None:
        proxyd = self.run_dir.endpoint(proxyd_name(shard))
        seen = self._proxies_seen.get(shard)
        if proxyd is not None and seen != (proxyd.address, proxyd.life):
            if seen is not None:
                self.relay.proxy_moved(shard)
            self._proxies_seen[shard] = (proxyd.address, proxyd.life)

    async def _listen(self) -> None:
        while True:
            said = await self.client.inbox.get()
            match said:
                case m.ExecutionOrder() | m.CancelExecution() | m.ExecutionNoted():
                    self.post(said)
                case m.Welcome() | m.Hello() | m.Refused():  # unasked: it does not know us (any more)
                    await self._say_hello()
                case _:
                    log.warning("cellctl said %r, which is not for executors", wire.to_json(said)["tag"])

    async def _answer(self, server: bus.Server) -> None:
        async for received in server:
            match received.message:
                case m.StatusRequest(what="status"):
                    answer: Any = m.StatusReply(rows=(self._status(),))
                case m.StatusRequest(what="executions"):
                    answer = m.StatusReply(rows=tuple(self._executions()))
                case m.StatusRequest(what=what):
                    answer = m.Refused(why=f"no view is called {what!r}: status, executions")
                case m.OperatorOrder(verb="leave"):
                    answer = self._leave_if_idle()
                case _:
                    answer = m.Refused(why="an executor answers status only")
            await server.send(received.peer, answer, received.correlation)

    def _leave_if_idle(self) -> m.Done | m.Refused:
        if self.core.held:
            return m.Refused(why=f"{len(self.core.held)} executions are held")
        asyncio.get_running_loop().call_later(ANSWER_S, self.stopping.set)
        return m.Done(note="leaves")

    def _status(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "kind": "executor",
            "life": self.life,
            "slots": self.core.limits.slots,
            **self.core.counts(),
            "finished": dict(self.core.finished),
            "cpu_s": round(time.process_time(), 3),
            "rss_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        }

    def _executions(self) -> list[dict[str, Any]]:
        now = self.clock.now()
        return [
            {
                "execution": name,
                "group": held.order.group,
                "state": held.state.value,
                "running_s": round(now - held.started_at, 1)
                if held.started_at and held.outcome is None
                else held.wall_s,
                "limit_s": held.limit_s or held.order.limit_s,
                "waited_s": round(self._waited_s(name, held), 1),
            }
            for name, held in self.core.held.items()
        ]

    def _waited_s(self, name: str, held: Held) -> float:
        """What the infrastructure has cost it so far: its limit moves by as much."""
        if held.end is not None:
            return held.end.waited_s
        return self.relay.clock(name)[0] if name in self.harnesses.children else 0.0

    # ---- life -----------------------------------------------------------------------------------------------------

    async def serve(self) -> None:
        """Until a signal. Leaves no process behind."""
        children.become_subreaper()
        swept = keeping.sweep(self.run_dir.path("executions"), self.name, self._printed)
        if swept:
            log.warning("%d executions of an earlier life were still there; they are ended", swept)
        children.GUARD.start()
        await self.relay.start()
        bind = self.settings.cluster.bind
        server = bus.Server(self.run_dir, self.keys, kind="executor", name=self.name, life=self.life, bind=bind)
        server.start()
        daemon.stop_on_signals(self.stopping)
        beside = (self._watch.run(), self._progress.run(), self._clean(), self._answer(server))
        for work in (*beside, self._keep_in_touch(), self._listen()):
            self.spawn(work)
        try:
            await self.run()
        finally:
            self.stopping.set()
            await self._leave(server)

    async def _leave(self, server: bus.Server) -> None:
        with contextlib.suppress(Exception):
            await self.client.send(m.Goodbye(kind="executor", name=self.name, life=self.life))
        await children.kill_all(STOP_GRACE_S)
        await self.relay.stop()
        for name in self.core.held:
            keeping.tidy(self.folder(name), keep=self.settings.tasks.keep_workspaces, limit=self._printed)
        children.GUARD.stop()
        self.client.close()
        server.close()
        if self.journal is not None:
            self.journal.close()


def places_of(tasks: config.TaskConfig) -> Settings:
    """What a run says of all its workspaces."""
    return Settings(
        image=tasks.image,
        images=tasks.images,
        visible=tasks.visible,
        file_bytes=tasks.disk_mib << 20,
        processes=tasks.processes,
    )


def _tidy_all(batch: list[Path], keep: bool, limit: int) -> None:
    for folder in batch:
        keeping.tidy(folder, keep=keep, limit=limit)


def _catalogue(path: Path) -> dict[str, dict[str, Any]]:
    try:
        return {name: {**body, "task_file_dir": str(path.parent)} for name, body in entries(path).items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TaskError(f"{path}: cannot be read as tasks ({error})") from None


async def run_executor(run_dir: str | Path, name: str) -> None:
    """Run the executor `name` until TERM. Raises RunDirError, ConfigError or ValueError with one clear line."""
    run = RunDir.open(run_dir)
    settings = config.from_json(run.path("run.json").read_text())
    adapter = adapter_for(settings.tasks.harness, settings.tasks.harness_env)
    with run.lock(name):
        executor = Executor(run, showing(settings, adapter), load_keys(run), name, run.next_life(name), adapter)
        await executor.serve()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m gyre_exec.daemon", description="Run one executor of a run.")
    parser.add_argument("--run", required=True, help="the run directory")
    parser.add_argument("--name", default="ex0", help="name of this executor, such as ex0")
    options = parser.parse_args(argv)
    logs = Path(options.run, "log")
    daemon.log_to(logs / f"{options.name}.log" if logs.is_dir() else None, name=options.name)
    try:
        daemon.run_main(lambda: run_executor(options.run, options.name))
    except RunDirError as error:
        print(f"executor {options.name}: {error}", file=sys.stderr)
        return 4
    except (config.ConfigError, ValueError, PermissionError) as error:
        print(f"executor {options.name}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
