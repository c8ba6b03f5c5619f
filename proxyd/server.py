"""HTTP/1.1 on the token path: httptools parses, an asyncio.Protocol holds one connection. Knows no path and no dialect.

One request at a time per connection, answered in order. Bounded in head, headers, body, pipelining and idle time; what
is not HTTP, or too much, gets a 4xx after the answers before it, and the connection ends. A client that is gone cancels
its request.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Protocol, cast

import httptools

from proxyd.turns import Turns

log = logging.getLogger(__name__)
MAX_BODY = 64 << 20  # bytes; a 2M-token history as JSON text is about 10 MB
MAX_HEAD = 64 << 10
MAX_HEADERS = 200
MAX_PIPELINED = 16
IDLE_S = 600.0  # without a whole request
REASONS = {status.value: status.phrase for status in HTTPStatus}


@dataclass(slots=True)
class Request:
    """A whole request. Header names are lower case; `path` is raw, without the query. A handler may drop the body."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    keep_alive: bool


@dataclass(slots=True)
class Response:
    """A whole answer, or one that goes out in `parts`, each an HTTP chunk. `last` ends the connection after it."""

    status: int
    content_type: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()
    last: bool = False
    parts: AsyncIterator[bytes] | None = None


class Later(Protocol):
    """An answer that is not there yet, for which no task has to wait."""

    def then(self, give: Callable[[Response], None]) -> None:
        """Give it by this, once, later."""

    def gone(self) -> None:
        """The client has left."""


Handler = Callable[[Request], "Response | Later | Coroutine[Any, Any, Response]"]
Wording = Callable[[int, str, str], Response]  # status, why, path -> the answer to what is no request


class _TooMuch(Exception):
    """A bound is exceeded; `refusal` says which."""


@dataclass(eq=False)
class Connection(asyncio.Protocol):
    """One client."""

    handle: Handler
    wording: Wording
    connections: set[Connection]
    ready: Turns[Connection]  # that have something to begin with
    queue: deque[Request | Response] = field(default_factory=deque)
    request: Request | None = None  # that is being answered
    later: Later | None = None  # where its answer will come from
    task: asyncio.Task[None] | None = None  # that works on it

    def __post_init__(self) -> None:
        self._raw: dict[bytes, bytes] = {}  # headers of the message that is being read
        self.on_header = self._raw.__setitem__  # no Python between the parser and the dict
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._idle_since: float | None = None  # None: a request is being answered
        self._deaf = False  # nothing more is read
        self._pausing = False  # for the time being
        self._unread = False  # the client does not take its answers
        self._refusal: tuple[int, str] | None = None
        self._wants_continue = False
        self._headers: dict[str, str] = {}
        self.on_message_begin()

    # ---- the parser's callbacks -------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._url = b""
        self._raw.clear()
        self._head_size = 0  # of a head that did not come in one piece
        self._in_head, self._is_new = True, True
        self._body: list[bytes] = []
        self._size = 0

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_headers_complete(self) -> None:
        raw, self._in_head = self._raw, False
        if len(raw) > MAX_HEADERS:
            self._refuse(431, f"more than {MAX_HEADERS} headers")
        if len(self._url) + sum(map(len, raw)) + sum(map(len, raw.values())) > MAX_HEAD:
            self._refuse(431, "the head of the request is too large")
        headers = {name.lower().decode("latin-1"): value.decode("latin-1") for name, value in raw.items()}
        self._headers = headers
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > MAX_BODY:
            self._refuse(413, f"The request body is larger than {MAX_BODY} bytes.")
        self._wants_continue = "expect" in headers and headers["expect"].lower() == "100-continue"

    def on_body(self, body: bytes) -> None:
        self._size += len(body)
        if self._size > MAX_BODY:
            self._refuse(413, f"The request body is larger than {MAX_BODY} bytes.")
        self._body.append(body)

    def on_message_complete(self) -> None:
        self._wants_continue = False
        path = self._url.partition(b"?")[0].decode("latin-1")
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        self._body = []
        method = self._parser.get_method().decode()
        self.queue.append(Request(method, path, self._headers, body, self._parser.should_keep_alive()))

    def _refuse(self, status: int, why: str) -> None:
        self._refusal = (status, why)
        raise _TooMuch

    # ---- the transport's --------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.connections.add(self)
        self._arm()

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        try:
            self._parser.feed_data(data)
            if self._in_head:
                self._more_head(len(data))
        except httptools.HttpParserUpgrade:
            self._end_with(400, "this connection can't be upgraded")
        except (httptools.HttpParserError, _TooMuch) as error:
            status, why = self._refusal or (400, f"this is not HTTP as it should be: {error}")
            self._end_with(status, why)
        if self.queue or self._wants_continue:
            self.ready.add(self)
        if len(self.queue) > MAX_PIPELINED and self._transport is not None and not self._pausing:
            self._pausing = True
            self._transport.pause_reading()

    def _more_head(self, size: int) -> None:
        """A head that is not whole yet: what of it came with the end of an earlier message is at most one read."""
        if not self._is_new:
            self._head_size += size
        self._is_new = False
        if self._head_size > MAX_HEAD:
            self._refuse(431, "the head of the request is too large")

    def _end_with(self, status: int, why: str) -> None:
        """The rest of what comes can't be told apart: refuse it after the answers that are due, and hang up."""
        self._deaf = True
        path = self._url.partition(b"?")[0].decode("latin-1")
        self.queue.append(self.wording(status, why, path))

    def connection_lost(self, error: Exception | None) -> None:
        self.connections.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        self.queue.clear()
        if self.later is not None:
            self.later.gone()
        if self.task is not None:
            self.task.cancel()

    def pause_writing(self) -> None:
        self._unread = True

    def resume_writing(self) -> None:
        self._unread = False
        self.next()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # ---- requests, one after the other ------------------------------------------------------------------------------

    def next(self) -> None:
        """Begin with what is here, until an answer has to be waited for or is not read."""
        while self.request is None and not self._unread and self._transport is not None:
            if self._transport.is_closing():
                return
            if not self.queue:
                return self._ready()
            given = self.queue.popleft()
            self._disarm()
            if isinstance(given, Response):
                self._write(given, head_only=False, keep_alive=False)
            else:
                self._serve(given)

    def _ready(self) -> None:
        """All that came is answered."""
        assert self._transport is not None
        if self._wants_continue:
            self._wants_continue = False
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if self._pausing and not self._deaf:
            self._pausing = False
            self._transport.resume_reading()

    def _serve(self, request: Request) -> None:
        self.request = request
        try:
            answer = self.handle(request)
        except Exception:
            log.exception("a request could not be handled")
            answer = self.wording(500, "Internal server error", request.path)
        if isinstance(answer, Response):
            self._answer(answer)
        elif isinstance(answer, Coroutine):
            self.task = self._loop.create_task(self._work(answer))
        else:
            self.later = answer
            answer.then(self._given)

    def _given(self, response: Response) -> None:
        self.later = None
        self._answer(response)
        self.next()

    async def _work(self, answer: Coroutine[Any, Any, Response]) -> None:
        assert self.request is not None
        try:
            response = await answer
        except Exception:
            log.exception("a request could not be handled")
            response = self.wording(500, "Internal server error", self.request.path)
        if response.parts is not None and not await self._write_parts(response, response.parts):
            return
        self.task = None
        self._answer(response)
        self.next()

    def _answer(self, response: Response) -> None:
        request, self.request = self.request, None
        if request is not None and self._transport is not None and not self._transport.is_closing():
            self._write(response, head_only=request.method == "HEAD", keep_alive=request.keep_alive)

    async def _write_parts(self, response: Response, parts: AsyncIterator[bytes]) -> bool:
        """All but the end of the message. False if it broke off: the connection is cut, so that nobody takes it for
        whole.
        """
        assert self._transport is not None
        head = _head(response, "Transfer-Encoding: chunked\r\n")
        try:
            async for part in parts:
                self._transport.write(b"%b%x\r\n%b\r\n" % (head, len(part), part))
                head = b""
        except Exception:
            log.exception("an answer broke off")
            self.abort()
            return False
        return True

    def _write(self, response: Response, *, head_only: bool, keep_alive: bool) -> None:
        assert self._transport is not None
        keep_alive = keep_alive and not response.last
        if response.parts is not None:
            self._transport.write(b"0\r\n\r\n")
        else:
            more = "" if response.status == 204 else f"Content-Length: {len(response.body)}\r\n"
            raw = _head(response, more if keep_alive else f"{more}Connection: close\r\n")
            self._transport.write(raw if head_only else raw + response.body)
        if keep_alive:
            self._arm()
        else:
            self._transport.close()

    def _arm(self) -> None:
        self._idle_since = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_later(IDLE_S, self._look)

    def _disarm(self) -> None:
        self._idle_since = None

    def _look(self) -> None:
        """One timer per connection, which outlives its requests: it closes what has been idle all the time."""
        assert self._transport is not None
        idle_s = self._loop.time() - self._idle_since if self._idle_since is not None else 0.0
        if idle_s >= IDLE_S:
            self._transport.close()
        else:
            self._timer = self._loop.call_later(IDLE_S - idle_s, self._look)


def _head(response: Response, more: str) -> bytes:
    """`more`: further whole lines."""
    own = "".join([f"{name}: {value}\r\n" for name, value in response.headers])
    return f"{_begin(response.status, response.content_type)}{own}{more}\r\n".encode("latin-1")


@functools.lru_cache(64)
def _begin(status: int, content_type: str) -> str:
    return f"HTTP/1.1 {status} {REASONS.get(status, '')}\r\nContent-Type: {content_type}\r\n"


class HttpServer:
    """A listening socket and its connections."""

    def __init__(self, handle: Handler, wording: Wording) -> None:
        self._handle, self._wording = handle, wording
        self._connections: set[Connection] = set()
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int = 0) -> tuple[str, int]:
        """(host, port) it listens on. Raises OSError."""
        ready = Turns(Connection.next)
        self._server = await asyncio.get_running_loop().create_server(
            lambda: Connection(self._handle, self._wording, self._connections, ready), host, port, backlog=1024
        )
        found = self._server.sockets[0].getsockname()
        return str(found[0]), int(found[1])

    def stop(self) -> None:
        """Hang up on everyone: their relays ask the next life."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.abort()
