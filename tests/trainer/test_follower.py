"""A rank that another leads: each order once and in turn, and its sum given to nobody while a commit is in doubt."""

from __future__ import annotations

import asyncio

import pytest

from celld.trainer.follower import Follower
from celld.trainer.rank import RankError
from celld.trainer.tensors import Tensors
from gyre_base import config as configuration
from gyre_base import messages as m
from gyre_base.bus import Received
from tests.trainer.forests import random_micro_step


class Sent:
    """Stands for the server socket."""

    def __init__(self) -> None:
        self.sent: list = []

    async def send(self, peer, message, correlation=0):
        self.sent.append(message)


@pytest.fixture
async def follower(policy):
    tensors = Tensors(configuration.from_tree({}), policy, None, None)
    follower = Follower(tensors, Sent(), cell="c1", rank=1, life=3, bulk=None, patience_s=0.2)
    working = asyncio.create_task(follower.work())
    yield follower
    working.cancel()
    tensors.close()


def compute(number: int) -> m.ComputeMicroStep:
    layout, payload = random_micro_step(5, 2).to_wire()
    return m.ComputeMicroStep(number=number, batch=7, id="s0", base_version="0.2", layout=layout, payload=payload)


async def told(follower: Follower, message):
    return await follower.reply(Received(b"leader", message, 1))


async def answers(follower: Follower, count: int) -> list:
    async with asyncio.timeout(30):
        while len(follower._server.sent) < count:  # noqa: ASYNC110 - the socket has no event to wait for
            await asyncio.sleep(0.01)
    return follower._server.sent


async def test_an_order_that_is_repeated_is_done_once_and_one_that_was_skipped_is_refused(follower):
    for _ in range(3):
        await told(follower, compute(1))
    await answers(follower, 1)
    again = await told(follower, compute(1))
    assert again.number == 1 and follower._server.sent == [again] and again.stats["micro_steps"] == 1
    assert isinstance(await told(follower, m.AddMicroStep(number=3, id="s0")), m.Refused)
    assert await told(follower, m.AddMicroStep(number=2, id="s0")) is None
    assert [done.number for done in await answers(follower, 2)] == [1, 2]
    assert follower._tensors.sum.ids == ["s0"]


async def test_its_sum_is_given_only_when_the_leader_has_said_what_became_of_the_micro_step(follower):
    await told(follower, compute(1))
    await answers(follower, 1)
    pull = asyncio.create_task(told(follower, m.PullGradient(batch=7, life=3, rank=1)))
    await asyncio.sleep(0.05)
    assert not pull.done()
    await told(follower, m.AddMicroStep(number=2, id="s0"))
    assert (await pull).ids == ("s0",)
    wrong = [{"rank": 0, "life": 3}, {"rank": 1, "life": 2}]
    assert all([isinstance(await told(follower, m.PullGradient(batch=7, **which)), m.Refused) for which in wrong])


async def test_an_order_that_fails_is_refused_and_ends_it(follower):
    working = asyncio.create_task(follower.work())
    await told(follower, m.AddMicroStep(number=1, id="s0"))  # nothing was computed
    (refused,) = await answers(follower, 1)
    assert isinstance(refused, m.Refused) and "nothing was computed" in refused.why
    working.cancel()


async def test_it_ends_when_its_leader_says_so_or_is_silent(follower):
    await told(follower, m.Heartbeat(kind="rank", name="c1", life=3))
    with pytest.raises(RankError, match="silent"):
        await follower.watch(60.0)
    assert isinstance(await told(follower, m.Goodbye(kind="rank", name="c1", life=2)), m.Refused)
    assert not follower.dismissed.is_set()
    await told(follower, m.Goodbye(kind="rank", name="c1", life=3))
    assert follower.dismissed.is_set()
