"""Forecasts, and the options of the scheduler that use them: long tasks first, head start, stagger, level by work."""

from __future__ import annotations

import dataclasses
import math
import random
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellctl.core import Scheduler, Start
from cellctl.durations import read
from cellctl.forecast import BELIEVED_CORRELATION, Forecast
from cellctl.ledger import TaskQueue
from cellctl.policies import Decision, Elastic
from cellctl.simulate.profile import Arm, Laws, Profile
from cellctl.simulate.world import World
from gyre_base import messages as m
from gyre_base import wire
from gyre_base.daemon import Send, Tick, WakeAt
from gyre_base.vocabulary import Role

LAWS = Laws(train_node_h=2.0, load_slope=0.0, step_s=0.0, pack_s=0.0, join_s=0.0)


def elastic(**values: object) -> Arm:
    base = Arm(name="e", policy="elastic", nodes=(1, 1, 1, 1), steps_per_burst=3)
    return dataclasses.replace(base, **values)  # type: ignore[arg-type]


def small(arm: Arm, steps: int = 12) -> Profile:
    return Profile(name="small", steps=steps, groups_per_batch=4, group_size=4, laws=LAWS, arms=(arm,))


# ---- forecast -----------------------------------------------------------------------------------------------------


def learnt(task_sigma: float, rollout_sigma: float, tasks: int = 60, each: int = 8, seed: int = 1) -> Forecast:
    chance, made = random.Random(seed), Forecast()
    for task in range(tasks):
        centre = chance.gauss(math.log(3600.0), task_sigma)
        for _ in range(each):
            made.learn(f"t{task}", math.exp(chance.gauss(centre, rollout_sigma)))
    return made


def test_before_anything_is_seen_all_tasks_are_alike_and_the_published_correlation_is_believed():
    made = Forecast()
    assert made.seconds("a") == made.seconds("b")
    assert made.correlation == BELIEVED_CORRELATION


@pytest.mark.parametrize(("task_sigma", "rollout_sigma"), [(0.2, 0.25), (0.3, 0.3), (0.05, 0.4)])
def test_the_tasks_share_of_the_variance_is_measured(task_sigma, rollout_sigma):
    wanted = task_sigma**2 / (task_sigma**2 + rollout_sigma**2)
    measured = fmean(learnt(task_sigma, rollout_sigma, seed=seed).correlation for seed in range(5))
    assert measured == pytest.approx(wanted, abs=0.06)


def test_siblings_move_a_tasks_forecast_towards_them_the_more_the_more_there_are():
    made = learnt(0.2, 0.25)
    before = made.seconds("new")
    found = []
    for _ in range(3):
        made.learn("new", 3.0 * before)
        found.append(made.seconds("new"))
    assert before < found[0] < found[1] < found[2] < 3.0 * before


@given(age_s=st.floats(0.0, 40_000.0), limit_s=st.floats(1.0, 40_000.0))
@settings(max_examples=60)
def test_what_is_left_is_never_more_than_the_limit_leaves_and_never_negative(age_s, limit_s):
    left = learnt(0.2, 0.25, tasks=9).remaining_s("t1", age_s, limit_s)
    assert 0.0 <= left <= max(0.0, limit_s - age_s) + 1e-9


def test_remaining_time_is_the_mean_of_those_that_lived_so_long():
    made, chance = learnt(0.0, 0.3, tasks=200), random.Random(3)
    mean, sigma = made.log_normal("nobody")
    lives = [math.exp(chance.gauss(mean, sigma)) for _ in range(60_000)]
    for age_s in (1000.0, 3600.0, 6000.0):
        alive = [life - age_s for life in lives if life > age_s]
        assert made.remaining_s("nobody", age_s, 1e9) == pytest.approx(fmean(alive), rel=0.08)


# ---- order of dispatch --------------------------------------------------------------------------------------------


def test_a_window_gives_its_longest_first_and_everybody_in_turn():
    tasks = tuple(f"t{i}" for i in range(12))
    plain, sorted_ = TaskQueue(tasks, 3), TaskQueue(tasks, 3)
    given_ = [sorted_.next_by(lambda t: float(t[1:]), 4) for _ in range(12)]
    for begin in range(0, 12, 4):
        window = [plain.next() for _ in range(4)]
        assert given_[begin : begin + 4] == sorted(window, key=lambda t: -float(t[1:]))


def dispatched(core: Scheduler, **scheduler: object) -> list[list[object]]:
    """Commands of a core that is started and has everybody there."""
    tree = {
        "cluster": {"cells": 1},
        "scheduler": {"group_size": 1, "groups_per_batch": 2, "steps_per_burst": 2, **scheduler},
        "evaluation": {"tasks": 0},
    }
    known = {"a": (60.0,), "b": (600.0,), "c": (6000.0,), "d": (6.0,)}
    begin = Start(config=tree, train=("a", "b", "c", "d"), heldout=(), durations_s=known)
    out = [core.handle(wire.from_json(wire.to_json(begin)), 0.0)]
    for kind, name in (("proxyd", "0"), ("trajd", "trajd"), ("executor", "ex0")):
        out.append(core.handle(m.Hello(kind=kind, name=name, life=1, pid=1, slots=9), 1.0))
    out.append(core.handle(m.RoleChanged(cell="c0", role=Role.ROLLOUT, epoch=0, version="0.0", engine_url="u"), 2.0))
    return out


def ordered(commands: list[object]) -> list[str]:
    sends = [c.message for c in commands if isinstance(c, Send)]
    return [s.task["id"] for s in sends if isinstance(s, m.ExecutionOrder)]


def test_with_known_durations_long_tasks_go_first():
    assert ordered(dispatched(Scheduler(), dispatch_order="longest")[-1]) == ["c", "b", "a", "d"]


def test_a_staggered_dispatch_goes_out_over_its_time_at_one_version():
    core = Scheduler()
    first = dispatched(core, dispatch_order="longest", stagger_s=40.0)[-1]
    assert ordered(first) == ["c"]
    assert WakeAt(at=12.0) in first
    assert ordered(core.handle(Tick(), 11.9)) == []
    assert ordered(core.handle(Tick(), 12.0)) == ["b"]
    assert ordered(core.handle(Tick(), 100.0)) == ["a", "d"]
    assert {g.version for g in core.ledger.groups.values()} == {"0.0"}
    assert core.ledger.level() == 4


# ---- in simulation ------------------------------------------------------------------------------------------------


OPTIONS = (
    {"dispatch_order": "longest", "known": 2},
    {"stagger_h": 0.5},
    {"head_start": 0.5, "dispatch_order": "longest", "known": 2},
    {"water_level": "work"},
    {"tail_load": 2.0, "nodes": (1, 1, 2)},
    {"order": "shuffle"},
    {"order": "stratified"},
)


@pytest.mark.parametrize("option", OPTIONS, ids=lambda o: "-".join(o))
@given(seed=st.integers(0, 10**6))
@settings(max_examples=5, deadline=None)
def test_no_option_loses_a_group_or_a_step(option, seed):
    arm = elastic(**option)
    world = World(small(arm), arm, seed)
    feed = world.feed

    def checked(event):
        feed(event)
        world.core.check()

    world.feed = checked
    world.run()
    assert world.core.version.step == 12
    assert len(world.places) == 12 * 4
    assert len(world.training._reserve) == 0


def test_a_head_start_costs_the_staleness_of_its_groups_and_no_more():
    plain, early = (World(small(a, 30), a, 4).run() for a in (elastic(), elastic(head_start=0.5)))
    added = fmean(early.staleness) - fmean(plain.staleness)
    assert 0.0 < added <= 0.5 / 3 + 1e-9


def test_orders_bring_durations_in_a_burst_nearer_to_each_other():
    by = {o: World(small(a, 30), a, 4).run() for o in ("arrival", "stratified") for a in [elastic(order=o)]}
    assert by["arrival"].duration_by_place() > by["stratified"].duration_by_place() + 0.1
    assert fmean(by["arrival"].staleness) == fmean(by["stratified"].staleness) == 1.0


class Wandering(Elastic):
    """A rule of another kind: in the middle of a burst a cell that trains comes back once micro-steps run out."""

    def turns(self, view):
        idle = view.step < view.burst_end and len(view.pool.training) > 1 and not view.groups_ready
        back = [Decision(cell=view.pool.training[-1].name, to=Role.ROLLOUT, why="nothing to compute")] if idle else []
        return back or super().turns(view)


def test_a_policy_may_move_cells_both_ways_in_the_middle_of_a_burst():
    arm = elastic(nodes=(1, 1, 1, 1), steps_per_burst=3)
    world = World(small(arm), arm, 2)
    world.core.policy = Wandering()
    back = []
    turn = world.core.turn

    def watched(decision, now):
        if decision.why == "nothing to compute":
            back.append(decision.cell)
        turn(decision, now)

    world.core.turn = watched
    world.run()
    assert back
    assert world.core.version.step == 12


# ---- files --------------------------------------------------------------------------------------------------------


def test_durations_of_stats_are_read_by_task(tmp_path):
    path = tmp_path / "stats.jsonl"
    told = (
        '{"executions": 3, "execution_s": {"p50": 1.0}}\n{"task": "a", "executions": 2, "duration_s": [3600, 7200.0]}'
    )
    path.write_text(told + '\n{"task": "b", "executions": 1, "duration_s": [0.0]}\n')
    assert read(path) == {"a": [1.0, 2.0]}
