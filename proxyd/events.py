"""What proxyd's shell tells its core and what the core answers. No tokens: counts only, so that a journal stays small.

Promise of the shell: each Submit is followed by exactly one SubmissionEnded of the same call and number, whatever
happens.
"""

from __future__ import annotations

from gyre_base.messages import message


@message("proxyd.call")
class CallArrived:
    """shell -> core: a request with a known prompt length. `budget` is how many tokens it may sample in all, `sampled`
    how many of them an earlier life has.
    """

    call: str
    execution: str
    prompt_tokens: int
    budget: int
    sampled: int = 0


@message("proxyd.ended")
class SubmissionEnded:
    """shell -> core. `how`: finished (answer complete), cut (tokens so far kept: aborted or engine gone), refused
    (4xx).

    `sampled` counts this submission's tokens; `lost` says that the engine, not the request, is at fault.
    """

    call: str
    number: int
    how: str
    sampled: int
    finish: str = ""
    lost: bool = False
    why: str = ""


@message("proxyd.dropped")
class CallDropped:
    """shell -> core: nobody has waited for this call for the grace time."""

    call: str


@message("proxyd.load")
class EngineLoad:
    """shell -> core: what an engine itself counts as running and waiting, ours included."""

    url: str
    work: int


@message("proxyd.restarted")
class Restarted:
    """shell -> core, first: a new life begins; open executions follow as `execution.open`. `held`: cells that a person
    drained in an earlier one.
    """

    life: int
    held: tuple[str, ...] = ()


@message("proxyd.submit")
class Submit:
    """core -> shell: send prompt and the `sampled` tokens so far to this engine. `rid` is ours and of fixed length."""

    call: str
    number: int
    rid: str
    cell: str
    url: str
    version: str
    sampled: int
    temperature: float


@message("proxyd.abort")
class Abort:
    """core -> shell: tell the engine to stop this submission; its last chunk brings the partial answer."""

    call: str
    number: int
    rid: str
    url: str


@message("proxyd.cut")
class Cut:
    """core -> shell: the engine does not obey; close the connection and report what came."""

    call: str
    number: int


@message("proxyd.finish")
class Finish:
    """core -> shell: the answer is complete. `waited_s` is time held by the infrastructure, `moved` its changes of
    engine.
    """

    call: str
    finish: str
    waited_s: float
    moved: int


@message("proxyd.refuse")
class Refuse:
    """core -> shell: no answer will come. `kind` is a dialect's failure kind."""

    call: str
    kind: str
    why: str
