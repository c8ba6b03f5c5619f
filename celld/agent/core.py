"""The agent of one cell: which child should run, and in which order a switch happens. Pure.

The agent obeys orders whose epoch is newer than its own and answers every order, so that a repeated one does no
harm. A child
that dies takes the cell out: the fault is told, both children are brought up, and the cell reports that it serves
again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gyre_base import messages as m
from gyre_base.daemon import Send, Tick
from gyre_base.vocabulary import Role


@m.message("agent.start")
class Start:
    """shell -> core, first."""


@m.message("agent.child-up")
class ChildUp:
    """shell -> core: `child` ("engine" or "rank") answers. `version` = weights it holds; `url` of an engine."""

    child: str
    version: str
    url: str = ""


@m.message("agent.child-died")
class ChildDied:
    """shell -> core: a child ended without being asked."""

    child: str
    detail: str


@m.message("agent.switched")
class Switched:
    """shell -> core: the work of `Switch` is done; `version` = weights that the engine serves (rollout) or the rank
    has.
    """

    to: Role
    epoch: int
    version: str
    phases_s: dict[str, float]


@m.message("agent.switch-failed")
class SwitchFailed:
    """shell -> core: the work of `Switch` can't be done; `child` is to blame."""

    epoch: int
    child: str
    detail: str


@m.message("agent.switch-refused")
class SwitchRefused:
    """shell -> core: the work of `Switch` was not begun, because it can't end well; the engine serves as before."""

    epoch: int
    why: str


@m.message("agent.saved")
class Saved:
    """shell -> core: the rank wrote a checkpoint, in so many seconds (0: it was there)."""

    version: str
    path: str
    seconds: float = 0.0


@m.message("agent.welcomed")
class Welcomed:
    """shell -> core: cellctl knows us (again): tell it where we stand."""


@m.message("agent.launch")
class Launch:
    """core -> shell: start this child; its outcome is ChildUp or ChildDied."""

    child: str


@m.message("agent.end")
class End:
    """core -> shell: stop this child (its memory is given back by the kernel)."""

    child: str


@m.message("agent.switch")
class Switch:
    """core -> shell: do the steps of a switch; its outcome is Switched or SwitchFailed. `update_only` = engine never
    turned.
    """

    to: Role
    epoch: int
    version: str
    update_only: bool = False


@m.message("agent.save")
class Save:
    """core -> shell: have the rank write a checkpoint; its outcome is Saved."""

    why: str


CELLCTL = "cellctl:cellctl"


@dataclass
class Agent:
    """State of one cell's agent."""

    cell: str
    role: Role = Role.STARTING
    epoch: int = 0
    version: str = ""
    url: str = ""
    up: set[str] = field(default_factory=set)
    phases_s: dict[str, float] = field(default_factory=dict)
    faults: int = 0
    refused: str = ""  # why the last order to train was

    def handle(self, event: Any, now: float) -> list[Any]:
        match event:
            case Start():
                return [Launch(child="rank"), Launch(child="engine")]
            case ChildUp():
                return self._child_up(event)
            case ChildDied(child=child, detail=detail):
                return self._fault(child, detail)
            case m.FlipCell(to=to, epoch=epoch, version=version):
                return self._ordered(to, epoch, version, update_only=False)
            case m.UpdateEngine(epoch=epoch, version=version):
                return self._ordered(Role.ROLLOUT, epoch, version, update_only=True)
            case Switched() if event.epoch == self.epoch:
                self.role, self.version, self.phases_s = event.to, event.version, event.phases_s
                self.refused = ""
                return [self._report()]
            case SwitchFailed() if event.epoch == self.epoch:
                return self._fault(event.child, event.detail)
            case SwitchRefused() if event.epoch == self.epoch:
                self.role, self.refused = Role.ROLLOUT, event.why
                return [Send(CELLCTL, m.SwitchRefused(cell=self.cell, epoch=self.epoch, why=event.why)), self._report()]
            case m.SaveCheckpoint(why=why):
                return [Save(why=why)]
            case Saved(version=version, path=path, seconds=seconds):
                return [Send(CELLCTL, m.CheckpointSaved(version=version, path=path, seconds=seconds))]
            case Welcomed():
                return [self._report()] if self.role in (Role.ROLLOUT, Role.TRAIN) else []
            case Switched() | SwitchFailed() | SwitchRefused() | m.Welcome() | Tick():
                return []  # of an older epoch, or nothing to do
        raise RuntimeError(f"celld {self.cell}: unexpected {event!r} in role {self.role.value}")

    def _child_up(self, event: ChildUp) -> list[Any]:
        self.up.add(event.child)
        if event.child == "engine":
            self.version, self.url = event.version, event.url
        if self.up == {"engine", "rank"} and self.role is Role.STARTING:
            self.role = Role.ROLLOUT
            return [self._report()]
        return []

    def _fault(self, child: str, detail: str) -> list[Any]:
        """Out of the pool, everything up again, then serving: the same way back whatever broke."""
        self.up.discard(child)
        self.faults += 1
        self.role = Role.STARTING
        commands: list[Any] = [Send(CELLCTL, m.CellFault(cell=self.cell, what=child, detail=detail))]
        other = "rank" if child == "engine" else "engine"
        if other == "engine" and "engine" in self.up:  # its memory may be released half-way: a fresh one is sure
            self.up.discard("engine")
            commands.append(End(child="engine"))
            commands.append(Launch(child="engine"))
        return [*commands, Launch(child=child)]

    def _ordered(self, to: Role, epoch: int, version: str, *, update_only: bool) -> list[Any]:
        if epoch <= self.epoch:
            done = self.role in (Role.ROLLOUT, Role.TRAIN) and epoch == self.epoch
            return [self._report()] if done else []
        if self.role is Role.STARTING:
            return []  # cellctl hears from us when we are up; its order is repeated if it still wants it
        self.epoch = epoch
        self.role = Role.TO_TRAIN if to is Role.TRAIN else Role.TO_ROLLOUT
        return [Switch(to=to, epoch=epoch, version=version, update_only=update_only)]

    def _report(self) -> Send:
        return Send(
            CELLCTL,
            m.RoleChanged(
                cell=self.cell,
                role=self.role,
                epoch=self.epoch,
                version=self.version,
                engine_url=self.url,
                phases_s=self.phases_s,
            ),
        )
