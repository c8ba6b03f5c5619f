"""The steps of a switch, in the only safe order, timed by phase.

To train: the engine is drained (proxyd saw to it), found idle, flushed, lets go of its memory; then the rank may claim.
To rollout: the rank stops claiming, the engine takes memory again, loads the version in a bracket, proves it, goes on.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from celld.engine_client import EngineClient
from celld.weights import Snapshot, Transport
from gyre_base import messages as m
from gyre_base.bus import Client
from gyre_base.ids import PolicyVersion

IDLE_S = 30.0
WRITE_BACK_S = 10.0  # for KV on its way to a shared store; flushing is refused until it is there
RANK_ANSWER_S = 120.0  # a rank may be in the middle of a long micro-step
PULL_S = 60.0


class Stopwatch:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.phases_s: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self.phases_s[name] = round(time.monotonic() - start, 4)


class Switcher:
    """One cell's engine and rank. `transport` fetches the core's weights; engines load them from under `folder`."""

    def __init__(self, rank: Client, transport: Transport, folder: Path, model_config: dict[str, Any]) -> None:
        self._rank, self._transport = rank, transport
        self._folder, self._model_config = folder, model_config
        self._held: Snapshot | None = None

    async def pull(self, at_least: str = "") -> tuple[str, Path]:
        """The core's newest weights as a directory that an engine can load. Waits until the core has `at_least`."""
        await self._fetch(at_least)
        return await self._written()

    async def _fetch(self, at_least: str) -> None:
        while True:
            have = self._held.version if self._held is not None else ""
            self._held = await self._transport.pull(have, PULL_S) or self._held
            assert self._held is not None
            if not at_least or PolicyVersion.parse(self._held.version) >= PolicyVersion.parse(at_least):
                return
            await asyncio.sleep(0.05)

    async def _written(self) -> tuple[str, Path]:
        held = self._held
        assert held is not None
        target = await asyncio.to_thread(held.write_hf, self._folder / held.version, self._model_config)
        for old in self._folder.iterdir():
            if old.name != held.version and not old.name.startswith("."):
                shutil.rmtree(old, ignore_errors=True)
        return held.version, target

    async def to_train(self, engine: EngineClient, epoch: int) -> tuple[str, dict[str, float]]:
        watch = Stopwatch()
        with watch.phase("idle"):
            await engine.wait_idle(IDLE_S)
        with watch.phase("flush"):
            await engine.pause("retract")  # holds what strays in until the cell serves again
            await engine.flush(WRITE_BACK_S)
        with watch.phase("release"):
            await engine.release()
        with watch.phase("rank"):
            state = await self._rank.ask(m.StartTraining(epoch=epoch), timeout_s=RANK_ANSWER_S)
        return state.version, watch.phases_s

    async def to_rollout(
        self, engine: EngineClient, epoch: int, version: str, *, update_only: bool
    ) -> tuple[str, dict[str, float]]:
        watch = Stopwatch()
        if not update_only:
            with watch.phase("rank"):
                await self._rank.ask(m.StopTraining(epoch=epoch), timeout_s=RANK_ANSWER_S)
            with watch.phase("resume_weights"):
                await engine.resume(("weights",))
        with watch.phase("pull"):
            await self._fetch(version)
        with watch.phase("write"):
            served, folder = await self._written()
        with watch.phase("load"):
            if update_only:
                await engine.pause("retract")  # a request that strays in would keep the flush from being done
                await engine.flush(WRITE_BACK_S)  # and so would KV that is on its way to a shared store
            await engine.update_weights(folder, served)
        with watch.phase("resume_kv"):
            await engine.resume(("kv_cache",))
            await engine.proceed()
        with watch.phase("prove"):
            proof = await engine.weight_version()
        if proof != served:
            raise RuntimeError(f"the engine says it serves {proof}, not {served}")
        return served, watch.phases_s
