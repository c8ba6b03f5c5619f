"""The rank's loop without sockets: what it does with each answer of trajd, and what it lets others see meanwhile."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
import torch

from celld.trainer.exchange import GradientExchange
from celld.trainer.gradients import BatchSum
from celld.trainer.optimizer import AdamW
from celld.trainer.rank import Ledger, Rank, RankError, Stepped
from celld.trainer.service import RankService
from celld.trainer.team import RankTeam
from celld.trainer.tensors import Tensors
from celld.weights import transport_to
from gyre_base import config as configuration
from gyre_base import messages as m
from gyre_base.bus import NoAnswer
from gyre_base.ids import PolicyVersion
from gyre_base.keys import make_keys
from gyre_base.rundir import RunDir
from tests.trainer.forests import random_micro_step


class Script:
    """Stands for a bus client: gives the scripted answers, then Done for everything."""

    server = "trajd"

    def __init__(self, *answers) -> None:
        self.answers, self.asked = list(answers), []

    async def send(self, message):
        self.asked.append(message)

    async def ask(self, message, timeout_s=0.0):
        self.asked.append(message)
        answer = self.answers.pop(0) if self.answers else m.Done()
        if isinstance(answer, asyncio.Event):
            await answer.wait()
            return m.Done()
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def make_rank(tmp_path, policy, reference):
    run = RunDir.create(tmp_path / "run")
    keys = make_keys(run)

    def make(*, core: bool = False, trajd: Script, followers: tuple[Script, ...] = ()) -> Rank:
        config = configuration.from_tree({"cluster": {"cells": 2, "peer_timeout_s": 0.2}})
        exchange = GradientExchange(run, keys, ["c1"], size=policy.gradient.numel(), patience_s=0.2)
        tensors = Tensors(config, policy, AdamW(policy, config.trainer), exchange)
        transport = transport_to(run, keys, "rank-c0", None)
        team = RankTeam(config, tensors, followers, transport=transport, bulk=None, checkpoints=run.path("checkpoints"))
        rank = Rank(config, run, keys, team, cell="c0" if core else "c1", life=1)
        rank.version, rank.trajd, rank.cellctl = PolicyVersion(0, 2), trajd, Script()
        return rank

    yield make
    policy.load(dict(reference.state_dict()))


async def asked(rank: Rank, count: int) -> None:
    while len(rank.trajd.asked) < count:  # noqa: ASYNC110 - the script has no event to wait for
        await asyncio.sleep(0.01)


def lease(name: str = "s0", *, seed: int = 5, base: str = "0.2") -> m.MicroStepLease:
    layout, payload = random_micro_step(seed, 2).to_wire()
    return m.MicroStepLease(batch=7, id=name, base_version=base, layout=layout, payload=payload)


async def test_a_commit_in_doubt_is_repeated_added_once_and_not_handed_out_meanwhile(make_rank):
    decided = asyncio.Event()
    rank = make_rank(trajd=Script(m.Done(), NoAnswer("dead"), NoAnswer("dead"), decided))
    await rank.train(lease("s0"), 0.0)
    before = rank.team.sum.flat.clone()
    training = asyncio.create_task(rank.train(lease("s1", seed=6), 0.0))
    await asked(rank, 4)
    service = RankService(rank, server=None)
    pull = asyncio.create_task(service.answer(m.PullGradient(batch=7, life=1)))
    await asyncio.sleep(0.05)
    assert not pull.done() and rank.team.sum.ids == ["s0"] and torch.equal(rank.team.sum.flat, before)
    decided.set()
    answer = await pull
    await training
    assert answer.ids == ("s0", "s1") and answer.weight_sum == 4.0
    assert {type(a) for a in rank.trajd.asked} == {m.MicroStepComputed}


async def test_a_refused_commit_drops_the_sum_and_the_next_claim_says_so(make_rank):
    rank = make_rank(trajd=Script(m.Done(), m.Refused(why="leased to another")))
    await rank.train(lease("s0"), 0.0)
    assert (rank.claim().batch, rank.claim().ids) == (7, ("s0",))
    await rank.train(lease("s1"), 0.0)
    assert (rank.claim().batch, rank.claim().ids) == (-1, ())


async def test_a_lease_for_other_weights_or_one_already_counted_is_not_computed(make_rank):
    rank = make_rank(trajd=Script())
    await rank.train(lease("s0"), 0.0)
    held = rank.team.sum.flat.clone()
    await rank.train(lease("s0"), 0.0)
    await rank.train(lease("s1", base="0.1"), 0.0)
    assert len(rank.trajd.asked) == 1 and rank.team.sum.ids == ["s0"] and torch.equal(rank.team.sum.flat, held)


async def test_a_stop_is_answered_only_when_no_micro_step_is_in_hand(make_rank):
    decided = asyncio.Event()
    rank = make_rank(trajd=Script(lease("s0"), decided))
    service = RankService(rank, server=None)
    work = asyncio.create_task(rank.work())
    assert (await service.answer(m.StartTraining(epoch=3))).training
    await asked(rank, 2)
    stop = asyncio.create_task(service.answer(m.StopTraining(epoch=4)))
    await asyncio.sleep(0.05)
    assert not stop.done()
    decided.set()
    state = await stop
    assert (state.training, state.epoch) == (False, 4)
    claims = len(rank.trajd.asked)
    await asyncio.sleep(0.05)
    assert len(rank.trajd.asked) == claims
    assert not (await service.answer(m.StartTraining(epoch=3))).training  # late: of an older epoch
    work.cancel()


async def returned(rank: Rank, service: RankService) -> list[m.LeaseReturned]:
    """What a stop tells trajd of a lease."""
    rank.may_claim.set()
    await service.answer(m.StopTraining(epoch=9))
    await asyncio.sleep(0.05)
    return [word for word in rank.trajd.asked if isinstance(word, m.LeaseReturned)]


async def test_a_rank_that_stops_after_a_claim_without_an_answer_gives_the_lease_back_again_until_heard(make_rank):
    rank = make_rank(trajd=Script(NoAnswer("dead"), NoAnswer("dead"), m.Done()))
    await rank.round()
    assert await returned(rank, RankService(rank, server=None)) == [m.LeaseReturned(cell="c1", life=1)] * 2


@pytest.mark.parametrize("base", ["0.2", "0.1"])
async def test_a_rank_that_stops_returns_a_lease_only_if_it_was_not_computed(make_rank, base):
    rank = make_rank(trajd=Script(lease("s0", base=base)))
    await rank.round()
    given_back = await returned(rank, RankService(rank, server=None))
    assert given_back == ([] if base == "0.2" else [m.LeaseReturned(cell="c1", life=1)])


def complete(*parts: m.Contribution) -> m.BatchComplete:
    return m.BatchComplete(batch=7, base_version="0.2", executions=2, contributions=parts)


async def test_a_batch_with_a_lost_part_is_not_stepped(make_rank):
    rank = make_rank(core=True, trajd=Script())
    await rank.train(lease("s0"), 0.0)
    weights = rank.team.tensors.policy.hf_arrays()["model.norm.weight"].copy()
    own, gone = m.Contribution(cell="c0", life=1, ids=("s0",)), m.Contribution(cell="c1", life=4, ids=("s1",))
    await rank.finish(complete(own, gone))
    assert rank.trajd.asked[-1] == m.ContributionLost(batch=7, cell="c1", life=4)
    assert str(rank.version) == "0.2" and rank.team.sum.ids == ["s0"]
    assert (rank.team.tensors.policy.hf_arrays()["model.norm.weight"] == weights).all()


async def test_a_core_whose_own_sum_is_not_what_trajd_believes_gives_it_up(make_rank):
    rank = make_rank(core=True, trajd=Script())
    await rank.train(lease("s0"), 0.0)
    await rank.finish(complete(m.Contribution(cell="c0", life=1, ids=("s0", "s9"))))
    assert rank.trajd.asked[-1] == m.ContributionLost(batch=7, cell="c0", life=1)
    assert rank.team.sum is None and str(rank.version) == "0.2"


async def test_a_step_is_reported_with_the_ids_that_are_really_in_it(make_rank):
    rank = make_rank(core=True, trajd=Script())
    await rank.train(lease("s0"), 0.0)
    await rank.finish(complete(m.Contribution(cell="c0", life=1, ids=("s0",))))
    assert rank.trajd.asked[-1] == m.BatchApplied(batch=7, ids=("s0",), version="0.3", weights_sum=1.0)
    (done,) = rank.cellctl.asked
    assert (done.batch, done.version, done.metrics["executions"]) == (7, "0.3", 2.0)
    assert rank.team.published.snapshot.version == "0.3" and rank.team.sum is None and rank.next_batch == 8


async def test_a_core_that_is_told_of_other_weights_ends(make_rank):
    rank = make_rank(core=True, trajd=Script(m.StaleWeights(version="3.3")))
    with pytest.raises(RankError, match="other weights"):
        await rank.round()


async def test_a_step_that_trajd_refuses_ends_the_core(make_rank):
    rank = make_rank(core=True, trajd=Script(m.Refused(why="batch 7 was applied otherwise")))
    rank.team.tensors.sum = BatchSum.empty(7, "0.2", rank.team.tensors.policy.gradient.numel())
    rank.team.sum.ids.append("s0")
    with pytest.raises(RankError, match="applied otherwise"):
        await rank.finish(complete(m.Contribution(cell="c0", life=1, ids=("s0",))))


class Writes:
    """`team.save` in a test's hand: what was asked to be saved, and how each write ends."""

    def __init__(self) -> None:
        self.ledgers: list[Ledger] = []
        self.ends: list[asyncio.Future[str]] = []

    async def save(self, ledger: Ledger) -> asyncio.Task[str]:
        self.ledgers.append(ledger)
        self.ends.append(asyncio.get_running_loop().create_future())
        return asyncio.ensure_future(self.ends[-1])


@pytest.fixture
async def stepping(make_rank):
    """A core that steps at each call of `step`, saves after every second step, and writes as the test says."""
    rank, writes = make_rank(core=True, trajd=Script()), Writes()
    rank.version, rank.team.save = PolicyVersion(0, 0), writes.save
    trainer = dataclasses.replace(rank.config.trainer, checkpoint_every_steps=2)
    rank.config = dataclasses.replace(rank.config, trainer=trainer)

    async def step() -> None:
        batch = rank.next_batch
        rank.team.gather = lambda *_: asyncio.sleep(0, [])
        rank.team.step = lambda _: asyncio.sleep(0, Stepped(ids=(f"b{batch}",), weight_sum=1.0, metrics={}))
        rank.team.publish = lambda _: asyncio.sleep(0)
        await rank.finish(m.BatchComplete(batch=batch, base_version=str(rank.version), executions=1, contributions=()))

    return rank, writes, step


def retired(rank: Rank) -> list[tuple[int, str]]:
    return [(word.below, word.version) for word in rank.trajd.asked if isinstance(word, m.BatchesRetired)]


async def test_steps_go_on_beside_a_save_and_trajd_hears_of_it_when_it_is_durable(stepping):
    rank, writes, step = stepping
    for _ in range(3):
        await step()
    assert str(rank.version) == "0.3" and len(writes.ends) == 1 and retired(rank) == [] and rank.saved == ("", "")
    writes.ends[0].set_result("checkpoints/0.2")
    await rank.telling
    assert retired(rank) == [(2, "0.2")] and rank.saved == ("0.2", "checkpoints/0.2")  # not 3: that batch is not in it
    saving = asyncio.create_task(RankService(rank, server=None).answer(m.SaveCheckpoint(why="test")))
    await asyncio.sleep(0.01)
    again = asyncio.create_task(rank.save())
    await asyncio.sleep(0.01)
    writes.ends[1].set_result("checkpoints/0.3")
    assert (await saving).version == "0.3" and (await again).saved.version == "0.3" and len(writes.ends) == 2
    assert [ledger.applied for ledger in writes.ledgers] == [("b0", "b1"), ("b2",)]


async def test_a_save_that_fails_retires_nothing_and_the_next_one_holds_its_micro_steps(stepping):
    rank, writes, step = stepping
    for _ in range(2):
        await step()
    writes.ends[0].set_exception(OSError("no space left on device"))
    refused = asyncio.create_task(RankService(rank, server=None).answer(m.SaveCheckpoint(why="test")))
    await asyncio.sleep(0.01)
    writes.ends[1].set_exception(OSError("no space left on device"))
    assert isinstance(await refused, m.Refused)
    for _ in range(2):
        await step()
    writes.ends[2].set_result("checkpoints/0.4")
    await rank.telling
    assert retired(rank) == [(4, "0.4")]
    assert writes.ledgers[2].applied == ("b0", "b1", "b2", "b3")


class Obedient(Script):
    """Stands for another rank of the cell: does what it is told, or fails at `fails`."""

    server = "rank-c1.1"

    def __init__(self, fails: type | None = None) -> None:
        super().__init__()
        self.fails = fails

    async def ask(self, message, timeout_s=0.0, again_every_s=0.0):
        self.asked.append(message)
        if isinstance(message, self.fails or ()):
            return m.Refused(why="out of memory")
        return m.OrderDone(number=message.number)


async def test_the_other_ranks_add_only_what_trajd_took_and_drop_what_it_did_not(make_rank):
    follower = Obedient()
    rank = make_rank(trajd=Script(m.Done(), m.Refused(why="leased to another")), followers=(follower,))
    await rank.train(lease("s0"), 0.0)
    assert [type(order) for order in follower.asked] == [m.ComputeMicroStep, m.AddMicroStep]
    await rank.train(lease("s1"), 0.0)
    assert [type(order) for order in follower.asked[2:]] == [m.ComputeMicroStep, m.DropSum]
    assert [order.number for order in follower.asked] == [1, 2, 3, 4]
    assert follower.asked[0].payload == lease("s0").payload and rank.team.sum is None


@pytest.mark.parametrize("order", [m.ComputeMicroStep, m.AddMicroStep])
async def test_a_rank_that_cannot_do_an_order_ends_its_cell(make_rank, order):
    rank = make_rank(trajd=Script(), followers=(Obedient(fails=order),))
    with pytest.raises(RankError, match="out of memory"):
        await rank.train(lease("s0"), 0.0)


async def test_a_part_that_one_rank_could_not_get_is_lost_for_all(make_rank):
    class Deaf(Obedient):
        async def ask(self, message, **words):
            done = await super().ask(message, **words)
            return m.OrderDone(number=done.number, here=(False,)) if isinstance(message, m.GatherSums) else done

    rank = make_rank(core=True, trajd=Script(), followers=(Deaf(),))
    await rank.train(lease("s0"), 0.0)
    await rank.finish(complete(m.Contribution(cell="c0", life=1, ids=("s0",))))
    assert rank.trajd.asked[-1] == m.ContributionLost(batch=7, cell="c0", life=1)
    assert rank.team.sum is None and str(rank.version) == "0.2"
    assert type(rank.team.followers[0].asked[-1]) is m.DropSum
