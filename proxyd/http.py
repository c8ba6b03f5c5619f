"""The HTTP side: authentication, bounds, call ids, and each dialect at its path. Decides nothing about calls.

`{http}/x/{execution}/v1/...` with the execution's bearer token. Every answer goes out whole, after its record is
durable.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import uuid
from collections.abc import Awaitable, Callable

from aiohttp import web

from gyre_base.ids import is_safe_name
from gyre_base.keys import Keys
from proxyd.dialects import BadRequest, Dialect, Failure, Written
from proxyd.dialects.anthropic import AnthropicMessages
from proxyd.dialects.openai_chat import OpenAIChat, models
from proxyd.dialects.openai_responses import OpenAIResponses
from proxyd.hints import hints_of
from proxyd.metrics import CONTENT_TYPE
from proxyd.service import Service

log = logging.getLogger(__name__)
MAX_BODY = 64 << 20  # bytes; a 2M-token history as JSON text is about 10 MB
CALL, WAITED = "X-Gyre-Call", "X-Gyre-Waited"
_NAMESPACE = uuid.UUID("b3c0a9f2-6f4e-5d0b-8a51-3f1b5a0c9e27")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Front:
    """The handlers."""

    def __init__(self, service: Service, keys: Keys, served_name: str, metrics: Callable[[], bytes]) -> None:
        self._service, self._keys, self._served_name = service, keys, served_name
        self._numbers = metrics
        self._derived: dict[str, int] = {}  # body hash -> answers delivered, for clients without call ids

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY)
        dialects: dict[str, Dialect] = {
            "/v1/chat/completions": OpenAIChat(),
            "/v1/messages": AnthropicMessages(),
            "/v1/responses": OpenAIResponses(),
        }
        for path, dialect in dialects.items():
            app.router.add_post("/x/{execution}" + path, self._calls(dialect))
        app.router.add_post("/x/{execution}/v1/messages/count_tokens", self._guarded(self._count_tokens))
        app.router.add_delete("/x/{execution}/calls/{call}", self._guarded(self._given_up))
        app.router.add_get("/x/{execution}/v1/models", self._guarded(self._models))
        app.router.add_get("/x/{execution}/v1/models/{model:.+}", self._guarded(self._model))
        app.router.add_get("/x/{execution}/api/hello", self._guarded(_health))
        app.router.add_get("/health", _health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_route("*", "/x/{execution}/{rest:.*}", self._guarded(_unknown))
        return app

    # ---- calls ------------------------------------------------------------------------------------------------------

    def _calls(self, dialect: Dialect) -> Handler:
        async def call(http: web.Request) -> web.StreamResponse:
            execution = http.match_info["execution"]
            if not self._accepts(http, execution):
                return _plain(dialect.fail(Failure("unauthorized")))
            try:
                body = await _body(http)
                asked = self._service.read(execution, dialect, body)
                request = asked.request
                number, derived = self._call_id(http, execution, body)
            except web.HTTPRequestEntityTooLarge:
                return _too_large(dialect)
            except BadRequest as error:
                return _plain(dialect.fail(Failure("bad_request", why=str(error))))
            hints = hints_of(http.headers, request.model)
            answer, waited_s = await self._service.answer(execution, number, asked, hints)
            if isinstance(answer, Failure):
                written = dialect.fail(answer, stream=request.stream)
            else:
                written = dialect.write(answer, request)
            response = _plain(written)
            response.headers[CALL], response.headers[WAITED] = number, f"{waited_s:.3f}"
            await response.prepare(http)
            await response.write_eof()
            if derived and written.status == 200:
                self._derived[derived] = self._derived.get(derived, 0) + 1
            return response

        return call

    def _call_id(self, http: web.Request, execution: str, body: bytes) -> tuple[str, str]:
        """(call id, the key to count its delivery under). A body seen again before delivery is the same call."""
        given = http.headers.get(CALL, "")
        if given:
            if not is_safe_name(given):
                raise BadRequest(f"{CALL} must be letters, digits, '.', '_' or '-'")
            return given, ""
        key = hashlib.blake2b(execution.encode() + b"\0" + body, digest_size=16).hexdigest()
        if len(self._derived) > 100_000:
            del self._derived[next(iter(self._derived))]
        return str(uuid.uuid5(_NAMESPACE, f"{key}/{self._derived.get(key, 0)}")), key

    # ---- the rest ---------------------------------------------------------------------------------------------------

    def _accepts(self, http: web.Request, execution: str) -> bool:
        scheme, _, token = http.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            token = http.headers.get("x-api-key", "")
        return is_safe_name(execution) and token.isascii() and self._keys.accepts(execution, token.strip())

    def _guarded(self, handler: Handler) -> Handler:
        async def guarded(http: web.Request) -> web.StreamResponse:
            if not self._accepts(http, http.match_info["execution"]):
                return _plain(OpenAIChat().fail(Failure("unauthorized")))
            return await handler(http)

        return guarded

    async def _metrics(self, http: web.Request) -> web.StreamResponse:
        """For Prometheus, with the run's admin key (`keys/admin`) as its bearer token."""
        token = http.headers.get("Authorization", "").partition(" ")[2].strip()
        if not hmac.compare_digest(token.encode("utf-8", "replace"), self._keys.admin.encode()):
            return web.Response(status=401, text="the run's admin key is wanted as bearer token\n")
        return web.Response(body=self._numbers(), headers={"Content-Type": CONTENT_TYPE})

    async def _count_tokens(self, http: web.Request) -> web.StreamResponse:
        dialect = AnthropicMessages()
        try:
            request = dialect.read(await _body(http))
        except web.HTTPRequestEntityTooLarge:
            return _too_large(dialect)
        except BadRequest as error:
            return _plain(dialect.fail(Failure("bad_request", why=str(error))))
        return web.json_response({"input_tokens": self._service.count(http.match_info["execution"], request)})

    async def _given_up(self, http: web.Request) -> web.StreamResponse:
        self._service.given_up(http.match_info["execution"], http.match_info["call"])
        return web.Response(status=204)

    async def _models(self, http: web.Request) -> web.StreamResponse:
        return _plain(models(self._served_name))

    async def _model(self, http: web.Request) -> web.StreamResponse:
        name = http.match_info["model"]
        if name != self._served_name:
            return _plain(OpenAIChat().fail(Failure("no_model", why=name)))
        return _plain(models(self._served_name, one=True))


async def _body(http: web.Request) -> bytes:
    """Raises HTTPRequestEntityTooLarge, before the body is sent if its length is given."""
    if (http.content_length or 0) > MAX_BODY:
        raise web.HTTPRequestEntityTooLarge(MAX_BODY, http.content_length or 0)
    return await http.read()


def _too_large(dialect: Dialect) -> web.Response:
    response = _plain(dialect.fail(Failure("too_large", why=f"The request body is larger than {MAX_BODY} bytes.")))
    response.force_close()
    return response


def _plain(written: Written) -> web.Response:
    return web.Response(status=written.status, body=written.body, headers={"Content-Type": written.content_type})


async def _health(http: web.Request) -> web.StreamResponse:
    return web.Response(text="ok\n")


async def _unknown(http: web.Request) -> web.StreamResponse:
    return _plain(OpenAIChat().fail(Failure("not_found", why=f"{http.method} /{http.match_info['rest']}")))
