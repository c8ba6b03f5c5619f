"""The lives of executions: ordered -> prepared -> running -> ended or time up -> scored -> reported -> noted.

Pure. Owns concurrency, clocks, retries of evaluators and the typing of outcomes; never touches a process or a file.
Three clocks: the harness's limit (its task's own if shorter), which moves by what the infrastructure made it wait; the
overall limit, which does not move, and when it ends a harness that had time left the failure is ours; the evaluator's.
Invariants (`check`): at most `slots` harnesses and `evaluators` evaluators at once; an execution leaves only when
cellctl has noted its outcome; a failure of ours never becomes a score.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from gyre_base import messages as m
from gyre_base.daemon import Tick, WakeAt
from gyre_base.ids import is_safe_name
from gyre_base.vocabulary import Outcome
from gyre_exec import events as e

REMEMBERED = 20_000  # noted executions whose late orders are still recognised
ERROR_CHARS = 2_000
EARLY_S = 0.05  # a timer may come due a little before the time it was set for; it is then set again
SIGKILL = -9


class State(str, Enum):
    """Where an execution stands."""

    QUEUED = "queued"
    PREPARING = "preparing"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    ENDED = "ended"  # waits for an evaluator slot
    SCORING = "scoring"
    REPORTED = "reported"


ACTIVE = frozenset({State.PREPARING, State.STARTING, State.RUNNING, State.STOPPING})
EXPECTED: dict[type, frozenset[State]] = {
    e.Prepared: frozenset({State.PREPARING}),
    e.Started: frozenset({State.STARTING}),
    e.Broken: frozenset({State.PREPARING, State.STARTING}),
    e.HarnessEnded: frozenset({State.RUNNING, State.STOPPING}),
    e.Evaluated: frozenset({State.SCORING}),
}


class Unexpected(AssertionError):
    """An event that this state does not allow: a bug in the shell. Carries the execution's story."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Numbers of one executor."""

    slots: int  # harnesses at once
    evaluators: int = 2  # evaluator processes at once
    evaluator_retries: int = 1  # further tries after a crash or rubbish
    grace_s: float = 3.0  # between TERM and KILL
    overall_limit_s: float = 86_400.0  # from the start of the harness, waits included
    resend_s: float = 5.0  # outcome said again until noted
    open_call_s: float = 60.0  # a call open at the limit is waited for at most so long: only its answer tells its wait


@dataclass
class Held:
    """One execution here."""

    order: m.ExecutionOrder
    state: State = State.QUEUED
    limit_s: float = 0.0  # of the harness: the run's or the task's own, whichever is shorter
    started_at: float = 0.0
    wall_s: float = 0.0
    time_up: bool = False
    quota: str = ""  # why it was ended although it had time left
    overdue: str = ""  # why it was ended although its own time was not up
    cancelled: str | None = None
    end: e.HarnessEnded | None = None
    tries: int = 0
    outcome: m.ExecutionFinished | None = None
    story: list[str] = field(default_factory=list)


class ExecutorCore:
    """`handle` is the only entry. `held` may be read by the shell."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.held: dict[str, Held] = {}
        self.finished: dict[str, int] = {}
        self._queue: deque[str] = deque()
        self._to_score: deque[str] = deque()
        self._active = 0
        self._scoring = 0
        self._due: dict[str, float] = {}
        self._wake_at: float | None = None
        self._noted: OrderedDict[str, None] = OrderedDict()
        self._out: list[Any] = []

    # ---- entry ----------------------------------------------------------------------------------------------------

    def handle(self, event: Any, now: float) -> list[Any]:
        """One event in, commands out. Raises Unexpected on an event that can't be."""
        self._out = []
        match event:
            case m.ExecutionOrder():
                self._order(event)
            case m.CancelExecution():
                self._cancel(event, now)
            case m.ExecutionNoted():
                self._note(event)
            case m.Welcome():  # cellctl is another one, or back: what it may have missed
                self._out += [said for h in self.held.values() if (said := self._known_end(h)) is not None]
            case Tick():
                self._tick(now)
            case e.ClockRead():
                self._clock(event, now)
            case e.OverQuota():
                self._over_quota(event, now)
            case e.Prepared() | e.Started() | e.Broken() | e.HarnessEnded() | e.Evaluated():
                self._progress(event, self._expected(event), now)
            case _:
                raise Unexpected(f"executor: no rule for {event!r}")
        self._fill()
        self._set_alarm(now)
        return self._out

    def _known_end(self, held: Held) -> m.ExecutionFinished | m.ExecutionEnded | None:
        if held.state in (State.ENDED, State.SCORING):
            return m.ExecutionEnded(execution=held.order.execution)
        return held.outcome

    def _expected(self, event: Any) -> Held:
        held = self.held.get(event.execution)
        if held is None or held.state not in EXPECTED[type(event)]:
            story = held.story if held else "not held here"
            raise Unexpected(f"executor: {event!r} does not fit: {story}")
        return held

    def _progress(self, event: Any, held: Held, now: float) -> None:
        match event:
            case e.Prepared():
                self._prepared(held, event, now)
            case e.Started():
                self._started(held, event, now)
            case e.Broken():
                self._report(held, event.outcome, now, error=event.why)
            case e.HarnessEnded():
                self._ended(held, event, now)
            case e.Evaluated():
                self._evaluated(held, event, now)

    # ---- orders of cellctl ----------------------------------------------------------------------------------------

    def _order(self, order: m.ExecutionOrder) -> None:
        name = order.execution
        if name in self._noted:
            return
        held = self.held.get(name)
        if held is not None:
            if held.outcome is not None:
                self._out.append(held.outcome)
            return
        if not is_safe_name(name):
            why = f"{name!r} can't be the name of an execution"
            self._out.append(m.ExecutionFinished(execution=name, outcome=Outcome.UNSCORED, error=why))
            return
        self.held[name] = Held(order=order, story=["ordered"])
        self._queue.append(name)

    def _cancel(self, event: m.CancelExecution, now: float) -> None:
        held = self.held.get(event.execution)
        if held is None:
            if event.execution not in self._noted:
                why = f"{event.why} (not held here)"
                self._out.append(m.ExecutionFinished(execution=event.execution, outcome=Outcome.CANCELLED, error=why))
            return
        if held.state is State.REPORTED or held.cancelled is not None:
            return
        held.cancelled = event.why
        held.story.append(f"cancelled: {event.why}")
        match held.state:
            case State.QUEUED:
                self._queue.remove(event.execution)
                self._report(held, Outcome.CANCELLED, now, error=event.why)
            case State.ENDED:
                self._to_score.remove(event.execution)
                self._report(held, Outcome.CANCELLED, now, error=event.why)
            case State.RUNNING:
                self._stop(held, now)
            case _:  # on its way: the next event finds the mark
                pass

    def _note(self, event: m.ExecutionNoted) -> None:
        held = self.held.get(event.execution)
        if held is None or held.state is not State.REPORTED:
            return  # said to every executor, or about an attempt that was replaced
        del self.held[event.execution]
        self._due.pop(event.execution, None)
        self._noted[event.execution] = None
        while len(self._noted) > REMEMBERED:
            self._noted.popitem(last=False)
        self._out.append(e.Forget(execution=event.execution))

    # ---- life -----------------------------------------------------------------------------------------------------

    def _move(self, held: Held, to: State) -> None:
        self._active += (to in ACTIVE) - (held.state in ACTIVE)
        self._scoring += (to is State.SCORING) - (held.state is State.SCORING)
        held.state = to
        held.story.append(to.value)
        self._due.pop(held.order.execution, None)

    def _prepared(self, held: Held, event: e.Prepared, now: float) -> None:
        if held.cancelled is not None:
            self._report(held, Outcome.CANCELLED, now, error=held.cancelled)
            return
        held.limit_s = min(held.order.limit_s, event.limit_s or held.order.limit_s)
        self._move(held, State.STARTING)
        self._out.append(e.Start(execution=held.order.execution))

    def _started(self, held: Held, event: e.Started, now: float) -> None:
        self._move(held, State.RUNNING)
        held.started_at = event.at or now
        self._due[held.order.execution] = held.started_at + min(held.limit_s, self.limits.overall_limit_s)
        if held.cancelled is not None:
            self._stop(held, now)

    def _stop(self, held: Held, now: float) -> None:
        self._move(held, State.STOPPING)
        self._due[held.order.execution] = now + self.limits.grace_s
        self._out.append(e.StopHarness(execution=held.order.execution, now=False))

    def _clock(self, event: e.ClockRead, now: float) -> None:
        """The limit came. Waits of the infrastructure are credited; an open call may still tell of one."""
        held = self.held.get(event.execution)
        if held is None or held.state is not State.RUNNING:
            return  # it ended while the relay was asked
        limit = held.started_at + held.limit_s + event.waited_s
        overall = held.started_at + self.limits.overall_limit_s
        patience = min(self.limits.open_call_s, held.limit_s)
        if overall <= now < limit:
            held.overdue = f"after {now - held.started_at:.0f} s, {event.waited_s:.0f} s of them waiting for us"
            self._stop(held, now)
        elif now < limit:
            self._due[event.execution] = min(limit, overall)
        elif event.call_open and now < limit + patience:
            self._due[event.execution] = now + min(1.0, patience / 4)
        else:
            held.time_up = True
            self._stop(held, now)

    def _over_quota(self, event: e.OverQuota, now: float) -> None:
        held = self.held.get(event.execution)
        if held is not None and held.state is State.RUNNING:
            held.time_up, held.quota = True, event.why
            self._stop(held, now)

    def _ended(self, held: Held, event: e.HarnessEnded, now: float) -> None:
        held.end = event
        held.wall_s = (event.at or now) - held.started_at
        if held.cancelled is not None:
            self._report(held, Outcome.CANCELLED, now, error=held.cancelled)
            return
        if held.overdue:
            self._report(held, Outcome.INFRA_FAILED, now, error=f"the overall limit ended it {held.overdue}")
            return
        fault = None if held.time_up else fault_of_ours(event)
        if fault is not None:
            self._report(held, Outcome.INFRA_FAILED, now, error=fault)
            return
        self._move(held, State.ENDED)
        self._to_score.append(event.execution)
        self._out.append(m.ExecutionEnded(execution=event.execution))

    def _evaluated(self, held: Held, event: e.Evaluated, now: float) -> None:
        if held.cancelled is not None:
            self._report(held, Outcome.CANCELLED, now, error=held.cancelled)
        elif event.verdict == "failed" and held.tries <= self._retries(event):
            held.tries += 1
            held.story.append(f"evaluator try {held.tries}")
            self._out.append(e.Evaluate(execution=event.execution, attempt=held.tries, time_up=held.time_up))
        elif event.verdict == "scored":
            self._report(held, Outcome.PARTIAL if held.time_up else Outcome.SCORED, now, verdict=event)
        elif event.verdict == "no_artifact":
            self._report(held, Outcome.NO_ARTIFACT, now, verdict=event)
        elif event.verdict == "refused":
            self._report(held, Outcome.UNSCORED, now, verdict=event)
        else:
            self._report(held, Outcome.EVALUATOR_FAILED, now, verdict=event)

    def _retries(self, event: e.Evaluated) -> int:
        return event.retry_budget if event.retry_budget >= 0 else self.limits.evaluator_retries

    def _report(
        self, held: Held, outcome: Outcome, now: float, *, error: str = "", verdict: e.Evaluated | None = None
    ) -> None:
        name = held.order.execution
        end = held.end or e.HarnessEnded(execution=name, exit_code=0)
        score = None
        if verdict is not None and outcome.counts:
            score = 0.0 if outcome is Outcome.NO_ARTIFACT else verdict.score
        held.outcome = m.ExecutionFinished(
            execution=name,
            outcome=outcome,
            score=score,
            parts=verdict.parts if verdict and outcome.counts else {},
            evaluator=verdict.evaluator if verdict else "",
            evaluator_version=verdict.version if verdict else "",
            error=((verdict.error if verdict else error) or held.quota)[:ERROR_CHARS],
            exit_code=end.exit_code if held.end else None,
            wall_s=round(held.wall_s, 4),
            waited_s=round(end.waited_s, 4),
            calls=end.calls,
            harness_errors=end.harness_errors,
        )
        self._move(held, State.REPORTED)
        self._due[name] = now + self.limits.resend_s
        self.finished[outcome.value] = self.finished.get(outcome.value, 0) + 1
        self._out += [e.Settle(execution=name), held.outcome]

    # ---- slots and time -------------------------------------------------------------------------------------------

    def _fill(self) -> None:
        while self._queue and self._active < self.limits.slots:
            held = self.held[self._queue.popleft()]
            self._move(held, State.PREPARING)
            self._out.append(e.Prepare(execution=held.order.execution))
        while self._to_score and self._scoring < self.limits.evaluators:
            held = self.held[self._to_score.popleft()]
            self._move(held, State.SCORING)
            held.tries = 1
            self._out.append(e.Evaluate(execution=held.order.execution, attempt=1, time_up=held.time_up))

    def _tick(self, now: float) -> None:
        if self._wake_at is not None and now >= self._wake_at - EARLY_S:
            self._wake_at = None
        for name in [n for n, at in self._due.items() if at <= now]:
            held = self.held[name]
            match held.state:
                case State.RUNNING:
                    self._due[name] = now + self.limits.resend_s
                    self._out.append(e.ReadClock(execution=name))
                case State.STOPPING:
                    self._due[name] = now + self.limits.grace_s
                    self._out.append(e.StopHarness(execution=name, now=True))
                case State.REPORTED:
                    self._due[name] = now + self.limits.resend_s
                    assert held.outcome is not None
                    self._out.append(held.outcome)
                case _:
                    raise Unexpected(f"executor: a timer in state {held.state.value}: {held.story}")

    def _set_alarm(self, now: float) -> None:
        """One alarm for the earliest due time; a later one that is already set stays and does no harm."""
        if not self._due:
            return
        earliest = max(min(self._due.values()), now)
        if self._wake_at is None or earliest < self._wake_at:
            self._wake_at = earliest
            self._out.append(WakeAt(at=earliest))

    # ---- views ----------------------------------------------------------------------------------------------------

    def holds(self) -> tuple[str, ...]:
        """Everything that cellctl has not noted."""
        return tuple(self.held)

    def counts(self) -> dict[str, int]:
        out = dict.fromkeys((s.value for s in State), 0)
        for held in self.held.values():
            out[held.state.value] += 1
        return out

    def check(self) -> None:
        """The invariants, for tests."""
        by_state = self.counts()
        assert self._active == sum(by_state[s.value] for s in ACTIVE) <= self.limits.slots
        assert self._scoring == by_state["scoring"] <= self.limits.evaluators
        assert by_state["queued"] == len(self._queue) and by_state["ended"] == len(self._to_score)
        assert all((h.outcome is not None) == (h.state is State.REPORTED) for h in self.held.values())
        timed = (State.RUNNING, State.STOPPING, State.REPORTED)
        assert {n for n, h in self.held.items() if h.state in timed} == set(self._due)


def fault_of_ours(end: e.HarnessEnded) -> str | None:
    """Why this end says nothing about the agent, or None if it may be scored."""
    if end.exit_code == 0:
        return None
    tail = f": {end.stderr_tail}" if end.stderr_tail else ""
    if end.exit_code == SIGKILL:
        return f"the harness was killed from outside (out of memory?){tail}"
    if end.harness_errors:
        return f"the harness gave up (exit code {end.exit_code}) after {end.harness_errors} errors of ours{tail}"
    if end.calls == 0:
        return f"the harness ended with exit code {end.exit_code} before its first answered call{tail}"
    return None
