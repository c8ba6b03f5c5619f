"""The HTTP side: authentication, call ids, and each dialect at its path. Decides nothing about calls.

`{http}/x/{execution}/v1/...` with the execution's bearer token. An answer goes out whole, after its record is durable;
in live delivery a stream goes out as it is sampled, and only its end after that.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import orjson

from gyre_base.ids import is_safe_name
from gyre_base.keys import Keys
from proxyd.capture import Node
from proxyd.conversation import Request as Wanted
from proxyd.conversation import without_history
from proxyd.dialects import BadRequest, Dialect, Failure, Written
from proxyd.dialects.anthropic import AnthropicMessages
from proxyd.dialects.openai_chat import SSE, OpenAIChat, models
from proxyd.dialects.openai_responses import OpenAIResponses
from proxyd.hints import hints_of
from proxyd.live import Seal, Telling, nothing_yet
from proxyd.metrics import CONTENT_TYPE
from proxyd.server import Later, Request, Response
from proxyd.service import Open, Service

log = logging.getLogger(__name__)
TEXT = "text/plain; charset=utf-8"
CALL, WAITED = "X-Gyre-Call", "X-Gyre-Waited"
CALL_KEY = CALL.lower()
SO_FAR_KEY = "x-gyre-so-far"  # bytes at the end of the body that were told of the call
_NAMESPACE = uuid.UUID("b3c0a9f2-6f4e-5d0b-8a51-3f1b5a0c9e27")
DIALECTS: dict[str, Dialect] = {
    "v1/chat/completions": OpenAIChat(),
    "v1/messages": AnthropicMessages(),
    "v1/responses": OpenAIResponses(),
}
COUNT = "v1/messages/count_tokens"
KINDS = {400: "bad_request", 404: "not_found", 413: "too_large", 500: "internal"}
Answer = Response | Later | Coroutine[Any, Any, Response]
Route = Callable[[Request, str, str], Answer]


def wording(status: int, why: str, path: str) -> Response:
    """What is no request, in the words of the dialect at its path; the connection ends."""
    written = _dialect_of(path).fail(Failure(KINDS.get(status, "bad_request"), why=why))
    return Response(status, written.content_type, written.body, last=True)


def _dialect_of(path: str) -> Dialect:
    tail = path.split("/", 3)[-1]
    return (
        DIALECTS["v1/messages"]
        if tail.startswith("v1/messages")
        else DIALECTS.get(tail, DIALECTS["v1/chat/completions"])
    )


class Front:
    """The handlers. A route is given the request, the execution, and what follows it in the path."""

    def __init__(
        self, service: Service, keys: Keys, served_name: str, metrics: Callable[[], bytes], *, live: bool = False
    ) -> None:
        self._service, self._keys, self._served_name, self._live = service, keys, served_name, live
        self._numbers = metrics
        self._accepted: dict[str, str] = {}  # execution -> its token, as a client sent it
        self._derived: dict[str, int] = {}  # body hash -> answers delivered, for clients without call ids
        self._routes: dict[tuple[str, str], Route] = {("POST", path): self._call for path in DIALECTS}
        self._routes[("POST", COUNT)] = self._count_tokens
        self._routes[("GET", "v1/models")] = self._models
        self._routes[("GET", "api/hello")] = self._routes[("HEAD", "api/hello")] = _hello

    def handle(self, request: Request) -> Answer:
        _, _, rest = request.path.partition("/")
        place, _, rest = rest.partition("/")
        if place == "x":
            execution, _, tail = rest.partition("/")
            if not self._accepts(request, execution):
                return _plain(_dialect_of(request.path).fail(Failure("unauthorized")))
            route = self._routes.get((request.method, tail)) or self._other(request.method, tail)
            return route(request, execution, tail)
        if request.path == "/health":
            return Response(200, TEXT, b"ok\n")
        if request.path == "/metrics":
            return self._metrics(request)
        return _plain(OpenAIChat().fail(Failure("not_found", why=f"{request.method} {request.path}")))

    def _other(self, method: str, tail: str) -> Route:
        if method == "DELETE" and tail.startswith("calls/"):
            return self._given_up
        if method == "GET" and tail.startswith("v1/models/"):
            return self._model
        return _unknown

    # ---- calls ------------------------------------------------------------------------------------------------------

    def _call(self, http: Request, execution: str, tail: str) -> Answer:
        dialect = DIALECTS[tail]
        try:
            if http.headers.get("content-encoding", "identity") != "identity":
                raise BadRequest("request bodies must not be compressed: send no Content-Encoding")
            lines = _so_far(http)
            asked = self._service.read(execution, dialect, http.body)
            number, derived = self._call_id(http, execution)
            seal = Seal(self._keys.admin, execution, number) if self._live or lines else None
            so_far, created = seal.read(lines) if seal is not None else ([], 0)
        except BadRequest as error:
            return _plain(dialect.fail(Failure("bad_request", why=str(error))))
        begun = self._service.begin(execution, number, asked, hints_of(http.headers, asked.request.model), so_far)
        request = without_history(asked.request)  # minutes may pass
        http.body = b""
        del asked
        if seal is not None and request.stream and not isinstance(begun, Failure):
            telling = self._telling(begun, dialect, request, seal, created)
            for chunk in so_far:
                telling.take(chunk)
            return self._tell(begun, telling, dialect, request, (number, derived))
        names = (number, derived)
        if isinstance(begun, Open):
            return _Waiting(self._service, begun, lambda answer: self._worded(answer, dialect, request, names))
        return self._worded(begun, dialect, request, names)

    def _worded(self, answer: Node | Failure, dialect: Dialect, request: Wanted, names: tuple[str, str]) -> Response:
        number, derived = names
        if isinstance(answer, Failure):
            waited_s, written = 0.0, dialect.fail(answer, stream=request.stream)
        else:
            waited_s, written = answer.waited_s, dialect.write(self._service.reply(answer, request), request)
        if written.status == 200:
            self._delivered(derived)
        return _plain(written, (CALL, number), (WAITED, f"{waited_s:.3f}"))

    def _delivered(self, derived: str) -> None:
        if derived:
            self._derived[derived] = self._derived.get(derived, 0) + 1

    # ---- live -------------------------------------------------------------------------------------------------------

    def _telling(self, begun: Open | Node, dialect: Dialect, request: Wanted, seal: Seal, created: int) -> Telling:
        started, tokens = (
            (begun.t0, begun.plan.prompt_tokens) if isinstance(begun, Open) else (begun.at, begun.prompt_tokens)
        )
        created = created or int(started)
        model = request.model or self._served_name
        events = dialect.stream(nothing_yet(begun.call, created, model, tokens), request)
        return Telling(self._service.chat, events, seal, created)

    async def _tell(
        self, begun: Open | Node, telling: Telling, dialect: Dialect, request: Wanted, names: tuple[str, str]
    ) -> Response:
        """In parts, if there is anything to say before the end; a failure before that has its status."""
        number, derived = names
        answer: Node | Failure
        if isinstance(begun, Open):
            pieces = self._service.tell(begun, telling)
            first = await anext(pieces, None)
            if first is not None:
                parts = self._parts(first, pieces, begun, telling, request, derived)
                return Response(200, SSE, b"", ((CALL, number),), parts=parts)
            answer = begun.said()
        else:
            answer = begun
        if isinstance(answer, Failure):
            return _plain(dialect.fail(answer, stream=True), (CALL, number))
        ending = telling.end(self._service.reply(answer, request), answer.waited_s)
        self._delivered(derived)
        return Response(200, SSE, ending, ((CALL, number),))

    async def _parts(
        self,
        first: bytes,
        pieces: AsyncGenerator[bytes],
        begun: Open,
        telling: Telling,
        request: Wanted,
        derived: str,
    ) -> AsyncIterator[bytes]:
        """To the end. Raises _BrokenOff if there is none: whoever asks again is told why."""
        async with contextlib.aclosing(pieces):
            yield first
            async for piece in pieces:
                yield piece
        answer = begun.said()
        if isinstance(answer, Failure):
            raise _BrokenOff(answer.why)
        yield telling.end(self._service.reply(answer, request), answer.waited_s)
        self._delivered(derived)

    def _call_id(self, http: Request, execution: str) -> tuple[str, str]:
        """(call id, the key to count its delivery under). A body seen again before delivery is the same call."""
        given = http.headers.get(CALL_KEY, "")
        if given:
            if not is_safe_name(given):
                raise BadRequest(f"{CALL} must be letters, digits, '.', '_' or '-'")
            return given, ""
        key = hashlib.blake2b(execution.encode() + b"\0" + http.body, digest_size=16).hexdigest()
        if len(self._derived) > 100_000:
            del self._derived[next(iter(self._derived))]
        return str(uuid.uuid5(_NAMESPACE, f"{key}/{self._derived.get(key, 0)}")), key

    # ---- the rest ---------------------------------------------------------------------------------------------------

    def _accepts(self, http: Request, execution: str) -> bool:
        scheme, _, token = http.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            token = http.headers.get("x-api-key", "")
        known = self._accepted.get(execution)
        if known is not None and token.isascii() and hmac.compare_digest(known, token):
            return True
        found = is_safe_name(execution) and token.isascii() and self._keys.accepts(execution, token.strip())
        if found:
            if len(self._accepted) > 100_000:
                self._accepted.clear()
            self._accepted[execution] = token
        return found

    def _metrics(self, http: Request) -> Response:
        """For Prometheus, with the run's admin key (`keys/admin`) as its bearer token."""
        token = http.headers.get("authorization", "").partition(" ")[2].strip()
        if not hmac.compare_digest(token.encode(), self._keys.admin.encode()):
            return Response(401, TEXT, b"the run's admin key is wanted as bearer token\n")
        return Response(200, CONTENT_TYPE, self._numbers())

    def _count_tokens(self, http: Request, execution: str, tail: str) -> Response:
        dialect = DIALECTS["v1/messages"]
        try:
            request = dialect.read(http.body)
        except BadRequest as error:
            return _plain(dialect.fail(Failure("bad_request", why=str(error))))
        counted = orjson.dumps({"input_tokens": self._service.count(execution, request)})
        return Response(200, "application/json", counted)

    def _given_up(self, http: Request, execution: str, tail: str) -> Response:
        self._service.given_up(execution, tail.partition("/")[2])
        return Response(204, TEXT, b"")

    def _models(self, http: Request, execution: str, tail: str) -> Response:
        return _plain(models(self._served_name))

    def _model(self, http: Request, execution: str, tail: str) -> Response:
        name = unquote(tail.removeprefix("v1/models/"))
        if name != self._served_name:
            return _plain(OpenAIChat().fail(Failure("no_model", why=name)))
        return _plain(models(self._served_name, one=True))


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request whose call runs; no task waits for it."""

    service: Service
    opened: Open
    worded: Callable[[Node | Failure], Response]
    give: Callable[[Response], None] | None = None

    def then(self, give: Callable[[Response], None]) -> None:
        self.give = give
        self.service.join(self.opened, self._told)

    def gone(self) -> None:
        self.service.leave(self.opened, self._told)

    def _told(self, answer: Node | Failure) -> None:
        assert self.give is not None
        try:
            response = self.worded(answer)
        except Exception:
            log.exception("the answer to call %s could not be worded", self.opened.call)
            response = wording(500, "Internal server error", "")
        self.give(response)


class _BrokenOff(Exception):
    """A call that failed when its answer had begun."""


def _so_far(http: Request) -> bytes:
    """Takes from the body what the relay put behind it. Raises BadRequest."""
    size = http.headers.get(SO_FAR_KEY)
    if size is None:
        return b""
    if not size.isdigit() or int(size) > len(http.body):
        raise BadRequest(f"{SO_FAR_KEY} must be a number of bytes of the body")
    count = int(size)
    lines = http.body[len(http.body) - count :]
    if count:
        http.body = http.body[:-count]
    return lines


def _plain(written: Written, *headers: tuple[str, str]) -> Response:
    return Response(written.status, written.content_type, written.body, headers)


def _hello(http: Request, execution: str, tail: str) -> Response:
    return Response(200, TEXT, b"ok\n")


def _unknown(http: Request, execution: str, tail: str) -> Response:
    return _plain(_dialect_of(http.path).fail(Failure("not_found", why=f"{http.method} /{tail}")))
