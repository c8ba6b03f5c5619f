"""CPU and memory of a process tree, and peers in environments of their own."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import psutil

PEERS = {
    "sglang-router": ("sglang-router==0.3.2",),
    "fastapi-httpx": (
        "fastapi==0.165.0",
        "uvicorn[standard]==0.54.0",
        "httpx==0.28.1",
        "tokenizers==0.23.3",
        "jinja2==3.1.6",
    ),
    "transformers": ("torch==2.13.0", "transformers==5.19.0"),
}


class PeerMissing(RuntimeError):
    """A peer's environment can't be made here."""


def cpu_s(pid: int) -> float:
    """Seconds on a CPU of a process and all below it, by the scheduler's own count. Those that have ended are gone."""
    total = 0
    for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        for task in Path(f"/proc/{process.pid}/task").iterdir():
            with contextlib.suppress(OSError):
                total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def memory_bytes(pid: int) -> int:
    """Private and proportional memory of a tree."""
    tree = (psutil.Process(pid), *psutil.Process(pid).children(recursive=True))
    return sum(p.memory_full_info().pss for p in tree)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def python_of(peers: Path, name: str) -> Path:
    """The interpreter of a peer's environment, made on first use. Raises PeerMissing."""
    folder = peers / name
    python = folder / "bin" / "python"
    if not (folder / "made").exists():
        commands = (
            [sys.executable, "-m", "venv", str(folder)],
            [str(python), "-m", "pip", "install", "-q", *PEERS[name]],
        )
        for command in commands:
            made = subprocess.run(command, capture_output=True, text=True)
            if made.returncode:
                raise PeerMissing(f"{name}: {made.stderr.strip()[-300:]}")
        (folder / "made").touch()
    return python


@contextlib.asynccontextmanager
async def running(*command: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that ends with the block."""
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def until_up(session: aiohttp.ClientSession, url: str, body: object, limit_s: float = 60.0) -> None:
    """Until a POST is answered with 200."""
    end = time.monotonic() + limit_s
    while True:
        with contextlib.suppress(aiohttp.ClientError, OSError):
            async with session.post(url, json=body) as response:
                await response.read()
                if response.status == 200:
                    return
        if time.monotonic() > end:
            raise PeerMissing(f"{url} did not come up in {limit_s} s")
        await asyncio.sleep(0.2)
