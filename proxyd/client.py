"""HTTP/1.1 to engines: httptools parses, a pool keeps connections. Bodies are handed on as they come.

A connection that was kept and is found closed before a byte of an answer came is replaced once: servers close idle
ones when they like. Anything else that goes wrong is raised; whose fault it is the engine client says.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import cast
from urllib.parse import urlsplit

import httptools

CONNECT_S = 5.0
IDLE_S = 4.0  # uvicorn closes after five
IDLE_KEPT = 1024
HEADS_KEPT = 4096
ONE_WRITE_BYTES = 64 << 10  # copying less costs less than a second system call


class Disconnected(ConnectionError):
    """The answer is not complete; `begun` says whether any of it came."""

    def __init__(self, why: str, *, begun: bool) -> None:
        super().__init__(why)
        self.begun = begun


class _Connection(asyncio.Protocol):
    """One socket, one request at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.idle_since = 0.0
        self.heard = 0.0
        self._pieces: list[bytes] = []
        self.on_body = self._pieces.append  # no Python between the parser and the list
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[int] | None = None
        self._begun = False
        self._timer: asyncio.TimerHandle | None = None
        self._look_at = 0.0

    def ask(self, head: bytes, body: list[bytes], sink: Callable[[int, bytes], None]) -> asyncio.Future[int]:
        """Resolved with the status when the answer is complete. `sink` gets the status and each piece of the body."""
        assert self.transport is not None
        self._parser = httptools.HttpResponseParser(self)
        self._sink, self._begun, self.keeps, self._complete = sink, False, False, False
        self._done = self._loop.create_future()
        self.heard = self._loop.time()
        self._body = body
        self._pieces.clear()
        if sum(map(len, body)) < ONE_WRITE_BYTES:
            self.transport.write(b"".join((head, *body)))
            return self._done
        for part in (head, *body):
            self.transport.write(part)
        return self._done

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() < 200:
            return
        self.keeps = self._parser.should_keep_alive()
        self._complete = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._done is None or self._done.done():
            self.close()  # nobody asked
            return
        if not self._begun:
            self._begun = True
            self._body.clear()
        self.heard = self._loop.time()
        wrong: Exception | None = None
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            wrong = Disconnected(f"not HTTP: {error}", begun=True)
        try:
            self._hand_on()
        except Exception as error:  # the asker is told what its sink says
            wrong = error
        if wrong is not None:
            self._fail(wrong)
        elif self._complete:
            self._done.set_result(self._parser.get_status_code())

    def _hand_on(self) -> None:
        """What one read brought, in one piece however it was cut."""
        if self._pieces:
            body = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
            self._pieces.clear()
            self._sink(self._parser.get_status_code(), body)

    def connection_lost(self, error: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._fail(Disconnected(f"the connection ended ({error or 'end'})", begun=self._begun))

    def _fail(self, error: BaseException) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)
        self.close()

    def watch(self, silence_s: float) -> None:
        """Fail a request once nothing has been heard for so long; looked at twice in that time.

        One timer per connection, which outlives its requests: most end long before anybody has to look.
        """
        self._silence_s = silence_s
        look_at = self.heard + silence_s / 2
        if self._timer is None or look_at < self._look_at:
            self._look_later(look_at)

    def _look_later(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._look_at = at
        self._timer = self._loop.call_at(at, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._done is None or self._done.done():
            return  # idle: the next request has it looked at again
        now = self._loop.time()
        if now - self.heard > self._silence_s:
            self._fail(TimeoutError(f"silent for {self._silence_s:.0f} s"))
        else:
            self._look_later(now + self._silence_s / 2)

    @property
    def open(self) -> bool:
        return self.transport is not None and not self.transport.is_closing()

    def close(self) -> None:
        if self.open:
            assert self.transport is not None
            self.transport.abort()


class HttpClient:
    """Connections to any number of servers."""

    def __init__(self, headers: dict[str, str]) -> None:
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._idle: dict[str, list[_Connection]] = {}
        self._begun: dict[tuple[str, str, str], str] = {}
        self._closed = False

    async def ask(
        self, method: str, base: str, path: str, body: list[bytes], sink: Callable[[int, bytes], None], silence_s: float
    ) -> int:
        """The status of a complete answer; `body` is emptied when it begins.

        Raises OSError, TimeoutError, ValueError, and what `sink` raises.
        """
        length = sum(map(len, body))
        head = f"{self._begin(method, base, path)}{length}\r\n\r\n".encode("latin-1")
        while True:
            kept = self._kept(base)
            connection = kept or await self._connect(base)
            try:
                return await self._exchange(base, connection, connection.ask(head, body, sink), silence_s)
            except Disconnected as error:
                if kept is None or error.begun:
                    raise

    def _begin(self, method: str, base: str, path: str) -> str:
        """A request's head but for its length: few different ones come again and again."""
        key = (method, base, path)
        found = self._begun.get(key)
        if found is None:
            host = urlsplit(base).netloc
            found = f"{method} {path} HTTP/1.1\r\nHost: {host}\r\n{self._headers}Content-Length: "
            if len(self._begun) > HEADS_KEPT:
                self._begun.clear()
            self._begun[key] = found
        return found

    def _kept(self, base: str) -> _Connection | None:
        idle, now = self._idle.get(base, []), asyncio.get_running_loop().time()
        while idle:
            connection = idle.pop()
            if connection.open and now - connection.idle_since < IDLE_S:
                return connection
            connection.close()
        return None

    async def _connect(self, base: str) -> _Connection:
        parts = urlsplit(base)
        if parts.scheme != "http" or not parts.hostname or not parts.port:
            raise ValueError("an engine's address must be http://host:port")
        async with asyncio.timeout(CONNECT_S):
            _, made = await asyncio.get_running_loop().create_connection(_Connection, parts.hostname, parts.port)
        return made

    async def _exchange(
        self,
        base: str,
        connection: _Connection,
        done: asyncio.Future[int],
        silence_s: float,
    ) -> int:
        connection.watch(silence_s)
        try:
            status = await done
        except asyncio.CancelledError:
            connection.close()
            raise
        self._give_back(base, connection)
        return status

    def _give_back(self, base: str, connection: _Connection) -> None:
        idle = self._idle.setdefault(base, [])
        if connection.keeps and not self._closed and len(idle) < IDLE_KEPT:
            connection.idle_since = asyncio.get_running_loop().time()
            idle.append(connection)
        else:
            connection.close()

    def close(self) -> None:
        self._closed = True
        for idle in self._idle.values():
            for connection in idle:
                with contextlib.suppress(OSError):
                    connection.close()
        self._idle.clear()
