"""The harness processes of one executor: each started behind its walls with a line to the relay, warned and ended.

Owns the children. Decides nothing and tells nobody: the executor waits for `Child.exited` and says what follows.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import subprocess
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from gyre_base import config
from gyre_base.keys import Keys
from gyre_exec import child as children
from gyre_exec.harness import Adapter, Launch
from gyre_exec.quota import Watched
from gyre_exec.relay import Relay
from gyre_exec.tasks import Task
from gyre_exec.workspace import MARK, SOCKET, CommandLine, Workspace

log = logging.getLogger(__name__)
WARNING_S = 10.0


class Harnesses:
    """`beside` runs a coroutine beside the loop (daemon.Shell.spawn)."""

    def __init__(
        self,
        settings: config.Config,
        keys: Keys,
        adapter: Adapter,
        relay: Relay,
        beside: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._settings, self._keys, self._adapter, self._relay, self._beside = settings, keys, adapter, relay, beside
        self._start_folder = str(Path.cwd())
        self.children: dict[str, children.Child] = {}
        self._places: dict[str, Workspace] = {}
        self._warnings: dict[str, tuple[str, ...]] = {}

    async def start(self, name: str, task: Task, place: Workspace) -> tuple[children.Child, children.Sink]:
        """The process and its stderr, for an execution that is open at the relay. Raises OSError, ValueError,
        WorkspaceError.
        """
        launch = self._launch(name, task, place)
        self._adapter.prepare(launch)
        line = place.command(self._adapter.argv(launch), self._adapter.env(launch))
        if line.relay_socket is not None:
            await self._relay.listen(name, line.relay_socket)
        child, err = self._spawn(name, place, line)
        self.children[name], self._places[name], self._warnings[name] = child, place, line.warning
        return child, err

    def _launch(self, name: str, task: Task, place: Workspace) -> Launch:
        return Launch(
            execution=name,
            task=task,
            workspace=place.inside,
            folder=place.harness_inside,
            host_folder=place.harness,
            base_url=place.base_url(name, self._relay.base_url(name)),
            token=self._keys.token(name),
            model=self._settings.model.served_name,
            start_folder=self._start_folder,
            context_tokens=self._settings.engine.context_length,
            max_new_tokens=self._settings.rollout.max_new_tokens,
        )

    def _spawn(self, name: str, place: Workspace, line: CommandLine) -> tuple[children.Child, children.Sink]:
        folder, tasks = place.folder, self._settings.tasks
        out, err = (children.Sink(folder / stream, tasks.printed_mib << 20) for stream in ("stdout", "stderr"))
        ours, theirs = socket.socketpair() if line.hands_over else (None, None)
        try:
            child = children.spawn(
                line.argv if theirs is None else [str(theirs.fileno()) if w == SOCKET else w for w in line.argv],
                cwd=place.root,
                env={**line.env, MARK: f"{folder}/"} if line.walled else line.env,
                stdout=out,
                stderr=err,
                marker=f"{folder}/",
                pass_fds=() if theirs is None else (theirs.fileno(),),
                walled=line.walled,
            )
        except OSError:
            if ours is not None:
                ours.close()
            raise
        finally:
            if theirs is not None:
                theirs.close()
        if ours is not None:
            self._beside(self._adopt(name, ours))
        if not line.walled:  # walls have set their own
            file_bytes = tasks.disk_mib << 20
            with contextlib.suppress(OSError, ValueError):
                resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
        return child, err

    async def _adopt(self, name: str, line: socket.socket) -> None:
        """The sandbox's listening socket comes over `line`, or its end says that there is no sandbox."""
        with line:
            line.setblocking(False)
            await readable(line)
            _, descriptors, _, _ = socket.recv_fds(line, 1, 1)
        for descriptor in descriptors:
            await self._relay.adopt(name, socket.socket(fileno=descriptor))

    def stop(self, name: str, *, now: bool) -> None:
        """Ended at once, or warned, if it still runs."""
        child = self.children.get(name)
        if child is not None and now:
            child.kill()
        elif child is not None and self._warnings.get(name):
            self._beside(_run_briefly(self._warnings[name]))
        elif child is not None:
            child.warn()

    def ended(self, name: str) -> None:
        """It has exited."""
        del self.children[name], self._places[name], self._warnings[name]

    def watched(self) -> list[Watched]:
        """What quotas hold of."""
        places = self._places
        return [Watched(n, child.pid, (places[n].root, places[n].harness)) for n, child in self.children.items()]


async def _run_briefly(argv: Sequence[str]) -> None:
    """A word to another program. It may fail: the limit holds without it."""
    try:
        process = await asyncio.create_subprocess_exec(*argv, stdin=subprocess.DEVNULL)
    except OSError as error:
        log.warning("%s can't be started: %s", argv[0], error)
        return
    try:
        await asyncio.wait_for(process.wait(), WARNING_S)
    except TimeoutError:
        process.kill()


async def readable(sock: socket.socket) -> None:
    """Until there is something to read, or the end."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()

    def come() -> None:
        loop.remove_reader(sock)
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(sock, come)
    try:
        await ready
    finally:
        loop.remove_reader(sock)
