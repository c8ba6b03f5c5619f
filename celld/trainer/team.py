"""The ranks of a cell, led by rank 0: every order goes to all of them, and its own part is done here.

Owns the order numbers and the connections to the other ranks. Never claims, never commits. Invariant: one order at a
time, and it is done only when every rank did it; a rank that is silent, refuses or fails ends the whole cell's life.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from celld.trainer import checkpoint
from celld.trainer.gradients import BatchSum
from celld.trainer.model import read_tensors
from celld.trainer.rank import Ledger, RankError, Stepped
from celld.trainer.tensors import MASTERS, MOMENTS, WEIGHTS, Tensors
from celld.transfer.bulk import Bulk
from celld.weights import Array, Published, Snapshot, Transport, layout_of
from gyre_base import messages as m
from gyre_base.bus import Client, NoAnswer
from gyre_base.config import Config
from gyre_base.ids import PolicyVersion

AGAIN_S = 10.0  # an order is repeated rarely: it may be large, and the others know its number


class RankTeam:
    """What `celld.trainer.rank.Team` promises, with megatron. `checkpoints` is their folder."""

    poll_s = 1.0

    def __init__(
        self,
        config: Config,
        tensors: Tensors,
        followers: Sequence[Client],
        *,
        transport: Transport,
        bulk: Bulk | None,
        checkpoints: Path,
    ) -> None:
        self.config, self.tensors, self.followers = config, tensors, followers
        self.transport, self.bulk, self._checkpoints = transport, bulk, checkpoints
        self.published = Published(bulk)
        self._writer = checkpoint.Writer(checkpoints, config.trainer.checkpoints_kept)
        self.computing = False
        self._number = 0
        self._one_at_a_time = asyncio.Lock()

    @property
    def sum(self) -> BatchSum | None:
        return self.tensors.sum

    # ---- orders -----------------------------------------------------------------------------------------------------

    async def _order(self, order: Any, arrays: Mapping[str, Array] | None = None) -> tuple[Any, list[m.OrderDone]]:
        """(what came of it here, the other ranks' answers). Raises RankError as soon as one of them can't."""
        async with self._one_at_a_time:
            self._number += 1
            order = dataclasses.replace(order, number=self._number)
            self.computing = True
            mine = asyncio.ensure_future(self.tensors.obey(order, arrays))
            others = [asyncio.ensure_future(self._ask(client, order)) for client in self.followers]
            try:
                done, *answers = await asyncio.gather(mine, *others)
            finally:
                self.computing = False
                for task in (mine, *others):
                    task.cancel()
            return done, answers

    async def _ask(self, client: Client, order: Any) -> m.OrderDone:
        answer = await client.ask(order, timeout_s=self.config.cluster.stall_s, again_every_s=AGAIN_S)
        if not isinstance(answer, m.OrderDone) or answer.number != order.number:
            raise RankError(f"{client.server} can't do {order.TAG} {order.number}: {answer}")
        return answer

    async def watch(self, beat: m.Heartbeat, every_s: float, patience_s: float) -> None:
        """Until one of the others is silent: then RankError. They learn from it that their leader lives."""
        while True:
            for client in self.followers:
                await self._beat(client, beat, patience_s)
            await asyncio.sleep(every_s)

    async def meet(self, beat: m.Heartbeat, patience_s: float) -> None:
        """Until all others are up; their network takes its time."""
        for client in self.followers:
            await self._beat(client, beat, patience_s)

    async def _beat(self, client: Client, beat: m.Heartbeat, patience_s: float) -> None:
        try:
            await client.ask(beat, timeout_s=patience_s, again_every_s=min(2.0, patience_s / 3))
        except NoAnswer:
            raise RankError(f"{client.server} is silent for {patience_s:g} s") from None

    # ---- Team -------------------------------------------------------------------------------------------------------

    async def restore(self) -> Ledger | None:
        kept = await self.tensors.in_thread(lambda: checkpoint.newest(self._checkpoints))
        if kept is None:
            tensors = await self.tensors.in_thread(lambda: read_tensors(self.config.model.path))
            await self._take(WEIGHTS, {name: tensor.float().numpy() for name, tensor in tensors.items()})
            return None
        await self._take(WEIGHTS, kept.exact)
        await self._take(MOMENTS, kept.moments, kept.optimizer_steps)
        checkpoint.set_rng_state(kept.rng)
        path = str(self._checkpoints / str(kept.version))
        return Ledger(version=kept.version, next_batch=kept.next_batch, applied=kept.applied, path=path)

    async def compute(self, lease: m.MicroStepLease) -> None:
        order = m.ComputeMicroStep(
            number=0,
            batch=lease.batch,
            id=lease.id,
            base_version=lease.base_version,
            layout=lease.layout,
            payload=lease.payload,
        )
        own, others = await self._order(order)
        self.tensors.note({name: n for done in others for name, n in done.stats.items() if name not in own})

    async def add(self, micro_step: str, stats: dict[str, float]) -> None:
        self.tensors.note(stats)
        await self._order(m.AddMicroStep(number=0, id=micro_step))

    async def drop(self) -> None:
        await self._order(m.DropSum(number=0))

    async def gather(self, batch: int, parts: Sequence[m.Contribution]) -> list[bool]:
        mine, others = await self._order(m.GatherSums(number=0, batch=batch, parts=tuple(parts)))
        return [all(each) for each in zip(mine, *(answer.here for answer in others), strict=True)]

    async def step(self, done: m.BatchComplete) -> Stepped:
        order = m.StepBatch(number=0, batch=done.batch, base_version=done.base_version, executions=done.executions)
        stepped: Stepped = (await self._order(order))[0]
        return stepped

    async def publish(self, version: PolicyVersion) -> None:
        weights = await self._give(WEIGHTS)
        await self.tensors.in_thread(lambda: self.published.publish(Snapshot.of(str(version), weights)))

    async def pull(self, have: str) -> str | None:
        """The snapshot comes to the leader once and goes to the other ranks within the cell."""
        snapshot = await self.transport.pull(have, self.config.cluster.peer_timeout_s)
        if snapshot is None:
            return None
        await self._take(WEIGHTS, snapshot.tensors())
        return snapshot.version

    async def save(self, ledger: Ledger) -> asyncio.Task[str]:
        """Whole arrays under Hugging Face names, whatever the layout: another one can read them."""
        await self._writer.idle()
        optimizer = self.tensors.optimizer
        assert optimizer is not None, "a satellite saves nothing"
        state = checkpoint.Checkpoint(
            version=ledger.version,
            next_batch=ledger.next_batch,
            applied=ledger.applied,
            optimizer_steps=optimizer.steps,
            config=self.tensors.policy.config,
            weights=await self._give(WEIGHTS),
            masters=await self._give(MASTERS),
            moments=await self._give(MOMENTS),
        )
        return await self._writer.start(state)

    async def _take(self, what: str, arrays: Mapping[str, Array], steps: int = 0) -> None:
        await self._order(m.TakeTensors(number=0, what=what, layout=layout_of(arrays), steps=steps), arrays)

    async def _give(self, what: str) -> dict[str, Array]:
        arrays: dict[str, Array] = (await self._order(m.GiveTensors(number=0, what=what)))[0]
        return arrays

    async def leave(self, goodbye: m.Goodbye) -> None:
        """The other ranks may end."""
        for client in self.followers:
            await client.send(goodbye)

    def close(self) -> None:
        self._writer.close()
        self.tensors.close()
        self.transport.close()
        for client in self.followers:
            client.close()
