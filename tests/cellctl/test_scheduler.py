"""The scheduler as a whole in virtual time: claims of DESIGN 5 on hundreds of seeded runs."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellctl import view
from cellctl.core import Restart, Scheduler, Start, Unexpected
from cellctl.roles import Cell, IllegalTransition
from gyre_base import messages as m
from gyre_base.daemon import Send
from gyre_base.ids import PolicyVersion
from gyre_base.vocabulary import Outcome, Role
from tests.cellctl.world import World

POLICIES = ("elastic", "colocate", "async")


@pytest.mark.parametrize("policy", POLICIES)
@given(seed=st.integers(0, 10**6), cells=st.integers(1, 5), m_steps=st.integers(1, 4))
@settings(max_examples=25, deadline=None)
def test_a_run_ends_with_all_steps_done_and_every_group_trained_once(policy, seed, cells, m_steps):
    world = World(seed, policy=policy, cells=cells, steps_per_burst=m_steps).run()
    counts = Counter(g for batch in world.trained for g in batch)
    assert world.core.version.step == 6
    assert set(counts.values()) == {1}
    assert not world.running
    assert all(c.version == "0.6" for c in world.core.cells.values())


@pytest.mark.parametrize("policy", POLICIES)
@given(seed=st.integers(0, 10**6), cells=st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_faults_anywhere_never_lose_a_step_or_a_group(policy, seed, cells):
    world = World(seed, policy=policy, cells=cells, faults=True, steps_per_burst=2, slots_per_cell=12).run()
    counts = Counter(g for batch in world.trained for g in batch)
    assert world.core.version.step == 6
    assert set(counts.values()) == {1}


@given(seed=st.integers(0, 10**6), cells=st.integers(2, 6))
@settings(max_examples=30, deadline=None)
def test_within_a_burst_the_water_level_only_falls(seed, cells):
    world = World(seed, policy="elastic", cells=cells, steps_per_burst=3, heldout=0)
    levels: list[tuple[int, int]] = []
    feed = world.feed

    def watched(event):
        feed(event)
        levels.append((world.core.burst_end, world.core.ledger.level()))

    world.feed = watched
    world.run()
    for (end_a, level_a), (end_b, level_b) in pairwise(levels):
        made_up = not all(g.enough for g in world.core.ledger.groups.values())
        assert end_a != end_b or level_b <= level_a or made_up


def test_the_core_turns_first_and_the_cells_in_order():
    world = World(3, policy="elastic", cells=4, steps_per_burst=4, heldout=0)
    turned = []
    feed = world.feed

    def watched(event):
        before = {c.name: c.role for c in world.core.cells.values()}
        feed(event)
        turned.extend(
            c.name for c in world.core.cells.values() if c.role is Role.TO_TRAIN and before[c.name] is not Role.TO_TRAIN
        )

    world.feed = watched
    world.run()
    assert turned[:4] == ["c0", "c1", "c2", "c3"]


def test_one_cell_falls_back_to_whole_pool_switching_and_says_so():
    world = World(1, policy="elastic", cells=1).run()
    assert world.core.policy.name == "colocate"
    assert "one cell" in world.core.policy_note


def test_staleness_of_an_execution_is_bounded_by_the_burst():
    world = World(5, policy="elastic", steps_per_burst=3).run()
    trained_at = {g: step for step, batch in enumerate(world.trained) for g in batch}
    for name, step in trained_at.items():
        dispatched = int(world.core.ledger.groups[name].version.split(".")[1])
        assert 0 <= step - dispatched < 3


def test_an_order_that_would_drop_below_the_water_level_is_refused_with_the_numbers():
    world = World(2, policy="elastic", cells=2, heldout=0, slots_per_cell=4)
    while not world.core.ledger.in_flight:
        _advance(world)
    answer = world.core.handle(m.OperatorOrder(verb="flip", argument="c0", options={"to": "train"}), world.now)
    refused = [c.message for c in answer if hasattr(c, "message") and isinstance(c.message, m.Refused)]
    assert refused
    assert "water level" in refused[0].why


def _advance(world: World) -> None:
    import heapq

    world.now, _, event = heapq.heappop(world.queue)
    event() if callable(event) else world.feed(event)


def test_an_illegal_transition_carries_the_story():
    cell = Cell(name="c1", order=1, slots=4)
    cell.become(Role.ROLLOUT, 1.0, "serves 0.0")
    with pytest.raises(IllegalTransition, match=r"serves 0\.0"):
        cell.become(Role.TRAIN, 2.0, "jumps")


def test_an_event_nobody_expects_is_an_error():
    with pytest.raises(Unexpected):
        Scheduler().handle(m.Welcome(life=1), 0.0)


@pytest.mark.parametrize(("heard", "held", "ready"), [(2, 3, 1), (2, 2, 3), (4, 3, 5)])
def test_a_core_that_returns_says_how_many_steps_it_holds_and_groups_are_counted_by_that(heard, held, ready):
    core = Scheduler()
    tree = {"scheduler": {"groups_per_batch": 2}, "evaluation": {"tasks": 0}}
    core.handle(Start(config=tree, train=("t",), heldout=()), 0.0)
    core.version, core.groups_packed = PolicyVersion(0, heard), 3 + 2 * heard
    core.handle(m.RoleChanged(cell="c0", role=Role.ROLLOUT, epoch=0, version=f"1.{held}", engine_url="u"), 1.0)
    assert (core.version, core.groups_ready) == (PolicyVersion(1, held), ready)


def test_the_word_of_a_step_may_overtake_the_word_of_its_groups():
    """Seen after a restart of cellctl in mid-burst: the count stayed too high and the next burst never began."""
    core = Scheduler()
    core.handle(Start(config={"scheduler": {"groups_per_batch": 1}}, train=("t",), heldout=()), 0.0)
    core.handle(m.StepDone(batch=0, version="0.1", metrics={}), 1.0)
    core.groups_packed += 1  # its group's word comes late
    assert core.groups_ready == 0


def test_async_replaces_a_group_with_too_few_valid_executions_once():
    """Seed 8865 dispatched the replacement twice and stepped beyond the end of the run."""
    world = World(8865, policy="async", cells=2, faults=True, steps_per_burst=2, slots_per_cell=12).run()
    assert world.core.version.step == 6


@pytest.mark.parametrize("restarted", [False, True])
def test_a_group_that_closed_while_trajd_was_gone_is_told_to_it_again_even_by_a_later_life_of_cellctl(restarted):
    core = Scheduler()
    tree = {"cluster": {"cells": 1}, "scheduler": {"group_size": 2, "groups_per_batch": 1, "steps_per_burst": 1}}
    core.handle(Start(config={**tree, "evaluation": {"tasks": 0}}, train=("t",), heldout=()), 0.0)
    for kind, name in (("proxyd", "0"), ("trajd", "trajd"), ("executor", "ex0")):
        core.handle(m.Hello(kind=kind, name=name, life=1, pid=1, slots=9), 1.0)
    core.handle(m.RoleChanged(cell="c0", role=Role.ROLLOUT, epoch=0, version="0.0", engine_url="u"), 1.0)
    told = [
        command
        for name in list(core.ledger.in_flight)
        for command in core.handle(m.ExecutionFinished(execution=name, outcome=Outcome.SCORED, score=1.0), 2.0)
        if isinstance(command, Send) and isinstance(command.message, m.GroupClosed)
    ]
    assert len(told) == 1
    if restarted:
        assert told[0] not in core.handle(Restart(life=2), 3.0)
    assert told[0] in core.handle(m.Hello(kind="trajd", name="trajd", life=2, pid=2), 3.0)
    core.handle(m.GroupPacked(group=told[0].message.group, enough=True, counted=2, micro_steps=1, owned_tokens=1), 4.0)
    assert told[0] not in core.handle(m.Hello(kind="trajd", name="trajd", life=3, pid=3), 5.0)


def test_groups_that_come_to_nothing_are_an_alarm_until_one_can_be_trained():
    """Replaced for ever, in silence, would be a run that burns its allocation."""
    world = World(3, policy="elastic", heldout=0)
    world.odds = (0, 0, 1)  # an evaluator that always fails
    core = world.core
    while core.barren_groups < core.rules.groups_per_batch:
        world.run_one()
    assert core.version.step == 0
    [row] = [row for row in view.status(core, world.now) if row.get("alarm") == "groups"]
    assert row["what"].startswith(f"{core.barren_groups} in a row")
    assert row["what"].endswith("evaluator_failed: the tests are gone")
    next_life = Scheduler()
    for at, event in world.events:
        next_life.handle(event, at)
    next_life.handle(Restart(life=2), world.now)
    assert "groups" in next_life.alarms
    world.odds = (1, 0, 0)
    assert world.run().core.alarms == {}
