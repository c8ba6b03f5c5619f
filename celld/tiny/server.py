"""`python -m celld.tiny.server --model DIR`: the tiny engine as a process of its own.

Owns the command line, the listening socket and the end of the process. On TERM or INT everything in flight is aborted
first, so that streaming clients get their partial answers, and then the process ends with 0.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import uvloop
from aiohttp import web

from celld.tiny.api import Server, ServerOptions
from celld.tiny.engine import Engine
from celld.tiny.kvstore import Giver, Shape, Taker
from celld.tiny.model import TinyConfig
from celld.tiny.runner import Runner, WeightsError
from celld.tiny.scheduler import Scheduler
from celld.tiny.wire import Limits
from celld.transfer.engine import TransferEngine, TransferUnavailable
from celld.transfer.streams import StreamEngine
from gyre_base.stacks import dump_on_signal

BAD_USAGE, REFUSED = 2, 4
KV_PATIENCE_S = 2.0  # a prompt is computed rather than waited for


class StartError(Exception):
    """The engine can't start; `code` is the exit code."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def parser() -> argparse.ArgumentParser:
    """The options; names are the real engine's where it has the option."""
    options = argparse.ArgumentParser(
        prog="celld.tiny.server", description="A small engine with SGLang's HTTP surface."
    )
    add = options.add_argument
    add("--model", type=Path, required=True, help="directory with config.json and model.safetensors (Qwen3-shaped)")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=0, help="0 takes a free one")
    add("--port-file", type=Path, help="where to write the port once requests are accepted")
    add("--served-model-name", help="default: the name of the model directory")
    add("--weight-version", default="default", help="name of the weights in --model")
    add("--api-key-file", type=Path, help="file with the bearer key for everything")
    add("--admin-api-key-file", type=Path, help="file with the bearer key for control endpoints")
    add("--max-running-requests", type=int, default=64)
    add("--max-queued-requests", type=int, default=1024, help="beyond this many in flight the answer is 503")
    add("--context-length", type=int, default=2048, help="prompt and completion, in tokens")
    add("--cache-slots", type=int, help="finished prefixes kept for reuse; default: twice the running requests")
    add("--max-prefill-tokens", type=int, default=1024, help="per step; lower values delay decoding rows less")
    add("--stream-interval", type=int, default=16, help="tokens per stream chunk after the first token")
    add("--stacks-file", type=Path, help="SIGUSR2 writes the stacks of all threads there")
    add("--kv-store", type=Path, help="folder that all engines of a run share: they read each other's keys and values")
    add("--kv-name", default="engine", help="with --kv-store: this engine's own name in it")
    add("--kv-transport", choices=("socket", "mooncake"), default="socket", help="how they are read")
    add("--kv-share-mib", type=int, default=256, help="of keys and values that others may read, kept after a release")
    add("--threads", type=int, default=1, help="torch threads")
    add("--seed", type=int, default=0, help="with the request id, the sampling noise of requests without a seed")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run until TERM or INT."""
    args = parser().parse_args(arguments)
    if args.stacks_file:
        dump_on_signal(open(args.stacks_file, "a"))  # noqa: SIM115 - for the life of the process
    try:
        low = [n for n in ("max_running_requests", "context_length", "stream_interval", "threads") if vars(args)[n] < 1]
        if low:
            raise StartError(f"--{low[0].replace('_', '-')} must be at least 1", BAD_USAGE)
        return uvloop.run(serve(args))
    except StartError as error:
        print(f"tiny engine: {error}", file=sys.stderr)
        return error.code


def build(args: argparse.Namespace) -> tuple[Engine, ServerOptions]:
    """Load the model and wire the parts. Raises StartError."""
    torch.set_num_threads(args.threads)
    cache_slots = 2 * args.max_running_requests if args.cache_slots is None else args.cache_slots
    slots = args.max_running_requests + cache_slots
    try:
        runner = Runner(args.model, slots=slots, context_length=args.context_length)
    except WeightsError as error:
        raise StartError(str(error), BAD_USAGE) from error
    config = runner.config
    if args.context_length > config.max_position_embeddings:
        known = config.max_position_embeddings
        raise StartError(f"--context-length {args.context_length} is beyond the model's {known} positions", BAD_USAGE)
    scheduler = Scheduler(
        rows=args.max_running_requests,
        cache_slots=cache_slots,
        prefill_tokens=args.max_prefill_tokens,
        notes_kept=args.kv_store is not None,
    )
    limits = Limits(
        vocab_size=config.vocab_size,
        context_length=args.context_length,
        eos_ids=frozenset(() if config.eos_token_id is None else (config.eos_token_id,)),
        stream_interval=args.stream_interval,
        engine_seed=args.seed,
    )
    options = ServerOptions(
        limits=limits,
        served_name=args.served_model_name or args.model.resolve().name,
        info=_server_info(args),
        max_queued=args.max_queued_requests,
        api_key=_key(args.api_key_file),
        admin_key=_key(args.admin_api_key_file),
    )
    return Engine(runner, scheduler, version=args.weight_version, shared=_shared(args, config)), options


def _shared(args: argparse.Namespace, config: TinyConfig) -> tuple[Giver, Taker] | None:
    """Both sides of the store, or None without one. Raises StartError."""
    if args.kv_store is None:
        return None
    try:
        args.kv_store.mkdir(mode=0o700, parents=True, exist_ok=True)
        if args.kv_transport == "mooncake":
            engine: TransferEngine | StreamEngine = TransferEngine(args.host, patience_s=KV_PATIENCE_S)
        else:
            engine = StreamEngine(args.host, progress_s=KV_PATIENCE_S)
    except (OSError, TransferUnavailable) as error:
        raise StartError(f"no shared keys and values: {error}", BAD_USAGE) from error
    shape = Shape(config.num_hidden_layers, config.num_key_value_heads, config.head_dim)
    giver = Giver(args.kv_store, args.kv_name, engine, shape, args.kv_share_mib << 20)
    return giver, Taker(args.kv_store, args.kv_name, engine, shape)


def _server_info(args: argparse.Namespace) -> dict[str, Any]:
    """What a probe looks at, under the real engine's names."""
    return {
        "model_path": str(args.model),
        "context_length": args.context_length,
        "max_running_requests": args.max_running_requests,
        "stream_interval": args.stream_interval,
        "random_seed": args.seed,
        "incremental_streaming_output": True,
        "skip_tokenizer_init": True,
        "enable_cache_report": True,
        "enable_metrics": True,
        "enable_memory_saver": True,
    }


def _key(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        key = path.read_text().strip()
    except OSError as error:
        raise StartError(f"can't read the key file {path}: {error.strerror}", BAD_USAGE) from error
    if not key:
        raise StartError(f"the key file {path} is empty", BAD_USAGE)
    return key


async def serve(args: argparse.Namespace) -> int:
    """Accept requests until told to end; 1 when the engine's worker failed."""
    engine, options = build(args)
    server = Server(engine, options)
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    failures: list[BaseException] = []

    def failed(error: BaseException) -> None:
        failures.append(error)
        ended.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    runner = web.AppRunner(server.app(), handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, args.host, args.port).start()
    except OSError as error:
        raise StartError(f"can't listen on {args.host}:{args.port}: {error.strerror or error}", REFUSED) from error
    engine.start(server.deliver, failed)
    host, port = runner.addresses[0][:2]
    if args.port_file:
        write_port_file(args.port_file, port)
    print(f"http://{host}:{port}", flush=True)
    await ended.wait()
    if failures:
        print(f"tiny engine: the worker failed: {failures[0]!r}", file=sys.stderr)
        raise failures[0]
    await engine.stop()
    await runner.cleanup()
    return 0


def write_port_file(path: Path, port: int) -> None:
    """Announce the port; readers see the whole number or no file."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(f"{port}\n")
    os.replace(temporary, path)


if __name__ == "__main__":
    sys.exit(main())
