"""The executor's core: transcripts of single lives, and properties over random ones."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gyre_base import messages as m
from gyre_base import wire
from gyre_base.daemon import Tick, WakeAt
from gyre_base.vocabulary import Outcome, Purpose
from gyre_exec import events as e
from gyre_exec.core import ExecutorCore, Limits, State, Unexpected


def order(name: str, limit_s: float = 100.0) -> m.ExecutionOrder:
    return m.ExecutionOrder(execution=name, group="g", task={}, attempt=0, purpose=Purpose.TRAIN, limit_s=limit_s)


def ended(name: str, code: int = 0, **figures: Any) -> e.HarnessEnded:
    return e.HarnessEnded(execution=name, exit_code=code, **{"calls": 1, **figures})


GONE = m.ExecutionEnded(execution="x")  # before its score: it needs no engine any more


def scored(name: str, score: float = 0.5) -> e.Evaluated:
    return e.Evaluated(execution=name, verdict="scored", score=score, parts={"a": score}, evaluator="j", version="v")


def running(name: str = "x", limit_s: float = 100.0, **limits: Any) -> ExecutorCore:
    """A core with one execution that runs since 0."""
    core = ExecutorCore(Limits(**{"slots": 4, **limits}))
    core.handle(order(name, limit_s), 0.0)
    core.handle(e.Prepared(execution=name), 0.0)
    core.handle(e.Started(execution=name, pid=1), 0.0)
    return core


def outcome_in(commands: list[Any]) -> m.ExecutionFinished:
    (found,) = [c for c in commands if isinstance(c, m.ExecutionFinished)]
    return found


def test_the_life_of_an_execution() -> None:
    core = ExecutorCore(Limits(slots=1))
    assert core.handle(order("x"), 1.0) == [e.Prepare(execution="x")]
    assert core.handle(e.Prepared(execution="x"), 2.0) == [e.Start(execution="x")]
    assert core.handle(e.Started(execution="x", pid=7), 3.0) == [WakeAt(at=103.0)]
    assert core.handle(ended("x", waited_s=2.0, calls=9), 13.0) == [GONE, e.Evaluate(execution="x", attempt=1)]
    finished = m.ExecutionFinished(
        execution="x",
        outcome=Outcome.SCORED,
        score=0.5,
        parts={"a": 0.5},
        evaluator="j",
        evaluator_version="v",
        exit_code=0,
        wall_s=10.0,
        waited_s=2.0,
        calls=9,
    )
    assert core.handle(scored("x"), 14.0) == [e.Settle(execution="x"), finished, WakeAt(at=19.0)]
    assert core.handle(order("x"), 15.0) == [finished]
    assert core.handle(Tick(), 19.0) == [finished, WakeAt(at=24.0)]
    assert core.handle(m.ExecutionNoted(execution="x"), 20.0) == [e.Forget(execution="x")]
    assert core.handle(m.ExecutionNoted(execution="x"), 20.0) == []
    assert core.handle(order("x"), 21.0) == [] and core.holds() == ()


def test_a_cellctl_that_is_new_or_back_hears_every_outcome_at_once() -> None:
    core = running()
    assert core.handle(m.Welcome(life=1), 1.0) == []
    finished = outcome_in(core.handle(ended("x", -9), 2.0))
    assert core.handle(m.Welcome(life=2), 3.0) == [finished]
    scoring = running()
    scoring.handle(ended("x"), 2.0)
    assert scoring.handle(m.Welcome(life=2), 3.0) == [GONE]


def test_orders_beyond_the_slots_wait_and_a_duplicate_starts_nothing() -> None:
    core = ExecutorCore(Limits(slots=1))
    core.handle(order("x"), 0.0)
    assert core.handle(order("y"), 0.0) == core.handle(order("y"), 0.0) == core.handle(order("x"), 0.0) == []
    core.handle(e.Prepared(execution="x"), 0.0)
    core.handle(e.Started(execution="x", pid=1), 0.0)
    commands = core.handle(ended("x"), 1.0)
    assert commands == [GONE, e.Prepare(execution="y"), e.Evaluate(execution="x", attempt=1)]
    assert core.holds() == ("x", "y")


def test_at_the_limit_waits_are_credited_then_term_then_kill_then_partial() -> None:
    core = running(limit_s=10.0)
    assert core.handle(Tick(), 10.0) == [e.ReadClock(execution="x"), WakeAt(at=15.0)]
    clock = e.ClockRead(execution="x", waited_s=4.0, call_open=False)
    assert core.handle(clock, 10.0) == [WakeAt(at=14.0)]
    assert core.handle(Tick(), 14.0) == [e.ReadClock(execution="x"), WakeAt(at=19.0)]
    assert core.handle(clock, 14.0) == [e.StopHarness(execution="x", now=False), WakeAt(at=17.0)]
    assert core.handle(Tick(), 17.0) == [e.StopHarness(execution="x", now=True), WakeAt(at=20.0)]
    assert core.handle(ended("x", -9), 17.1) == [GONE, e.Evaluate(execution="x", attempt=1, time_up=True)]
    assert outcome_in(core.handle(scored("x"), 18.0)).outcome is Outcome.PARTIAL


@pytest.mark.parametrize(("own_s", "due"), [(None, 10.0), (4.0, 4.0), (99.0, 10.0)])
def test_a_tasks_own_limit_holds_if_it_is_shorter(own_s: float | None, due: float) -> None:
    core = ExecutorCore(Limits(slots=1))
    core.handle(order("x", 10.0), 0.0)
    core.handle(e.Prepared(execution="x", limit_s=own_s), 0.0)
    assert core.handle(e.Started(execution="x", pid=1), 0.0) == [WakeAt(at=due)]
    clock = e.ClockRead(execution="x", waited_s=0.0, call_open=False)
    core.handle(Tick(), due)
    assert core.handle(clock, due)[0] == e.StopHarness(execution="x", now=False)


def test_the_overall_limit_does_not_move_and_what_it_ends_with_time_left_is_our_failure() -> None:
    core = running(limit_s=10.0, overall_limit_s=25.0)
    core.handle(Tick(), 10.0)
    core.handle(e.ClockRead(execution="x", waited_s=8.0, call_open=False), 10.0)
    assert core._due == {"x": 18.0}
    core.handle(Tick(), 18.0)
    core.handle(e.ClockRead(execution="x", waited_s=16.0, call_open=True), 18.0)
    assert core._due == {"x": 25.0}
    core.handle(Tick(), 25.0)
    stop = core.handle(e.ClockRead(execution="x", waited_s=23.0, call_open=True), 25.0)
    assert stop[0] == e.StopHarness(execution="x", now=False)
    finished = outcome_in(core.handle(ended("x", -15, waited_s=23.0), 26.0))
    assert (finished.outcome, finished.score, finished.waited_s) == (Outcome.INFRA_FAILED, None, 23.0)
    assert "overall limit ended it after 25 s, 23 s of them waiting for us" in finished.error


def test_a_harness_that_used_its_time_is_measured_although_the_overall_limit_came_too() -> None:
    core = running(limit_s=10.0, overall_limit_s=10.0)
    core.handle(Tick(), 10.0)
    core.handle(e.ClockRead(execution="x", waited_s=0.0, call_open=False), 10.0)
    assert core.handle(ended("x", -15), 11.0) == [GONE, e.Evaluate(execution="x", attempt=1, time_up=True)]


def test_more_than_its_quota_ends_it_and_what_is_there_is_scored() -> None:
    core = running()
    over = e.OverQuota(execution="x", why="9 MiB on disk")
    assert core.handle(over, 5.0)[0] == e.StopHarness(execution="x", now=False)
    assert core.handle(over, 5.1) == [] == core.handle(e.OverQuota(execution="gone", why=""), 5.1)
    assert core.handle(ended("x", -25), 6.0) == [GONE, e.Evaluate(execution="x", attempt=1, time_up=True)]
    assert core.handle(over, 6.1) == []
    finished = outcome_in(core.handle(scored("x"), 7.0))
    assert (finished.outcome, finished.score, finished.error) == (Outcome.PARTIAL, 0.5, "9 MiB on disk")


def test_a_call_that_is_open_at_the_limit_is_waited_for_but_not_for_ever() -> None:
    core = running(limit_s=8.0)
    core.handle(Tick(), 8.0)
    held = e.ClockRead(execution="x", waited_s=0.0, call_open=True)
    assert core.handle(held, 8.0) == [WakeAt(at=9.0)]
    core.handle(Tick(), 16.0)
    assert core.handle(held, 16.0)[0] == e.StopHarness(execution="x", now=False)


def test_a_timer_that_rings_early_is_set_again() -> None:
    core = running(limit_s=10.0)
    assert core.handle(Tick(), 9.9996) == [WakeAt(at=10.0)]


def test_an_answer_of_the_clock_that_comes_after_the_end_is_ignored() -> None:
    core = running(limit_s=10.0)
    core.handle(Tick(), 10.0)
    core.handle(ended("x"), 10.0)
    assert core.handle(e.ClockRead(execution="x", waited_s=0.0, call_open=False), 10.0) == []


@pytest.mark.parametrize(
    ("end", "word"),
    [
        (ended("x", 1, calls=0, stderr_tail="no module"), "no module"),
        (ended("x", 1, harness_errors=2), "2 errors of ours"),
        (ended("x", -9), "killed from outside"),
    ],
)
def test_an_end_that_the_agent_did_not_cause_is_no_score(end: e.HarnessEnded, word: str) -> None:
    finished = outcome_in(running().handle(end, 5.0))
    assert (finished.outcome, finished.score) == (Outcome.INFRA_FAILED, None) and word in finished.error


@pytest.mark.parametrize("code", [0, 1, 3, -11, -15])
def test_an_end_of_the_agents_own_is_measured(code: int) -> None:
    assert running().handle(ended("x", code), 5.0) == [GONE, e.Evaluate(execution="x", attempt=1)]


def test_a_crash_of_the_evaluator_is_tried_again_once_and_is_never_a_zero() -> None:
    core = running()
    core.handle(ended("x"), 1.0)
    failed = e.Evaluated(execution="x", verdict="failed", error="boom", evaluator="j", version="v")
    assert core.handle(failed, 2.0) == [e.Evaluate(execution="x", attempt=2)]
    finished = outcome_in(core.handle(failed, 3.0))
    assert (finished.outcome, finished.score, finished.error) == (Outcome.EVALUATOR_FAILED, None, "boom")


def test_an_evaluator_has_its_own_budget_of_tries() -> None:
    for budget in (0, 3):
        core = running()
        core.handle(ended("x"), 1.0)
        failed = e.Evaluated(execution="x", verdict="failed", retry_budget=budget)
        for attempt in range(budget):
            assert core.handle(failed, 2.0) == [e.Evaluate(execution="x", attempt=attempt + 2)]
        assert outcome_in(core.handle(failed, 3.0)).outcome is Outcome.EVALUATOR_FAILED


def test_partial_work_that_can_not_be_graded_is_unscored_and_not_a_zero() -> None:
    core = running(limit_s=1.0)
    core.handle(Tick(), 1.0)
    core.handle(e.ClockRead(execution="x", waited_s=0.0, call_open=False), 1.0)
    assert core.handle(ended("x", -15), 1.5) == [GONE, e.Evaluate(execution="x", attempt=1, time_up=True)]
    finished = outcome_in(core.handle(e.Evaluated(execution="x", verdict="refused", error="can't be graded"), 2.0))
    assert (finished.outcome, finished.score, finished.error) == (Outcome.UNSCORED, None, "can't be graded")


def test_a_hang_of_the_evaluator_is_not_repeated() -> None:
    core = running()
    core.handle(ended("x"), 1.0)
    hung = e.Evaluated(execution="x", verdict="hung", error="slow")
    assert outcome_in(core.handle(hung, 2.0)).outcome is Outcome.EVALUATOR_FAILED


def test_a_busy_loop_that_hears_of_start_and_end_late_measures_what_was() -> None:
    core = ExecutorCore(Limits(slots=1))
    core.handle(order("x", 10.0), 0.0)
    core.handle(e.Prepared(execution="x"), 0.0)
    assert core.handle(e.Started(execution="x", pid=1, at=1.0), 4.0) == [WakeAt(at=11.0)]
    core.handle(ended("x", at=3.5), 4.0)
    assert outcome_in(core.handle(scored("x"), 5.0)).wall_s == 2.5


def test_an_unexpected_event_carries_the_story() -> None:
    with pytest.raises(Unexpected, match=r"'ordered', 'preparing', 'starting', 'running'"):
        running().handle(e.Prepared(execution="x"), 1.0)


LIVES: dict[State, list[Any]] = {
    State.QUEUED: [],
    State.PREPARING: [e.Prepared],
    State.STARTING: [e.Started],
    State.RUNNING: [e.HarnessEnded],
    State.STOPPING: [e.HarnessEnded],
    State.SCORING: [e.Evaluated],
}


class Executions(RuleBasedStateMachine):
    """Random orders, cancels, notes, times and outcomes; the shell answers what it was told to do, in any order."""

    def __init__(self) -> None:
        super().__init__()
        limits = Limits(slots=2, evaluators=1, grace_s=1.0, resend_s=2.0, overall_limit_s=6.0)
        self.core = ExecutorCore(limits)
        self.now = 0.0
        self.alarms: list[float] = []
        self.to_do: list[Any] = []
        self.settled: dict[str, int] = {}
        self.ordered: set[str] = set()
        self.score_of: dict[str, float] = {}

    def tell(self, event: Any) -> None:
        wire.from_json(wire.to_json(event))
        for command in self.core.handle(event, self.now):
            assert wire.from_json(wire.to_json(command)) == command  # every command fits the journal
            match command:
                case WakeAt(at=at):
                    assert at >= self.now
                    self.alarms.append(at)
                case e.Settle(execution=name):
                    self.settled[name] = self.settled.get(name, 0) + 1
                case m.ExecutionFinished():
                    self.check_outcome(command)
                case e.Forget() | m.ExecutionEnded():
                    pass
                case _:
                    self.to_do.append(command)

    def check_outcome(self, finished: m.ExecutionFinished) -> None:
        if finished.outcome.counts and finished.outcome is not Outcome.NO_ARTIFACT:
            assert finished.score == self.score_of[finished.execution]
        elif finished.outcome is not Outcome.NO_ARTIFACT:
            assert finished.score is None

    @rule(number=st.integers(0, 6), limit_s=st.sampled_from([1.0, 5.0]))
    def order(self, number: int, limit_s: float) -> None:
        self.ordered.add(f"e{number}")
        self.tell(order(f"e{number}", limit_s))

    @rule(number=st.integers(0, 6))
    def cancel(self, number: int) -> None:
        if f"e{number}" in self.core.held:
            self.tell(m.CancelExecution(execution=f"e{number}", why="no longer"))

    @rule(number=st.integers(0, 6))
    def note(self, number: int) -> None:
        self.tell(m.ExecutionNoted(execution=f"e{number}"))

    @precondition(lambda self: self.to_do)
    @rule(pick=st.integers(0, 99), luck=st.integers(0, 5), score=st.floats(-1, 1))
    def obey(self, pick: int, luck: int, score: float) -> None:
        command = self.to_do.pop(pick % len(self.to_do))
        name = command.execution
        match command:
            case e.Prepare():
                bad = e.Broken(execution=name, outcome=Outcome.INFRA_FAILED, why="disk")
                self.tell(bad if luck == 0 else e.Prepared(execution=name))
            case e.Start():
                self.tell(e.Started(execution=name, pid=1))
            case e.ReadClock():
                self.tell(e.ClockRead(execution=name, waited_s=float(luck % 3), call_open=luck == 0))
            case e.StopHarness(now=now):
                if name in self.core.held and self.core.held[name].state is State.STOPPING and (now or luck):
                    self.tell(ended(name, -9 if now else -15))
            case e.Evaluate():
                self.score_of[name] = score
                verdict = ("failed", "hung", "no_artifact", "scored", "scored", "scored")[luck]
                self.tell(e.Evaluated(execution=name, verdict=verdict, score=score if verdict == "scored" else None))

    @rule(number=st.integers(0, 6), code=st.sampled_from([0, 0, 1, -9]))
    def harness_ends(self, number: int, code: int) -> None:
        held = self.core.held.get(f"e{number}")
        if held is not None and held.state in (State.RUNNING, State.STOPPING):
            self.tell(ended(f"e{number}", code))

    @rule(number=st.integers(0, 6))
    def takes_too_much(self, number: int) -> None:
        self.tell(e.OverQuota(execution=f"e{number}", why="9 MiB on disk"))

    @rule(step=st.floats(0.01, 3.0))
    def time_passes(self, step: float) -> None:
        self.now += step
        due = [a for a in self.alarms if a <= self.now]
        self.alarms = [a for a in self.alarms if a > self.now]
        for _ in due:
            self.tell(Tick())

    @invariant()
    def holds(self) -> None:
        self.core.check()
        assert all(times == 1 for times in self.settled.values())
        if self.core._due:  # nothing that is due is ever forgotten
            assert self.alarms and min(self.alarms) <= max(min(self.core._due.values()), self.now)

    def teardown(self) -> None:
        """Whatever happened, obedience and time bring every execution to its outcome."""
        for _ in range(3000):
            if all(h.state is State.REPORTED for h in self.core.held.values()):
                break
            if self.to_do:
                self.obey(0, 5, 0.5)
            else:
                for name, held in list(self.core.held.items()):
                    if held.state in (State.RUNNING, State.STOPPING):
                        self.tell(ended(name, -9))
                self.time_passes(2.0)
        assert set(self.settled) == self.ordered


TestExecutions = Executions.TestCase
TestExecutions.settings = settings(max_examples=40, stateful_step_count=60, deadline=None)
