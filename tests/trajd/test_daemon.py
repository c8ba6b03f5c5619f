"""trajd as a process: killed in the middle of a batch, it leaves nothing out and hands nothing out twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from gyre_base import messages as m
from gyre_base.bus import Client
from tests.trajd.calls import Log
from tests.trajd.processes import Cellctl, Rank, Trained, Trajd, closing, make_run

SCORES = (0.0, 1.0, 0.5)


class Setting:
    """A run with a call log of five groups, of which one is too small."""

    def __init__(self, folder: Path) -> None:
        self.run, self.keys, self.config = make_run(str(folder / "run"))
        self.log = Log(self.run.path("calls"))
        for group in ("g0", "g1", "g2", "g3"):
            for i in range(len(SCORES)):
                self.log.execution(f"{group}-{i}", turns=2 + i, sub_agent=i == 1)
        self.trajd = Trajd(self.run, self.keys)
        self.cellctl = Cellctl(self.run, self.keys)
        self.ranks = {"c0": self.rank("c0", core=True), "c1": self.rank("c1")}
        self.trained = Trained()

    def rank(self, cell: str, *, life: int = 1, core: bool = False) -> Rank:
        client = Client(self.run, self.keys, "trajd", identity=f"rank:{cell}:{life}")
        return Rank(client, cell, life, core)

    async def close_groups(self, *groups: str) -> None:
        for serial, group in enumerate(groups):
            await self.cellctl.close_group(closing(group, serial, SCORES))

    async def step(self, version: str) -> None:
        """The core applies the complete batch; every rank pulls the new weights."""
        done = await self.ranks["c0"].work()
        assert isinstance(done, m.BatchComplete)
        word = self.trained.step(done, self.ranks, version)
        assert word.weights_sum == pytest.approx(1.0, abs=1e-9)
        for _ in range(2):  # said twice, noted once
            assert isinstance(await self.ranks["c0"].ask(word), m.Done)
        for rank in self.ranks.values():
            rank.version, rank.batch, rank.steps = version, -1, {}

    async def close(self) -> None:
        await self.trajd.close()
        await self.cellctl.close()
        for rank in self.ranks.values():
            rank.client.close()


@pytest.fixture
async def setting(tmp_path: Path) -> AsyncIterator[Setting]:
    made = Setting(tmp_path)
    await made.trajd.start()
    yield made
    await made.close()


async def start_core(setting: Setting, life: int = 1, next_batch: int = 0, version: str = "0.0") -> None:
    if life > 1:
        setting.ranks["c0"].client.close()
        setting.ranks["c0"] = setting.rank("c0", life=life, core=True)
        setting.ranks["c0"].version = setting.ranks["c1"].version = version
    word = m.Ledger(next_batch=next_batch, version=version, applied=())
    assert isinstance(await setting.ranks["c0"].ask(word), m.Done)


async def test_killed_in_mid_batch_nothing_is_trained_twice_and_nothing_is_lost(setting: Setting):
    core, satellite = setting.ranks.values()
    await start_core(setting)
    await setting.close_groups("g0")
    await satellite.take()
    await satellite.compute()
    await core.take()  # held over the kill
    held = core.lease
    assert held is not None and held.id not in satellite.steps

    await setting.trajd.kill()
    setting.log.call("g0-0", 9, setting.log.call("g0-0", 8, setting_prompt()))  # logged too late for its group
    await setting.trajd.start()

    await satellite.take()
    assert satellite.lease is not None and satellite.lease.id not in {held.id, *satellite.steps}
    await satellite.compute()
    await core.compute()
    await setting.close_groups("g1", "g2")
    assert isinstance(await satellite.work(), m.NoMicroStep)
    await setting.trajd.kill()  # all of the batch is computed, nothing of it applied
    await setting.trajd.start()
    await setting.step("0.1")

    await setting.close_groups("g3")
    await satellite.take()
    assert satellite.lease is not None and satellite.lease.base_version == "0.1"
    await satellite.compute()
    await setting.trajd.kill()
    await setting.trajd.start()
    await setting.step("0.2")

    assert len(set(setting.trained.tokens)) == len(setting.trained.tokens)
    owned = sum(packed.owned_tokens for packed in setting.cellctl.packed.values())
    assert len(setting.trained.tokens) == owned == 4 * (16 + 32 + 32)
    status = (await setting.trajd.rows())[0]
    assert (status["life"], status["open_batch"], status["version"]) == (4, 2, "0.2")
    assert (status["tokens_trained"], status["tokens_trained_twice"]) == (owned, 0)
    assert status["weights_sum_min"] == pytest.approx(1.0) == status["weights_sum_max"]
    assert status["tokens_recorded"] > status["tokens_stored"]
    rows = await setting.trajd.rows("batches")
    assert [(r["batch"], r["groups"], r["executions"], r["staleness_mean"]) for r in rows] == [
        (0, ["g0", "g1"], 6, 0.0),
        (1, ["g2", "g3"], 6, 1.0),
    ]


def setting_prompt() -> np.ndarray:
    return np.arange(10, dtype=np.int32)


async def test_a_core_back_at_its_checkpoint_gets_the_same_micro_steps_again(setting: Setting):
    await start_core(setting)
    await setting.close_groups("g0", "g1", "g2", "g3")
    payloads = {}
    for version in ("0.1", "0.2"):
        core = setting.ranks["c0"]
        while isinstance(lease := await core.claim(), m.MicroStepLease):
            payloads[lease.id] = (lease.batch, lease.layout, lease.payload)
            await core.compute()
        await setting.step(version)
    core = setting.ranks["c0"]
    assert isinstance(await core.ask(m.BatchesRetired(below=1, version="0.1")), m.Done)
    assert isinstance(await core.ask(m.BatchesRetired(below=2, version="0.2")), m.Done)
    await setting.trajd.kill()
    await setting.trajd.start()

    await start_core(setting, life=2, next_batch=0, version="1.0")  # an older checkpoint than was promised
    setting.trained = Trained()
    again = {}
    for version in ("1.1", "1.2"):
        core = setting.ranks["c0"]
        while not isinstance(lease := await core.claim(), m.BatchComplete):
            if isinstance(lease, m.MicroStepLease):
                again[lease.id] = (lease.batch, lease.layout, lease.payload)
                await core.compute()
        await setting.step(version)
    assert again == payloads
    assert len(set(setting.trained.tokens)) == len(setting.trained.tokens) == 320
    status = (await setting.trajd.rows())[0]
    assert (status["tokens_trained"], status["tokens_trained_twice"], status["version"]) == (320, 0, "1.2")


async def test_a_small_group_is_reported_until_cellctl_has_it_and_takes_no_place(setting: Setting):
    await start_core(setting)
    setting.cellctl.deaf = True
    await setting.cellctl.close_group(closing("g0", 0, SCORES, failed=2))
    await setting.trajd.kill()
    setting.cellctl.packed.clear()
    setting.cellctl.deaf = False
    await setting.trajd.start()
    await setting.cellctl.until_packed("g0")  # cellctl did not have to ask again
    assert not setting.cellctl.packed["g0"].enough
    await setting.close_groups("g1")
    lease = await setting.ranks["c1"].claim()
    assert isinstance(lease, m.MicroStepLease) and lease.id.startswith("g1.")


async def test_a_lost_satellite_gives_back_its_lease_and_trajd_leaves_cleanly(setting: Setting):
    await start_core(setting)
    await setting.close_groups("g0")
    satellite = setting.ranks["c1"]
    first = await satellite.claim()
    await satellite.client.send(m.Goodbye(kind="rank", name="c1", life=1))
    assert (await setting.ranks["c0"].claim()).id == first.id
    assert isinstance(await setting.ranks["c0"].ask(m.SaveCheckpoint(why="not for trajd")), m.Refused)
    assert (await setting.trajd.rows("nonsense"))[0].keys() == {"error"}
    assert {row.get("cell") for row in await setting.trajd.rows()} == {None, "c0"}
    assert await setting.trajd.stop() == 0
    assert setting.run.endpoint("trajd") is None


async def test_a_new_life_whose_hello_was_lost_is_asked_for_it_at_its_first_heartbeat(setting: Setting):
    core, satellite = setting.ranks.values()
    await start_core(setting)
    await setting.close_groups("g0", "g1")
    await satellite.client.send(m.Hello(kind="rank", name="c1", life=1, pid=1))
    await satellite.take()
    held = satellite.lease
    assert held is not None

    reborn = setting.rank("c1", life=2)
    await reborn.client.send(m.Heartbeat(kind="rank", name="c1", life=2))
    async with asyncio.timeout(20.0):
        assert isinstance(await reborn.client.inbox.get(), m.Welcome)
    await reborn.client.send(m.Hello(kind="rank", name="c1", life=2, pid=2))
    await reborn.client.send(m.Heartbeat(kind="rank", name="c1", life=2))
    reborn.client.close()

    await core.work()
    assert held.id in core.steps  # without waiting for the claim of the new life
