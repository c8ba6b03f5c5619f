"""The sums of a batch as the core gets them: in the cells' order, few in memory, a lost one told and no more."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
import torch

from celld.trainer import exchange as exchanges
from celld.trainer.exchange import GradientExchange
from celld.trainer.gradients import BatchSum, Computed
from gyre_base import messages as m
from gyre_base.keys import make_keys
from gyre_base.rundir import RunDir

SIZE, BATCH = 8, 7
CELLS = [f"c{n}" for n in range(1, 7)]


def sum_of(number: int) -> BatchSum:
    whole = BatchSum.empty(BATCH, "0.2", SIZE)
    whole.add([f"s{number}"], Computed(torch.full((SIZE,), float(number)), 1.0, Counter()))
    return whole


@pytest.fixture
def exchange(tmp_path, monkeypatch):
    """Satellite n holds s<n>; an odd one takes long to answer, c4 lost its sum."""
    run = RunDir.create(tmp_path / "run")
    made = GradientExchange(run, make_keys(run), CELLS, size=SIZE, patience_s=1.0)
    made.asked, made.under_way, made.most = [], 0, 0

    async def ask(batch: int, part: m.Contribution) -> m.GradientSum | m.Refused:
        made.asked.append(part.cell)
        made.under_way += 1
        made.most = max(made.most, made.under_way)
        number = int(part.cell[1:])
        for _ in range(5 if number % 2 else 1):
            await asyncio.sleep(0)
        made.under_way -= 1
        return m.Refused(why="life 1 of c4 is over") if number == 4 else sum_of(number).message()

    monkeypatch.setattr(made, "_ask", ask)
    yield made
    made.close()


def parts(*numbers: int) -> list[m.Contribution]:
    return [m.Contribution(cell=f"c{n}", life=1, ids=(f"s{n}",)) for n in numbers]


async def test_sums_come_in_order_the_cores_own_among_them_and_a_lost_one_is_none(exchange):
    found = [each async for each in exchange.pull(BATCH, parts(0, 1, 2, 3, 4, 5, 6), sum_of(0))]
    assert [None if each is None else float(each.gradient[0]) for each in found] == [0.0, 1.0, 2.0, 3.0, None, 5.0, 6.0]


async def test_no_more_are_asked_for_than_may_be_in_memory(exchange):
    taken = 0
    async for _ in exchange.pull(BATCH, parts(1, 2, 3, 4, 5, 6), None):
        taken += 1
        await asyncio.sleep(0.01)  # it is added meanwhile
        assert len(exchange.asked) <= taken - 1 + exchanges.AT_ONCE, "beside the one that is added one may come"
    assert exchange.most == exchanges.AT_ONCE and exchange.asked == CELLS


@pytest.mark.parametrize("own", [None, sum_of(3)])
async def test_the_cores_own_sum_is_checked_as_a_peers(exchange, own):
    assert [each async for each in exchange.pull(BATCH, parts(0), own)] == [None]


async def test_who_stops_listening_asks_no_more(exchange):
    sums = exchange.pull(BATCH, parts(1, 2, 3), None)
    await anext(sums)
    await sums.aclose()
    await asyncio.sleep(0.01)
    assert exchange.asked == ["c1", "c2"]
