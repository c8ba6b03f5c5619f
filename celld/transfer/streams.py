"""Reads over plain TCP connections: the engine that every machine has, and on TCP the fastest of ours.

Owns one listening port and a thread per connection. A peer's name carries a key that only the authenticated bus hands
out; without it nothing is given. Invariant: memory that was not registered as shared is never given, and nobody can
write: unlike Mooncake's ports, these are harmless to whoever finds them. A read that has returned writes no more.

On the wire: 16 bytes of key, then per operation its address and size (two little-endian u64), answered by the bytes
in order; a request that is not granted is answered by the end of the connection.
"""

from __future__ import annotations

import contextlib
import hmac
import math
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from celld.transfer.engine import (
    OPERATION_BYTES,
    PROGRESS_S,
    SLOWEST_BYTES_PER_S,
    Buffer,
    Operation,
    TransferFailed,
)

LANES = 2  # connections of one read: the digests of one are made while the other receives
KEY_BYTES = 16
CONNECTIONS = 64  # served at once; beyond that a reader is turned away and takes the bus
REQUEST = struct.Struct("<QQ")


class StreamEngine:
    """One listening port of this process at `host`, an address that its peers can reach."""

    kind, name, late_writes = "socket", "plain sockets", False

    def __init__(self, host: str, *, progress_s: float = PROGRESS_S) -> None:
        self._progress_s = progress_s
        self._key = secrets.token_bytes(KEY_BYTES)
        self._shared: dict[int, Buffer] = {}
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=CONNECTIONS)
        self._host, self._port = host, int(self._listener.getsockname()[1])
        self._places = threading.BoundedSemaphore(CONNECTIONS)
        threading.Thread(target=self._accept, name="bulk listener", daemon=True).start()

    @property
    def peer(self) -> str:
        return f"{self._host}:{self._port}/{self._key.hex()}"

    def register(self, buffer: Buffer, *, shared: bool = False) -> None:
        if shared:
            self._shared[int(buffer.ctypes.data)] = buffer

    def unregister(self, buffer: Buffer) -> None:
        self._shared.pop(int(buffer.ctypes.data), None)

    def renew(self) -> None:
        """Each read has connections of its own."""

    def close(self) -> None:
        """No new readers."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    # ---- giving -----------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                taker, _ = self._listener.accept()
            except OSError:  # closed
                return
            if self._places.acquire(blocking=False):
                threading.Thread(target=self._serve, args=(taker,), name="bulk", daemon=True).start()
            else:
                taker.close()

    def _serve(self, taker: socket.socket) -> None:
        try:
            with taker, contextlib.suppress(OSError):
                _limit(taker, self._progress_s)
                if hmac.compare_digest(_exactly(taker, KEY_BYTES), self._key):
                    for part in self._asked(taker):
                        taker.sendall(part)
        finally:
            self._places.release()

    def _asked(self, taker: socket.socket) -> Iterator[memoryview]:
        """What it asks for, until it asks for what is not shared."""
        while True:
            address, size = REQUEST.unpack(_exactly(taker, REQUEST.size))
            part = self._range(address, size)
            if part is None:
                return
            yield part

    def _range(self, address: int, size: int) -> memoryview | None:
        for start, buffer in list(self._shared.items()):
            if start <= address and address + size <= start + buffer.nbytes:
                return buffer.data[address - start : address - start + size]
        return None

    # ---- taking -----------------------------------------------------------------------------------------------------

    def read(self, peer: str, buffer: Buffer, operations: Sequence[Operation], arrived: Callable[[int], None]) -> None:
        lanes = min(LANES, len(operations))
        deadline = time.monotonic() + 4 * self._progress_s + sum(n for _, _, n in operations) / SLOWEST_BYTES_PER_S
        one_by_one = threading.Lock()
        failures: list[str] = []

        def lane(first: int) -> None:
            mine = range(first, len(operations), lanes)
            try:
                with self._connected(peer) as giver:
                    giver.sendall(b"".join(REQUEST.pack(*operations[index][1:]) for index in mine))
                    for index in mine:
                        local, _, size = operations[index]
                        at = local - int(buffer.ctypes.data)
                        _receive(giver, buffer.data[at : at + size], deadline)
                        with one_by_one:
                            arrived(index)
            except (OSError, ValueError) as error:
                failures.append(f"a read from {peer.partition('/')[0]} failed: {error}")

        threads = [threading.Thread(target=lane, args=(n,), name="bulk read") for n in range(1, lanes)]
        for thread in threads:
            thread.start()
        if lanes:
            lane(0)
        for thread in threads:
            thread.join()
        if failures:
            raise TransferFailed(failures[0])

    def _connected(self, peer: str) -> socket.socket:
        address, _, key = peer.partition("/")
        host, _, port = address.rpartition(":")
        giver = socket.create_connection((host, int(port)), timeout=self._progress_s)
        _limit(giver, self._progress_s)
        giver.sendall(bytes.fromhex(key))
        return giver


def _limit(connection: socket.socket, progress_s: float) -> None:
    """Waits end after `progress_s` without a byte. By the kernel: Python's own timeouts cost a wake-up per 64 KiB."""
    connection.settimeout(None)
    limit = struct.pack("@ll", int(progress_s), int(progress_s % 1 * 1e6))
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, limit)


def _receive(giver: socket.socket, into: memoryview, deadline: float = math.inf) -> None:
    """Raises OSError if it ends early, pauses too long (see `_limit`) or drips past `deadline`."""
    while into:
        if time.monotonic() > deadline:
            raise TimeoutError(f"slower than {SLOWEST_BYTES_PER_S / 1e6:g} MB/s")
        try:
            count = giver.recv_into(into[:OPERATION_BYTES], 0, socket.MSG_WAITALL)
        except BlockingIOError:
            raise TimeoutError("timed out") from None
        if not count:
            raise ConnectionError("its end came too early")
        into = into[count:]


def _exactly(taker: socket.socket, size: int) -> bytes:
    """Raises ConnectionError if the other side ends first."""
    found = bytearray(size)
    _receive(taker, memoryview(found))
    return bytes(found)
