"""Executions that a policy or a person pauses: no slot, no time, nothing lost; live order and simulation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellctl import executions
from cellctl.core import Scheduler, Start
from cellctl.operator import obey
from cellctl.policies import Elastic, ExecutionView, Pause, View
from cellctl.simulate.profile import Arm, Durations, Laws, Profile
from cellctl.simulate.serving import NEVER, Serving
from cellctl.simulate.world import World
from gyre_base import messages as m
from gyre_base.daemon import Send
from gyre_base.vocabulary import Outcome, Role

ARM = Arm(name="e", policy="elastic", nodes=(1, 1, 1, 1), steps_per_burst=2)
SMALL = Profile(
    name="small",
    steps=4,
    groups_per_batch=4,
    group_size=4,
    tasks=16,
    durations=Durations(median_h=2.0, task_sigma=0.4, rollout_sigma=0.2, limit_h=4.0),
    laws=Laws(train_node_h=1.2, load_slope=0.0, slots_per_node=8.0, replica_nodes=1),
    arms=(ARM,),
)


class AtMost(Elastic):
    """A rule as other schedulers have them: no more than so many run at once, oldest first."""

    def __init__(self, most: int) -> None:
        self.most, self.asked = most, 0

    def pauses(self, view: View, in_flight: Callable[[], list[ExecutionView]]) -> list[Pause]:
        self.asked += 1
        orders = []
        for number, one in enumerate(in_flight()):
            if one.paused is not (number >= self.most):
                orders.append(Pause(execution=one.name, paused=not one.paused, why=f"at most {self.most} run"))
        return orders


class Narrow(World):
    """A simulated run with that rule; the most that ever ran at once is kept."""

    most_running = 0

    def _begin(self, tree):
        handle = self.core.handle

        def with_rule(event, now):
            commands = handle(event, now)
            if isinstance(event, Start):
                self.core.policy = AtMost(5)
            return commands

        self.core.handle = with_rule
        super()._begin(tree)

    def feed(self, event):
        super().feed(event)
        self.most_running = max(self.most_running, len(self.serving.running))


def test_a_rule_that_pauses_executions_keeps_their_durations_and_loses_none():
    plain, narrow = World(SMALL, ARM, 2).run(), Narrow(SMALL, ARM, 2).run()
    assert (narrow.most_running, plain.serving.paused) == (5, {})
    assert narrow.now > plain.now
    batch = SMALL.groups_per_batch * SMALL.steps
    durations = [sorted(round(hours, 6) for _, hours in world.places[:batch]) for world in (plain, narrow)]
    assert durations[0] == durations[1]  # a pause is no time of the execution's, nor of its limit
    assert narrow.core.ledger.retries == 0
    assert narrow.core.ledger.paused == len(narrow.serving.paused)


def test_while_executions_are_paused_cells_are_lent_that_would_be_needed_else():
    """The water level counts who runs: with 5 of 32 running, three of four cells with 8 slots train at once."""
    plain, narrow = World(SMALL, ARM, 2, trace=True).run(), Narrow(SMALL, ARM, 2, trace=True).run()
    begin = [
        min(at for at, cell, role in world.trace.roles if (cell, role) == ("c2", Role.TRAIN))
        for world in (plain, narrow)
    ]
    assert begin[1] < 60.0 < 3600.0 < begin[0]


@given(
    work=st.lists(st.floats(1.0, 50.0), min_size=2, max_size=6),
    pauses=st.lists(st.tuples(st.floats(0.1, 20.0), st.integers(0, 5), st.booleans()), max_size=12),
)
@settings(max_examples=80, deadline=None)
def test_an_execution_takes_its_own_time_whatever_is_paused_in_between(work, pauses):
    serving = Serving(0.0, 0.5, 30.0)
    serving.add_slots(4)
    for number, seconds in enumerate(work):
        serving.start(f"e{number}", seconds)
    ended: dict[str, tuple[bool, float]] = {}
    now = 0.0

    def until(to: float) -> None:
        while (due := serving.next_end()) <= to:
            serving.advance(due)
            name, timed_out, wall = serving.end()
            ended[name] = (timed_out, wall)
        serving.advance(to)

    for gap, number, pause in pauses:
        now += gap
        until(now)
        (serving.pause if pause else serving.resume)(f"e{number}")
    for number in range(len(work)):
        serving.resume(f"e{number}")
    until(now + 60.0)
    assert serving.next_end() == NEVER
    for number, seconds in enumerate(work):
        timed_out, wall = ended[f"e{number}"]
        assert (timed_out, wall) == (seconds > 30.0, pytest.approx(min(seconds, 30.0), abs=1e-6))


# ---- the core -----------------------------------------------------------------------------------------------------


@pytest.fixture
def core() -> Scheduler:
    """In its first burst, four executions in flight."""
    made = Scheduler()
    tree = {
        "cluster": {"cells": 2},
        "scheduler": {"groups_per_batch": 1, "group_size": 4, "steps_per_burst": 1, "slots_per_cell": 4, "steps": 2},
    }
    made.handle(Start(config=tree, train=("t",), heldout=()), 0.0)
    for kind, name in (("proxyd", "0"), ("proxyd", "proxyd"), ("trajd", "trajd")):
        made.handle(m.Hello(kind=kind, name=name, life=1, pid=1), 0.0)
    made.handle(m.Hello(kind="executor", name="ex0", life=1, pid=1, slots=9), 0.0)
    for cell in ("c0", "c1"):
        ready = m.RoleChanged(cell=cell, role=Role.ROLLOUT, epoch=0, version="0.0", engine_url=f"http://{cell}")
        made.handle(ready, 0.0)
    assert made.ledger.level() == 4
    return made


def order(core: Scheduler, verb: str, name: str) -> tuple[list[m.OpenExecution], object]:
    """(what the router is told, the answer)."""
    commands = core.handle(m.OperatorOrder(verb=verb, argument=name, options={}), 1.0)
    told = [c.message for c in commands if isinstance(c, Send) and isinstance(c.message, m.OpenExecution)]
    return told, commands[-1]


def test_a_pause_is_said_once_and_the_water_level_falls(core):
    name = next(iter(core.ledger.in_flight))
    told, _ = order(core, "pause", name)
    assert [(t.execution, t.paused) for t in told] == [(name, True)]
    assert (core.ledger.level(), core.ledger.paused) == (3, 1)
    again = obey(core, m.OperatorOrder(verb="pause", argument=name, options={}), 2.0)
    assert isinstance(again, m.Refused) and "by order of the operator" in again.why
    told, _ = order(core, "resume", name)
    assert [(t.execution, t.paused) for t in told] == [(name, False)]
    assert (core.ledger.level(), core.ledger.paused) == (4, 0)


def test_a_router_that_comes_back_hears_who_is_paused(core):
    first, *others = core.ledger.in_flight
    order(core, "pause", first)
    heard = []
    for name in ("0", "proxyd"):
        commands = core.handle(m.Hello(kind="proxyd", name=name, life=2, pid=2), 3.0)
        heard += [c.message for c in commands if isinstance(c, Send) and isinstance(c.message, m.OpenExecution)]
    paused = {message.execution for message in heard if message.paused}
    assert paused == {first} and {message.execution for message in heard} == {first, *others}


def test_a_paused_execution_that_ends_or_is_tried_again_leaves_no_pause_behind(core):
    first, second, third, _ = core.ledger.in_flight
    for name in (first, second, third):
        order(core, "pause", name)
    core.handle(m.ExecutionEnded(execution=first), 2.0)  # it had no call open
    core.handle(m.ExecutionFinished(execution=first, outcome=Outcome.SCORED, score=1.0, wall_s=1.0), 2.0)
    core.handle(m.ExecutionFinished(execution=second, outcome=Outcome.INFRA_FAILED, score=None, wall_s=1.0), 2.0)
    again = next(e for e in core.ledger.in_flight.values() if e.attempt == 1)
    assert (again.paused, core.ledger.paused, core.ledger.level()) == ("", 1, 2)
    assert not executions.pause(core, Pause(execution=first, paused=True, why="too late"))


@pytest.mark.parametrize(("verb", "name", "why"), [("pause", "nobody", "in flight"), ("resume", "", "not paused")])
def test_an_order_that_can_not_be_is_refused_with_the_reason(core, verb, name, why):
    answer = obey(core, m.OperatorOrder(verb=verb, argument=name or next(iter(core.ledger.in_flight)), options={}), 1.0)
    assert isinstance(answer, m.Refused) and why in answer.why
