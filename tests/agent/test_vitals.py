"""A child that answers but gets nothing done is found by its tokens and micro-steps."""

from __future__ import annotations

from celld.agent.vitals import Vitals


def test_work_without_tokens_for_too_long_is_a_stall():
    vitals = Vitals(stall_s=10.0)
    assert [vitals.look("engine", 5, 2, float(t)) for t in (0, 6, 10)] == [0.0, 0.0, 0.0]
    assert vitals.look("engine", 5, 2, 11.0) == 11.0


def test_tokens_or_idleness_are_no_stall():
    vitals = Vitals(stall_s=10.0)
    for t in range(0, 100, 5):
        assert vitals.look("engine", t, 2, float(t)) == 0.0
        assert vitals.look("rank", 3, 0, float(t)) == 0.0
    assert (vitals.progress, vitals.work) == (95, 2)


def test_waiting_begins_with_the_work_not_with_the_last_token():
    vitals = Vitals(stall_s=10.0)
    vitals.look("engine", 5, 0, 0.0)
    assert vitals.look("engine", 5, 1, 1000.0) == 0.0
    assert vitals.look("engine", 5, 1, 1011.0) == 11.0


def test_a_child_that_is_started_anew_counts_from_nothing():
    vitals = Vitals(stall_s=10.0)
    vitals.look("rank", 100, 1, 0.0)
    vitals.look("rank", 120, 1, 5.0)
    vitals.forget("rank")
    assert vitals.look("rank", 0, 1, 20.0) == 0.0
    assert vitals.progress == 20


def test_silence_counts_in_a_row():
    vitals = Vitals(stall_s=10.0)
    assert [vitals.silent("rank") for _ in range(3)] == [1, 2, 3]
    vitals.look("rank", 1, 1, 0.0)
    assert vitals.silent("rank") == 1
