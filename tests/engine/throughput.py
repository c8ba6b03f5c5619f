"""`python -m tests.engine.throughput`: generated tokens per second of a tiny engine over HTTP, streams included.

The client runs in this process and takes CPU time of its own; on a machine with one free core the figure is lower.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from pathlib import Path

import aiohttp
import orjson

from celld.tiny.model import TinyConfig, TinyQwen3, save
from tests.engine.process import EngineProcess


async def stream(session: aiohttp.ClientSession, url: str, ids: list[int], rid: str, new: int) -> list[int]:
    """Output ids of one streamed request."""
    params = {"max_new_tokens": new, "temperature": 1.0, "ignore_eos": True}
    body = {"rid": rid, "input_ids": ids, "sampling_params": params, "stream": True, "return_logprob": True}
    out: list[int] = []
    async with session.post(url + "/generate", data=orjson.dumps(body)) as response:
        async for line in response.content:
            if line.startswith(b"data: {"):
                out += orjson.loads(line[6:])["output_ids"]
    return out


async def chat(session: aiohttp.ClientSession, url: str, name: str, args: argparse.Namespace) -> int:
    """One execution: turns that each continue the last; the number of generated tokens."""
    rng = random.Random(name)
    ids = [rng.randrange(640) for _ in range(args.prompt)]
    for turn in range(args.turns):
        ids += await stream(session, url, ids, f"{name}-{turn}", args.new)
        ids += [rng.randrange(640) for _ in range(args.between)]
    return args.turns * args.new


async def measure(url: str, args: argparse.Namespace) -> float:
    """Tokens per second with `rows` executions at once."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await stream(session, url, [1, 2, 3], "warm", 20)
        started = time.perf_counter()
        counts = await asyncio.gather(*(chat(session, url, f"e{i:03d}", args) for i in range(args.rows)))
        return sum(counts) / (time.perf_counter() - started)


def main() -> None:
    """Print one line per number of concurrent executions."""
    options = argparse.ArgumentParser(prog="tests.engine.throughput")
    options.add_argument("--rows", type=int, nargs="*", default=[1, 24, 32, 64])
    options.add_argument("--prompt", type=int, default=60)
    options.add_argument("--turns", type=int, default=6)
    options.add_argument("--new", type=int, default=25)
    options.add_argument("--between", type=int, default=10)
    args = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = TinyConfig(vocab_size=640, initializer_range=0.1)
        save(TinyQwen3(config).initialise(1), folder)
        for rows in args.rows:
            with EngineProcess(Path(folder)) as engine:
                args.rows = rows
                before = engine.cpu_s()
                rate = asyncio.run(measure(engine.url, args))
                tokens = rows * args.turns * args.new
                cpu_us = 1e6 * (engine.cpu_s() - before) / tokens
                print(f"{rows:3d} rows: {rate:7.0f} tok/s, engine CPU {cpu_us:.0f} us/token")


if __name__ == "__main__":
    main()
