"""The scheduler in a Slurm job: cells whose node left, the way out, nodes given back."""

from __future__ import annotations

import heapq
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellctl.core import Restart
from cellctl.view import run_row
from gyre_base import messages as m
from gyre_base.daemon import Answer, PeerLost, Send
from gyre_base.vocabulary import Role
from tests.cellctl.world import World


def facts(**known: Any) -> m.JobFacts:
    return m.JobFacts(**{"job": "7", "restarts": 0, "nodes": ("n1",), "began_at": 0.0, "ends_at": 0.0, **known})


def advance(world: World) -> None:
    world.now, _, event = heapq.heappop(world.queue)
    event() if callable(event) else world.feed(event)


def until(world: World, what: Any) -> None:
    while not what():
        advance(world)


def order(world: World, verb: str, cell: str, **options: str) -> Any:
    commands = world.core.handle(m.OperatorOrder(verb=verb, argument=cell, options=options), world.now)
    for command in commands:
        world.obey(command)
    return next(c.message for c in commands if isinstance(c, Answer))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), steps=st.integers(0, 4), policy=st.sampled_from(["elastic", "colocate"]))
def test_a_run_whose_satellite_left_the_job_at_any_time_ends_with_all_steps(seed, steps, policy):
    world = World(seed, policy=policy, cells=3)
    until(world, lambda: world.core.version.step >= steps and (steps or world.core.phase != "new"))
    for event in (m.Goodbye(kind="celld", name="c2", life=1), facts(lost=("c2",))):
        world.feed(event)
    world.run()
    assert world.core.version.step == world.core.config.scheduler.steps
    assert world.core.cells["c2"].role is Role.DOWN


def test_a_cell_that_was_given_up_is_not_heard_any_more():
    world = World(1, cells=3)
    until(world, lambda: world.core.version.step >= 1)
    world.feed(facts(lost=("c2",)))
    for event in (
        m.Hello(kind="celld", name="c2", life=2, pid=1),
        m.RoleChanged(cell="c2", role=Role.ROLLOUT, epoch=99, version="0.1", engine_url="http://old"),
        m.CellFault(cell="c2", what="engine", detail="died"),
    ):
        world.feed(event)
        assert world.core.cells["c2"].role is Role.DOWN


def test_leaving_dispatches_nothing_more_turns_nothing_and_saves_once():
    world = World(3, cells=2, heldout=0)
    until(world, lambda: world.core.version.step >= 1)
    commands = world.core.handle(m.LeaveJob(why="the time is up"), world.now)
    assert [c.message for c in commands if isinstance(c, Send) and isinstance(c.message, m.SaveCheckpoint)]
    groups, turns = len(world.core.ledger.groups), world.core.totals["switches"]
    again = world.core.handle(m.LeaveJob(why="again"), world.now)
    assert not [c for c in again if isinstance(c, Send) and isinstance(c.message, m.SaveCheckpoint)]
    for _ in range(200):
        advance(world)
    assert (len(world.core.ledger.groups), world.core.totals["switches"]) == (groups, turns)
    assert run_row(world.core, world.now)["leaving"] == "the time is up"


def test_the_next_life_of_a_job_is_not_leaving():
    world = World(3, cells=2)
    until(world, lambda: world.core.version.step >= 1)
    world.core.handle(m.LeaveJob(why="the time is up"), world.now)
    world.core.handle(Restart(life=2), world.now)
    assert run_row(world.core, world.now)["leaving"] == ""


def test_status_shows_the_save_window_and_the_cadence_as_measured():
    world = World(3, cells=2)
    until(world, lambda: world.core.version.step >= 1)
    world.feed(facts(ends_at=world.now + 3600.0, began_at=world.now))
    world.feed(m.CheckpointSaved(version="0.1", path="", seconds=10.0))
    row = run_row(world.core, world.now)
    assert (row["save_s"], row["save_every_s"]) == (10.0, 500.0)
    assert row["save_window_s"] >= 40.0
    assert row["left_s"] == pytest.approx(3600.0)


def test_in_a_job_a_step_after_the_cadence_is_saved():
    world = World(3, cells=2, steps=12, heldout=0)
    until(world, lambda: world.core.version.step >= 1)
    world.feed(facts(ends_at=world.now + 1e6, began_at=world.now))
    world.feed(m.CheckpointSaved(version="0.1", path="", seconds=0.1))
    step = m.StepDone(batch=world.core.version.step, version=f"0.{world.core.version.step + 1}", metrics={})
    early = world.core.handle(step, world.now + 59.0)
    assert not [c for c in early if isinstance(c, Send) and isinstance(c.message, m.SaveCheckpoint)]
    step = m.StepDone(batch=world.core.version.step, version=f"0.{world.core.version.step + 1}", metrics={})
    late = world.core.handle(step, world.now + 61.0)
    assert [c for c in late if isinstance(c, Send) and isinstance(c.message, m.SaveCheckpoint)]


def executor_ends(world: World, event: Any) -> None:
    held = list(world.core.ledger.in_flight)
    world.running.clear()
    world.feed(event)
    world.feed(m.Hello(kind="executor", name="ex0", life=2, pid=1, slots=64))
    assert not set(held) & set(world.core.ledger.in_flight)


@pytest.mark.parametrize("times", [1, 9])
def test_an_executor_that_is_told_to_leave_costs_its_executions_no_attempt_however_often(times):
    world = World(5, cells=2, heldout=0, retry_budget=2)
    until(world, lambda: world.running)
    count = len(world.core.ledger.in_flight)
    for _ in range(times):
        executor_ends(world, m.Goodbye(kind="executor", name="ex0", life=1))
        assert len(world.core.ledger.in_flight) == count
    world.run()


def test_an_executor_that_dies_costs_its_executions_an_attempt_each_time():
    world = World(5, cells=2, heldout=0, retry_budget=2)
    until(world, lambda: world.running)
    groups = set(world.core.ledger.groups)
    for _ in range(3):
        executor_ends(world, PeerLost(kind="executor", name="ex0", why="silent"))
    assert all(world.core.ledger.groups[g].closed for g in groups)
    world.run()


def test_a_drained_cell_takes_part_no_more_until_it_is_taken_back():
    world = World(4, cells=3, steps=10, heldout=0)
    until(world, lambda: world.core.version.step >= 1 and world.core.cells["c2"].role is Role.ROLLOUT)
    assert isinstance(order(world, "drain", "c2", force="yes"), m.Done)
    until(world, lambda: world.core.cells["c2"].role is Role.DOWN)
    step = world.core.version.step
    until(world, lambda: world.core.version.step >= step + 2)
    assert world.core.cells["c2"].role is Role.DOWN
    assert isinstance(order(world, "undrain", "c2"), m.Done)
    until(world, lambda: world.core.cells["c2"].role is Role.ROLLOUT)
    world.run()


@pytest.mark.parametrize(("verb", "cell", "why"), [("drain", "c0", "core"), ("drain", "c9", "no cell"),
                                                  ("undrain", "c1", "not drained")])  # fmt: skip
def test_what_can_not_be_drained_is_refused_with_the_reason(verb, cell, why):
    world = World(4, cells=2)
    until(world, lambda: world.core.version.step >= 1)
    refused = order(world, verb, cell)
    assert isinstance(refused, m.Refused)
    assert why in refused.why
