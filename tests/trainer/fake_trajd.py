"""A scripted trajd and cellctl on the real bus: leases what it is given, believes what ranks say, records it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from gyre_base import messages as m
from gyre_base.bus import Server
from gyre_base.keys import Keys
from gyre_base.microstep import MicroStep
from gyre_base.rundir import RunDir

Holder = tuple[str, int]


@dataclass
class FakeTrajd:
    """`quota` bounds how many micro-steps of the open batch a cell may hold; batches from `hold_from` on are kept back
    when complete.

    A lost contribution holds the open batch too, so that a test can look at what the core has then.
    """

    batches: list[dict[str, MicroStep]]
    quota: dict[str, int] = field(default_factory=dict)
    refuse_once: set[str] = field(default_factory=set)
    hold_from: int = 99
    hold_commits: bool = False  # commits are not answered, as by a trajd that is slow
    version: str = ""
    batch: int = 0
    leased: dict[str, Holder] = field(default_factory=dict)
    computed: dict[str, Holder] = field(default_factory=dict)
    said: list[Any] = field(default_factory=list)
    steps: list[m.StepDone] = field(default_factory=list)
    pulled: set[tuple[str, str]] = field(default_factory=set)  # (cell, version) of every claim

    def heard(self, kind: type) -> list[Any]:
        return [message for message in self.said if isinstance(message, kind)]

    def reply(self, message: Any) -> Any:
        if not isinstance(message, m.ClaimMicroStep | m.Heartbeat):
            self.said.append(message)
        match message:
            case m.ClaimMicroStep():
                return self.claim(message)
            case m.MicroStepComputed() if self.hold_commits:
                return None
            case m.MicroStepComputed(id=name):
                holder = (message.cell, message.life)
                if name in self.refuse_once:
                    self.refuse_once.remove(name)
                    self.forget(holder)
                    return m.Refused(why="scripted")
                self.leased.pop(name, None)
                self.computed[name] = holder
            case m.ContributionLost():
                self.forget((message.cell, message.life))
                self.hold_from = self.batch
            case m.BatchApplied():
                self.rebase(message.batch + 1, message.version)
            case m.Ledger():
                self.rebase(message.next_batch, message.version)
            case m.StepDone():
                self.steps.append(message)
            case m.Hello(name=cell, life=life):
                for holder in {*self.leased.values(), *self.computed.values()}:
                    if holder[0] == cell and holder[1] < life:
                        self.forget(holder)
                return None
            case m.Heartbeat() | m.Goodbye():
                return None
        return m.Done()

    def claim(self, claim: m.ClaimMicroStep) -> Any:
        self.pulled.add((claim.cell, claim.version))
        if not self.version:
            return m.NoMicroStep(why="no core", wait_s=0.05)
        if claim.version != self.version:
            return m.StaleWeights(version=self.version)
        if self.batch >= len(self.batches):
            return m.NoMicroStep(why="the script is over", wait_s=0.1)
        holder = (claim.cell, claim.life)
        have = claim.ids if claim.batch == self.batch else ()
        for name in [n for n, h in self.computed.items() if h == holder and n not in have]:
            del self.computed[name]
        return self.lease(holder, claim.core)

    def lease(self, holder: Holder, core: bool) -> Any:
        todo = self.batches[self.batch]
        if len(self.computed) == len(todo):
            return (
                self.complete() if core and self.batch < self.hold_from else m.NoMicroStep(why="complete", wait_s=0.05)
            )
        mine = [n for n, h in self.leased.items() if h == holder]
        free = mine or [n for n in todo if n not in self.leased and n not in self.computed]
        if not free or sum(h == holder for h in self.computed.values()) >= self.quota.get(holder[0], 99):
            return m.NoMicroStep(why="others compute", wait_s=0.05)
        self.leased[free[0]] = holder
        layout, payload = todo[free[0]].to_wire()
        return m.MicroStepLease(batch=self.batch, id=free[0], base_version=self.version, layout=layout, payload=payload)

    def complete(self) -> m.BatchComplete:
        by: dict[Holder, list[str]] = {}
        for name, holder in self.computed.items():
            by.setdefault(holder, []).append(name)
        return m.BatchComplete(
            batch=self.batch,
            base_version=self.version,
            executions=sum(len(step.executions) for step in self.batches[self.batch].values()),
            contributions=tuple(m.Contribution(cell=c, life=n, ids=tuple(ids)) for (c, n), ids in by.items()),
        )

    def forget(self, holder: Holder) -> None:
        for held in (self.leased, self.computed):
            for name in [n for n, h in held.items() if h == holder]:
                del held[name]

    def rebase(self, batch: int, version: str) -> None:
        self.batch, self.version = batch, version
        self.leased.clear()
        self.computed.clear()


@contextlib.asynccontextmanager
async def served(fake: FakeTrajd, run: RunDir, keys: Keys) -> AsyncIterator[None]:
    """Bound as trajd and as cellctl meanwhile."""
    both = [await _serve(fake, run, keys, name) for name in ("trajd", "cellctl")]
    try:
        yield
    finally:
        for server, task in both:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            server.close()


async def _serve(fake: FakeTrajd, run: RunDir, keys: Keys, name: str) -> tuple[Server, asyncio.Task[None]]:
    server = Server(run, keys, kind=name, name=name, life=1, bind="127.0.0.1")
    server.start()

    async def loop() -> None:
        async for received in server:
            answer = fake.reply(received.message)
            if answer is not None:
                await server.send(received.peer, answer, received.correlation)

    return server, asyncio.get_running_loop().create_task(loop())
