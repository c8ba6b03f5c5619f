"""The call log: one append-only file per shard and life, group commit in a thread, and the way back from it at start.

Invariant: `append` resolves only when the record is as durable as the run asks (DESIGN 3.5). A disk that is full holds
calls: the writer cuts what it half wrote, says so and tries again until it succeeds; nothing is dropped.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from gyre_base.rundir import RunDir
from gyre_base.runfile import Note, Record, RunHeader, RunReader, framed
from gyre_base.runframes import MAGIC

log = logging.getLogger(__name__)
RETRY_S = 1.0
BATCH = 512  # records per write
NAME = "{proxyd}-{life}.gtr"

_Item = tuple[Callable[[], bytes], asyncio.Future[None]]


class CallLog:
    """Appends records, a frame each. `durable` False leaves them in the page cache: they survive the process, not the
    node.
    """

    def __init__(self, path: Path, header: RunHeader, *, durable: bool) -> None:
        self.path, self._durable = path, durable
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._end = os.fstat(self._descriptor).st_size
        self._loop = asyncio.get_running_loop()
        self._appended: list[_Item] = []  # in this turn of the loop
        self._queue: queue.SimpleQueue[list[_Item] | None] = queue.SimpleQueue()
        self.trouble = ""  # why nothing can be written just now
        self._write((b"" if self._end else MAGIC) + framed(header))
        self._thread = threading.Thread(target=self._work, name="call-log", daemon=True)
        self._thread.start()

    def append(self, frame: Callable[[], bytes]) -> asyncio.Future[None]:
        """Resolved when the frame is on disk. `frame` is called in the writer's thread, in order of `append`."""
        future: asyncio.Future[None] = self._loop.create_future()
        if not self._appended:
            self._loop.call_soon(self._hand_over)
        self._appended.append((frame, future))
        return future

    def _hand_over(self) -> None:
        """All records of one turn at once: waking the thread costs more than a record."""
        if self._appended:
            self._queue.put(self._appended)
            self._appended = []

    def note(self, note: Note) -> asyncio.Future[None]:
        return self.append(lambda: framed(note))

    def close(self) -> None:
        """Write what is queued and end. Waits at most ten seconds for a disk in trouble."""
        self._hand_over()
        self._queue.put(None)
        self._thread.join(timeout=10.0)
        os.close(self._descriptor)

    # ---- the thread -------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            batch, last = self._collect()
            if batch:
                self._commit(batch)
            if last:
                return

    def _collect(self) -> tuple[list[_Item], bool]:
        """Everything that is queued, at least one item; True if this is the end."""
        batch: list[_Item] = []
        items = self._queue.get()
        while items is not None:
            batch += items
            if len(batch) >= BATCH:
                return batch, False
            try:
                items = self._queue.get_nowait()
            except queue.Empty:
                return batch, False
        return batch, True

    def _commit(self, batch: list[_Item]) -> None:
        frames: list[bytes] = []
        failed: dict[int, Exception] = {}
        for place, (make, _) in enumerate(batch):
            try:
                frames.append(make())
            except Exception as error:  # one bad record must not stop the log
                log.exception("a record can't be written")
                failed[place] = error
        self._write(b"".join(frames))
        self._loop.call_soon_threadsafe(_resolve, [future for _, future in batch], failed)

    def _write(self, data: bytes) -> None:
        """All of it or, after any trouble, again from where the file was good."""
        while True:
            try:
                self._write_once(data)
                self.trouble = ""
                return
            except OSError as error:
                if error.errno in (errno.EBADF, errno.EINVAL):
                    raise
                if not self.trouble:
                    log.critical("%s: %s; calls are held until it can be written again", self.path, error.strerror)
                self.trouble = error.strerror or str(error)
                time.sleep(RETRY_S)

    def _write_once(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._descriptor, view) :]
            if self._durable:
                os.fdatasync(self._descriptor)
        except OSError:
            os.ftruncate(self._descriptor, self._end)
            raise
        self._end += len(data)


def _resolve(futures: list[asyncio.Future[None]], failed: dict[int, Exception]) -> None:
    for place, future in enumerate(futures):
        if future.done():
            continue
        if place in failed:
            future.set_exception(failed[place])
        else:
            future.set_result(None)


def earlier_records(run: RunDir, proxyd: str) -> Iterator[Record]:
    """Every record of earlier lives of a shard, oldest life first. Damaged ones are counted and passed over."""
    for path in sorted(run.path("calls").glob(NAME.format(proxyd=proxyd, life="*")), key=_life):
        reader = RunReader(path)
        for located in reader.records():
            yield located.record
        report = reader.report
        if report.bad or report.torn or report.conflicts:
            log.warning(
                "%s: %d bad frames, torn %s, conflicts %d", path, len(report.bad), report.torn, len(report.conflicts)
            )


def _life(path: Path) -> tuple[int, str]:
    text = path.stem.rpartition("-")[2]
    return (int(text) if text.isdigit() else -1, path.name)
