"""Two cells, uneven cells, a cell that dies at any moment, one that never comes back: the run goes on."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_base import messages as m
from gyre_base.daemon import PeerLost
from gyre_base.vocabulary import Role
from tests.cellctl.world import World


def ended(world: World) -> World:
    """All steps, every group once, nothing left."""
    counts = Counter(group for batch in world.trained for group in batch)
    assert world.core.version.step == world.core.config.scheduler.steps
    assert set(counts.values()) == {1}
    assert not world.running
    return world


def gone_for_good(world: World, name: str) -> None:
    """Its agent dies and nobody starts another; its node is not given up either."""
    world.epochs[name] = 1 << 30
    world.roles[name] = Role.DOWN
    world.feed(PeerLost(kind="celld", name=name, why="killed"))


def when(world: World, holds, act) -> None:
    """`act` once, a millisecond after the first event after which `holds`."""
    feed, done = world.feed, []

    def watched(event):
        feed(event)
        if not done and holds():
            done.append(True)
            world.put(0.001, act)

    world.feed = watched


def serving(world: World) -> list[str]:
    return [c.name for c in world.core.cells.values() if c.role is Role.ROLLOUT]


@given(seed=st.integers(0, 10**6), slots=st.lists(st.integers(1, 12), min_size=2, max_size=5), faults=st.booleans())
@settings(max_examples=40, deadline=None)
def test_uneven_cells_end_with_all_steps_and_are_never_lent_while_needed(seed, slots, faults):
    ended(World(seed, policy="elastic", cells=len(slots), cell_slots=slots, steps_per_burst=2, faults=faults).run())


@pytest.mark.parametrize("role", [Role.TO_TRAIN, Role.TRAIN, Role.TO_ROLLOUT])
@pytest.mark.parametrize("name", ["c0", "c1"])
@given(seed=st.integers(0, 10**6), cells=st.integers(2, 4))
@settings(max_examples=10, deadline=None)
def test_a_cell_that_dies_in_the_middle_of_a_switch_comes_back_and_nothing_is_lost(role, name, seed, cells):
    world = World(seed, policy="elastic", cells=cells, steps_per_burst=2, slots_per_cell=12, heldout=0)
    kill = world.kill_core if name == "c0" else lambda: world.kill_cell(name)
    when(world, lambda: world.core.cells[name].role is role, kill)
    ended(world.run())
    assert world.core.cells[name].role is Role.ROLLOUT


@pytest.mark.parametrize("policy", ["elastic", "colocate"])
@given(seed=st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_the_last_serving_cell_dies_for_good_and_a_training_one_comes_back_for_the_executions(policy, seed):
    """Without that they wait for ever, and the batch waits for them."""
    world = World(seed, policy=policy, cells=3, standalone_cells=1, steps_per_burst=2, heldout=0)
    core = world.core
    is_last = lambda: core.phase == "training" and serving(world) == ["c2"] and core.ledger.level() > 0  # noqa: E731
    when(world, is_last, lambda: gone_for_good(world, "c2"))
    for _ in range(60_000):
        if core.version.step == core.config.scheduler.steps:
            break
        world.run(limit=1) if core.phase == "done" else step(world)
    assert core.version.step == core.config.scheduler.steps


def step(world: World) -> None:
    import heapq

    world.now, _, event = heapq.heappop(world.queue)
    event() if callable(event) else world.feed(event)


def test_why_it_came_back_is_told():
    world = World(5, policy="elastic", cells=2, steps_per_burst=2, slots_per_cell=8, heldout=0)
    core = world.core
    when(
        world,
        lambda: serving(world) == ["c1"] and core.cells["c0"].role is Role.TRAIN and core.ledger.level() > 0,
        lambda: gone_for_good(world, "c1"),
    )
    while "c1" not in core.cells or core.cells["c1"].role is not Role.DOWN:
        step(world)
    assert core.cells["c0"].role is Role.TO_ROLLOUT
    assert "no cell serves" in core.cells["c0"].reason


def test_the_run_waits_for_a_cell_that_comes_late_and_then_begins():
    world = World(3, policy="elastic", cells=3, heldout=0)
    late = [entry for entry in world.queue if callable(entry[2])][-1]
    world.queue.remove(late)
    world.queue.append((300.0, late[1], late[2]))
    world.queue.sort()
    while world.queue[0][0] < 300.0:
        step(world)
        assert world.core.phase in ("new", "starting") and world.core.ledger.level() == 0
    ended(world.run())


def test_the_only_cell_that_serves_is_drained_only_by_force():
    world = World(2, policy="elastic", cells=3, steps_per_burst=2, slots_per_cell=8, heldout=0)
    while serving(world) != ["c2"] or not world.core.ledger.level():
        step(world)
    order = m.OperatorOrder(verb="drain", argument="c2", options={"reason": "its fan fails"})
    refused = world.core.handle(order, world.now)[-1].message
    assert isinstance(refused, m.Refused) and "water level" in refused.why and "--force" in refused.why
    forced = m.OperatorOrder(verb="drain", argument="c2", options={"reason": "its fan fails", "force": "yes"})
    done = [c.message for c in world.core.handle(forced, world.now) if isinstance(getattr(c, "message", 0), m.Done)]
    assert done and "its fan fails" in world.core.cells["c2"].reason


@pytest.mark.parametrize(("age_s", "life", "is_lost"), [(1.0, 1, False), (60.0, 1, True), (1.0, 2, True)])
def test_an_order_on_its_way_is_not_lost_but_one_that_an_executor_does_not_know_after_a_while_is(age_s, life, is_lost):
    world = World(2, policy="elastic", cells=2, heldout=0)
    while not world.core.ledger.in_flight:
        step(world)
    held = tuple(world.core.ledger.in_flight)
    hello = m.Hello(kind="executor", name="ex0", life=life, pid=1, slots=64, holds=held[1:])
    world.core.handle(hello, world.now + age_s)
    assert (held[0] not in world.core.ledger.in_flight) == is_lost
    assert world.core.ledger.retries == is_lost


@given(seed=st.integers(0, 10**6), cells=st.integers(2, 4))
@settings(max_examples=20, deadline=None)
def test_a_satellite_that_can_not_hold_training_is_asked_once_and_serves_until_the_end(seed, cells):
    world, asked = World(seed, policy="elastic", cells=cells, steps_per_burst=2, slots_per_cell=12, heldout=0), []
    flip, world.check = world.flip, lambda before: None  # an engine that never turns is updated beside a turn

    def flip_but(cell: str, to: Role, epoch: int, version: str) -> None:
        if (cell, to) != ("c1", Role.TRAIN):
            return flip(cell, to, epoch, version)
        asked.append(epoch)
        world.epochs[cell] = epoch
        world.put(0.1, lambda: world.feed(m.SwitchRefused(cell="c1", epoch=epoch, why="needs 9 GiB")))

    world.flip = flip_but
    ended(world.run())
    assert len(set(asked)) <= 1
    if asked:
        assert world.core.cells["c1"].role is Role.ROLLOUT
        assert "needs 9 GiB" in world.core.cells["c1"].refused
        assert any("refuses to train" in line for line in world.core.cells["c1"].story)


def test_another_agent_of_a_cell_that_refused_is_asked_again():
    world = World(3, policy="elastic", cells=2, steps_per_burst=2, slots_per_cell=12, heldout=0)
    refusals = []

    def refuse() -> None:
        world.core.cells["c1"].refused = "needs 9 GiB"
        refusals.append(1)
        world.kill_cell("c1")

    when(world, lambda: "c1" in world.core.cells and world.core.cells["c1"].role is Role.ROLLOUT, refuse)
    ended(world.run())
    assert refusals and not world.core.cells["c1"].refused
