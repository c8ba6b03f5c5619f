"""A rank that another leads: it does what rank 0 of its cell orders, and gives its sum to the same rank of the core.

Owns its server socket and the number of the last order. Never claims, never asks trajd. Invariant: orders are done in
their numbers' order, each once; a sum is not handed out between computing a micro-step and the leader's word on it. It
ends with its leader: told so, or when the leader has been silent too long. A collective that hangs meanwhile is left to
`celld.trainer.main`, which ends the process whatever its threads do.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from celld.trainer.rank import RankError, Stepped
from celld.trainer.service import Service, offered
from celld.trainer.tensors import Tensors
from celld.transfer.bulk import Bulk
from gyre_base import messages as m
from gyre_base.bus import Received, Server

log = logging.getLogger(__name__)
ORDERS = (
    m.ComputeMicroStep,
    m.AddMicroStep,
    m.DropSum,
    m.GatherSums,
    m.StepBatch,
    m.TakeTensors,
    m.GiveTensors,
)


class Follower(Service):
    """`serve`, `work` and `watch` run side by side; `dismissed` is set when the leader needs it no more."""

    def __init__(
        self, tensors: Tensors, server: Server, *, cell: str, rank: int, life: int, bulk: Bulk | None, patience_s: float
    ) -> None:
        super().__init__(server)
        self._tensors, self._bulk, self._patience_s = tensors, bulk, patience_s
        self.cell, self.rank, self.life = cell, rank, life
        self.dismissed = asyncio.Event()
        self._orders: asyncio.Queue[Received] = asyncio.Queue()
        self._last: tuple[int, m.OrderDone | None] = (0, None)  # None: in hand
        self._heard = 0.0  # when the leader last said something

    async def reply(self, received: Received) -> Any:
        message = received.message
        match message:
            case m.PullGradient():
                await self._tensors.settled.wait()
                return offered(
                    message, self._tensors.sum, cell=self.cell, rank=self.rank, life=self.life, bulk=self._bulk
                )
            case m.SlotDone(lease=lease):
                return self._bulk.shelf.done(lease) if self._bulk is not None else None
            case m.StatusRequest():
                return m.StatusReply(rows=(self._row(),))
            case m.Heartbeat() | m.Goodbye() if message.name == self.cell and message.life == self.life:
                self._heard = time.monotonic()
                return m.Done() if isinstance(message, m.Heartbeat) else self.dismissed.set()
            case _ if isinstance(message, ORDERS):
                self._heard = time.monotonic()
                return self._ordered(received)
        return m.Refused(why=f"rank {self.rank} of {self.cell} does not answer {getattr(message, 'TAG', message)!r}")

    def _ordered(self, received: Received) -> m.OrderDone | m.Refused | None:
        """A repeat of the last order is answered again, or when it is done; none is skipped."""
        number, (last, answer) = received.message.number, self._last
        if number == last:
            return answer
        if number != last + 1 or (last and answer is None):
            return m.Refused(why=f"order {number} came after {last}")
        self._last = number, None
        self._orders.put_nowait(received)
        return None

    async def work(self) -> None:
        """Order by order. One that fails is refused, and this rank ends: the leader ends the cell."""
        while True:
            received = await self._orders.get()
            order = received.message
            try:
                found = await self._tensors.obey(order)
            except Exception as error:
                await self._server.send(received.peer, m.Refused(why=repr(error)), received.correlation)
                raise
            done = m.OrderDone(number=order.number)
            if isinstance(found, tuple):
                done = m.OrderDone(number=order.number, here=found)
            elif isinstance(found, dict) and isinstance(order, m.ComputeMicroStep):
                done = m.OrderDone(number=order.number, stats=found)
            elif isinstance(found, Stepped):
                log.info("batch %d: %d micro-steps stepped", order.batch, len(found.ids))
            self._last = order.number, done
            await self._server.send(received.peer, done, received.correlation)

    async def watch(self, first_s: float) -> None:
        """Until the leader was silent for `patience_s`; its first word may take `first_s`."""
        began = time.monotonic()
        while True:
            await asyncio.sleep(1.0)
            silent_s = time.monotonic() - (self._heard or began)
            if silent_s > (self._patience_s if self._heard else first_s):
                raise RankError(f"the leader of {self.cell} is silent for {silent_s:.0f} s")

    def _row(self) -> dict[str, Any]:
        held = self._tensors.sum
        return {
            "cell": self.cell,
            "rank": self.rank,
            "life": self.life,
            "role": "follower",
            "batch": held.batch if held else None,
            "micro_steps_in_sum": len(held.ids) if held else 0,
            "computing": self._tensors.computing,
        }
