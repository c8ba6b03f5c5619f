"""The harness's side of the relay: connections in, waiters that keep a stream open, answers out, in one piece or live.

A stream that has begun ends with its last chunk only if the whole answer went out; a failure ends it with an error
event and a cut.
"""

from __future__ import annotations

import asyncio
import fcntl
import struct
import termios
from collections import deque
from collections.abc import Callable
from typing import cast

import orjson

from gyre_exec import http1

MAX_PIPELINED = 16  # requests that came in one piece, more than one ahead of its answer: no client of ours does that
MAX_CONNECTIONS = 256  # of one execution: what it opens beyond is refused, so that others have descriptors left
EARLY_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
EARLY_JSON_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
PING = http1.chunk(b": waiting\n\n")
BLANK = http1.chunk(b"\n")  # JSON may begin with blanks
HIDDEN = http1.HOP_BY_HOP | {b"x-gyre-waited", b"x-gyre-call"}
Accept = Callable[["Waiter", http1.Message], None]


class Downstream(asyncio.Protocol):
    """One connection of a harness: requests in order, one answered at a time.

    What it may keep of a client's is bounded: nothing is read while a whole request waits for its turn, and none is
    begun while the client does not take the answers before.
    """

    def __init__(self, accept: Accept, connections: set[Downstream], room: int = MAX_CONNECTIONS) -> None:
        self._accept = accept
        self._connections, self._room = connections, room
        self._reader = http1.Reader(requests=True)
        self._transport: asyncio.Transport | None = None
        self._waiting: Waiter | None = None
        self._next: deque[http1.Message] = deque()
        self._told_to_continue = False
        self._full = False  # of answers that the client does not read
        self._broke = False  # it ended before the client had everything
        self._lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if len(self._connections) >= self._room:
            self._transport.abort()
            return
        self._connections.add(self)

    def data_received(self, data: bytes) -> None:
        try:
            self._next.extend(self._reader.feed(data))
        except http1.HttpError as error:
            self._bad(error)
            return
        if len(self._next) > MAX_PIPELINED:
            self.abort()
            return
        self._serve_if_free()
        if self._next and self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def pause_writing(self) -> None:
        self._full = True

    def resume_writing(self) -> None:
        self._full = False
        self._serve_if_free()

    def _bad(self, error: http1.HttpError) -> None:
        if self._waiting is None and not self._next:
            self.write(http1.response(error.status, _error_headers(), _error_body(str(error))))
        self.close()

    def _serve(self) -> None:
        if self._next and self._transport is not None and not self._transport.is_closing():
            request = self._next.popleft()
            if not self._next:
                self._transport.resume_reading()
            self._told_to_continue = False
            self._waiting = Waiter(self, request)
            self._accept(self._waiting, request)
        elif self._reader.wants_continue and not self._told_to_continue:
            self._told_to_continue = True
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def done(self, *, keep_alive: bool) -> None:
        """The present request is answered."""
        self._waiting = None
        if not keep_alive:
            self.close()
        elif self._next or self._reader.wants_continue:
            asyncio.get_running_loop().call_soon(self._serve_if_free)

    def _serve_if_free(self) -> None:
        if self._waiting is None and not self._full:
            self._serve()

    def write(self, data: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        self._broke = True
        if self._transport is not None:
            self._transport.abort()

    @property
    def has_all(self) -> bool:
        """Whether the client's machine has taken every byte that was written, and did not throw any away."""
        return not self._broke and (self._lost or self._flushed())

    def _flushed(self) -> bool:
        """Nothing is left in our buffer or unacknowledged in the kernel's."""
        if self._transport is None or self._transport.get_write_buffer_size():
            return False
        try:
            left = fcntl.ioctl(self._transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, b"\0" * 4)
        except OSError:
            return False
        return bool(struct.unpack("i", left)[0] == 0)

    def eof_received(self) -> None:
        """The client sends no more, and is taken to read no more."""
        self._broke = self._broke or not self._flushed()

    def connection_lost(self, error: Exception | None) -> None:
        self._connections.discard(self)
        self._lost = True
        self._broke = self._broke or error is not None  # closed with bytes unread: the kernel says reset
        if self._waiting is not None:
            self._waiting.gone()


class Waiter:
    """One request that waits for its answer."""

    def __init__(self, connection: Downstream, request: http1.Message) -> None:
        self.connection = connection
        self._request = request
        self.begun = False  # status and headers are out
        self._streams: bool | None = None
        self.alive = True
        self.on_gone: Callable[[], None] | None = None

    def gone(self) -> None:
        """The connection is lost before the answer."""
        self.alive = False
        if self.on_gone is not None:
            self.on_gone()

    def keep_open(self, *, plain: bool) -> None:
        """After a while of waiting: headers, then comments, if a stream was asked for. `plain`: the wait is so long
        that an answer in one piece, too, begins, with blanks.
        """
        if self._streams is None:
            self._streams = asks_for_stream(self._request)
        if not self.alive or not (self._streams or (plain and self._request.method == b"POST")):
            return
        if not self.begun:
            self.begun = True
            self.connection.write(EARLY_HEAD if self._streams else EARLY_JSON_HEAD)
        self.connection.write(PING if self._streams else BLANK)

    def piece(self, events: bytes) -> None:
        """The next events of a live answer."""
        if self._streams is None:
            self._streams = asks_for_stream(self._request)
        if not self.alive or not self._streams or not events:
            return
        if not self.begun:
            self.begun = True
            self.connection.write(EARLY_HEAD)
        self.connection.write(http1.chunk(events))

    def answer(self, answer: http1.Message) -> bool:
        """The whole answer. False if the harness is thereby shown an error of ours."""
        self.alive = False
        if self.begun:
            return self._finish_begun(answer)
        keep_alive = self._request.keep_alive
        headers = [(key, value) for key, value in answer.headers if key not in HIDDEN]
        if not keep_alive:
            headers.append((b"connection", b"close"))
        bodiless = self._request.method == b"HEAD"
        if bodiless:
            headers += [(key, value) for key, value in answer.headers if key == b"content-length"]
        raw = http1.response(answer.status, headers, answer.body, reason=answer.reason, bodiless=bodiless)
        self.connection.write(raw)
        self.connection.done(keep_alive=keep_alive)
        return answer.status < 500

    def _finish_begun(self, answer: http1.Message) -> bool:
        """Status and headers are gone already: only events can say more, and of a plain answer only a cut."""
        kind = b"text/event-stream" if self._streams else b"application/json"
        if answer.status == 200 and answer.header(b"content-type").startswith(kind):
            self.connection.write(http1.chunk(answer.body) + http1.LAST_CHUNK if answer.body else http1.LAST_CHUNK)
            self.connection.done(keep_alive=self._request.keep_alive)
            return True
        if not self._streams:
            self.connection.abort()
            return False
        self.connection.write(http1.chunk(_error_event(self._request.target, answer)))
        self.connection.done(keep_alive=False)
        return False

    def refuse(self, status: int, why: str) -> None:
        self.answer(http1.Message(_error_headers(), _error_body(why), True, status=status))

    def abort(self) -> None:
        self.alive = False
        self.connection.abort()


def asks_for_stream(request: http1.Message) -> bool:
    if b'"stream"' not in request.body:
        return False
    try:
        body = orjson.loads(request.body)
    except orjson.JSONDecodeError:
        return False
    return isinstance(body, dict) and body.get("stream") is True


def _error_headers() -> http1.Headers:
    return ((b"content-type", b"application/json"),)


def _error_body(why: str) -> bytes:
    return orjson.dumps({"type": "error", "error": {"type": "api_error", "message": why}})


def _error_event(target: bytes, answer: http1.Message) -> bytes:
    """In the form that the dialect's clients read as a failure, and retry."""
    try:
        said = orjson.loads(answer.body)
    except orjson.JSONDecodeError:
        said = orjson.loads(_error_body(f"the model's server answered {answer.status}"))
    path = target.partition(b"?")[0]
    if path.endswith(b"/messages"):
        return b"event: error\ndata: " + orjson.dumps(said) + b"\n\n"
    if path.endswith(b"/responses"):
        error = said.get("error") if isinstance(said, dict) else None
        failed = {
            "type": "response.failed",
            "response": {"status": "failed", "error": error or {"code": "server_error"}},
        }
        return b"event: response.failed\ndata: " + orjson.dumps(failed) + b"\n\n"
    return b"data: " + orjson.dumps(said) + b"\n\n"
