"""One rank's part of a cell's tensors, and what each order does to it. The same on the leader and on its followers.

Owns the policy's part, its sum and what was gathered; on the core also the optimizer. Never asks trajd, never decides.
Invariant: every rank of a cell gets the same orders one after another, so the collectives inside them meet; a
micro-step that was computed is in the sum only after `AddMicroStep`. Tensor work has a thread of its own, so that the
sockets go on being served.

Shapes: T tokens of this rank, N targets of a micro-step; flat gradients have one entry per parameter of this rank.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from celld.trainer import context, cpu, dtypes, gradients, loss, pipeline, tree
from celld.trainer.exchange import GradientExchange
from celld.trainer.gradients import BatchSum, Computed
from celld.trainer.model import Policy
from celld.trainer.optimizer import AdamW, learning_rate
from celld.trainer.rank import RankError, Stepped
from celld.weights import Array, Layout
from gyre_base import messages as m
from gyre_base.config import Config
from gyre_base.ids import PolicyVersion
from gyre_base.microstep import MicroStep, PackedExecution

log = logging.getLogger(__name__)
T = TypeVar("T")
WEIGHTS, MASTERS, MOMENTS = "weights", "masters", "moments"


class Tensors:
    """`obey` is all there is to it."""

    def __init__(self, config: Config, policy: Policy, optimizer: AdamW | None, exchange: GradientExchange | None):
        self.config, self.policy, self.optimizer, self.exchange = config, policy, optimizer, exchange
        trainer = config.trainer
        self.options = loss.LossOptions(
            ratio_cap=trainer.ratio_cap,
            clip_low=trainer.sequence_clip_low,
            clip_high=trainer.sequence_clip_high,
            reading=trainer.reading,
        )
        self.sum: BatchSum | None = None
        self.pending: Computed | None = None  # computed, and not in the sum
        self.settled = asyncio.Event()  # nothing is pending
        self.settled.set()
        self.computing = False
        self._whole: BatchSum | None = None  # the cells' sums of one batch, added up
        device = policy.gradient.device
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tensors", initializer=cpu.use, initargs=(device,))

    async def obey(self, order: Any, arrays: Mapping[str, Array] | None = None) -> Any:
        """One order of the leader; `arrays` are what a `TakeTensors` is about, on the leader alone.

        Returns statistics (compute), which parts are here (gather), Stepped (step), whole arrays (give), or None.
        """
        match order:
            case m.ComputeMicroStep():
                self.pending = await self.in_thread(lambda: self._compute(order))
                self.settled.clear()
                return dict(self.pending.stats)
            case m.AddMicroStep(id=name):
                assert self.sum is not None and self.pending is not None, "nothing was computed"
                self.sum.add([name], self.pending)
                self._settle()
            case m.DropSum():
                self.sum = None
                self._settle()
            case m.GatherSums():
                return await self._gather(order)
            case m.StepBatch():
                return await self.in_thread(lambda: self._step(order))
            case m.TakeTensors():
                await self.in_thread(lambda: self._take(order, arrays))
            case m.GiveTensors(what=what):
                return await self.in_thread(lambda: self._give(what))
            case _:
                raise RankError(f"an order that no rank knows: {order!r}")
        return None

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Tensor work, one piece at a time, while the sockets go on being served."""
        self.computing = True
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        finally:
            self.computing = False

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self.exchange is not None:
            self.exchange.close()

    # ---- micro-steps ------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        self.pending = None
        self.settled.set()

    def _compute(self, order: m.ComputeMicroStep) -> Computed:
        """Forward and backward of one micro-step; the gradient is that of the sum of 1/T_e losses."""
        if self.sum is None or (self.sum.batch, self.sum.base_version) != (order.batch, order.base_version):
            self.sum = BatchSum.empty(order.batch, order.base_version, self.policy.gradient.numel())
        base_step, began = PolicyVersion.parse(order.base_version).step, time.perf_counter()
        step = MicroStep.from_wire(order.layout, order.payload)
        alive = [packed for packed in step.executions if packed.advantage != 0.0]
        stats = gradients.counts(step, alive, base_step)
        self.policy.zero_gradient()
        if alive:
            passes = [alive] if self.policy.stages == 1 else [[packed] for packed in alive]
            stats |= self._forward_backward(passes, base_step)
            self.policy.finish_gradient()
        stats["compute_s"] = time.perf_counter() - began
        return Computed(self.policy.gradient.to("cpu", copy=True), loss.weight_sum(step.executions), stats)

    def _forward_backward(self, passes: list[list[PackedExecution]], base_step: int) -> dict[str, float]:
        """Statistics on the last stage of the pipeline, none on the others. The executions of a pass are packed."""
        device, temperature = self.policy.gradient.device, self.config.rollout.temperature
        wholes, rank, ranks = map(tree.plan, passes), self.policy.cp_rank, self.policy.cp
        plans = [context.part(whole, rank, ranks).to(device) for whole in wholes]

        def loss_of(number: int, hidden_TD: Tensor) -> tuple[Tensor, dict[str, float]]:
            goal = loss.targets(passes[number], base_step).to(device)
            logp_N, entropy_N = self.policy.logprobs_of(
                hidden_TD, plans[number], goal.rows_N, goal.tokens_N, temperature
            )
            total, sums = loss.loss_sum(logp_N, goal, self.options)
            return total, sums | {"entropy": float(entropy_N[goal.owned_N].sum())}

        return pipeline.forward_backward(self.policy, plans, loss_of)

    def note(self, stats: Mapping[str, float]) -> None:
        """More statistics of the micro-step that is pending."""
        assert self.pending is not None, "nothing was computed"
        self.pending = dataclasses.replace(self.pending, stats={**self.pending.stats, **stats})

    # ---- the core's step --------------------------------------------------------------------------------------------

    async def _gather(self, order: m.GatherSums) -> tuple[bool, ...]:
        assert self.exchange is not None, "a satellite gathers nothing"
        self._whole = whole = BatchSum.empty(order.batch, "", self.policy.gradient.numel())
        parts, here = iter(order.parts), []
        async with aclosing(self.exchange.pull(order.batch, order.parts, self.sum)) as sums:
            async for computed in sums:
                part = next(parts)
                if computed is not None:
                    await self.in_thread(partial(whole.add, part.ids, computed))
                here.append(computed is not None)
        return tuple(here)

    def _step(self, order: m.StepBatch) -> Stepped:
        """Divide what was gathered, clip, AdamW."""
        assert self.optimizer is not None, "a satellite steps nothing"
        whole = self._whole
        assert whole is not None and whole.batch == order.batch, "its sums were not gathered"
        step, trainer = PolicyVersion.parse(order.base_version).step, self.config.trainer
        lr = learning_rate(step, self.config.scheduler.steps, trainer)
        self.policy.gradient.copy_(whole.flat.div_(order.executions))
        norm = self.optimizer.step(lr)
        if not math.isfinite(norm):
            log.error("batch %d: the gradient is not finite, the weights stay", whole.batch)
        self.sum = self._whole = None
        metrics = gradients.metrics(whole.stats) | {"grad_norm": norm, "lr": lr}
        return Stepped(ids=tuple(whole.ids), weight_sum=whole.weight_sum, metrics=metrics)

    # ---- weights and moments ----------------------------------------------------------------------------------------

    def _take(self, order: m.TakeTensors, arrays: Mapping[str, Array] | None) -> None:
        whole = shared(order.layout, arrays)
        if order.what == WEIGHTS:
            self.policy.load_arrays(whole)
            if self.optimizer is not None:
                self.optimizer.start_from(whole)
            self.sum = None
        else:
            assert self.optimizer is not None, "a satellite has no moments"
            self.optimizer.load(whole, order.steps)

    def _give(self, what: str) -> dict[str, Array]:
        """On the leader; the others hold one tensor at a time, and no copy of the whole."""
        kept = dist.get_rank() == 0
        if what == WEIGHTS:
            return self.policy.hf_arrays(kept=kept)
        assert self.optimizer is not None, "a satellite has no moments"
        return self.optimizer.masters(kept=kept) if what == MASTERS else self.optimizer.hf_arrays(kept=kept)


def shared(layout: Layout, arrays: Mapping[str, Array] | None) -> Mapping[str, Array]:
    """The leader's `arrays` on every rank of the cell, tensor by tensor. Collective."""
    if dist.get_world_size() == 1:
        assert arrays is not None, "the leader has them"
        return arrays
    whole: dict[str, Array] = {}
    for name, kind, shape in layout:
        mine = torch.empty(shape, dtype=dtypes.BY_KIND[kind]) if arrays is None else dtypes.to_tensor(arrays[name])
        moved = mine.to(cpu.device())
        dist.broadcast(moved, src=0)
        whole[name] = dtypes.to_array(moved)
    return whole
