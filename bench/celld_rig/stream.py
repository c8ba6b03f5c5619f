"""Batches that two cells of unequal speed compute: emulated rank processes, real claims, commits, pulls and steps.

A sleeping rank stands in for the network: two that compute would share the cores of a small machine, and their speeds
would be those of the load, not 1 to 3.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from gyre_base import config as configuration
from gyre_base import messages as m
from gyre_base.bus import Client
from gyre_base.keys import make_keys
from gyre_base.rundir import RunDir
from tests.trainer.fake_trajd import FakeTrajd, served
from tests.trainer.forests import random_micro_step

MICRO_STEPS = 64
FAST_S = 0.2  # one micro-step on the fast cell
IDEAL_S = MICRO_STEPS * FAST_S * 3 / 4  # both work until the end
LIMIT_S = 180.0


@dataclass
class TimedTrajd(FakeTrajd):
    """`quotas`: per batch, how many micro-steps each cell may hold; empty means that whoever is free takes one."""

    quotas: Sequence[dict[str, int]] = ()
    ends: list[float] = field(default_factory=list)

    def reply(self, message: Any) -> Any:
        answer = super().reply(message)
        if isinstance(message, m.BatchApplied):
            self.ends.append(time.monotonic())
            self.quota = self.quotas[self.batch] if self.batch < len(self.quotas) else {}
        return answer


async def batches(folder: Path) -> tuple[list[float], list[float]]:
    """Seconds of batches that are claimed, and of batches split in halves beforehand."""
    run = RunDir.create(folder / "run")
    keys = make_keys(run)
    laws = {"execution_node_s": 3 * FAST_S, "nodes": [3, 1], "join_s": 0.0, "step_s": 0.0}
    sections = {"cluster": {"cells": 2}, "engine": {"kind": "emulate"}, "emulate": laws}
    run.write_atomic("run.json", configuration.to_json(configuration.from_tree(sections)))
    step = random_micro_step(0, 1)
    half = {"c0": MICRO_STEPS // 2, "c1": MICRO_STEPS // 2}
    free: dict[str, int] = {}
    quotas = [free, free, free, free, half]  # the first is not counted: ranks start in it
    fake = TimedTrajd([{f"b{b}.s{s}": step for s in range(MICRO_STEPS)} for b in range(len(quotas))], quotas=quotas)
    async with served(fake, run, keys):
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            ranks += [_spawn(run, cell) for cell in ("c0", "c1")]
            await asyncio.gather(*(_start(run, keys, cell) for cell in ("c0", "c1")))
            deadline = time.monotonic() + LIMIT_S
            while len(fake.ends) < len(quotas):
                if time.monotonic() > deadline or any(rank.poll() is not None for rank in ranks):
                    raise RuntimeError(f"the ranks did not finish: {len(fake.ends)} of {len(quotas)} batches")
                await asyncio.sleep(0.05)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    seconds = [after - before for before, after in pairwise(fake.ends)]
    return seconds[:-1], seconds[-1:]


def _spawn(run: RunDir, cell: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "celld.emulate.trainer", "--run", str(run.root), "--cell", cell])


async def _start(run: RunDir, keys: Any, cell: str) -> None:
    """celld's part: wait for the rank, let it claim."""
    while run.endpoint(f"rank-{cell}") is None:  # noqa: ASYNC110  # another process writes it
        await asyncio.sleep(0.05)
    client = Client(run, keys, f"rank-{cell}")
    await client.ask(m.StartTraining(epoch=1), timeout_s=30.0)
    client.close()
