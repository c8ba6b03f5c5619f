"""HTTP/1.1 messages out of bytes, both ways, complete or not at all. Pure.

Only what a relay needs: a message is handed out when its last byte is there; a broken or ambiguous one (two framings,
folded headers, a body cut short) is an error and never half a message. Bounded in head, headers and body.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

MAX_HEAD_BYTES = 64 << 10
MAX_HEADERS = 200
MAX_BODY_BYTES = 64 << 20
_TOKEN = frozenset(b"!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
NO_BODY = frozenset({204, 304})
HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"content-length",
    )
)
Headers = tuple[tuple[bytes, bytes], ...]


class HttpError(ValueError):
    """Not HTTP as we take it. `status` is what a server would answer."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


@dataclass(frozen=True, slots=True)
class Message:
    """A request (`method`, `target`) or a response (`status`). Header names are lower case."""

    headers: Headers
    body: bytes
    keep_alive: bool
    method: bytes = b""
    target: bytes = b""
    status: int = 0
    reason: bytes = b""

    def header(self, name: bytes) -> bytes:
        return next((value for key, value in self.headers if key == name), b"")


class Reader:
    """Feed bytes, get whole messages. One per connection and direction."""

    def __init__(self, *, requests: bool, max_body: int = MAX_BODY_BYTES) -> None:
        self._requests, self._max_body = requests, max_body
        self._buffer = bytearray()
        self._head: Message | None = None
        self._length = 0  # of the body; -1 = chunked, -2 = until the end of the connection
        self._chunked = bytearray()  # one buffer: a list of tiny chunks would take many times their size
        self._chunked_bytes = 0
        self.answers_head = False  # the response to come has no body
        self.wants_continue = False  # the client waits for `100 Continue` before it sends the body
        self.on_chunk: Callable[[bytes], None] | None = None  # gets the chunks of a chunked body instead of the message

    @property
    def idle(self) -> bool:
        """Nothing begun."""
        return self._head is None and not self._buffer

    def feed(self, data: bytes) -> list[Message]:
        """All messages completed by `data`. Raises HttpError; the connection is then useless."""
        self._buffer += data
        out: list[Message] = []
        while (message := self._next()) is not None:
            out.append(message)
        return out

    def end(self) -> Message | None:
        """The connection ended: a response that lasts until here is complete; anything else begun is an HttpError."""
        if self._head is not None and self._length == -2:
            return self._complete(bytes(self._buffer))
        if not self.idle:
            raise HttpError(400, "the connection ended within a message")
        return None

    def _next(self) -> Message | None:
        if self._head is None and not self._begin():
            return None
        if self._length == -1:
            return self._dechunk()
        if self._length == -2:
            self._bound(len(self._buffer))
            return None
        if len(self._buffer) < self._length:
            return None
        body = bytes(self._buffer[: self._length])
        del self._buffer[: self._length]
        return self._complete(body)

    def _complete(self, body: bytes) -> Message:
        head = self._head
        assert head is not None
        self._head, self._chunked, self._chunked_bytes = None, bytearray(), 0
        self.wants_continue = False
        return Message(head.headers, body, head.keep_alive, head.method, head.target, head.status, head.reason)

    def _begin(self) -> bool:
        """Parse a head if it is complete. Interim responses (1xx) are skipped."""
        while True:
            end = self._buffer.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES + 4)
            if end < 0:
                if len(self._buffer) > MAX_HEAD_BYTES:
                    raise HttpError(431, "the head is too large")
                return False
            lines = bytes(self._buffer[:end]).lstrip(b"\r\n").split(b"\r\n")
            del self._buffer[: end + 4]
            headers = parse_headers(lines[1:])
            head = self._request_line(lines[0], headers) if self._requests else _status_line(lines[0], headers)
            if head.status < 100 or head.status >= 200:
                break
        self._length = self._framing(head)
        self._head = head
        self.wants_continue = self._requests and head.header(b"expect").lower() == b"100-continue"
        return True

    def _request_line(self, line: bytes, headers: Headers) -> Message:
        parts = line.split(b" ")
        if len(parts) != 3 or parts[2] not in (b"HTTP/1.1", b"HTTP/1.0") or not parts[1].startswith(b"/"):
            raise HttpError(400, "not an HTTP/1.1 request line")
        if not parts[0] or not _TOKEN.issuperset(parts[0]) or any(c <= 32 or c >= 127 for c in parts[1]):
            raise HttpError(400, "a method or target with characters that may not be there")
        return Message(headers, b"", _keeps(headers, parts[2]), method=parts[0], target=parts[1])

    def _framing(self, head: Message) -> int:
        coding = head.header(b"transfer-encoding").lower()
        lengths = {value for key, value in head.headers if key == b"content-length"}
        if coding:
            if coding != b"chunked" or lengths:
                raise HttpError(400, "a transfer-encoding that is not plain chunked")
            return -1
        if self.answers_head or head.status in NO_BODY:
            return 0
        if not lengths:
            return 0 if self._requests else -2
        (length,) = lengths if len(lengths) == 1 else (b"?",)
        if not length.isdigit() or len(length) > 15:
            raise HttpError(400, "a content-length that is not one number")
        self._bound(int(length))
        return int(length)

    def _bound(self, size: int) -> None:
        if size > self._max_body:
            raise HttpError(413, f"a body of more than {self._max_body >> 20} MiB")

    def _dechunk(self) -> Message | None:
        buffer = self._buffer
        at = 0
        try:
            while True:
                end = buffer.find(b"\r\n", at, at + 4096)
                if end < 0:
                    if len(buffer) - at >= 4096:
                        raise HttpError(400, "a chunk header that is too long")
                    return None
                size = _chunk_size(bytes(buffer[at:end]))
                if size == 0:
                    done, at = self._trailer(end, at)
                    return self._complete(bytes(self._chunked)) if done else None
                if len(buffer) < end + 2 + size + 2:
                    self._bound(self._chunked_bytes + size)
                    return None
                if buffer[end + 2 + size : end + 4 + size] != b"\r\n":
                    raise HttpError(400, "a chunk longer than it says")
                self._take(bytes(buffer[end + 2 : end + 2 + size]))
                self._chunked_bytes += size
                self._bound(self._chunked_bytes)
                at = end + 4 + size
        finally:
            del buffer[:at]

    def _take(self, chunk: bytes) -> None:
        if self.on_chunk is not None:
            self.on_chunk(chunk)
        else:
            self._chunked += chunk

    def _trailer(self, end: int, at: int) -> tuple[bool, int]:
        """After the last chunk: nothing, or trailer fields, which are dropped."""
        if self._buffer[end + 2 : end + 4] == b"\r\n":
            return True, end + 4
        stop = self._buffer.find(b"\r\n\r\n", end)
        if stop >= 0:
            return True, stop + 4
        if len(self._buffer) - end > MAX_HEAD_BYTES:
            raise HttpError(431, "trailers are too large")
        return False, at


def _status_line(line: bytes, headers: Headers) -> Message:
    version, _, rest = line.partition(b" ")
    code, _, reason = rest.partition(b" ")
    if version not in (b"HTTP/1.1", b"HTTP/1.0") or len(code) != 3 or not code.isdigit() or int(code) < 100:
        raise HttpError(502, "not an HTTP/1.1 status line")
    return Message(headers, b"", _keeps(headers, version), status=int(code), reason=reason)


def _keeps(headers: Headers, version: bytes) -> bool:
    said = next((value.lower() for key, value in headers if key == b"connection"), b"")
    return b"keep-alive" in said if version == b"HTTP/1.0" else b"close" not in said


def _chunk_size(line: bytes) -> int:
    digits = line.partition(b";")[0].strip()
    if not digits or len(digits) > 12 or any(c not in b"0123456789abcdefABCDEF" for c in digits):
        raise HttpError(400, "a chunk size that is not a number")
    return int(digits, 16)


def parse_headers(lines: Iterable[bytes]) -> Headers:
    """Names lower case. Raises HttpError."""
    out = []
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon or not name or not _TOKEN.issuperset(name) or b"\0" in value or b"\n" in value or b"\r" in value:
            raise HttpError(400, "a header line that is not `name: value`")
        out.append((name.lower(), value.strip(b" \t")))
    if len(out) > MAX_HEADERS:
        raise HttpError(431, f"more than {MAX_HEADERS} headers")
    return tuple(out)


def request(method: bytes, target: bytes, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> bytes:
    """Bytes of a request; framing headers are ours."""
    lines = [method + b" " + target + b" HTTP/1.1"]
    lines += [key + b": " + value for key, value in headers]
    lines.append(b"content-length: %d" % len(body))
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def response(
    status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes, *, reason: bytes = b"", bodiless: bool = False
) -> bytes:
    """Bytes of a response. `bodiless` keeps a content-length that the headers carry (an answer to HEAD)."""
    lines = [b"HTTP/1.1 %d %s" % (status, reason or b"-")]
    lines += [key + b": " + value for key, value in headers]
    if not bodiless and status not in NO_BODY:
        lines.append(b"content-length: %d" % len(body))
    return b"\r\n".join(lines) + b"\r\n\r\n" + (b"" if bodiless else body)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


LAST_CHUNK = b"0\r\n\r\n"
