"""Switches of one cell, phase by phase: a real tiny engine of about 0.1 GB with calls in flight, weights pulled from a
core over the bus and its slots, and a rank that only answers (its first micro-step is no part of a switch).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from celld.agent.switching import Stopwatch, Switcher
from celld.engine_client import EngineClient
from celld.tiny.model import TinyConfig, TinyQwen3, save
from celld.transfer.bulk import Bulk, open_engine
from celld.weights import Published, Snapshot, transport_to
from gyre_base import messages as m
from gyre_base.bus import Client, Server
from gyre_base.keys import Keys, make_keys
from gyre_base.rundir import RunDir
from tests.engine.process import EngineProcess

MODEL = TinyConfig(
    vocab_size=8192, hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8, head_dim=64
)
CALLS, PROMPT = 8, 200
ROUNDS = 3
BOUNDS = {
    "drain": "one decoding step: an abort takes effect between two",
    "idle": "the engine's answer to /v1/loads",
    "flush": "the engine's answers; with a shared store also what is on its way to it",
    "release": "the kernel unmapping weights and cache",
    "rank": "the rank's answer; a stop waits for the micro-step in hand",
    "resume_weights": "the engine's answer; the real one maps its memory again",
    "pull": "the socket and a checksum (bench: pull_vs_socket_256mib)",
    "write": "the disk: every byte is durable before an engine sees it",
    "load": "reading, checking and fusing the weights in the engine, one thread",
    "resume_kv": "mapping the cache; its pages come when they are touched",
    "prove": "the engine's answer to /model_info",
}


class Core:
    """Answers as `rank-c0`: orders at once, weights from what is published."""

    def __init__(self, run: RunDir, keys: Keys) -> None:
        self.bulk = Bulk(open_engine("auto", "tcp", "127.0.0.1"))
        self.published = Published(self.bulk)
        self.server = Server(run, keys, kind="rank", name="rank-c0", life=1, bind="127.0.0.1")
        self.server.start()

    async def serve(self) -> None:
        async for received in self.server:
            match received.message:
                case m.PullWeights():
                    answer: Any = self.published.answer(received.message)
                case m.SlotDone(lease=lease):
                    self.bulk.shelf.done(lease)
                    continue
                case _:
                    answer = m.RankState(cell="c0", rank=0, life=1, training=False, version="0.0", epoch=0)
            await self.server.send(received.peer, answer, received.correlation)


@contextmanager
def made(folder: Path) -> Iterator[tuple[RunDir, Keys, EngineProcess, TinyQwen3]]:
    run = RunDir.create(folder / "run")
    keys = make_keys(run)
    network = TinyQwen3(MODEL).initialise(0)
    (folder / "model").mkdir()
    save(network, folder / "model")
    options = ("--weight-version", "0.0", "--max-running-requests", str(CALLS), "--context-length", "1024")
    with EngineProcess(folder / "model", *options) as engine:
        yield run, keys, engine, network


async def switches(folder: Path) -> tuple[int, list[dict[str, float]], list[dict[str, float]]]:
    """(bytes of the weights, seconds by phase of each switch to train, and of each back); the first round warms up."""
    with made(folder) as (run, keys, engine, network):
        core, rank = Core(run, keys), Client(run, keys, "rank-c0")
        serving = asyncio.get_running_loop().create_task(core.serve())
        transport = transport_to(run, keys, "rank-c0", Bulk(open_engine("auto", "tcp", "127.0.0.1")))
        config = json.loads((folder / "model" / "config.json").read_text())
        switcher = Switcher(rank, transport, folder / "weights", config)
        (folder / "weights").mkdir()
        tensors = {name: tensor.numpy() for name, tensor in network.state_dict().items()}
        there, back = [], []
        async with EngineClient(engine.url, timeout_s=300.0) as client, aiohttp.ClientSession() as session:
            for number in range(1, ROUNDS + 2):
                calls = [asyncio.ensure_future(_call(session, engine.url, f"{number}.{n}")) for n in range(CALLS)]
                await _running(client, CALLS)
                watch = Stopwatch()
                with watch.phase("drain"):
                    await client.abort_all()
                    await asyncio.gather(*calls)
                _, phases = await switcher.to_train(client, 2 * number)
                there.append(watch.phases_s | phases)
                changed = {name: tensor + np.float32(1e-4 * number) for name, tensor in tensors.items()}
                core.published.publish(Snapshot.of(f"0.{number}", changed))
                served, phases = await switcher.to_rollout(client, 2 * number + 1, f"0.{number}", update_only=False)
                assert served == f"0.{number}"
                back.append(phases)
        serving.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await serving
        for connection in (rank, transport, core.server):
            connection.close()
        return sum(tensor.nbytes for tensor in tensors.values()), there[1:], back[1:]


async def _call(session: aiohttp.ClientSession, url: str, rid: str) -> None:
    ids = np.random.default_rng(abs(hash(rid)) % 2**32).integers(2, 8000, PROMPT).tolist()
    body = {"rid": f"{rid}.", "input_ids": ids, "sampling_params": {"max_new_tokens": 800, "ignore_eos": True}}
    async with session.post(url + "/generate", json=body) as response:
        await response.read()


async def _running(client: EngineClient, count: int) -> None:
    deadline = time.monotonic() + 120
    while (await client.loads()).running < count:
        if time.monotonic() > deadline:
            raise RuntimeError("the engine does not get to its calls")
        await asyncio.sleep(0.05)


def disk_s(folder: Path, size: int) -> float:
    """Seconds of a plain durable write of so many bytes: what `write` is measured against."""
    content = bytes(size)
    began = time.monotonic()
    with open(folder / "plain", "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return time.monotonic() - began
