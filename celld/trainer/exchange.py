"""How the core gets the gradient sums of a batch: each of its ranks pulls from the same rank of each satellite, checks.

Owns the questions to satellites. Never adds, never speaks to trajd. Invariants: a `Computed` that comes out holds
exactly the micro-steps that were asked for, of the same part of the model; however many cells there are, the sums of
`AT_ONCE` are in memory. With `bulk` the bytes are read from a slot of the satellite, and over the bus if that fails.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Sequence

from celld.trainer.gradients import BatchSum, Computed, ContributionDamaged, held, received
from celld.trainer.rank import endpoint_of
from celld.transfer.bulk import Bulk
from celld.transfer.engine import TransferFailed
from gyre_base.bus import Client, NoAnswer
from gyre_base.keys import Keys
from gyre_base.messages import Contribution, GradientSum, PullGradient, Refused
from gyre_base.rundir import RunDir

log = logging.getLogger(__name__)
AT_ONCE = 2  # one is added while the next one comes: a sum is as large as the model in fp32
TURN_S = 2.0  # between two looks at the endpoint of a silent satellite


class GradientExchange:
    """The core's side."""

    def __init__(
        self,
        run: RunDir,
        keys: Keys,
        cells: Sequence[str],
        *,
        size: int,
        patience_s: float,
        bulk: Bulk | None = None,
        rank: int = 0,
    ) -> None:
        self._run, self._size, self._patience_s, self._bulk, self._rank = run, size, patience_s, bulk, rank
        self._clients = {cell: Client(run, keys, endpoint_of(cell, rank)) for cell in cells}

    async def pull(
        self, batch: int, parts: Sequence[Contribution], own: BatchSum | None
    ) -> AsyncGenerator[Computed | None, None]:
        """The sum of each contribution, in their order; None where it can't be had. The core's own has no client."""
        coming: deque[asyncio.Task[Computed | None]] = deque()
        try:
            for part in parts:
                coming.append(asyncio.create_task(self._one(batch, part, own)))
                if len(coming) == AT_ONCE:
                    yield await coming.popleft()
            while coming:
                yield await coming.popleft()
        finally:
            for task in coming:
                task.cancel()

    async def _one(self, batch: int, part: Contribution, own: BatchSum | None) -> Computed | None:
        try:
            if part.cell not in self._clients:
                return held(own, batch, part.ids)
            message = await self._ask(batch, part)
            if isinstance(message, Refused):
                raise ContributionDamaged(message.why)
            return received(message, batch, part.ids, self._size)
        except (NoAnswer, ContributionDamaged) as error:
            log.error("the sum of %s for batch %d is lost: %s", part.cell, batch, error)
            return None

    async def _ask(self, batch: int, part: Contribution) -> GradientSum | Refused:
        """Ask in short turns: a rank that was started again shows in its endpoint and needs no waiting out."""
        by = "bus" if self._bulk is None else self._bulk.kind
        question = PullGradient(batch=batch, life=part.life, by=by, rank=self._rank)
        deadline = time.monotonic() + self._patience_s
        while time.monotonic() < deadline:
            endpoint = self._run.endpoint(endpoint_of(part.cell, self._rank))
            if endpoint is None or endpoint.life != part.life:
                return Refused(why=f"life {part.life} of {part.cell} is over")
            try:
                client = self._clients[part.cell]
                answer: GradientSum | Refused = await client.ask(question, timeout_s=TURN_S)
                if self._bulk is None or isinstance(answer, Refused):
                    return answer
                filled: GradientSum = await self._bulk.filled(answer, client)
                return filled
            except TransferFailed as error:
                log.error("%s; this sum comes over the bus", error)
                question = dataclasses.replace(question, by="bus")
            except NoAnswer:
                continue
        raise NoAnswer(f"{endpoint_of(part.cell, self._rank)} does not answer")

    def close(self) -> None:
        for client in self._clients.values():
            client.close()
