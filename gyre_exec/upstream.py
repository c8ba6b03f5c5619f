"""Connections to proxyd: kept alive, one request each at a time, found anew through the run directory after any break.

Each shard has connections of its own: one that dies breaks no other's. `exchange` gives the complete answer or raises
Broken; parts of one go only to those who ask for the chunks of a live answer. Decides nothing about trying again.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from functools import partial
from typing import cast
from urllib.parse import urlsplit

from gyre_base.shards import shard_of
from gyre_exec import http1

Address = tuple[str, int]
CONNECT_S = 5.0
IDLE_KEPT = 256
KEEPALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))  # a host that vanished is noticed in 25 s


class Broken(Exception):
    """No complete answer came: not reachable, cut, or not HTTP."""


def address_of(url: str) -> Address:
    """Host and port of `http://host:port`. Raises ValueError."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname or not parts.port:
        raise ValueError(f"not an address of proxyd: {url!r} (expected http://host:port)")
    return parts.hostname, parts.port


class _Connection(asyncio.Protocol):
    """One socket to proxyd."""

    def __init__(self, pool: Upstream) -> None:
        self._pool = pool
        self.reader = http1.Reader(requests=False, max_body=http1.MAX_BODY_BYTES * 4)
        self.transport: asyncio.Transport | None = None
        self.waiting: asyncio.Future[http1.Message] | None = None
        self.used = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        _keep_alive(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        try:
            for message in self.reader.feed(data):
                self._answer(message)
        except http1.HttpError as error:
            self.fail(f"proxyd sent no HTTP: {error}")

    def _answer(self, message: http1.Message) -> None:
        waiting, self.waiting = self.waiting, None
        if waiting is None or waiting.done():
            self.fail("proxyd answered what nobody asked")
            return
        waiting.set_result(message)
        if message.keep_alive:
            self._pool.give_back(self)
        else:
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        try:
            message = self.reader.end()
        except http1.HttpError:
            message = None
        if message is not None and self.waiting is not None and not self.waiting.done() and error is None:
            self.waiting.set_result(message)
        self.fail(f"proxyd closed the connection ({error or 'end'})")

    def fail(self, why: str) -> None:
        if self.waiting is not None and not self.waiting.done():
            self.waiting.set_exception(Broken(why))
        self.close()

    def close(self) -> None:
        self._pool.lose(self)
        if self.transport is not None and not self.transport.is_closing():
            self.transport.abort()


def _keep_alive(sock: socket.socket | None) -> None:
    if sock is None:
        return
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE:
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Upstream:
    """The pool of one shard. `find` reads where it is now; None while it has no endpoint."""

    def __init__(self, find: Callable[[], Address | None]) -> None:
        self._find = find
        self._address: Address | None = None
        self._idle: list[_Connection] = []
        self._busy: set[_Connection] = set()

    async def exchange(
        self, request: bytes, *, is_head: bool, on_chunk: Callable[[bytes], None] | None = None
    ) -> http1.Message:
        """Send, wait for the whole answer however long it takes. Raises Broken. Cancelled: the connection is cut.

        `on_chunk` gets the chunks of a chunked body as they come; the message then has none.
        """
        connection = self._idle.pop() if self._idle else await self._connect()
        assert connection.transport is not None
        waiting: asyncio.Future[http1.Message] = asyncio.get_running_loop().create_future()
        connection.waiting = waiting
        connection.reader.answers_head = is_head
        connection.reader.on_chunk = on_chunk
        connection.used += 1
        self._busy.add(connection)
        connection.transport.write(request)
        try:
            return await waiting
        except asyncio.CancelledError:
            connection.close()
            raise

    async def _connect(self) -> _Connection:
        try:
            self._address = self._address or self._find()
        except (OSError, ValueError) as error:
            raise Broken(f"the endpoint of proxyd can't be read: {error}") from None
        if self._address is None:
            raise Broken("proxyd has no endpoint yet")
        host, port = self._address
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_S):
                _, connection = await loop.create_connection(lambda: _Connection(self), host, port)
        except (OSError, TimeoutError) as error:
            self._address = None
            raise Broken(f"proxyd at {host}:{port} can't be reached ({error})") from None
        return connection

    def give_back(self, connection: _Connection) -> None:
        self._busy.discard(connection)
        if len(self._idle) < IDLE_KEPT:
            self._idle.append(connection)
        else:
            connection.close()

    def lose(self, connection: _Connection) -> None:
        self._busy.discard(connection)
        with contextlib.suppress(ValueError):
            self._idle.remove(connection)

    def look_again(self) -> None:
        """After a failure: the next connection reads the endpoint file first."""
        self._address = None

    def moved(self) -> None:
        """It has a new life: whatever still hangs on the old one is broken now, so that it is sent again."""
        self._address = None
        for connection in [*self._idle, *self._busy]:
            connection.fail("proxyd has moved")

    def close(self) -> None:
        self.moved()


class Upstreams:
    """A pool for each shard of proxyd. `find` reads where a shard is now."""

    def __init__(self, find: Callable[[int], Address | None], shards: int = 1) -> None:
        self._pools = [Upstream(partial(find, shard)) for shard in range(shards)]

    def of(self, execution: str) -> Upstream:
        """To the shard that an execution belongs to."""
        return self._pools[shard_of(execution, len(self._pools))]

    def moved(self, shard: int) -> None:
        """This shard has a new life."""
        self._pools[shard].moved()

    def close(self) -> None:
        for pool in self._pools:
            pool.close()
