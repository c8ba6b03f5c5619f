"""A paused execution's calls: taken back with their tokens, held, and served again; the wait is told."""

from __future__ import annotations

from dataclasses import replace

from proxyd.events import Abort, CallArrived, Finish, SubmissionEnded, Submit
from tests.proxyd.test_core import arrived, ended, only, opened, router

PAUSED = replace(opened("e"), paused=True)


def test_a_running_call_is_taken_back_and_goes_on_with_its_tokens() -> None:
    core = router("a")
    (submit,) = core.handle(arrived("k"), 1.0)
    assert only(core.handle(PAUSED, 2.0), Abort)
    assert not only(core.handle(ended(submit, how="aborted", sampled=5), 3.0), Submit)
    assert not only(core.handle(PAUSED, 4.0), Abort | Submit)  # said twice
    (again,) = only(core.handle(opened("e"), 12.0), Submit)
    assert (again.call, again.number, again.sampled) == ("k", 2, 5)
    (done,) = only(core.handle(ended(again), 13.0), Finish)
    assert done.waited_s == 10.0  # from the abort on: no limit of the harness counts it


def test_calls_that_come_in_a_pause_wait_and_others_are_served() -> None:
    core = router("a")
    core.handle(opened("f"), 1.0)
    core.handle(PAUSED, 1.0)
    assert not only(core.handle(arrived("k"), 2.0), Submit)
    assert only(core.handle(arrived("other", execution="f"), 2.0), Submit)
    assert [s.call for s in only(core.handle(opened("e"), 5.0), Submit)] == ["k"]


def test_an_execution_that_is_opened_paused_as_after_a_restart_is_held() -> None:
    core = router("a")
    core.handle(replace(opened("new"), paused=True), 1.0)
    call = CallArrived(call="k", execution="new", prompt_tokens=10, budget=64)
    assert not only(core.handle(call, 2.0), Submit)
    (submit,) = only(core.handle(opened("new"), 3.0), Submit)
    assert isinstance(submit, Submit)


def test_a_call_that_finishes_before_the_abort_arrives_is_finished() -> None:
    core = router("a")
    (submit,) = core.handle(arrived("k"), 1.0)
    core.handle(PAUSED, 2.0)
    finished = SubmissionEnded(call="k", number=submit.number, how="finished", sampled=3, finish="stop")
    assert only(core.handle(finished, 2.1), Finish)
