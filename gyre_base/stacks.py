"""What a process is doing when it does nothing: stacks of its threads and tasks, on request, on a signal, or by itself.

Three ways, for three kinds of standstill: `stacks()` while the loop still answers; `LoopWatch` when one piece of work
blocks the loop; SIGUSR2 (`dump_on_signal`) when even that thread is stuck. `examine` looks at another process of this
machine from outside, a stopped one too.
"""

from __future__ import annotations

import asyncio
import faulthandler
import io
import logging
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import IO

log = logging.getLogger(__name__)
LAG_S = 10.0  # a loop that does not turn for so long is said to stand still
TASKS_SHOWN = 200
DUMP_WAIT_S = 1.0
TAIL_BYTES = 64 << 10


def stacks(loop: asyncio.AbstractEventLoop | None = None) -> str:
    """Every thread, then every task of `loop` (default: the running one) that is not done."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    out = io.StringIO()
    for ident, frame in sys._current_frames().items():
        out.write(f"thread {names.get(ident, ident)}\n{''.join(traceback.format_stack(frame))}\n")
    tasks = [task for task in asyncio.all_tasks(loop) if not task.done()] if loop or _runs_loop() else []
    for task in tasks[:TASKS_SHOWN]:
        out.write(f"task {task.get_name()}\n")
        task.print_stack(file=out)
    if len(tasks) > TASKS_SHOWN:
        out.write(f"... and {len(tasks) - TASKS_SHOWN} more tasks\n")
    return out.getvalue()


def _runs_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class LoopWatch:
    """A thread that logs the stacks once when the loop stands still, and how long it was when it goes on."""

    def __init__(self, lag_s: float = LAG_S) -> None:
        self._lag_s = lag_s
        self._turned = time.monotonic()
        self._ended = threading.Event()
        self.longest_s = 0.0

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Call inside the loop."""
        self._turn(loop)
        threading.Thread(target=self._watch, args=(loop,), name="loop watch", daemon=True).start()

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        now = time.monotonic()
        stood_s, self._turned = now - self._turned, now
        self.longest_s = max(self.longest_s, stood_s)
        if stood_s > self._lag_s:
            log.critical("the loop turns again after %.1f s", stood_s)
        if not self._ended.is_set():
            loop.call_later(self._lag_s / 4, self._turn, loop)

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        told = looked = time.monotonic()
        while not self._ended.wait(self._lag_s / 4):
            before, looked = looked, time.monotonic()
            if looked - before > self._lag_s:  # we stood still as well: the whole process was stopped, or the machine
                continue
            if self._turned != told and looked - self._turned > self._lag_s:
                told = self._turned
                log.critical("the loop stands still for %.1f s\n%s", looked - self._turned, stacks(loop))

    def end(self) -> None:
        self._ended.set()


def dump_on_signal(file: IO[str]) -> None:
    """SIGUSR2 writes the stacks of all threads to `file`, from C: it works while Python is blocked."""
    faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)


def examine(pid: int, belongs_to: Path, dump: Path | None = None) -> str:
    """State of another process on this machine, and its stacks if it catches SIGUSR2 and writes them to `dump`.

    "" if there is no process `pid` with `belongs_to` in its command line: it lives elsewhere, or is gone.
    """
    folder = Path("/proc") / str(pid)
    try:
        if os.fsencode(belongs_to) not in (folder / "cmdline").read_bytes():
            return ""
        status = dict(line.split(":\t", 1) for line in (folder / "status").read_text().splitlines() if ":\t" in line)
        state, caught = status["State"].strip(), int(status["SigCgt"], 16)
        where = (folder / "wchan").read_text().strip()
    except (OSError, KeyError, ValueError):
        return ""
    words = f"process {pid} is in state {state}" + (f", in {where}" if where not in ("", "0") else "")
    if dump is None or not caught >> (signal.SIGUSR2 - 1) & 1:
        return words
    return f"{words}\n{_dump(pid, dump)}".rstrip()


def _dump(pid: int, dump: Path) -> str:
    """What the process adds to its dump file within a second."""
    before = dump.stat().st_size if dump.exists() else 0
    try:
        os.kill(pid, signal.SIGUSR2)
    except OSError:
        return ""
    deadline = time.monotonic() + DUMP_WAIT_S
    while time.monotonic() < deadline:
        time.sleep(0.05)
        if dump.exists() and dump.stat().st_size > before:
            time.sleep(0.05)  # the rest of it
            break
    try:
        with open(dump, "rb") as file:
            file.seek(before)
            return file.read(TAIL_BYTES).decode(errors="replace")
    except OSError:
        return ""
