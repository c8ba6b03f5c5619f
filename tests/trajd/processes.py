"""A real trajd process; cellctl and the ranks are played by the test over the real bus."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gyre_base import config as configuration
from gyre_base import messages as m
from gyre_base.bus import Client, Server
from gyre_base.config import Config
from gyre_base.keys import Keys, make_keys
from gyre_base.microstep import MicroStep
from gyre_base.rundir import RunDir
from gyre_base.vocabulary import Outcome

PATIENCE_S = 20.0


class Trajd:
    """The daemon in its own process."""

    def __init__(self, run: RunDir, keys: Keys) -> None:
        self.run, self.keys = run, keys
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        command = (sys.executable, "-m", "trajtools.trajd.daemon", "--run", str(self.run.root))
        self._process = await asyncio.create_subprocess_exec(*command)

    async def kill(self) -> None:
        await self._end(signal.SIGKILL)

    async def stop(self) -> int:
        return await self._end(signal.SIGTERM)

    async def _end(self, number: signal.Signals) -> int:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)
        code = await asyncio.wait_for(self._process.wait(), PATIENCE_S)
        self._process = None
        return code

    async def close(self) -> None:
        if self._process is not None:
            await self._end(signal.SIGKILL)

    async def rows(self, what: str = "status") -> list[dict[str, Any]]:
        client = Client(self.run, self.keys, "trajd")
        reply = await client.ask(m.StatusRequest(what=what), timeout_s=PATIENCE_S, again_every_s=0.5)
        client.close()
        return list(reply.rows)


class Cellctl:
    """Answers hello and group.packed; keeps what it was told. `deaf`: takes reports without answering."""

    def __init__(self, run: RunDir, keys: Keys) -> None:
        self._server = Server(run, keys, kind="cellctl", name="cellctl", life=1, bind="127.0.0.1")
        self._server.start()
        self._route = b""
        self._here, self._news = asyncio.Event(), asyncio.Event()
        self.deaf = False
        self.packed: dict[str, m.GroupPacked] = {}
        self._task = asyncio.get_running_loop().create_task(self._listen())

    async def _listen(self) -> None:
        async for received in self._server:
            match received.message:
                case m.Hello(kind="trajd"):
                    self._route = received.peer
                    self._here.set()
                    await self._server.send(received.peer, m.Welcome(life=1), received.correlation)
                case m.GroupPacked(group=group) as packed:
                    self.packed[group] = packed
                    self._news.set()
                    if not self.deaf:
                        await self._server.send(received.peer, m.Done(), received.correlation)

    async def close_group(self, closed: m.GroupClosed) -> None:
        """Again until it is answered, as the real one does."""
        async with asyncio.timeout(PATIENCE_S):
            while closed.group not in self.packed:
                await self._here.wait()
                await self._server.send(self._route, closed)
                self._news.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), 0.5)

    async def until_packed(self, group: str) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while group not in self.packed:
                self._news.clear()
                await self._news.wait()

    async def close(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._server.close()


@dataclass
class Rank:
    """Claims and "computes": its sum is the ids and the tokens that they train."""

    client: Client
    cell: str
    life: int = 1
    core: bool = False
    version: str = "0.0"
    batch: int = -1
    steps: dict[str, MicroStep] = field(default_factory=dict)
    lease: m.MicroStepLease | None = None

    async def ask(self, message: Any) -> Any:
        return await self.client.ask(message, timeout_s=PATIENCE_S, again_every_s=0.5)

    async def claim(self) -> Any:
        """One claim; a lease is kept in hand."""
        answer = await self.ask(
            m.ClaimMicroStep(
                cell=self.cell,
                life=self.life,
                version=self.version,
                core=self.core,
                batch=self.batch,
                ids=tuple(sorted(self.steps)),
            )
        )
        self.lease = answer if isinstance(answer, m.MicroStepLease) else None
        return answer

    async def take(self) -> None:
        """Claim until there is a lease: trajd may still be packing what it had packed before its restart."""
        async with asyncio.timeout(PATIENCE_S):
            while isinstance(await self.claim(), m.NoMicroStep):  # noqa: ASYNC110 - trajd says nothing unasked
                await asyncio.sleep(0.02)

    async def compute(self) -> None:
        """Commit the lease in hand."""
        assert self.lease is not None
        if self.lease.batch != self.batch:
            self.batch, self.steps = self.lease.batch, {}
        word = m.MicroStepComputed(batch=self.batch, id=self.lease.id, cell=self.cell, life=self.life)
        assert isinstance(await self.ask(word), m.Done)
        self.steps[self.lease.id] = MicroStep.from_wire(self.lease.layout, self.lease.payload)
        self.lease = None

    async def work(self) -> Any:
        """Claim and compute until there is no lease; returns that other answer."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                answer = await self.claim()
                if self.lease is None and not (self.core and isinstance(answer, m.NoMicroStep)):
                    return answer
                await (self.compute() if self.lease else asyncio.sleep(0.02))


@dataclass
class Trained:
    """What the core's weights contain."""

    ids: list[str] = field(default_factory=list)
    tokens: list[tuple[str, int]] = field(default_factory=list)  # (execution, packed index) of every trained token

    def step(self, done: m.BatchComplete, ranks: dict[str, Rank], version: str) -> m.BatchApplied:
        """Add the sums up, as the core does."""
        weight, ids = 0.0, []
        for part in done.contributions:
            rank = ranks[part.cell]
            assert set(part.ids) == set(rank.steps) and part.life == rank.life
            for step in rank.steps.values():
                assert step.context_mismatches() == 0
                for e in step.executions:
                    weight += float(e.owned.sum()) / e.total_owned
                    self.tokens += [(e.execution, int(i)) for i in np.flatnonzero(e.owned)]
            ids += sorted(rank.steps)
        self.ids += ids
        return m.BatchApplied(batch=done.batch, ids=tuple(ids), version=version, weights_sum=weight / done.executions)


def make_run(folder: str, *, micro_step_tokens: int = 90) -> tuple[RunDir, Keys, Config]:
    """A run directory with its configuration: two groups a batch."""
    tree = {"scheduler": {"groups_per_batch": 2}, "trainer": {"micro_step_tokens": micro_step_tokens}}
    config = configuration.from_tree(tree)
    run = RunDir.create(folder)
    run.write_atomic("run.json", configuration.to_json(config))
    return run, make_keys(run), config


def closing(group: str, serial: int, scores: tuple[float, ...], failed: int = 0) -> m.GroupClosed:
    """`failed`: the last ones ended for reasons of ours."""
    bad = len(scores) - failed
    executions = tuple(
        m.FinalExecution(
            execution=f"{group}-{i}",
            outcome=Outcome.SCORED if i < bad else Outcome.INFRA_FAILED,
            score=score if i < bad else None,
        )
        for i, score in enumerate(scores)
    )
    return m.GroupClosed(group=group, task="t", serial=serial, dispatched_version="0.0", executions=executions)
