"""The same loop for every daemon: one ordered stream of stamped events, a pure core, a journal, effects as values.

No decision lives here. An event is stamped once, on arrival, so that a replay of the journal sees the same time.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gyre_base.clock import Clock, WallClock
from gyre_base.config import ClusterConfig
from gyre_base.journal import Journal
from gyre_base.messages import message
from gyre_base.stacks import LoopWatch, dump_on_signal

log = logging.getLogger(__name__)
TIMER_SLACK_S = 0.002  # uvloop's timers may ring a millisecond early; a core that compares times would lose its alarm


@message("tick")
class Tick:
    """A timer that a core asked for came due (WakeAt)."""


@message("peer.lost")
class PeerLost:
    """shell -> core: no heartbeat from this peer for too long, or its process ended."""

    kind: str
    name: str
    why: str


@message("wake")
class WakeAt:
    """core -> shell: hand me a Tick at this time (s since the epoch)."""

    at: float


@dataclass(frozen=True)
class Send:
    """core -> shell: give `message` to the peer `to`, written `kind:name` (`kind:*` = every peer of that kind)."""

    to: str
    message: Any


@dataclass(frozen=True)
class Answer:
    """core -> shell: give `message` to whoever asked what is being handled."""

    message: Any


class Core(Protocol):
    """Pure: no IO, no clock, no randomness of its own."""

    def handle(self, event: Any, now: float) -> list[Any]: ...


class Shell(ABC):
    """Feeds a core and carries out what it says. Subclasses implement `perform` and may start background tasks."""

    def __init__(self, core: Core, journal: Journal | None, clock: Clock | None = None) -> None:
        self.core = core
        self.journal = journal
        self.clock = clock or WallClock()
        self.inbox: asyncio.Queue[Any] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self.stopping = asyncio.Event()
        self.heartbeat_s = ClusterConfig.heartbeat_s

    def post(self, event: Any) -> None:
        """Put an event into the stream."""
        self.inbox.put_nowait(event)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run an effect beside the loop. Its failure is logged with its traceback and stops the daemon: no silent
        half-life.
        """
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.critical("a background task died", exc_info=task.exception())
            self.stopping.set()

    async def run(self) -> None:
        """Until `stopping` is set. A core that raises stops the daemon after the entry is in the log."""
        stop = asyncio.get_running_loop().create_task(self.stopping.wait())
        try:
            while not self.stopping.is_set():
                get = asyncio.get_running_loop().create_task(self.inbox.get())
                done, _ = await asyncio.wait({get, stop}, return_when=asyncio.FIRST_COMPLETED)
                if get not in done:
                    get.cancel()
                    break
                await self.step(get.result())
        finally:
            stop.cancel()
            await self.cancel_tasks()

    async def cancel_tasks(self) -> None:
        """End the background work and wait until it has ended."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def step(self, event: Any) -> None:
        """One event through the core: decide, journal, perform."""
        now = self.clock.now()
        commands = self.core.handle(event, now)
        if self.journal is not None:
            self.journal.write(now, event, commands, durable=self.is_durable(event))
        for command in commands:
            if isinstance(command, WakeAt):
                self._wake_at(command.at, now)
            else:
                await self.perform(command)

    def _wake_at(self, at: float, now: float) -> None:
        delay = max(0.0, at - now) + TIMER_SLACK_S
        asyncio.get_running_loop().call_later(delay, self.post, Tick())

    def is_durable(self, event: Any) -> bool:
        """Whether this entry must be on disk before its commands go out. Override for what must not be lost."""
        return False

    @abstractmethod
    async def perform(self, command: Any) -> None:
        """One effect: a message to a peer, a process, a file."""


def run_main(main: Callable[[], Coroutine[Any, Any, None]], *, watch_loop: bool = True) -> None:
    """asyncio.run with uvloop where there is one. A loop that stands still leaves its stacks in the log; not where a
    person waits before a terminal, for whom slow imports are no story.
    """

    async def watched() -> None:
        if not watch_loop:
            return await main()
        watch = LoopWatch()
        watch.start(asyncio.get_running_loop())
        try:
            await main()
        finally:
            watch.end()

    with contextlib.suppress(ImportError):
        import uvloop

        uvloop.run(watched())
        return
    asyncio.run(watched())


def stop_on_signals(stopping: asyncio.Event, told: Callable[[], None] | None = None) -> None:
    """TERM, INT and USR1 mean the same everywhere in gyre: leave cleanly, losing nothing. `told` is called first."""
    loop = asyncio.get_running_loop()

    def leave() -> None:
        if told is not None:
            told()
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        loop.add_signal_handler(number, leave)


def log_to(path: Path | None, *, name: str) -> None:
    """One log file per daemon; stderr as well when it is a terminal or no file is given. SIGUSR2: stacks beside it."""
    handlers: list[logging.Handler] = []
    if path is not None:
        handlers.append(logging.FileHandler(path))
        dump_on_signal(open(path.with_suffix(".stacks"), "a"))  # noqa: SIM115 - for the life of the process
    if path is None or sys.stderr.isatty():
        handlers.append(logging.StreamHandler(sys.stderr))
    logging.basicConfig(
        level=logging.INFO, handlers=handlers, format=f"%(asctime)s {name} %(levelname)s %(name)s: %(message)s"
    )


def die_with_parent() -> None:
    """Linux: this process gets TERM when the one that started it ends, however it ends (PR_SET_PDEATHSIG)."""
    pr_set_pdeathsig = 1
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGTERM, 0, 0, 0)
    if os.getppid() == 1:
        log.warning("started without a parent: nothing will stop this process but a signal")
