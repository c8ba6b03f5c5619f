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
Sink = Callable[[int, bytes], None]  # status, a piece of the body
Then = Callable[[int, Exception | None], None]  # status of a complete answer, or 0 and what went wrong


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
        self._parser = httptools.HttpResponseParser(self)
        self._loop = asyncio.get_running_loop()
        self._then: Then | None = None  # of the request that is under way
        self._begun = False
        self._timer: asyncio.TimerHandle | None = None
        self._look_at = 0.0

    def ask(self, head: bytes, body: list[bytes], sink: Sink, then: Then) -> None:
        """`sink` gets the status and each piece of the body, `then` the status when the answer is complete."""
        assert self.transport is not None
        self._sink, self._begun, self.keeps, self._complete = sink, False, False, False
        self._then = then
        self.heard = self._loop.time()
        self._body = body
        self._pieces.clear()
        if sum(map(len, body)) < ONE_WRITE_BYTES:
            self.transport.write(b"".join((head, *body)))
            return
        for part in (head, *body):
            self.transport.write(part)

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() < 200:
            return
        self.keeps = self._parser.should_keep_alive()
        self._complete = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._then is None:
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
            then, self._then = self._then, None
            then(self._parser.get_status_code(), None)

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

    def _fail(self, error: Exception) -> None:
        self.close()
        if self._then is not None:
            then, self._then = self._then, None
            then(0, error)

    def drop(self) -> None:
        """End the request that is under way, without a word to who asked."""
        self._then = None
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
        if self._then is None:
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


class Exchange:
    """One request on its way to its answer, over a kept connection if there is one."""

    __slots__ = (
        "_base",
        "_body",
        "_client",
        "_connecting",
        "_connection",
        "_head",
        "_kept",
        "_silence_s",
        "_sink",
        "_then",
    )

    def __init__(
        self, client: HttpClient, base: str, head: bytes, body: list[bytes], sink: Sink, silence_s: float, then: Then
    ) -> None:
        self._client, self._base, self._head, self._body = client, base, head, body
        self._sink, self._silence_s, self._then = sink, silence_s, then
        self._connection: _Connection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._start()

    def _start(self) -> None:
        kept = self._client.kept(self._base)
        self._kept = kept is not None
        if kept is not None:
            self._ask(kept)
        else:
            self._connecting = asyncio.get_running_loop().create_task(self._connect())

    async def _connect(self) -> None:
        try:
            made = await self._client.connect(self._base)
        except (OSError, TimeoutError, ValueError) as error:
            self._then(0, error)
        else:
            self._ask(made)

    def _ask(self, connection: _Connection) -> None:
        self._connection = connection
        connection.ask(self._head, self._body, self._sink, self._ended)
        connection.watch(self._silence_s)

    def _ended(self, status: int, error: Exception | None) -> None:
        connection, self._connection = self._connection, None
        if isinstance(error, Disconnected) and self._kept and not error.begun:
            self._start()  # the server hung up on an idle connection
            return
        if error is None and connection is not None:
            self._client.give_back(self._base, connection)
        self._then(status, error)

    def cut(self) -> None:
        """Hang up. Whoever asked hears nothing more."""
        if self._connecting is not None:
            self._connecting.cancel()
        if self._connection is not None:
            self._connection.drop()


class HttpClient:
    """Connections to any number of servers."""

    def __init__(self, headers: dict[str, str]) -> None:
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._idle: dict[str, list[_Connection]] = {}
        self._begun: dict[tuple[str, str, str], str] = {}
        self._closed = False

    def begin(
        self, method: str, base: str, path: str, body: list[bytes], sink: Sink, silence_s: float, then: Then
    ) -> Exchange:
        """Ask; `body` is emptied when the answer begins. `then` is told once, later: the status of a complete answer,
        or 0 and what went wrong: OSError, TimeoutError, ValueError, and what `sink` raises.
        """
        head = f"{self._begin(method, base, path)}{sum(map(len, body))}\r\n\r\n".encode("latin-1")
        return Exchange(self, base, head, body, sink, silence_s, then)

    async def ask(self, method: str, base: str, path: str, body: list[bytes], sink: Sink, silence_s: float) -> int:
        """The same, awaited: the status, or what went wrong is raised."""
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def then(status: int, error: Exception | None) -> None:
            if error is None:
                answer.set_result(status)
            else:
                answer.set_exception(error)

        exchange = self.begin(method, base, path, body, sink, silence_s, then)
        try:
            return await answer
        except asyncio.CancelledError:
            exchange.cut()
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

    def kept(self, base: str) -> _Connection | None:
        """An idle connection that is still good."""
        idle, now = self._idle.get(base, []), asyncio.get_running_loop().time()
        while idle:
            connection = idle.pop()
            if connection.open and now - connection.idle_since < IDLE_S:
                return connection
            connection.close()
        return None

    async def connect(self, base: str) -> _Connection:
        """A new one. Raises OSError, TimeoutError, ValueError."""
        parts = urlsplit(base)
        if parts.scheme != "http" or not parts.hostname or not parts.port:
            raise ValueError("an engine's address must be http://host:port")
        async with asyncio.timeout(CONNECT_S):
            _, made = await asyncio.get_running_loop().create_connection(_Connection, parts.hostname, parts.port)
        return made

    def give_back(self, base: str, connection: _Connection) -> None:
        """After a complete answer."""
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
