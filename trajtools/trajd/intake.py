"""The stand-alone intake: calls recorded elsewhere, taken over a Unix or TCP socket into files that every tool reads.

Owns the acknowledgement and the promise behind it: `ok` means that the record is on disk (fdatasync, many records per
flush). Back-pressure by bytes: nothing is read while `limit_bytes` of them wait for the disk. Restart: the files are
scanned, a torn tail is cut off. What a frame means is `store`'s, its bytes `frames`'.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hmac
import os
import socket
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any, BinaryIO

import msgpack
import xxhash

from gyre_base.runfile import RunHeader, framed, repair_tail
from gyre_base.runframes import MAGIC
from trajtools.trajd.frames import HEAD, MAX_HEAD, MAX_RAW, BadFrame, pack_frame
from trajtools.trajd.store import Store, no, yes

LIMIT_BYTES = 64 << 20


class Taken(RuntimeError):
    """Another intake has this folder or this address."""


class Intake:
    """Files, flushes and connections. A failing disk stops it: what was acknowledged is on disk, nothing else is."""

    def __init__(self, folder: Path, *, token: str = "", limit_bytes: int = LIMIT_BYTES) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = _locked(folder)
        self.store = Store()
        self.waiting_bytes = 0
        self.peak_bytes = 0
        self._token, self._limit = token, limit_bytes
        old = sorted(folder.glob("intake-*.gtr"), key=lambda p: int(p.stem.rpartition("-")[2]))
        for path in old:
            repair_tail(path)
            self.store.recall(path)
        life = int(old[-1].stem.rpartition("-")[2]) + 1 if old else 1
        self.path = folder / f"intake-{life}.gtr"
        self._file: BinaryIO = self.path.open("ab", buffering=0)
        self._records: list[bytes] = [MAGIC, framed(RunHeader(run=folder.name, writer="trajd intake"))]
        self._flushed: asyncio.Future[None] | None = None
        self._room = asyncio.Condition()
        self._wake = asyncio.Event()
        self.failed: OSError | None = None

    async def write(self) -> None:
        """Runs beside the connections: one write and one fdatasync for all that came in meanwhile."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            records, waiter = self._records, self._flushed
            self._records, self._flushed = [], None
            try:
                await asyncio.to_thread(self._put, b"".join(records))
            except OSError as error:
                self.failed = error
                if waiter is not None:
                    waiter.set_exception(error)
                raise
            if waiter is not None:
                waiter.set_result(None)

    def _put(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._file.fileno(), view) :]
        os.fdatasync(self._file.fileno())

    async def durable(self, record: bytes) -> None:
        """Until this record, and all before it, are on disk. An empty one waits for those before it."""
        if self.failed is not None:
            raise self.failed
        if record:
            self._records.append(record)
        if self._flushed is None:
            self._flushed = asyncio.get_running_loop().create_future()
        waiter = self._flushed
        self._wake.set()
        await asyncio.shield(waiter)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection: frames in, answers out, in order."""
        known = not self._token
        frames = self._frames(reader)
        try:
            async for head, raw in frames:
                if not known:
                    known = head.get("op") == "hello" and hmac.compare_digest(str(head.get("token")), self._token)
                    writer.write(pack_frame(yes() if known else no("no valid token")))
                    if not known:
                        break
                else:
                    answer, record = (yes(), b"") if head.get("op") == "hello" else self.store.take(head, raw)
                    await self.durable(record)
                    writer.write(pack_frame(answer))
                await writer.drain()
        except (BadFrame, ConnectionError, asyncio.IncompleteReadError, OSError):
            pass
        finally:
            await frames.aclose()
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _frames(self, reader: asyncio.StreamReader) -> AsyncGenerator[tuple[dict[str, Any], bytes], None]:
        while True:
            try:
                head_size, raw_size, check = HEAD.unpack(await reader.readexactly(HEAD.size))
            except asyncio.IncompleteReadError as error:
                if error.partial:
                    raise BadFrame("a torn frame") from None
                return
            if head_size > MAX_HEAD or raw_size > MAX_RAW:
                raise BadFrame(f"a frame of {head_size} + {raw_size} bytes")
            size = head_size + raw_size
            await self._reserve(size)
            try:
                body = await reader.readexactly(head_size)
                raw = await reader.readexactly(raw_size)
                if xxhash.xxh32_intdigest(body + raw) != check:
                    raise BadFrame("its checksum does not fit")
                head = msgpack.unpackb(body)
                if not isinstance(head, dict):
                    raise BadFrame("its head is not a map")
                yield head, raw
            finally:
                await self._release(size)

    async def _reserve(self, size: int) -> None:
        """Wait for room; a frame above the limit goes alone."""
        async with self._room:
            await self._room.wait_for(lambda: not self.waiting_bytes or self.waiting_bytes + size <= self._limit)
            self.waiting_bytes += size
            self.peak_bytes = max(self.peak_bytes, self.waiting_bytes)

    async def _release(self, size: int) -> None:
        async with self._room:
            self.waiting_bytes -= size
            self._room.notify_all()

    def close(self) -> None:
        self._file.close()
        os.close(self._lock)


def _locked(folder: Path) -> int:
    """One writer per folder. Raises Taken."""
    handle = os.open(folder / ".lock", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise Taken(f"another intake writes to {folder}") from None
    return handle


def _free(path: str) -> None:
    """Remove the socket of an intake that died. Raises Taken if one answers there, or if it is no socket."""
    if Path(path).exists() and not Path(path).is_socket():
        raise Taken(f"{path} is there and is no socket; name another place")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except OSError:
            Path(path).unlink(missing_ok=True)
            return
    raise Taken(f"something listens on {path} already")


async def run_intake(
    folder: Path, listen: str, *, token: str = "", ready: Callable[[str], None] | None = None, stop: asyncio.Event
) -> None:
    """Serve until `stop`. `listen`: unix:PATH (mode 0600) or tcp:HOST:PORT. Raises Taken, OSError if the disk fails."""
    kind, _, where = listen.partition(":")
    if kind == "unix":
        _free(where)
    intake = Intake(folder, token=token)
    if kind == "unix":
        server: Any = await asyncio.start_unix_server(intake.serve, where)
        os.chmod(where, 0o600)
    else:
        host, _, port = where.rpartition(":")
        server = await asyncio.start_server(intake.serve, host, int(port))
        where = ":".join(map(str, server.sockets[0].getsockname()[:2]))
    writing = asyncio.ensure_future(intake.write())
    stopping = asyncio.ensure_future(stop.wait())
    await intake.durable(b"")
    if ready is not None:
        ready(f"{kind}:{where}")
    try:
        await asyncio.wait({writing, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if writing.done():
            writing.result()
    finally:
        server.close()
        for task in (writing, stopping):
            task.cancel()
        await asyncio.gather(writing, stopping, return_exceptions=True)
        intake.close()
