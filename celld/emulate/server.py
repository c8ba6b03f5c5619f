"""`python -m celld.emulate.server`: the emulated engine as a process with SGLang's HTTP surface.

Owns the command line, the listening socket and the shapes on the wire; what is served is engine.py's. TERM or INT
abort everything in flight, so that clients get their partial answers, and end the process with 0.
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from celld.emulate import wire
from celld.emulate.engine import RELEASABLE, Engine, Refused, Request, Times
from celld.emulate.pool import Pace
from celld.emulate.wire import BadRequest, Limits
from gyre_base.daemon import run_main
from gyre_base.stacks import dump_on_signal

DONE = b"data: [DONE]\n\n"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
MAX_BODY_BYTES = 32 << 20
MAX_SLOW_S = 10.0
MAX_FLUSH_S = 3600.0
VERSION = "0.5.23"  # of the surface


def reply(body: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")


def refusal(message: str, status: int = 400) -> web.Response:
    return reply({"error": {"message": message}}, status)


class Server:
    """Handlers over one engine."""

    def __init__(self, engine: Engine, *, name: str, limits: Limits, admin_key: str | None) -> None:
        self._engine, self._name, self._limits, self._key = engine, name, limits, admin_key

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        routes: dict[str, tuple[Handler, bool]] = {
            "/generate": (self.generate, False),
            "/health": (self.health, False),
            "/model_info": (self.model_info, False),
            "/server_info": (self.server_info, False),
            "/v1/loads": (self.loads, False),
            "/v1/models": (self.models, False),
            "/metrics": (self.metrics, False),
            "/abort_request": (self.abort, True),
            "/pause_generation": (self.pause, True),
            "/continue_generation": (self.proceed, True),
            "/flush_cache": (self.flush, True),
            "/release_memory_occupation": (self.release, True),
            "/resume_memory_occupation": (self.resume, True),
            "/begin_weight_update": (self.begin, True),
            "/end_weight_update": (self.end, True),
            "/update_weights_from_disk": (self.update, True),
            "/update_weight_version": (self.rename, True),
            "/weights_checker": (self.checksums, True),
            "/slow_down": (self.slow_down, True),
        }
        for path, (handler, is_control) in routes.items():
            for method in ("GET", "POST"):
                app.router.add_route(method, path, self._guarded(handler, is_control))
        return app

    def _guarded(self, handler: Handler, is_control: bool) -> Handler:
        async def guarded(http: web.Request) -> web.StreamResponse:
            given = http.headers.get("Authorization", "").removeprefix("Bearer ").encode()
            if is_control and self._key and not hmac.compare_digest(given, self._key.encode()):
                return reply({"error": "Unauthorized"}, 401)
            try:
                return await handler(http)
            except BadRequest as error:
                return refusal(str(error))
            except Refused as error:
                return reply({"success": False, "message": str(error), "error": {"message": str(error)}}, 400)

        return guarded

    # ---- generation -------------------------------------------------------------------------------------------------

    async def generate(self, http: web.Request) -> web.StreamResponse:
        body = await _json(http)
        streams = isinstance(body, dict) and body.get("stream") is True
        try:
            request = wire.parse(body, self._limits)
            if request.rid in self._engine.requests:
                raise BadRequest(f"Duplicate request ID detected: {request.rid}")
        except BadRequest as error:
            return await _error_stream(http, str(error)) if streams else refusal(str(error))
        logprobs = bool(body.get("return_logprob"))
        self._engine.submit(request)
        try:
            if streams:
                return await self._stream(http, request, logprobs)
            while request.finish is None:
                await request.news.wait()
                request.news.clear()
            return reply(self._chunk(request, logprobs))
        finally:
            self._engine.forget(request)

    async def _stream(self, http: web.Request, request: Request, logprobs: bool) -> web.StreamResponse:
        response = await _event_stream(http)
        while True:
            await request.news.wait()
            request.news.clear()
            last = request.finish is not None
            chunk = b"data: " + orjson.dumps(self._chunk(request, logprobs)) + b"\n\n"
            if last:
                await response.write(chunk + DONE)
                await response.write_eof()
                return response
            await response.write(chunk)

    def _chunk(self, request: Request, logprobs: bool) -> dict[str, Any]:
        return wire.chunk(request, self._engine.weights.version, logprobs)

    async def abort(self, http: web.Request) -> web.Response:
        body = await _object(http)
        rid = body.get("rid") or ""
        if body.get("abort_all") is True:
            self._engine.abort(list(self._engine.requests))
        elif rid in self._engine.requests:  # as the real engine: with it every other whose id begins so
            self._engine.abort([r for r in self._engine.requests if r.startswith(rid)])
        return web.Response()

    # ---- control ----------------------------------------------------------------------------------------------------

    async def pause(self, http: web.Request) -> web.Response:
        mode = (await _object(http)).get("mode", "abort")
        if mode not in ("abort", "retract", "in_place"):
            raise BadRequest("mode must be abort, retract or in_place")
        self._engine.pause(mode)
        return reply({"message": "Generation paused successfully.", "status": "ok"})

    async def proceed(self, http: web.Request) -> web.Response:
        self._engine.proceed()
        return reply({"message": "Generation continued successfully.", "status": "ok"})

    async def flush(self, http: web.Request) -> web.Response:
        try:
            wait_s = min(float(http.query.get("timeout", "0")), MAX_FLUSH_S)
        except ValueError as error:
            raise BadRequest("timeout must be a number of seconds") from error
        await self._engine.flush(wait_s)
        return web.Response(text="Cache flushed.\n")

    async def release(self, http: web.Request) -> web.Response:
        await self._engine.release(await _tags(http))
        return reply(None)

    async def resume(self, http: web.Request) -> web.Response:
        self._engine.resume(await _tags(http))
        return reply(None)

    async def begin(self, http: web.Request) -> web.Response:
        self._engine.bracket(True)
        return reply({"success": True, "message": "Succeeded."})

    async def end(self, http: web.Request) -> web.Response:
        self._engine.bracket(False)
        return reply({"success": True, "message": "Succeeded."})

    async def update(self, http: web.Request) -> web.Response:
        body = await _object(http)
        path, version = body.get("model_path"), body.get("weight_version")
        if not isinstance(path, str) or not path:
            raise BadRequest("model_path must be a directory")
        flush = body.get("flush_cache", True) is not False
        await self._engine.update_weights(Path(path), version, flush=flush)
        return reply({"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0})

    async def rename(self, http: web.Request) -> web.Response:
        """As the real engine: everything in flight is aborted unless told not to."""
        body = await _object(http)
        version = body.get("new_version")
        if not isinstance(version, str) or not version:
            raise BadRequest("new_version must be a string")
        if body.get("abort_all_requests", True) is not False:
            self._engine.abort(list(self._engine.requests))
        self._engine.rename(version)
        return reply({"success": True, "message": f"Weight version updated to {version}", "new_version": version})

    async def checksums(self, http: web.Request) -> web.Response:
        sums = {"weights": f"{self._engine.weights.check:08x}"}
        return reply({"success": True, "message": "Success.", "ranks": [{"checksums": sums}]})

    async def slow_down(self, http: web.Request) -> web.Response:
        """Sleep so many seconds before every token; null or 0 ends it. For tests."""
        sleep_s = (await _object(http)).get("forward_sleep_time") or 0.0
        if not isinstance(sleep_s, int | float) or not 0 <= sleep_s <= MAX_SLOW_S:
            raise BadRequest(f"forward_sleep_time must be a number of seconds up to {MAX_SLOW_S:g}")
        self._engine.slow_down(float(sleep_s))
        return reply(None)

    # ---- information ------------------------------------------------------------------------------------------------

    async def health(self, http: web.Request) -> web.Response:
        return web.Response()

    async def model_info(self, http: web.Request) -> web.Response:
        engine = self._engine
        return reply(
            {
                "model_path": str(engine.weights.model),
                "served_model_name": self._name,
                "is_generation": True,
                "weight_version": engine.weights.version,
            }
        )

    async def server_info(self, http: web.Request) -> web.Response:
        return reply(
            {
                "model_path": str(self._engine.weights.model),
                "context_length": self._limits.context_length,
                "max_running_requests": self._engine.pool.slots,  # more run, too, and slower
                "version": VERSION,
                "engine": "emulate",
                "incremental_streaming_output": True,
                "skip_tokenizer_init": True,
                "enable_memory_saver": True,
            }
        )

    async def models(self, http: web.Request) -> web.Response:
        card = {"id": self._name, "object": "model", "max_model_len": self._limits.context_length}
        return reply({"object": "list", "data": [card]})

    async def loads(self, http: web.Request) -> web.Response:
        engine = self._engine
        engine.touch()
        held = {
            "num_running_reqs": engine.running,
            "num_waiting_reqs": len(engine.waiting),
            "num_used_tokens": 0,
            "gen_throughput": 0.0,
        }
        return reply({"version": VERSION, "loads": [held]})

    async def metrics(self, http: web.Request) -> web.Response:
        """Prometheus text; `request_seconds_total` is what a bench compares with the executions' time."""
        engine = self._engine
        engine.touch()
        values = {
            "num_running_reqs": engine.running,
            "num_requests_total": engine.counts["requests"],
            "num_aborted_requests_total": engine.counts["aborted"],
            "prompt_tokens_total": engine.counts["prompt_tokens"],
            "generation_tokens_total": engine.pool.tokens + sum(map(engine.pool.done, engine.pool.running)),
            "request_seconds_total": engine.pool.request_s,
        }
        lines = [f'sglang:{name}{{model_name="{self._name}"}} {value}' for name, value in values.items()]
        return web.Response(text="\n".join(lines) + "\n")


async def _event_stream(http: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(http)
    return response


async def _error_stream(http: web.Request, message: str) -> web.StreamResponse:
    """What the real engine answers to a stream that it can't begin: 200, and an event that says why."""
    event = orjson.dumps({"error": {"message": message, "type": "invalid_request_error", "code": 400}})
    return web.Response(body=b"data: " + event + b"\n\n" + DONE, content_type="text/event-stream")


async def _json(http: web.Request) -> Any:
    try:
        return orjson.loads(await http.read())
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not JSON: {error}") from error


async def _object(http: web.Request) -> dict[str, Any]:
    body = await _json(http)
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    return body


async def _tags(http: web.Request) -> tuple[str, ...]:
    tags = (await _object(http)).get("tags") if await http.read() else None
    tags = list(RELEASABLE) if tags is None else tags
    if not isinstance(tags, list) or not all(tag in RELEASABLE for tag in tags):
        raise BadRequest(f"tags must be a list of {', '.join(RELEASABLE)}")
    return tuple(tags)


# ---- process --------------------------------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(prog="celld.emulate.server", description="An engine that only takes time.")
    add = options.add_argument
    add("--model", type=Path, required=True, help="directory with config.json; nothing else of it is read")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=0, help="0 takes a free one")
    add("--port-file", type=Path, help="where to write the port once requests are accepted")
    add("--served-model-name", default="emulated")
    add("--weight-version", default="default")
    add("--admin-api-key-file", type=Path)
    add("--context-length", type=int, default=1 << 20)
    add("--stacks-file", type=Path, help="SIGUSR2 writes the stacks there")
    add("--slots", type=int, required=True, help="requests at which the load is 1")
    add("--tokens-per-s", type=float, required=True, help="of one request at load 1")
    add("--load-slope", type=float, default=0.0)
    add("--load-floor", type=float, default=0.5)
    add("--release-s", type=float, default=0.0, help="seconds that a release of memory takes")
    add("--update-s", type=float, default=0.0, help="seconds that loading weights takes")
    return options


async def serve(args: argparse.Namespace) -> None:
    pace = Pace(
        slots=args.slots, tokens_per_s=args.tokens_per_s, load_slope=args.load_slope, load_floor=args.load_floor
    )
    times = Times(release_s=args.release_s, update_s=args.update_s)
    engine = Engine(pace, times, model=args.model, version=args.weight_version)
    key = args.admin_api_key_file.read_text().strip() if args.admin_api_key_file else None
    vocab_size = int(orjson.loads((args.model / "config.json").read_bytes()).get("vocab_size", 0))
    limits = Limits(vocab_size=vocab_size, context_length=args.context_length)
    server = Server(engine, name=args.served_model_name, limits=limits, admin_key=key)
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    runner = web.AppRunner(server.app(), handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, args.host, args.port, backlog=1024).start()
    port = runner.addresses[0][1]
    if args.port_file:
        temporary = args.port_file.with_name(f"{args.port_file.name}.{os.getpid()}")
        temporary.write_text(f"{port}\n")
        os.replace(temporary, args.port_file)
    print(f"http://{args.host}:{port}", flush=True)
    await ended.wait()
    engine.abort(list(engine.requests))
    await runner.cleanup()


def main(arguments: list[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    if args.stacks_file:
        dump_on_signal(open(args.stacks_file, "a"))  # noqa: SIM115 - for the life of the process
    try:
        run_main(lambda: serve(args))
    except (OSError, Refused) as error:
        print(f"emulated engine: {error}", file=sys.stderr)
        return 4
    return 0


if __name__ == "__main__":
    sys.exit(main())
