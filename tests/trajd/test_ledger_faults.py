"""Whatever the network and the processes do: no micro-step is in the weights twice, none is missing in the end."""

from __future__ import annotations

import random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.trajd.model import World

CELLS = st.sampled_from(["c0", "c0", "c1", "c2"])
ANY = st.integers(0, 1 << 16)


class LedgerUnderFaults(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World()

    @precondition(lambda self: len(self.world.closed) < 12)
    @rule(steps=st.integers(1, 3), enough=st.sampled_from([True, True, True, False]))
    def group_closes(self, steps: int, enough: bool) -> None:
        self.world.close_group(steps, enough)

    @rule(index=ANY)
    def group_is_packed(self, index: int) -> None:
        self.world.pack_one(index)

    @rule(cells=st.lists(CELLS, min_size=1, max_size=12))
    def ranks_speak_and_are_heard(self, cells: list[str]) -> None:
        for cell in cells:
            self.world.speak(cell)
            self.world.deliver(len(self.world.wire) - 1)

    @precondition(lambda self: len(self.world.wire) < 20)
    @rule(cell=CELLS)
    def rank_speaks(self, cell: str) -> None:
        self.world.speak(cell)

    @precondition(lambda self: self.world.wire)
    @rule(index=ANY, keep=st.booleans(), lose_answer=st.booleans())
    def question_arrives(self, index: int, keep: bool, lose_answer: bool) -> None:
        self.world.deliver(index, keep=keep, lose_answer=lose_answer)

    @precondition(lambda self: self.world.wire)
    @rule(index=ANY)
    def question_is_lost(self, index: int) -> None:
        self.world.lose_question(index)

    @rule(cell=CELLS)
    def cell_falls_silent(self, cell: str) -> None:
        self.world.silence(cell)

    @rule(cell=CELLS)
    def rank_restarts(self, cell: str) -> None:
        self.world.restart_rank(cell)

    @rule(cell=st.sampled_from(["c1", "c2"]))
    def satellite_dies(self, cell: str) -> None:
        self.world.dead.add(cell)

    @rule()
    def core_saves(self) -> None:
        self.world.core.save()

    @rule()
    def trajd_restarts(self) -> None:
        self.world.restart_trajd()

    @invariant()
    def nothing_is_trained_twice(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        self.world.settle()
        self.world.check()
        assert self.world.core.weights == self.world.batches()
        assert [b.ids for b in self.world.trajd.ledger.applied] == self.world.batches()


LedgerUnderFaults.TestCase.settings = settings(
    max_examples=60, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
TestLedgerUnderFaults = LedgerUnderFaults.TestCase


def wander(world: World, rng: random.Random, events: int) -> None:
    """Long random histories that hypothesis' short ones do not reach. Mostly work, some faults."""
    for _ in range(events):
        cell, dice = rng.choice(["c0", "c0", "c1", "c2"]), rng.random()
        if dice < 0.02 and len(world.closed) < 40:
            world.close_group(rng.randint(1, 3), rng.random() < 0.8)
        elif dice < 0.06:
            world.pack_one(rng.randrange(1 << 16))
        elif dice < 0.65:
            world.speak(cell)
            world.deliver(len(world.wire) - 1, keep=rng.random() < 0.1, lose_answer=rng.random() < 0.1)
        elif dice < 0.72:
            world.speak(cell)
        elif dice < 0.96 and world.wire:
            world.deliver(rng.randrange(len(world.wire)), keep=rng.random() < 0.2)
        else:
            faults = (world.silence, world.restart_rank, lambda _: world.core.save(), lambda _: world.restart_trajd())
            rng.choices(faults, (4, 2, 3, 2))[0](cell)
        world.check()


def test_long_histories_with_every_fault_train_everything_once():
    steps = 0
    for seed in range(24):
        world = World()
        wander(world, random.Random(seed), 1000)
        world.hold_and_die("c1")
        world.settle()
        assert world.core.weights == world.batches()
        steps += len(world.core.weights)
    assert steps > 60
