"""What the shell tells the executor's core, and what the core answers, beside the messages of cellctl.

All are messages so that the journal can hold them; none of them crosses a socket.
"""

from __future__ import annotations

import dataclasses

from gyre_base.messages import message
from gyre_base.vocabulary import Outcome

# ---- shell -> core ------------------------------------------------------------------------------------------------


@message("exec.prepared")
class Prepared:
    """The workspace stands. `limit_s` is the task's own limit for the harness, if it has one."""

    execution: str
    limit_s: float | None = None


@message("exec.started")
class Started:
    """The harness process runs; its clock starts at `at` (0: when this is handled, which a busy loop may put off)."""

    execution: str
    pid: int
    at: float = 0.0


@message("exec.broken")
class Broken:
    """It could not start, and the agent had no part in it. `outcome` is infra_failed (try again) or unscored."""

    execution: str
    outcome: Outcome
    why: str


@message("exec.clock")
class ClockRead:
    """Answers `exec.read_clock`: what the relay knows of waits so far, and whether a call is open right now."""

    execution: str
    waited_s: float
    call_open: bool


@message("exec.quota")
class OverQuota:
    """Its disk or its processes are more than the run allows. `why` says what and how much."""

    execution: str
    why: str


@message("exec.ended")
class HarnessEnded:
    """The harness process and all its children are gone. `exit_code` is negative for a signal."""

    execution: str
    exit_code: int
    waited_s: float = 0.0
    calls: int = 0
    harness_errors: int = 0
    stderr_tail: str = ""
    at: float = 0.0  # as in `exec.started`


@message("exec.evaluated")
class Evaluated:
    """One run of the evaluator: `scored`, `no_artifact`, `failed` (crash or rubbish: may be tried again), `hung`, or
    `refused` (the task says that work which ran out of time can't be graded). `retry_budget` -1: the executor's.
    """

    execution: str
    verdict: str
    score: float | None = None
    parts: dict[str, float] = dataclasses.field(default_factory=dict)
    evaluator: str = ""
    version: str = ""
    error: str = ""
    retry_budget: int = -1


# ---- core -> shell ------------------------------------------------------------------------------------------------


@message("exec.prepare")
class Prepare:
    """Make the workspace. Answered by `exec.prepared` or `exec.broken`."""

    execution: str


@message("exec.start")
class Start:
    """Start the harness. Answered by `exec.started` or `exec.broken`, later by `exec.ended`."""

    execution: str


@message("exec.read_clock")
class ReadClock:
    """Ask the relay. Answered by `exec.clock` unless the harness has ended."""

    execution: str


@message("exec.stop")
class StopHarness:
    """Warn all its processes (TERM), or end them all if `now`."""

    execution: str
    now: bool


@message("exec.evaluate")
class Evaluate:
    """Run the evaluator once. Answered by `exec.evaluated`. `time_up`: by the ruler for partial work."""

    execution: str
    attempt: int
    time_up: bool = False


@message("exec.settle")
class Settle:
    """Write the outcome, let go of the workspace. No answer."""

    execution: str


@message("exec.forget")
class Forget:
    """cellctl has the outcome: nothing in memory is needed any more. No answer."""

    execution: str
