"""A trainer rank without a network: the real claims, commits, pulls and steps, with sleep in the place of computing.

What it says and hears is what celld.trainer.rank does: micro-steps are claimed one at a time, a commit stands when
trajd took it, the core pulls the sums and steps, a satellite pulls the weights of a newer base. A checkpoint is a few
words.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from celld.transfer.bulk import Bulk
from celld.weights import Published, Snapshot, SocketTransport, WeightsError
from gyre_base import messages as m
from gyre_base.bus import Client, NoAnswer
from gyre_base.config import Config
from gyre_base.ids import PolicyVersion
from gyre_base.keys import Keys
from gyre_base.microstep import MicroStep
from gyre_base.rundir import RunDir

log = logging.getLogger(__name__)
CLAIM_S = 5.0
TELL_S = 30.0
POLL_S = 0.05  # an hour of a profile takes seconds here: trajd's own advice on waiting is for real micro-steps


@dataclass
class Sum:
    """The micro-steps of one batch that this rank has done: what a gradient sum would hold."""

    batch: int
    base_version: str
    ids: list[str] = field(default_factory=list)
    weight_sum: float = 0.0
    stats: dict[str, float] = field(default_factory=dict)

    def add(self, ids: tuple[str, ...], weight_sum: float, stats: dict[str, float]) -> None:
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


class EmulatedRank:
    """`work` is the loop; `celld.trainer.service` answers others while it runs."""

    def __init__(self, config: Config, run: RunDir, keys: Keys, *, cell: str, life: int) -> None:
        self.config, self.run, self.cell, self.life = config, run, cell, life
        self.cells = [f"c{i}" for i in range(config.cluster.cells)]
        self.core = cell == self.cells[0]
        self.trajd = Client(run, keys, "trajd", identity=f"rank:{cell}:{life}")
        self.cellctl = Client(run, keys, "cellctl", identity=f"rank:{cell}:{life}")
        self.transport = SocketTransport(run, keys, f"rank-{self.cells[0]}")
        self.peers = {c: Client(run, keys, f"rank-{c}") for c in self.cells[1:]} if self.core else {}
        self.bulk: Bulk | None = None  # nothing is large here
        self.published = Published()
        self.version: PolicyVersion | None = None
        self.sum: Sum | None = None
        self.next_batch = 0
        self.applied: tuple[str, ...] = ()
        self.saved = ("", "")
        self.may_hold = False
        self.progress = 0
        self.computing = False
        self.may_claim = asyncio.Event()
        self.busy = asyncio.Lock()
        self.committing = asyncio.Lock()
        self.stepping = asyncio.Lock()
        laws = config.emulate
        self._scale = laws.time_scale
        nodes = laws.nodes[self.cells.index(cell)] if laws.nodes else 1
        self._execution_s = laws.execution_node_s / nodes * self._scale
        if self.core:
            self._restore()

    # ---- what a checkpoint would hold -------------------------------------------------------------------------------

    @property
    def _checkpoint(self) -> Path:
        return self.run.path("checkpoints", "emulated.json")

    def _restore(self) -> None:
        """A resume is a new lineage, as in the real rank."""
        self.version = PolicyVersion(self.life - 1, 0)
        if self._checkpoint.exists():
            kept = json.loads(self._checkpoint.read_text())
            old = PolicyVersion.parse(kept["version"])
            self.version = PolicyVersion(max(old.lineage + 1, self.life - 1), old.step)
            self.next_batch, self.applied = kept["next_batch"], tuple(kept["applied"])
            self.saved = (str(self.version), str(self._checkpoint))
        self._publish()

    async def save(self) -> m.CheckpointSaved:
        async with self.stepping:
            if self.saved[0] != str(self.version):
                kept = {"version": str(self.version), "next_batch": self.next_batch, "applied": self.applied}
                self.run.write_atomic("checkpoints/emulated.json", json.dumps(kept))
                self.saved, self.applied = (str(self.version), str(self._checkpoint)), ()
        return m.CheckpointSaved(version=self.saved[0], path=self.saved[1])

    def _publish(self) -> None:
        assert self.version is not None
        self.published.publish(Snapshot.of(str(self.version), {"emulated": np.zeros(1, dtype=np.float32)}))

    # ---- the loop ---------------------------------------------------------------------------------------------------

    async def work(self) -> None:
        """Until cancelled."""
        if self.core:
            word = m.Ledger(next_batch=self.next_batch, version=str(self.version), applied=self.applied)
            await self.tell(self.trajd, word)
        while True:
            await self.may_claim.wait()
            async with self.busy:
                wait_s = await self._round() if self.may_claim.is_set() else 0.0
            await asyncio.sleep(wait_s)

    async def _round(self) -> float:
        """One claim and what follows from its answer. Returns how long to wait before the next."""
        if self.version is None:
            return await self._pull()
        began, self.may_hold = time.monotonic(), True
        try:
            answer = await self.trajd.ask(self._claim(), timeout_s=CLAIM_S)
        except NoAnswer as error:
            log.warning("%s", error)
            return POLL_S
        self.may_hold = isinstance(answer, m.MicroStepLease)
        match answer:
            case m.MicroStepLease():
                return await self._train(answer, began)
            case m.BatchComplete():
                return await self._finish(answer)
            case m.StaleWeights():
                return await self._pull()
            case m.NoMicroStep(wait_s=wait_s):
                return min(wait_s, POLL_S)
            case m.Refused(why=why):
                return self._drop(why)
        raise RuntimeError(f"trajd answered a claim with {answer!r}")

    def _claim(self) -> m.ClaimMicroStep:
        held = self.sum
        return m.ClaimMicroStep(
            cell=self.cell,
            life=self.life,
            version=str(self.version),
            core=self.core,
            batch=held.batch if held else -1,
            ids=tuple(held.ids) if held else (),
        )

    async def _train(self, lease: m.MicroStepLease, began: float) -> float:
        assert self.version is not None
        if self.sum is None or (self.sum.batch, self.sum.base_version) != (lease.batch, lease.base_version):
            self.sum = Sum(lease.batch, lease.base_version)
        if lease.base_version != str(self.version) or lease.id in self.sum.ids:
            return POLL_S
        step = MicroStep.from_wire(lease.layout, lease.payload)
        slept = time.monotonic()
        await self._compute(self._execution_s * len(step.executions))
        slept = time.monotonic() - slept
        word = m.MicroStepComputed(batch=lease.batch, id=lease.id, cell=self.cell, life=self.life)
        async with self.committing:
            why = await self.tell(self.trajd, word, may_refuse=True)
            self.may_hold = False
            if why:
                return self._drop(why)
            weight = sum(float(e.owned.sum()) / e.total_owned for e in step.executions)
            stats = _stats(step, self.version.step)
            stats |= {"computing_s": slept, "talking_s": time.monotonic() - began - slept}
            self.sum.add((lease.id,), weight, stats)
        self.progress += 1
        return 0.0

    async def _compute(self, seconds: float) -> None:
        self.computing = True
        await asyncio.sleep(seconds)
        self.computing = False

    def _drop(self, why: str) -> float:
        log.warning("%s drops its sum: %s", self.cell, why)
        self.sum = None
        return POLL_S

    async def _pull(self) -> float:
        """The core's version. A newer one ends the life of our old sum."""
        try:
            snapshot = await self.transport.pull(str(self.version or ""), self.config.cluster.peer_timeout_s)
        except (NoAnswer, WeightsError) as error:
            log.warning("%s", error)
            return POLL_S
        if snapshot is None:
            return POLL_S
        await asyncio.sleep(self.config.emulate.join_s * self._scale)
        self.version, self.sum = PolicyVersion.parse(snapshot.version), None
        return 0.0

    # ---- the core's end of a batch ----------------------------------------------------------------------------------

    async def _finish(self, done: m.BatchComplete) -> float:
        parts = await self._gather(done)
        if parts is None:
            return 0.0
        whole = Sum(done.batch, done.base_version)
        for part in parts:
            whole.add(part.ids, part.weight_sum, part.stats)
        assert self.version is not None
        async with self.stepping:
            await self._compute(self.config.emulate.step_s * self._scale)
            self.version = PolicyVersion(self.version.lineage, self.version.step + 1)
            self._publish()
            self.next_batch = done.batch + 1
            self.applied = (*self.applied, *whole.ids)
        weights_sum = whole.weight_sum / done.executions
        metrics = {
            "staleness_mean": whole.stats.get("staleness", 0.0) / max(1.0, whole.stats.get("executions", 1.0)),
            "micro_steps": float(len(whole.ids)),
            "owned_tokens": whole.stats.get("owned_tokens", 0.0),
            "computing_s": whole.stats.get("computing_s", 0.0),  # of its micro-steps, and the words around them
            "talking_s": whole.stats.get("talking_s", 0.0),
            "executions": float(done.executions),
            "cells": float(len(parts)),
            "weights_sum": weights_sum,
        }
        ids, version = tuple(whole.ids), str(self.version)
        self.sum = None
        await self.tell(self.trajd, m.BatchApplied(batch=done.batch, ids=ids, version=version, weights_sum=weights_sum))
        await self.tell(self.cellctl, m.StepDone(batch=done.batch, version=version, metrics=metrics))
        if self.version.step % self.config.trainer.checkpoint_every_steps == 0:
            saved = await self.save()
            await self.tell(self.trajd, m.BatchesRetired(below=self.next_batch, version=saved.version))
        return 0.0

    async def _gather(self, done: m.BatchComplete) -> list[m.GradientSum] | None:
        """Each cell's sum; None if one is lost: its ids are leased again, the others stand."""
        found = await asyncio.gather(*(self._sum_of(done.batch, part) for part in done.contributions))
        for each, part in zip(done.contributions, found, strict=True):
            if part is None:
                self.sum = None if each.cell == self.cell else self.sum
                await self.tell(self.trajd, m.ContributionLost(batch=done.batch, cell=each.cell, life=each.life))
        parts = [part for part in found if part is not None]
        return parts if len(parts) == len(found) else None

    async def _sum_of(self, batch: int, part: m.Contribution) -> m.GradientSum | None:
        answer: Any = None
        if part.cell == self.cell:
            answer = self.sum.message() if self.sum is not None and self.sum.batch == batch else None
        else:
            question = m.PullGradient(batch=batch, life=part.life)
            try:
                answer = await self.peers[part.cell].ask(question, timeout_s=self.config.cluster.peer_timeout_s)
            except NoAnswer as error:
                log.error("%s", error)
        return answer if isinstance(answer, m.GradientSum) and sorted(answer.ids) == sorted(part.ids) else None

    async def tell(self, client: Client, message: Any, *, may_refuse: bool = False) -> str:
        """Repeat until it is answered. Returns "" or why it was refused; an unexpected refusal ends this rank."""
        while True:
            try:
                answer = await client.ask(message, timeout_s=TELL_S)
            except NoAnswer as error:
                log.warning("%s", error)
                continue
            if isinstance(answer, m.Refused) and not may_refuse:
                raise RuntimeError(f"{client.server} refused {message.TAG}: {answer.why}")
            return answer.why if isinstance(answer, m.Refused) else ""

    def close(self) -> None:
        self.transport.close()
        for client in (self.trajd, self.cellctl, *self.peers.values()):
            client.close()


def _stats(step: MicroStep, base_step: int) -> dict[str, float]:
    return {
        "executions": float(len(step.executions)),
        "owned_tokens": float(sum(int(e.owned.sum()) for e in step.executions)),
        "staleness": float(sum(base_step - e.dispatched_step for e in step.executions)),
    }
