"""One trainer rank: claim, compute, commit; on the core also pull the sums, step, publish.

Unlike the paper (which publishes no code), each with its reason:
1. Micro-steps are claimed one at a time, never assigned: a cell that is free sooner takes more.
2. Sums of gradients are pulled over the bus by the core and added there in the cells' order; no process group spans
cells,
   so a satellite joins or dies without one being rebuilt, and the order of addition is fixed.
3. The divisor is known only when a batch closes, so ranks sum 1/T_e losses and the core divides by its executions.
4. An execution of advantage 0 is not computed (its gradient is exactly 0); its weight is counted.
5. The step, the moments and the published weights live on the core alone; a satellite has a copy and a sum.
6. A rank is one process here (tensor-parallel size 1); the model and the loss are written for more, the loop is not
yet.

Who dies when: a satellite takes its sum along, trajd leases its ids again. A core goes back to its checkpoint and says
so in its ledger; what was applied since is trained again from the weights before it, under a new lineage. A commit in
doubt (trajd silent) is repeated until it is answered, and the sum is not handed out meanwhile.

Shapes: N targets of a micro-step; flat gradients have one entry per parameter.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from celld.trainer import checkpoint, gradients, loss, tree
from celld.trainer.exchange import GradientExchange
from celld.trainer.gradients import BatchSum, Computed
from celld.trainer.model import Policy, read_tensors
from celld.trainer.optimizer import AdamW, learning_rate
from celld.transfer.bulk import open_bulk
from celld.weights import Published, Snapshot, WeightsError, transport_to
from gyre_base import messages as m
from gyre_base.bus import Client, NoAnswer
from gyre_base.config import Config
from gyre_base.ids import PolicyVersion
from gyre_base.keys import Keys
from gyre_base.microstep import MicroStep
from gyre_base.rundir import RunDir

log = logging.getLogger(__name__)
T = TypeVar("T")
CLAIM_S = 5.0  # how long one claim waits for trajd; also bounds how long a stop waits when trajd is dead
TELL_S = 30.0  # after this long without an answer a line is logged and the message repeated
AGAIN_S = 0.2  # pause after a claim that led to nothing


class RankError(RuntimeError):
    """This rank can't go on without breaking a promise; its end is seen by celld, which starts another."""


class Rank:
    """`work` is the loop; `celld.trainer.service` answers others while it runs. Tensor work has a thread of its own."""

    def __init__(self, config: Config, run: RunDir, keys: Keys, *, cell: str, core: bool, life: int) -> None:
        self.config, self.run, self.keys = config, run, keys
        self.cell, self.core, self.life = cell, core, life
        self.cells = [f"c{i}" for i in range(config.cluster.cells)]
        self.trajd = Client(run, keys, "trajd", identity=f"rank:{cell}:{life}")
        self.cellctl = Client(run, keys, "cellctl", identity=f"rank:{cell}:{life}")
        self.bulk = open_bulk(config.cluster)
        self.transport = transport_to(run, keys, f"rank-{self.cells[0]}", self.bulk)
        self.published = Published(self.bulk)
        self.version: PolicyVersion | None = None  # None: a satellite that has not pulled yet
        self.sum: BatchSum | None = None
        self.next_batch = 0
        self.applied: tuple[str, ...] = ()  # micro-steps since the last checkpoint
        self.saved = ("", "")  # version and path of the checkpoint that holds the present weights
        self.batch_began: float | None = None
        self.may_hold = False  # trajd may think that we hold a lease
        self.progress = 0  # micro-steps committed in this life
        self.computing = False  # tensor work is in hand: without progress for long the agent takes us for stalled
        self.may_claim = asyncio.Event()
        self.busy = asyncio.Lock()  # one round of `work`; a stop waits for it
        self.committing = asyncio.Lock()  # a commit in doubt; a pull of the sum waits for it
        self.stepping = asyncio.Lock()  # weights and ledger change together; a checkpoint waits for it
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="tensors")

    # ---- setup
    # --------------------------------------------------------------------------------------------------------

    async def build(self, model_config: dict[str, Any]) -> None:
        """The network; on the core also the optimizer, and weights from the newest checkpoint, else from model.path."""
        self.policy: Policy = await self.in_thread(lambda: Policy(model_config))
        trainer, size = self.config.trainer, self.policy.gradient.numel()
        self.options = loss.LossOptions(
            ratio_cap=trainer.ratio_cap,
            clip_low=trainer.sequence_clip_low,
            clip_high=trainer.sequence_clip_high,
            reading=trainer.reading,
        )
        if self.core:
            self.optimizer = AdamW(self.policy, trainer)
            patience_s = self.config.cluster.peer_timeout_s
            self.exchange = GradientExchange(
                self.run, self.keys, self.cells[1:], size=size, patience_s=patience_s, bulk=self.bulk
            )
            await self.in_thread(self.restore)
            await self.in_thread(self.publish)

    def restore(self) -> None:
        """A resume is a new lineage: what was trained after the checkpoint is lost, its versions are not made twice."""
        kept = checkpoint.newest(self.run.path("checkpoints"))
        if kept is None:
            self.policy.load(read_tensors(self.config.model.path))
            self.version = PolicyVersion(self.life - 1, 0)
        else:
            self.policy.load_arrays(kept.weights)
            self.optimizer.load(kept.moments, kept.optimizer_steps)
            self.version = PolicyVersion(max(kept.version.lineage + 1, self.life - 1), kept.version.step)
            self.next_batch, self.applied = kept.next_batch, kept.applied
            self.saved = (str(self.version), str(self.run.path("checkpoints", str(kept.version))))
        log.info("core starts at %s, next batch %d", self.version, self.next_batch)

    async def announce(self) -> None:
        """The checkpoint's word on what is trained wins over trajd's memory."""
        if self.core:
            word = m.Ledger(next_batch=self.next_batch, version=str(self.version), applied=self.applied)
            await self.tell(self.trajd, word)

    # ---- the loop
    # -----------------------------------------------------------------------------------------------------

    async def work(self) -> None:
        """Until cancelled."""
        await self.announce()
        while True:
            await self.may_claim.wait()
            async with self.busy:
                wait_s = await self.round() if self.may_claim.is_set() else 0.0
            await asyncio.sleep(wait_s)

    async def round(self) -> float:
        """One claim and what follows from its answer. Returns how long to wait before the next."""
        if self.version is None:
            return await self.pull_weights()
        self.may_hold = True
        try:
            answer = await self.trajd.ask(self.claim(), timeout_s=CLAIM_S)
        except NoAnswer as error:
            log.warning("%s", error)
            return AGAIN_S
        self.may_hold = isinstance(answer, m.MicroStepLease)
        match answer:
            case m.MicroStepLease():
                return await self.train(answer)
            case m.BatchComplete():
                return await self.finish(answer)
            case m.StaleWeights():
                return await self.pull_weights()
            case m.NoMicroStep(wait_s=wait_s):
                return min(wait_s, 1.0)
            case m.Refused(why=why):
                return self.drop_sum(why)
        raise RankError(f"trajd answered a claim with {answer!r}")

    def claim(self) -> m.ClaimMicroStep:
        held = self.sum
        return m.ClaimMicroStep(
            cell=self.cell,
            life=self.life,
            version=str(self.version),
            core=self.core,
            batch=held.batch if held else -1,
            ids=tuple(held.ids) if held else (),
        )

    async def train(self, lease: m.MicroStepLease) -> float:
        """Compute a micro-step beside the sum, then commit: it is added exactly if trajd takes it."""
        if lease.base_version != str(self.version):
            return AGAIN_S
        if self.sum is None or (self.sum.batch, self.sum.base_version) != (lease.batch, lease.base_version):
            self.sum = BatchSum.empty(lease.batch, lease.base_version, self.policy.gradient.numel())
            self.batch_began = time.monotonic()
        if lease.id in self.sum.ids:  # trajd forgot; our next claim tells it
            return AGAIN_S
        computed = await self.in_thread(lambda: self.compute(MicroStep.from_wire(lease.layout, lease.payload)))
        word = m.MicroStepComputed(batch=lease.batch, id=lease.id, cell=self.cell, life=self.life)
        async with self.committing:
            why = await self.tell(self.trajd, word, may_refuse=True)
            self.may_hold = False
            if why:
                return self.drop_sum(why)
            self.sum.add([lease.id], computed)
        self.progress += 1
        return 0.0

    def compute(self, step: MicroStep) -> Computed:
        """Forward and backward of one micro-step; the gradient is that of the sum of 1/T_e losses."""
        assert self.version is not None
        began = time.perf_counter()
        alive = [packed for packed in step.executions if packed.advantage != 0.0]
        stats = gradients.counts(step, alive, self.version.step)
        self.policy.zero_gradient()
        if alive:
            plan = tree.plan(alive).to(self.policy.gradient.device)
            goal = loss.targets(alive, self.version.step).to(self.policy.gradient.device)
            temperature = self.config.rollout.temperature
            logp_N, entropy_N = self.policy.logprobs(plan, goal.rows_N, goal.tokens_N, temperature)
            total, sums = loss.loss_sum(logp_N, goal, self.options)
            total.backward()  # type: ignore[no-untyped-call]
            self.policy.finish_gradient()
            stats |= sums | {"entropy": float(entropy_N[goal.owned_N].sum())}
        stats["compute_s"] = time.perf_counter() - began
        return Computed(self.policy.gradient.cpu().clone(), loss.weight_sum(step.executions), stats)

    def drop_sum(self, why: str) -> float:
        log.warning("%s drops its sum: %s", self.cell, why)
        self.sum = None
        return AGAIN_S

    async def pull_weights(self) -> float:
        """The core's snapshot. A newer base version ends the life of our old sum."""
        if self.core:
            raise RankError("trajd wants other weights than the core has")
        try:
            snapshot = await self.transport.pull(str(self.version or ""), self.config.cluster.peer_timeout_s)
        except (NoAnswer, WeightsError) as error:
            log.warning("%s", error)
            return AGAIN_S
        if snapshot is None:
            return AGAIN_S
        await self.in_thread(lambda: self.policy.load_arrays(snapshot.tensors()))
        self.version, self.sum = PolicyVersion.parse(snapshot.version), None
        return 0.0

    # ---- the core's end of a batch
    # ------------------------------------------------------------------------------------

    async def finish(self, done: m.BatchComplete) -> float:
        """Every micro-step is computed: sums in, one step, the new version out."""
        parts = await self.gather(done)
        if parts is None:
            return 0.0
        whole = BatchSum.empty(done.batch, done.base_version, self.policy.gradient.numel())
        for ids, part in parts:
            whole.add(ids, part)
        async with self.stepping:
            metrics = await self.in_thread(lambda: self.step(whole, done.executions))
            await self.in_thread(self.publish)
            self.next_batch = done.batch + 1
            self.applied = (*self.applied, *whole.ids)
        weights_sum = whole.weight_sum / done.executions
        if abs(weights_sum - 1) > 1e-9:
            log.error("batch %d: the weights sum to %r, not 1", done.batch, weights_sum)
        metrics |= {"cells": float(len(parts)), "weights_sum": weights_sum}
        metrics["step_s"] = time.monotonic() - self.batch_began if self.batch_began else 0.0
        self.sum = self.batch_began = None
        ids, version = tuple(whole.ids), str(self.version)
        await self.tell(self.trajd, m.BatchApplied(batch=done.batch, ids=ids, version=version, weights_sum=weights_sum))
        await self.tell(self.cellctl, m.StepDone(batch=done.batch, version=version, metrics=metrics))
        if self.optimizer.steps % self.config.trainer.checkpoint_every_steps == 0:
            saved = await self.save()
            await self.cellctl.send(saved)
            await self.tell(self.trajd, m.BatchesRetired(below=self.next_batch, version=saved.version))
        return 0.0

    async def gather(self, done: m.BatchComplete) -> list[tuple[tuple[str, ...], Computed]] | None:
        """Each contribution in the cells' order; None if one is lost: its ids are leased again, the others stand."""
        order = sorted(done.contributions, key=lambda c: self.cells.index(c.cell))
        own = self.sum if self.sum is not None and self.sum.batch == done.batch else None
        found = await self.exchange.pull(done.batch, order, own)
        for each, part in zip(order, found, strict=True):
            if part is None:
                self.sum = None if each.cell == self.cell else self.sum
                await self.tell(self.trajd, m.ContributionLost(batch=done.batch, cell=each.cell, life=each.life))
        parts = [(each.ids, part) for each, part in zip(order, found, strict=True) if part is not None]
        return parts if len(parts) == len(order) else None

    def step(self, whole: BatchSum, executions: int) -> dict[str, float]:
        """Divide, clip, AdamW; the version moves on."""
        assert self.version is not None
        lr = learning_rate(self.version.step, self.config.scheduler.steps, self.config.trainer)
        self.policy.gradient.copy_(whole.flat / executions)
        norm = self.optimizer.step(lr)
        if not math.isfinite(norm):
            log.error("batch %d: the gradient is not finite, the weights stay", whole.batch)
        self.version = PolicyVersion(self.version.lineage, self.version.step + 1)
        return gradients.metrics(whole.stats) | {"grad_norm": norm, "lr": lr, "executions": float(executions)}

    def publish(self) -> None:
        self.published.publish(Snapshot.of(str(self.version), self.policy.hf_arrays()))

    async def save(self) -> m.CheckpointSaved:
        """A durable checkpoint of the present weights; a second call for the same ones writes nothing."""
        seconds = 0.0
        async with self.stepping:
            if self.saved[0] != str(self.version):
                began = time.monotonic()
                path = await self.in_thread(self.write_checkpoint)
                self.saved, self.applied = (str(self.version), path), ()
                seconds = time.monotonic() - began
        return m.CheckpointSaved(version=self.saved[0], path=self.saved[1], seconds=seconds)

    def write_checkpoint(self) -> str:
        assert self.version is not None
        state = checkpoint.Checkpoint(
            version=self.version,
            next_batch=self.next_batch,
            applied=self.applied,
            optimizer_steps=self.optimizer.steps,
            config=self.policy.config,
            weights=self.policy.hf_arrays(),
            moments=self.optimizer.hf_arrays(),
        )
        return str(checkpoint.save(self.run.path("checkpoints"), state, self.config.trainer.checkpoints_kept))

    # ---- helpers
    # ------------------------------------------------------------------------------------------------------

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Tensor work, one piece at a time, while the sockets go on being served."""
        self.computing = True
        try:
            return await asyncio.get_running_loop().run_in_executor(self.thread, work)
        finally:
            self.computing = False

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
        self.thread.shutdown(wait=False, cancel_futures=True)
        self.transport.close()
        for client in (self.trajd, self.cellctl):
            client.close()
        if self.core:
            self.exchange.close()
