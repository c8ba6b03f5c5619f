"""The bound on hours per step: known cases, brute force, and that no simulated schedule is better than it."""

from __future__ import annotations

import itertools
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellctl.simulate import bound
from cellctl.simulate.profile import Arm, Durations, Laws, Profile
from cellctl.simulate.world import World

ARMS = (
    Arm(name="burst", policy="elastic", nodes=(1, 1, 1, 1), steps_per_burst=2),
    Arm(name="ahead", policy="elastic", nodes=(1, 1, 1, 1), steps_per_burst=1, look_ahead=1.0),
    Arm(name="started", policy="elastic", nodes=(1, 1, 1, 1), steps_per_burst=2, head_start=0.5),
    Arm(name="whole", policy="colocate", nodes=(4,), steps_per_burst=2, streaming=False),
    Arm(name="pools", policy="async", nodes=(1, 3), steps_per_burst=1, look_ahead=1.0),
)
SMALL = Profile(
    name="small",
    steps=24,
    groups_per_batch=4,
    group_size=4,
    tasks=64,
    durations=Durations(median_h=2.0, task_sigma=0.4, rollout_sigma=0.2, limit_h=4.0),
    laws=Laws(train_node_h=1.2, load_slope=0.0, slots_per_node=8.0, replica_nodes=1),
    arms=ARMS,
)


@given(
    costs=st.integers(2, 3).flatmap(
        lambda columns: st.lists(
            st.lists(st.integers(0, 5), min_size=columns, max_size=columns),
            min_size=2 * columns,
            max_size=2 * columns,
        )
    )
)
@settings(max_examples=80, deadline=None)
def test_the_cheapest_assignment_is_that_of_brute_force(costs):
    rows, columns = len(costs), len(costs[0])
    ways = set(itertools.permutations([c for c in range(columns) for _ in range(2)]))
    assert bound.cheapest(costs, 2) == min(sum(costs[r][way[r]] for r in range(rows)) for way in ways)


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_groups_of_equal_length_in_a_cycle_that_just_holds_them_have_the_staleness_of_a_burst(steps):
    """All wait for the longest interval, so they are trained one batch after the other: 0, 1, .. m - 1."""
    intervals = [3.0, *[0.5] * (steps - 1)]
    assert bound.least_staleness(intervals, [2.9] * 2 * steps) == (steps - 1) / 2


def test_groups_that_outlast_the_cycle_are_carried_into_the_next():
    assert bound.least_staleness([3.0], [3.1]) == 1.0
    assert bound.least_staleness([3.0], [9.1]) == 3.0
    assert bound.least_staleness([2.0, 1.0], [0.5, 3.5]) == 1.0  # the short one at 0, the long one over three intervals


def test_every_spacing_fills_the_cycle_and_respects_the_shortest_interval():
    made = list(bound.spacings(3, 6.0, 0.5))
    assert all(sum(each) == pytest.approx(6.0) and min(each) >= 0.5 for each in made)
    assert [6.0 - 2 * 0.5, 0.5, 0.5] in [[pytest.approx(x) for x in each] for each in made]


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: arm.name)
def test_no_simulated_schedule_has_less_staleness_than_the_bound_at_its_hours(arm):
    """Over whole cycles in the middle of the run: its first steps have an empty pipeline."""
    world = World(SMALL, arm, 3).run()
    begin, end = 8, 24
    took = (world.step_times[end - 1] - world.step_times[begin - 1]) / 3600.0 / (end - begin)
    batch = SMALL.groups_per_batch
    hours = [hours for _, hours in world.places[begin * batch : end * batch]]
    least = min(bound.bound(SMALL, sorted(hours), took, steps) for steps in (1, 2, 3))
    assert least <= fmean(world.staleness[begin:end]) + 0.05
    assert bound.bound(SMALL, sorted(hours), 0.29, 2) == float("inf")  # training alone takes 0.3 h


def test_fewer_hours_cost_staleness():
    hours = bound.durations_h(SMALL, ARMS[0], 2)
    by_hours = [bound.bound(SMALL, hours, per_step, 2) for per_step in (0.6, 1.0, 2.0, 4.0)]
    assert by_hours == sorted(by_hours, reverse=True)
    assert by_hours[0] > by_hours[-1]
    least = bound.least_hours(SMALL, hours, by_hours[2], 2)
    assert least <= 2.0 and bound.bound(SMALL, hours, least - 0.02, 2) > by_hours[2]
