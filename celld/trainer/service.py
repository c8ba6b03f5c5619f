"""What a rank says while it works: answers to celld, to the core and to satellites, and its heartbeat to trajd.

Owns the rank's server socket and the order epoch. Never computes. Invariant: a stop is answered only when no micro-step
is in hand, a pull of the sum only when no commit is in doubt.
"""

from __future__ import annotations

import asyncio
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from celld.transfer.bulk import Bulk
from gyre_base import messages as m
from gyre_base.bus import Received, Server

if TYPE_CHECKING:
    from celld.trainer.rank import HeldSum, Rank

log = logging.getLogger(__name__)
SUM = "gradient sum"  # its name on the shelf


def offered(
    question: m.PullGradient, held: HeldSum | None, *, cell: str, rank: int, life: int, bulk: Bulk | None
) -> m.GradientSum | m.Refused:
    """What a satellite's rank answers to the core's. Only when no commit is in doubt."""
    if question.rank != rank:
        return m.Refused(why=f"this is rank {rank} of {cell}, not {question.rank}: both must have one layout")
    if question.life != life or held is None or held.batch != question.batch:
        return m.Refused(why=f"{cell} in life {life} has no sum for batch {question.batch}")
    message = held.message()
    if bulk is None or question.by != bulk.kind:
        return message
    bulk.shelf.put(SUM, message.payload)
    return bulk.emptied(message, SUM)


class Service(ABC):
    """A rank's server and what runs beside it; the first of them to fail sets `failed`."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._tasks: set[asyncio.Task[None]] = set()
        self.failed = asyncio.Event()

    @abstractmethod
    async def reply(self, received: Received) -> Any:
        """The answer, None if there is none (yet)."""

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Beside everything else. Its failure ends the rank: no silent half-life."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.critical("this rank ends", exc_info=task.exception())
            self.failed.set()

    async def serve(self) -> None:
        """Each question in a task of its own: one that has to wait does not hold up the others."""
        async for received in self._server:
            self.spawn(self._answer(received))

    async def _answer(self, received: Received) -> None:
        reply = await self.reply(received)
        if reply is not None:
            await self._server.send(received.peer, reply, received.correlation)

    async def leave(self) -> None:
        """End what runs beside."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class RankService(Service):
    """The leader's: `serve` and `beat` run beside `Rank.work`."""

    def __init__(self, rank: Rank, server: Server) -> None:
        super().__init__(server)
        self._rank = rank
        self._epoch = 0

    async def reply(self, received: Received) -> Any:
        return await self.answer(received.message)

    async def answer(self, message: Any) -> Any:
        rank = self._rank
        match message:
            case m.PullGradient():
                return await self._gradient(message)
            case m.PullWeights() if rank.core:
                return rank.team.published.answer(message)
            case m.SlotDone(lease=lease):
                return rank.team.bulk.shelf.done(lease) if rank.team.bulk is not None else None
            case m.StartTraining(epoch=epoch):
                if self._is_new(epoch):
                    rank.may_claim.set()
                return self._state()
            case m.StopTraining(epoch=epoch):
                if self._is_new(epoch):
                    rank.may_claim.clear()
                    async with rank.busy:
                        self._return_lease()
                return self._state()
            case m.SaveCheckpoint() if rank.core:
                return await self._save()
            case m.StatusRequest():
                return m.StatusReply(rows=(self._row(),))
        return m.Refused(why=f"rank-{rank.cell} does not answer {getattr(message, 'TAG', message)!r}")

    def _return_lease(self) -> None:
        """A stopped rank claims no more, so a lease whose answer was lost would hold up its batch."""
        rank = self._rank
        if rank.may_hold:
            rank.may_hold = False
            self.spawn(self._tell_trajd(m.LeaseReturned(cell=rank.cell, life=rank.life)))

    def _is_new(self, epoch: int) -> bool:
        """An order of the same epoch is a repeat and harmless; an older one is late and void."""
        newest, self._epoch = self._epoch, max(self._epoch, epoch)
        return epoch >= newest

    async def _gradient(self, question: m.PullGradient) -> m.GradientSum | m.Refused:
        rank = self._rank
        async with rank.committing:
            team = rank.team
            return offered(question, team.sum, cell=rank.cell, rank=0, life=rank.life, bulk=team.bulk)

    async def _save(self) -> m.CheckpointSaved | m.Refused:
        durable = await self._rank.save()
        if durable is None:
            return m.Refused(why="the checkpoint can't be written; the ones before it stand (see the rank's log)")
        retired = m.BatchesRetired(below=durable.below, version=durable.saved.version)
        self.spawn(self._tell_trajd(retired))
        return durable.saved

    async def _tell_trajd(self, message: Any) -> None:
        await self._rank.tell(self._rank.trajd, message)

    def _state(self) -> m.RankState:
        rank = self._rank
        return m.RankState(
            cell=rank.cell,
            rank=0,
            life=rank.life,
            training=rank.may_claim.is_set(),
            version=str(rank.version or ""),
            epoch=self._epoch,
        )

    def _row(self) -> dict[str, Any]:
        rank, held = self._rank, self._rank.team.sum
        return {
            "cell": rank.cell,
            "rank": 0,
            "life": rank.life,
            "role": "core" if rank.core else "satellite",
            "training": rank.may_claim.is_set(),
            "version": str(rank.version or ""),
            "epoch": self._epoch,
            "batch": held.batch if held else None,
            "micro_steps_in_sum": len(held.ids) if held else 0,
            "micro_steps": rank.progress,
            "computing": rank.team.computing,
            "transport": rank.team.transport.name,
        }

    async def beat(self) -> None:
        """trajd learns of our life from hello and of our end from silence. Once: a lost one is replaced by the next."""
        rank = self._rank
        hello = m.Hello(kind="rank", name=rank.cell, life=rank.life, pid=os.getpid())
        await rank.trajd.send(hello)
        while True:
            await asyncio.sleep(rank.config.cluster.heartbeat_s)
            while not rank.trajd.inbox.empty():
                if isinstance(rank.trajd.inbox.get_nowait(), m.Welcome):  # trajd is new: introduce ourselves again
                    await rank.trajd.send(hello)
            beat = m.Heartbeat(kind="rank", name=rank.cell, life=rank.life, progress=rank.progress)
            await rank.trajd.send(beat)

    async def leave(self) -> None:
        await super().leave()
        await self._rank.trajd.send(m.Goodbye(kind="rank", name=self._rank.cell, life=self._rank.life))
