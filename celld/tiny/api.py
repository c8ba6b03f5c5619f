"""The HTTP side of the tiny engine: SGLang 0.5.23's subset as aiohttp handlers.

Owns the streams and the table of request ids in flight. Never touches scheduler or tensors: those belong
to the engine's worker thread. Differences from the real engine, all on the safe side: release on a busy engine is
refused instead of fatal, an in-place paused update with flush is refused before anything changes, a request held during
a pause can be aborted, /health stays 200 during a pause, the last chunk of a queued abort repeats no token.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from celld.tiny import wire
from celld.tiny.engine import RELEASABLE, Engine, Progress, Refused, WeightsError
from celld.tiny.wire import BadRequest, Limits, Submission

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
MAX_BODY_BYTES = 32 * 1024 * 1024
VERSION = "0.5.23"  # of the surface


@dataclass(slots=True, eq=False)
class Stream:
    """What has been reported of one request and not yet sent."""

    submission: Submission
    started: float
    news: Progress | None = None
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    def push(self, progress: Progress) -> None:
        """Append; news that nobody has fetched yet becomes one chunk."""
        self.news = progress if self.news is None else wire.merge(self.news, progress)
        self.arrived.set()

    async def next(self) -> Progress:
        """The news since the last call."""
        await self.arrived.wait()
        self.arrived.clear()
        news, self.news = self.news, None
        assert news is not None
        return news


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """What the HTTP side needs to know."""

    limits: Limits
    served_name: str
    info: dict[str, Any]  # the static part of /server_info
    architecture: str = "Qwen3ForCausalLM"
    max_queued: int = 1024  # requests beyond this are answered 503
    api_key: str | None = None
    admin_key: str | None = None


def reply(body: Any, status: int = 200) -> web.Response:
    """A JSON response."""
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")


def refusal(message: str, status: int = 400) -> web.Response:
    """An error in the real engine's shape."""
    return reply({"error": {"message": message}}, status)


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Whatever can't be honoured is a 400 with its reason."""
    try:
        return await handler(request)
    except BadRequest as error:
        return refusal(str(error))


class Server:
    """HTTP handlers over one engine."""

    def __init__(self, engine: Engine, options: ServerOptions) -> None:
        self.engine, self.options = engine, options
        self.streams: dict[str, Stream] = {}

    def app(self) -> web.Application:
        """The routes: (methods, path, handler, needs the admin key)."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors])
        get, post, both, put = ("GET",), ("POST",), ("GET", "POST"), ("POST", "PUT")
        routes: list[tuple[tuple[str, ...], str, Handler, bool]] = [
            (put, "/generate", self.generate, False),
            (get, "/health", self.health, False),
            (get, "/v1/models", self.models, False),
            (get, "/model_info", self.model_info, False),
            (get, "/server_info", self.server_info, False),
            (get, "/v1/loads", self.loads, False),
            (get, "/metrics", self.metrics, False),
            (post, "/abort_request", self.abort_request, True),
            (post, "/pause_generation", self.pause, True),
            (post, "/continue_generation", self.proceed, True),
            (both, "/flush_cache", self.flush_cache, True),
            (both, "/release_memory_occupation", self.release, True),
            (both, "/resume_memory_occupation", self.resume, True),
            (post, "/begin_weight_update", self.begin_update, True),
            (post, "/end_weight_update", self.end_update, True),
            (post, "/update_weights_from_disk", self.update_weights, True),
            (post, "/update_weight_version", self.update_version, True),
            (both, "/weights_checker", self.weights_checker, True),
            (both, "/slow_down", self.slow_down, True),
        ]
        for methods, path, handler, admin in routes:
            for method in methods:
                app.router.add_route(method, path, self._guarded(handler, admin))
        return app

    def deliver(self, news: list[Progress]) -> None:
        """Called by the engine on the event loop."""
        for progress in news:
            stream = self.streams.get(progress.request.rid)
            if stream is not None and stream.submission.request is progress.request:
                stream.push(progress)

    def _guarded(self, handler: Handler, admin: bool) -> Handler:
        """Bearer keys as the real engine has them: the admin key for control, if set; else the plain key, if set."""
        plain, own = self.options.api_key, self.options.admin_key
        accepted = [own] if admin and own else [key for key in (plain, own) if key] if plain else []

        async def guarded(http: web.Request) -> web.StreamResponse:
            given = http.headers.get("Authorization", "").removeprefix("Bearer ").encode()
            if accepted and not any(hmac.compare_digest(given, key.encode()) for key in accepted):
                return reply({"error": "Unauthorized"}, 401)
            return await handler(http)

        return guarded

    # -- generation ---------------------------------------------------------------------------------------------

    async def generate(self, http: web.Request) -> web.StreamResponse:
        """One submission, streamed or whole. A client that goes away aborts it."""
        body = await _json(http)
        streams = isinstance(body, dict) and body.get("stream") is True
        try:
            submission = wire.parse_generate(body, self.options.limits)
            rid = submission.request.rid
            if rid in self.streams:
                raise BadRequest(f"Duplicate request ID detected: {rid}")
        except BadRequest as error:
            return await _error_stream(http, str(error)) if streams else refusal(str(error))
        if len(self.streams) >= self.options.max_queued:
            return refusal("The request queue is full.", 503)
        stream = self.streams[rid] = Stream(submission, time.monotonic())
        self.engine.submit(submission.request)
        finished = False
        try:
            response = await (self._send_stream(http, stream) if submission.stream else self._send_whole(stream))
            finished = True
            return response
        finally:
            del self.streams[rid]
            if not finished:
                self.engine.drop(submission.request)

    async def _send_whole(self, stream: Stream) -> web.Response:
        while True:
            await stream.arrived.wait()
            if stream.news is not None and stream.news.finish_reason is not None:
                return reply(self._response(stream, stream.news))
            stream.arrived.clear()

    async def _send_stream(self, http: web.Request, stream: Stream) -> web.StreamResponse:
        """Server-sent events, one per piece of news; ids and logprobs are increments."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(http)
        while True:
            news = await stream.next()
            chunk = b"data: " + orjson.dumps(self._response(stream, news)) + b"\n\n"
            if news.finish_reason is not None:
                await response.write(chunk + b"data: [DONE]\n\n")
                await response.write_eof()
                return response
            await response.write(chunk)

    def _response(self, stream: Stream, news: Progress) -> dict[str, Any]:
        latency_s = time.monotonic() - stream.started if news.finish_reason is not None else None
        return wire.generate_response(stream.submission, news, latency_s)

    async def abort_request(self, http: web.Request) -> web.Response:
        """Stop one request (and, as the real engine does, every other whose id begins with its id), or all."""
        body = await _json_object(http)
        rid = body.get("rid") or ""
        if not isinstance(rid, str):
            raise BadRequest("rid must be a string")
        if body.get("abort_all") is True:
            self.engine.abort_all()
        elif rid in self.streams:  # an id that is not in flight is ignored, even if it is a prefix of others
            self.engine.abort(rid)
        return web.Response()

    # -- control ------------------------------------------------------------------------------------------------

    async def pause(self, http: web.Request) -> web.Response:
        """Stop stepping; new requests are held."""
        mode = (await _json_object(http)).get("mode", "abort")
        if mode not in ("abort", "retract", "in_place"):
            raise BadRequest("mode must be abort, retract or in_place")
        await self.engine.ask(lambda: self.engine.pause(mode))
        return reply({"message": "Generation paused successfully.", "status": "ok"})

    async def proceed(self, http: web.Request) -> web.Response:
        """End a pause."""
        await _json_object(http)
        await self.engine.ask(self.engine.proceed)
        return reply({"message": "Generation continued successfully.", "status": "ok"})

    async def flush_cache(self, http: web.Request) -> web.Response:
        """Forget cached prefixes; `timeout` seconds may be spent waiting for idleness."""
        try:
            deadline = time.monotonic() + min(float(http.query.get("timeout", "0")), 3600.0)
        except ValueError as error:
            raise BadRequest("timeout must be a number of seconds") from error
        while not (done := await self.engine.ask(self.engine.flush)) and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        text = "Cache flushed.\n" if done else "Flush cache failed.\n"
        return web.Response(text=text, status=200 if done else 400)

    async def release(self, http: web.Request) -> web.Response:
        """Let go of memory."""
        return await self._memory(http, self.engine.release)

    async def resume(self, http: web.Request) -> web.Response:
        """Take memory again."""
        return await self._memory(http, self.engine.resume)

    async def _memory(self, http: web.Request, action: Callable[[tuple[str, ...]], None]) -> web.Response:
        tags = (await _json_object(http, optional=True)).get("tags")
        tags = list(RELEASABLE) if tags is None else tags
        if not isinstance(tags, list) or not all(tag in RELEASABLE for tag in tags):
            raise BadRequest(f"tags must be a list of {', '.join(RELEASABLE)}")
        try:
            await self.engine.ask(lambda: action(tuple(tags)))
        except Refused as error:
            return refusal(str(error))
        return reply(None)

    async def begin_update(self, http: web.Request) -> web.Response:
        """Open a weight-update session."""
        return await self._bracket(http, True)

    async def end_update(self, http: web.Request) -> web.Response:
        """Close it."""
        return await self._bracket(http, False)

    async def _bracket(self, http: web.Request, opens: bool) -> web.Response:
        await _json_object(http)
        try:
            await self.engine.ask(lambda: self.engine.bracket(opens))
        except Refused as error:
            return reply({"success": False, "message": str(error)}, 400)
        return reply({"success": True, "message": "Succeeded."})

    async def update_weights(self, http: web.Request) -> web.Response:
        """Read weights from a directory. Without a pause this waits for what is in flight; in one it acts at once."""
        body = await _json_object(http)
        path, version = body.get("model_path"), body.get("weight_version")
        if not isinstance(path, str) or not path:
            raise BadRequest("model_path must be a directory with model.safetensors")
        if version is not None and not isinstance(version, str):
            raise BadRequest("weight_version must be a string")
        flush = body.get("flush_cache", True) is not False
        if body.get("abort_all_requests") is True:
            self.engine.abort_all()
        engine = self.engine
        try:
            paused = await engine.ask_idle(lambda: engine.update_weights(Path(path), version, flush))
        except (Refused, WeightsError) as error:
            return reply({"success": False, "message": str(error), "num_paused_requests": 0}, 400)
        message = "Succeeded to update model weights."
        if version is not None:
            message += f" Weight version updated to {version}."
        return reply({"success": True, "message": message, "num_paused_requests": paused})

    async def update_version(self, http: web.Request) -> web.Response:
        """Rename the weights. Trap kept from the real engine: everything in flight is aborted by default."""
        body = await _json_object(http)
        version = body.get("new_version")
        if not isinstance(version, str) or not version:
            raise BadRequest("new_version must be a string")
        if body.get("abort_all_requests", True) is not False:
            self.engine.abort_all()
        await self.engine.ask(lambda: self.engine.set_version(version))
        message = f"Weight version updated to {version}"
        return reply({"success": True, "message": message, "new_version": version})

    async def weights_checker(self, http: web.Request) -> web.Response:
        """Digests of the served tensors."""
        action = (await _json_object(http, optional=True)).get("action", "checksum")
        if action != "checksum":
            return reply({"success": False, "message": f"action {action!r} is not supported"}, 400)
        try:
            checksums = await self.engine.ask(self.engine.checksums)
        except Refused as error:
            return reply({"success": False, "message": str(error)}, 400)
        return reply({"success": True, "message": "Success.", "ranks": [{"checksums": checksums}]})

    async def slow_down(self, http: web.Request) -> web.Response:
        """Sleep so many seconds before every step; null or 0 ends it. For tests."""
        sleep_s = (await _json_object(http)).get("forward_sleep_time") or 0.0
        if not isinstance(sleep_s, int | float) or not 0 <= sleep_s <= 10:
            raise BadRequest("forward_sleep_time must be a number of seconds up to 10")
        await self.engine.ask(lambda: self.engine.slow_down(float(sleep_s)))
        return reply(None)

    # -- information --------------------------------------------------------------------------------------------

    async def health(self, http: web.Request) -> web.Response:
        """The process answers. Says nothing about pauses."""
        return web.Response()

    async def models(self, http: web.Request) -> web.Response:
        """OpenAI's list with the one model."""
        card = {
            "id": self.options.served_name,
            "object": "model",
            "owned_by": "sglang",
            "root": self.options.served_name,
            "max_model_len": self.options.limits.context_length,
        }
        return reply({"object": "list", "data": [card]})

    async def model_info(self, http: web.Request) -> web.Response:
        """What is served; `weight_version` is the proof of an update."""
        return reply(
            {
                "model_path": str(self.engine.model_path),
                "served_model_name": self.options.served_name,
                "is_generation": True,
                "weight_version": self.engine.version,
                "load_format": "safetensors",
                "model_type": "qwen3",
                "architectures": [self.options.architecture],
            }
        )

    async def server_info(self, http: web.Request) -> web.Response:
        """Start options and what is held now."""
        loads = await self.engine.ask(self.engine.loads)
        state = {"paused": loads.paused, "kv_bytes": loads.kv_bytes, "weights_bytes": loads.weights_bytes}
        return reply({**self.options.info, "version": VERSION, "engine": "tiny", "internal_states": [state]})

    async def loads(self, http: web.Request) -> web.Response:
        """What is held now, live (the real engine publishes a snapshot every few steps)."""
        loads = await self.engine.ask(self.engine.loads)
        return reply(
            {
                "timestamp": datetime.now(UTC).isoformat(),
                "version": VERSION,
                "accelerator": "cpu",
                "num_accelerators": 0,
                "loads": [wire.loads_response(loads, self.engine.counters, time.time())],
            }
        )

    async def metrics(self, http: web.Request) -> web.Response:
        """Prometheus text."""
        loads = await self.engine.ask(self.engine.loads)
        text = wire.metrics_text(loads, self.engine.counters, self.options.served_name)
        return web.Response(text=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


async def _json(http: web.Request) -> Any:
    try:
        return orjson.loads(await http.read())
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not JSON: {error}") from error


async def _json_object(http: web.Request, *, optional: bool = False) -> dict[str, Any]:
    """The body as an object. As with the real engine, an absent body is an error unless it is optional."""
    if optional and not await http.read():
        return {}
    body = await _json(http)
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    return body


async def _error_stream(http: web.Request, message: str) -> web.StreamResponse:
    """The real engine answers a bad streaming request with 200 and an error event."""
    error = {"message": message, "type": "invalid_request_error", "code": 400, "retryable": False}
    body = b"data: " + orjson.dumps({"error": error}) + b"\n\ndata: [DONE]\n\n"
    return web.Response(body=body, content_type="text/event-stream")
