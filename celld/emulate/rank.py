"""The tensors of a rank that has none: sleep in the place of computing, under the real loop of `celld.trainer.rank`.

Micro-steps are really claimed and committed, the core really pulls the sums and steps, a satellite really pulls the
weights of a newer base; a sum is a list of ids and one number, a checkpoint a few words.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from celld.trainer.rank import Ledger, Stepped
from celld.transfer.bulk import Bulk
from celld.weights import Published, Snapshot, transport_to
from gyre_base import messages as m
from gyre_base.bus import Client, NoAnswer
from gyre_base.config import Config
from gyre_base.ids import PolicyVersion
from gyre_base.keys import Keys
from gyre_base.microstep import MicroStep
from gyre_base.rundir import RunDir

log = logging.getLogger(__name__)
CHECKPOINT = "checkpoints/emulated.json"


@dataclass
class Sum:
    """The micro-steps of one batch that this rank has done: what a gradient sum would hold."""

    batch: int
    base_version: str
    ids: list[str] = field(default_factory=list)
    weight_sum: float = 0.0
    stats: dict[str, float] = field(default_factory=dict)

    def add(self, ids: Sequence[str], weight_sum: float, stats: dict[str, float]) -> None:
        self.ids.extend(ids)
        self.weight_sum += weight_sum
        for name, value in stats.items():
            self.stats[name] = self.stats.get(name, 0.0) + value

    def message(self) -> m.GradientSum:
        payload = np.zeros(1, dtype="<f4").tobytes()
        return m.GradientSum(
            batch=self.batch,
            ids=tuple(self.ids),
            weight_sum=self.weight_sum,
            stats=dict(self.stats),
            digest=xxhash.xxh3_128_hexdigest(payload),
            payload=payload,
        )


class EmulatedTeam:
    """What `celld.trainer.rank.Team` promises, by the clock."""

    poll_s = 0.05  # an hour of a profile takes seconds here: trajd's own advice on waiting is for real micro-steps

    def __init__(self, config: Config, run: RunDir, keys: Keys, *, cell: str) -> None:
        self._config, self._run, self._cell, self._laws = config, run, cell, config.emulate
        cells = [f"c{i}" for i in range(config.cluster.cells)]
        self.transport = transport_to(run, keys, f"rank-{cells[0]}", None)
        self._peers = {c: Client(run, keys, f"rank-{c}") for c in cells[1:]} if cell == cells[0] else {}
        self.bulk: Bulk | None = None  # nothing is large here
        self.published = Published()
        self.sum: Sum | None = None
        self.computing = False
        self._pending: tuple[float, dict[str, float]] = (0.0, {})
        self._gathered: list[m.GradientSum] = []
        nodes = self._laws.nodes[cells.index(cell)] if self._laws.nodes else 1
        self._execution_s = self._laws.execution_node_s / nodes

    async def restore(self) -> Ledger | None:
        path = self._run.path(CHECKPOINT)
        if not path.exists():
            return None
        kept = json.loads(path.read_text())
        version = PolicyVersion.parse(kept["version"])
        applied = tuple(kept["applied"])
        return Ledger(version=version, next_batch=kept["next_batch"], applied=applied, path=str(path))

    async def save(self, ledger: Ledger) -> asyncio.Task[str]:
        kept = {"version": str(ledger.version), "next_batch": ledger.next_batch, "applied": ledger.applied}
        self._run.write_atomic(CHECKPOINT, json.dumps(kept))
        return asyncio.create_task(asyncio.sleep(0, str(self._run.path(CHECKPOINT))))

    async def publish(self, version: PolicyVersion) -> None:
        self.published.publish(Snapshot.of(str(version), {"emulated": np.zeros(1, dtype=np.float32)}))

    async def pull(self, have: str) -> str | None:
        snapshot = await self.transport.pull(have, self._config.cluster.peer_timeout_s)
        if snapshot is None:
            return None
        await asyncio.sleep(self._laws.join_s * self._laws.time_scale)
        self.sum = None
        return snapshot.version

    async def compute(self, lease: m.MicroStepLease) -> None:
        if self.sum is None or (self.sum.batch, self.sum.base_version) != (lease.batch, lease.base_version):
            self.sum = Sum(lease.batch, lease.base_version)
        step = MicroStep.from_wire(lease.layout, lease.payload)
        await self._take_time(self._execution_s * len(step.executions))
        weight = sum(float(e.owned.sum()) / e.total_owned for e in step.executions)
        self._pending = weight, _stats(step, PolicyVersion.parse(lease.base_version).step)

    async def _take_time(self, seconds: float) -> None:
        """Seconds of the profile."""
        self.computing = True
        await asyncio.sleep(seconds * self._laws.time_scale)
        self.computing = False

    async def add(self, micro_step: str, stats: dict[str, float]) -> None:
        assert self.sum is not None, "nothing was computed"
        weight, own = self._pending
        self.sum.add((micro_step,), weight, own | stats)

    async def drop(self) -> None:
        self.sum = None

    async def gather(self, batch: int, parts: Sequence[m.Contribution]) -> list[bool]:
        found = await asyncio.gather(*(self._sum_of(batch, part) for part in parts))
        self._gathered = [part for part in found if part is not None]
        return [part is not None for part in found]

    async def _sum_of(self, batch: int, part: m.Contribution) -> m.GradientSum | None:
        answer: Any = None
        if part.cell == self._cell:
            answer = self.sum.message() if self.sum is not None and self.sum.batch == batch else None
        else:
            question = m.PullGradient(batch=batch, life=part.life)
            try:
                answer = await self._peers[part.cell].ask(question, timeout_s=self._config.cluster.peer_timeout_s)
            except NoAnswer as error:
                log.error("%s", error)
        return answer if isinstance(answer, m.GradientSum) and sorted(answer.ids) == sorted(part.ids) else None

    async def step(self, done: m.BatchComplete) -> Stepped:
        whole = Sum(done.batch, done.base_version)
        for part in self._gathered:
            whole.add(part.ids, part.weight_sum, part.stats)
        await self._take_time(self._laws.step_s)
        self.sum = None
        metrics = {
            "staleness_mean": whole.stats.get("staleness", 0.0) / max(1.0, whole.stats.get("executions", 1.0)),
            "micro_steps": float(len(whole.ids)),
            "owned_tokens": whole.stats.get("owned_tokens", 0.0),
            "computing_s": whole.stats.get("computing_s", 0.0),  # of its micro-steps, and the words around them
            "talking_s": whole.stats.get("talking_s", 0.0),
        }
        return Stepped(ids=tuple(whole.ids), weight_sum=whole.weight_sum, metrics=metrics)

    def close(self) -> None:
        self.transport.close()
        for client in self._peers.values():
            client.close()


def _stats(step: MicroStep, base_step: int) -> dict[str, float]:
    return {
        "executions": float(len(step.executions)),
        "owned_tokens": float(sum(int(e.owned.sum()) for e in step.executions)),
        "staleness": float(sum(base_step - e.dispatched_step for e in step.executions)),
    }
