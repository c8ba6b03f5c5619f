"""How often a run saves and when it leaves a job, from what was measured."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gyre_base import saving

SECONDS = st.floats(0.01, 3000)


def plan(**known: float) -> saving.SavePlan:
    return saving.plan(**{"save_s": 0.0, "micro_step_s": 0.0, "ends_at": 0.0, "now": 0.0, **known})


def test_a_save_of_ten_seconds_is_done_every_eight_minutes_and_leaves_forty_seconds_before_the_end():
    made = plan(save_s=10.0, ends_at=10_000.0, now=9_961.0)
    assert (made.every_s, made.window_s, made.left_s, made.must_leave) == (500.0, 40.0, 39.0, True)


def test_nothing_must_be_left_where_no_end_is_known():
    assert plan(save_s=10.0, now=1e9).must_leave is False


@given(save_s=SECONDS, micro_step_s=SECONDS)
def test_the_window_holds_a_slow_save_and_the_micro_step_in_hand(save_s, micro_step_s):
    made = plan(save_s=save_s, micro_step_s=micro_step_s, ends_at=1e6)
    assert made.window_s >= 2 * save_s + micro_step_s


@given(save_s=SECONDS, total_s=st.floats(60, 1e6))
def test_at_least_half_of_a_job_is_worked_in(save_s, total_s):
    assert plan(save_s=save_s, began_at=1000.0, ends_at=1000.0 + total_s, now=1000.0).window_s <= total_s / 2 * 1.001


@given(save_s=SECONDS)
def test_saves_take_a_fiftieth_of_the_time_within_bounds(save_s):
    every_s = plan(save_s=save_s).every_s
    assert saving.SHORTEST_S <= every_s <= saving.LONGEST_S
    assert every_s in (saving.SHORTEST_S, saving.LONGEST_S) or abs(save_s / every_s - saving.SHARE) < 1e-9


def test_no_save_is_due_when_the_one_on_leaving_comes_first():
    far, near = plan(save_s=1.0, ends_at=1000.0, now=0.0), plan(save_s=1.0, ends_at=1000.0, now=960.0)
    assert saving.is_due(far, since_save_s=61.0) and not saving.is_due(far, since_save_s=59.0)
    assert not saving.is_due(near, since_save_s=900.0)
