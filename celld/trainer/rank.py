"""One cell's trainer: claim, compute, commit; on the core also pull the sums, step, publish. This is the loop.

Unlike the paper (which publishes no code), each with its reason:
1. Micro-steps are claimed one at a time, never assigned: a cell that is free sooner takes more.
2. Sums of gradients are pulled by the core, each of its ranks from the same rank of a satellite, and added there in the
   cells' order; no process group spans cells, so a satellite joins or dies without one being rebuilt, and the order of
   addition is fixed.
3. The divisor is known only when a batch closes, so ranks sum 1/T_e losses and the core divides by its executions.
4. An execution of advantage 0 is not computed (its gradient is exactly 0); its weight is counted.
5. The step, the moments and the published weights live on the core alone; a satellite has a copy and a sum.

The loop runs on rank 0, the leader of its cell; what tensors need is behind `Team` (`celld.trainer.team` does it on all
ranks of the cell, `celld.emulate.rank` only takes the time). A micro-step is added on no rank before trajd took it.

Who dies when: a satellite takes its sum along, trajd leases its ids again. A core goes back to its checkpoint and says
so in its ledger; what was applied since is trained again from the weights before it, under a new lineage. A commit in
doubt (trajd silent) is repeated until it is answered, and the sum is not handed out meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from celld.transfer.bulk import Bulk
from celld.weights import Published, Transport, WeightsError
from gyre_base import messages as m
from gyre_base.bus import Client, NoAnswer
from gyre_base.config import Config
from gyre_base.ids import PolicyVersion
from gyre_base.keys import Keys
from gyre_base.rundir import RunDir

log = logging.getLogger(__name__)
CLAIM_S = 5.0  # how long one claim waits for trajd; also bounds how long a stop waits when trajd is dead
TELL_S = 30.0  # after this long without an answer a line is logged and the message repeated
AGAIN_S = 0.2  # pause after a claim that led to nothing


class RankError(RuntimeError):
    """This rank can't go on without breaking a promise; celld sees its end and starts the cell's ranks anew."""


def endpoint_of(cell: str, rank: int) -> str:
    """The daemon name of a cell's rank; the leader speaks for its cell."""
    return f"rank-{cell}.{rank}" if rank else f"rank-{cell}"


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """What a checkpoint holds: every batch below `next_batch`; `applied`: micro-steps since the one before."""

    version: PolicyVersion
    next_batch: int
    applied: tuple[str, ...]
    path: str = ""  # of one that was read


@dataclass(frozen=True, kw_only=True)
class Stepped:
    """One optimizer step: the micro-steps that are really in it, their sum of 1/T_e, plain numbers for people."""

    ids: tuple[str, ...]
    weight_sum: float
    metrics: dict[str, float]


@dataclass(frozen=True)
class Durable:
    """A checkpoint that is on disk: every batch below `below` is in it."""

    saved: m.CheckpointSaved
    below: int


class HeldSum(Protocol):
    """The gradient sum of one batch: which micro-steps are in it."""

    batch: int
    base_version: str
    ids: list[str]

    def message(self) -> m.GradientSum:
        """It for another cell's rank."""


class Team(Protocol):
    """The ranks of a cell as the loop sees them: what is done to tensors, on all of them."""

    published: Published
    transport: Transport  # of the core's weights
    bulk: Bulk | None
    computing: bool  # tensor work is in hand: without progress for long the agent takes us for stalled
    poll_s: float  # longest pause between two claims

    @property
    def sum(self) -> HeldSum | None:
        """The leader's part of the open batch's sum."""

    async def restore(self) -> Ledger | None:
        """The core's weights and moments: of the newest checkpoint, or of model.path (None)."""

    async def compute(self, lease: m.MicroStepLease) -> None:
        """Forward and backward of one micro-step, beside the sum, which begins anew for a new batch."""

    async def add(self, micro_step: str, stats: dict[str, float]) -> None:
        """What was computed last goes into the sum, with more statistics beside its own."""

    async def drop(self) -> None:
        """The sum and what was computed last are void."""

    async def gather(self, batch: int, parts: Sequence[m.Contribution]) -> list[bool]:
        """Get the sum of each part, kept for `step`; which of them are here."""

    async def step(self, done: m.BatchComplete) -> Stepped:
        """One optimizer step with what was gathered. The sum is void then."""

    async def publish(self, version: PolicyVersion) -> None:
        """Offer the present weights."""

    async def pull(self, have: str) -> str | None:
        """The core's weights: their version, None if `have` is it; the sum is void. Raises NoAnswer, WeightsError."""

    async def save(self, ledger: Ledger) -> asyncio.Task[str]:
        """A checkpoint of what there is when this returns, after the one before is through; the task ends with its path
        when it is durable, or with OSError."""

    def close(self) -> None:
        """Connections and thread."""


class Rank:
    """`work` is the loop; `celld.trainer.service` answers others while it runs."""

    def __init__(self, config: Config, run: RunDir, keys: Keys, team: Team, *, cell: str, life: int) -> None:
        self.config, self.team, self.cell, self.life = config, team, cell, life
        self.cells = [f"c{i}" for i in range(config.cluster.cells)]
        self.core = cell == self.cells[0]
        self.trajd = Client(run, keys, "trajd", identity=f"rank:{cell}:{life}")
        self.cellctl = Client(run, keys, "cellctl", identity=f"rank:{cell}:{life}")
        self.version: PolicyVersion | None = None  # None: a satellite that has not pulled yet
        self.next_batch = 0
        self.applied: tuple[str, ...] = ()  # micro-steps since the last checkpoint
        self.saved = ("", "")  # version and path of the newest durable checkpoint
        self.saving: asyncio.Task[Durable | None] | None = None  # the newest one, written beside the steps
        self.telling: asyncio.Task[None] | None = None  # that it is durable
        self.batch_began: float | None = None
        self.may_hold = False  # trajd may think that we hold a lease
        self.progress = 0  # micro-steps committed in this life
        self.may_claim = asyncio.Event()
        self.busy = asyncio.Lock()  # one round of `work`; a stop waits for it
        self.committing = asyncio.Lock()  # a commit in doubt; a pull of the sum waits for it
        self.stepping = asyncio.Lock()  # weights and ledger change together; a checkpoint waits for it

    async def start(self) -> None:
        """The core: weights, and their first version. A resume is a new lineage: what was trained after the checkpoint
        is lost, its versions are not made twice."""
        if not self.core:
            return
        kept = await self.team.restore()
        if kept is None:
            self.version = PolicyVersion(self.life - 1, 0)
        else:
            self.version = PolicyVersion(max(kept.version.lineage + 1, self.life - 1), kept.version.step)
            self.next_batch, self.applied = kept.next_batch, kept.applied
            self.saved = (str(self.version), kept.path)
            word = m.CheckpointSaved(version=str(self.version), path=kept.path)
            self.saving = asyncio.create_task(asyncio.sleep(0, Durable(word, kept.next_batch)))
        log.info("core starts at %s, next batch %d", self.version, self.next_batch)
        await self.team.publish(self.version)

    async def announce(self) -> None:
        """The checkpoint's word on what is trained wins over trajd's memory."""
        if self.core:
            word = m.Ledger(next_batch=self.next_batch, version=str(self.version), applied=self.applied)
            await self.tell(self.trajd, word)

    # ---- the loop ---------------------------------------------------------------------------------------------------

    async def work(self) -> None:
        """Until cancelled."""
        await self.announce()
        while True:
            await self.may_claim.wait()
            async with self.busy:
                wait_s = await self.round() if self.may_claim.is_set() else 0.0
            await asyncio.sleep(min(wait_s, self.team.poll_s))

    async def round(self) -> float:
        """One claim and what follows from its answer. Returns how long to wait before the next."""
        if self.version is None:
            return await self.pull_weights()
        began, self.may_hold = time.monotonic(), True
        try:
            answer = await self.trajd.ask(self.claim(), timeout_s=CLAIM_S)
        except NoAnswer as error:
            log.warning("%s", error)
            return AGAIN_S
        self.may_hold = isinstance(answer, m.MicroStepLease)
        match answer:
            case m.MicroStepLease():
                return await self.train(answer, began)
            case m.BatchComplete():
                return await self.finish(answer)
            case m.StaleWeights():
                return await self.pull_weights()
            case m.NoMicroStep(wait_s=wait_s):
                return wait_s
            case m.Refused(why=why):
                return await self.drop_sum(why)
        raise RankError(f"trajd answered a claim with {answer!r}")

    def claim(self) -> m.ClaimMicroStep:
        held = self.team.sum
        return m.ClaimMicroStep(
            cell=self.cell,
            life=self.life,
            version=str(self.version),
            core=self.core,
            batch=held.batch if held else -1,
            ids=tuple(held.ids) if held else (),
        )

    async def train(self, lease: m.MicroStepLease, began: float) -> float:
        """Compute a micro-step beside the sum, then commit: it is added exactly if trajd takes it."""
        if lease.base_version != str(self.version):
            return AGAIN_S
        held = self.team.sum
        if held is None or (held.batch, held.base_version) != (lease.batch, lease.base_version):
            self.batch_began = time.monotonic()
        elif lease.id in held.ids:  # trajd forgot; our next claim tells it
            return AGAIN_S
        computing = time.monotonic()
        await self.team.compute(lease)
        computing_s = time.monotonic() - computing
        word = m.MicroStepComputed(batch=lease.batch, id=lease.id, cell=self.cell, life=self.life)
        async with self.committing:
            why = await self.tell(self.trajd, word, may_refuse=True)
            self.may_hold = False
            if why:
                return await self.drop_sum(why)
            talking_s = time.monotonic() - began - computing_s
            await self.team.add(lease.id, {"computing_s": computing_s, "talking_s": talking_s})
        self.progress += 1
        return 0.0

    async def drop_sum(self, why: str) -> float:
        log.warning("%s drops its sum: %s", self.cell, why)
        await self.team.drop()
        return AGAIN_S

    async def pull_weights(self) -> float:
        """The core's snapshot. A newer base version ends the life of our old sum."""
        if self.core:
            raise RankError("trajd wants other weights than the core has")
        try:
            version = await self.team.pull(str(self.version or ""))
        except (NoAnswer, WeightsError) as error:
            log.warning("%s", error)
            return AGAIN_S
        if version is None:
            return AGAIN_S
        self.version = PolicyVersion.parse(version)
        return 0.0

    # ---- the core's end of a batch ----------------------------------------------------------------------------------

    async def finish(self, done: m.BatchComplete) -> float:
        """Every micro-step is computed: sums in, one step, the new version out."""
        parts = sorted(done.contributions, key=lambda part: self.cells.index(part.cell))
        if not await self.gather(done.batch, parts):
            return 0.0
        assert self.version is not None
        async with self.stepping:
            stepped = await self.team.step(done)
            self.version = PolicyVersion(self.version.lineage, self.version.step + 1)
            await self.team.publish(self.version)
            self.next_batch = done.batch + 1
            self.applied = (*self.applied, *stepped.ids)
        weights_sum = stepped.weight_sum / done.executions
        if abs(weights_sum - 1) > 1e-9:
            log.error("batch %d: the weights sum to %r, not 1", done.batch, weights_sum)
        metrics = stepped.metrics | {"cells": float(len(parts)), "weights_sum": weights_sum}
        metrics |= {"executions": float(done.executions)}
        metrics["step_s"] = time.monotonic() - self.batch_began if self.batch_began else 0.0
        self.batch_began = None
        version = str(self.version)
        word = m.BatchApplied(batch=done.batch, ids=stepped.ids, version=version, weights_sum=weights_sum)
        await self.tell(self.trajd, word)
        await self.tell(self.cellctl, m.StepDone(batch=done.batch, version=version, metrics=metrics))
        if self.version.step % self.config.trainer.checkpoint_every_steps == 0:
            if self.telling is not None:
                await self.telling
            self.telling = asyncio.create_task(self._tell_durable(await self._begin_save()))
        return 0.0

    async def gather(self, batch: int, parts: Sequence[m.Contribution]) -> bool:
        """False if a contribution is lost: its ids are leased again, the others stand."""
        here = await self.team.gather(batch, parts)
        for part, is_here in zip(parts, here, strict=True):
            if not is_here:
                if part.cell == self.cell:
                    await self.team.drop()
                await self.tell(self.trajd, m.ContributionLost(batch=batch, cell=part.cell, life=part.life))
        return all(here)

    async def save(self) -> Durable | None:
        """A durable checkpoint of the present weights; None if it can't be written. A second call for the same ones
        writes nothing."""
        return await asyncio.shield(await self._begin_save())

    async def _begin_save(self) -> asyncio.Task[Durable | None]:
        """The task that ends when the present weights are durable. What it needs is copied when this returns."""
        async with self.stepping:
            began = time.monotonic()
            before = await asyncio.shield(self.saving) if self.saving is not None else None
            assert self.version is not None
            if self.saving is None or before is None or before.saved.version != str(self.version):
                ledger = Ledger(version=self.version, next_batch=self.next_batch, applied=self.applied)
                self.saving = asyncio.create_task(self._written(ledger, await self.team.save(ledger), began))
            return self.saving

    async def _written(self, ledger: Ledger, writing: asyncio.Task[str], began: float) -> Durable | None:
        try:
            path = await writing
        except OSError as error:  # nothing is retired by it, and the next one is tried
            log.critical("%s", error)
            return None
        self.saved, self.applied = (str(ledger.version), path), self.applied[len(ledger.applied) :]
        seconds = time.monotonic() - began
        return Durable(m.CheckpointSaved(version=str(ledger.version), path=path, seconds=seconds), ledger.next_batch)

    async def _tell_durable(self, saving: asyncio.Task[Durable | None]) -> None:
        durable = await saving
        if durable is not None:
            await self.cellctl.send(durable.saved)
            await self.tell(self.trajd, m.BatchesRetired(below=durable.below, version=durable.saved.version))

    # ---- helpers ----------------------------------------------------------------------------------------------------

    async def tell(self, client: Client, message: Any, *, may_refuse: bool = False) -> str:
        """Repeat until it is answered. Returns "" or why it was refused; an unexpected refusal ends this rank."""
        while True:
            try:
                answer = await client.ask(message, timeout_s=TELL_S)
            except NoAnswer as error:
                log.warning("%s", error)
                continue
            if isinstance(answer, m.Refused) and may_refuse:
                return answer.why
            if isinstance(answer, m.Refused):
                raise RankError(f"{client.server} refused {message.TAG}: {answer.why}")
            return ""

    def close(self) -> None:
        self.team.close()
        for client in (self.trajd, self.cellctl):
            client.close()
