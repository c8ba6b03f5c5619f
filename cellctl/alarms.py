"""What a person should look at: peers that went silent, peers that speak but get nothing done, and groups that come to
nothing one after the other. Pure.

A peer's alarm stands until it says hello again, or moves; that of the groups until one can be trained. `cellctl status`
shows it, with the file of the stacks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gyre_base import messages as m
from gyre_base.daemon import Send

if TYPE_CHECKING:
    from cellctl.core import Scheduler


@m.message("cellctl.stalled")
class PeerStalled:
    """shell -> core: this peer's heartbeats have told of work and of no progress for `seconds`."""

    kind: str
    name: str
    work: int
    seconds: float


@m.message("cellctl.moves")
class PeerMoves:
    """shell -> core: a stalled peer got something done."""

    kind: str
    name: str


@m.message("cellctl.stacks-kept")
class StacksKept:
    """shell -> core: what a stalled peer said of its stacks lies in `file` of the run directory."""

    peer: str
    file: str


GROUPS = "groups"  # whose alarm it is when no peer is to blame


@dataclass
class Alarm:
    """One peer's, or that of the groups. `stacks` is a file in the run directory, "" until there is one."""

    since: float
    what: str
    stacks: str = ""

    def row(self, peer: str, now: float) -> dict[str, Any]:
        since_s = round(now - self.since, 1)
        return {"alarm": peer, "what": self.what, "since_s": since_s, "stacks": self.stacks or "none"}


def silent(s: Scheduler, peer: str, why: str, now: float) -> None:
    s.alarms[peer] = Alarm(now, why)


def stalled(s: Scheduler, event: PeerStalled, now: float) -> None:
    """Noted, told in the cell's story, and the peer is asked for its stacks."""
    what = f"has {event.work} in hand and got nothing done for {event.seconds:.0f} s"
    s.alarms[f"{event.kind}:{event.name}"] = Alarm(now, what)
    if event.kind == "celld" and event.name in s.cells:
        s.cells[event.name].story.append(f"{now:.3f} stalled: {what}")
    s.say(Send(f"{event.kind}:{event.name}", m.DumpStacks()))


def barren(s: Scheduler, now: float) -> None:
    """A batch's worth of groups in a row had too few valid executions: they are replaced, and nothing will be trained
    until what fails them is mended. That is not retried away, so a person is told, with the last reason.
    """
    if s.barren_groups < s.rules.groups_per_batch:
        return
    what = f"{s.barren_groups} in a row had too few valid executions; the last that failed: {s.last_failure}"
    s.alarms[GROUPS] = Alarm(s.alarms[GROUPS].since if GROUPS in s.alarms else now, what)


def stacks_kept(s: Scheduler, event: StacksKept, now: float) -> None:
    if event.peer in s.alarms:
        s.alarms[event.peer].stacks = event.file


def moves(s: Scheduler, event: PeerMoves, now: float) -> None:
    s.alarms.pop(f"{event.kind}:{event.name}", None)
    if event.kind == "celld" and event.name in s.cells:
        s.cells[event.name].story.append(f"{now:.3f} moves again")
