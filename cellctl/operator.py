"""What a person may order. Each order is carried out or refused with the reason (exit code 4)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cellctl import executions, turning
from cellctl.policies import Decision, Pause
from cellctl.roles import Cell
from gyre_base import messages as m
from gyre_base.daemon import Send
from gyre_base.vocabulary import Role

if TYPE_CHECKING:
    from cellctl.core import Scheduler


def obey(scheduler: Scheduler, order: m.OperatorOrder, now: float) -> m.Done | m.Refused:
    """Carry out or refuse. Unknown verbs are refused by name."""
    match order.verb:
        case "freeze":
            scheduler.frozen = True
            return m.Done(note="no dispatch and no turn until `cellctl thaw`")
        case "thaw":
            scheduler.frozen = False
            return m.Done(note="dispatching and turning again")
        case "flip":
            return _flip(scheduler, order.argument, order.options.get("to", ""), now)
        case "drain":
            return _drain(scheduler, order.argument, order.options, now)
        case "undrain":
            return _undrain(scheduler, order.argument, now)
        case "pause" | "resume":
            return _pause(scheduler, order.argument, paused=order.verb == "pause")
    return m.Refused(why=f"no order is called {order.verb!r}: freeze, thaw, flip, drain, undrain, pause, resume")


def _pause(scheduler: Scheduler, name: str, *, paused: bool) -> m.Done | m.Refused:
    """Hold one execution's calls, or let them go on. A policy that pauses may decide otherwise at the next event."""
    if executions.pause(scheduler, Pause(execution=name, paused=paused, why="by order of the operator")):
        held = "its calls are held, its limit stands still" if paused else "its calls are served again"
        return m.Done(note=f"{name}: {held}")
    record = scheduler.ledger.in_flight.get(name)
    if record is None:
        return m.Refused(why=f"no execution in flight is called {name!r}; `proxyd sessions` lists them")
    if record.calls_no_more:
        return m.Refused(why=f"the harness of {name} has ended; it is being scored")
    return m.Refused(why=f"{name} is paused: {record.paused}" if record.paused else f"{name} is not paused")


def _drain(scheduler: Scheduler, name: str, options: dict[str, str], now: float) -> m.Done | m.Refused:
    """Take a serving cell out for good: its calls move, then nothing of the run is left on it. `reason` is kept in its
    story; the only cell that serves what is in flight goes only by `force`.
    """
    cell = scheduler.cells.get(name)
    if cell is None:
        return m.Refused(why=f"no cell is called {name!r}: {', '.join(scheduler.cells)}")
    if name in scheduler.job.drained:
        return m.Done(note=f"{name} is {cell.role.value}: {cell.reason}")
    if cell.order == 0:
        return m.Refused(why=f"{name} is the core: it owns weights and optimizer; stop the run instead")
    if cell.role is not Role.ROLLOUT:
        return m.Refused(why=f"{name} is {cell.role.value}; only a cell that serves can be drained: try again then")
    tight = _too_little_without(scheduler, cell)
    others = [c for c in scheduler.cells.values() if c.serves and c is not cell]
    if tight and not others and not options.get("force"):
        return m.Refused(
            why=f"{name} is the only cell that serves, {tight}; wait, or --force: a training cell comes back"
        )
    scheduler.job.drained.add(name)
    cell.epoch += 1
    reason = f": {options['reason']}" if options.get("reason") else ""
    turning.become(scheduler, cell, Role.TO_ROLLOUT, now, f"drains by order of the operator{reason}")
    turning.drain(scheduler, cell, now)
    note = f"{name} drains; when it is down its node can be given back"
    return m.Done(note=f"{note} ({tight}: they share them)" if tight else note)


def _undrain(scheduler: Scheduler, name: str, now: float) -> m.Done | m.Refused:
    """Take a drained cell back: it loads the newest weights and serves."""
    cell = scheduler.cells.get(name)
    if cell is None or name not in scheduler.job.drained:
        return m.Refused(why=f"{name} is not drained; drained: {', '.join(sorted(scheduler.job.drained)) or 'none'}")
    if cell.role is not Role.DOWN:
        return m.Refused(why=f"{name} still drains; try again when it is down")
    scheduler.job.drained.discard(name)
    cell.epoch += 1
    turning.become(scheduler, cell, Role.STARTING, now, "taken back by order of the operator")
    order = m.UpdateEngine(cell=name, epoch=cell.epoch, version=str(scheduler.version))
    scheduler.promises.keep(f"flip:{name}", Send(f"celld:{name}", order), now)
    return m.Done(note=f"{name} loads {scheduler.version} and serves again")


def _too_little_without(scheduler: Scheduler, cell: Cell) -> str:
    """Why the executions in flight need this cell, in numbers; "" if they do not."""
    rest = sum(c.slots for c in scheduler.cells.values() if c.serves and c is not cell)
    level = scheduler.ledger.level()
    return f"the water level is {level}, the other cells have {rest} slots" if rest < level else ""


def _flip(scheduler: Scheduler, name: str, to: str, now: float) -> m.Done | m.Refused:
    cell = scheduler.cells.get(name)
    if cell is None:
        return m.Refused(why=f"no cell is called {name!r}: {', '.join(scheduler.cells)}")
    if to not in (Role.TRAIN.value, Role.ROLLOUT.value):
        return m.Refused(why="say --to train or --to rollout")
    wanted = Role(to)
    origin = Role.ROLLOUT if wanted is Role.TRAIN else Role.TRAIN
    if cell.role is not origin:
        return m.Refused(why=f"{name} is {cell.role.value}; only a cell in {origin.value} can turn to {to}")
    if wanted is Role.TRAIN and (why := _too_little_without(scheduler, cell)):
        return m.Refused(why=why)
    scheduler.turn(Decision(cell=name, to=wanted, why="by order of the operator"), now)
    return m.Done(note=f"{name} turns to {to}")
