"""Cells as the scheduler turns them: drained, flipped, updated, gone and back. Functions of the scheduler's state.

Which change of role is legal stands in roles.py, when to turn in policies.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cellctl import policies
from cellctl.roles import Cell
from gyre_base import messages as m
from gyre_base.daemon import Send
from gyre_base.ids import PolicyVersion
from gyre_base.shards import ALL, proxyd_peer
from gyre_base.vocabulary import Role

if TYPE_CHECKING:
    from cellctl.core import Scheduler


def become(s: Scheduler, cell: Cell, role: Role, now: float, why: str) -> None:
    s.changes += 1
    cell.become(role, now, why)


def turn(s: Scheduler, decision: policies.Decision, now: float) -> None:
    cell = s.cells[decision.cell]
    cell.epoch += 1
    cell.switches += 1
    s.totals["switches"] += 1
    if decision.to is Role.TRAIN:
        become(s, cell, Role.TO_TRAIN, now, decision.why)
        drain(s, cell, now)
    else:
        become(s, cell, Role.TO_ROLLOUT, now, decision.why)
        flip(s, cell, Role.ROLLOUT, now)


def drain(s: Scheduler, cell: Cell, now: float) -> None:
    """Every shard moves its own calls; the cell turns when the last one has said so."""
    publish_engines(s)
    order = m.DrainCell(cell=cell.name, epoch=cell.epoch)
    for shard in range(s.config.proxyd.shards):
        cell.undrained.add(shard)
        s.promises.keep(_drain_key(cell, shard), Send(proxyd_peer(shard), order), now)


def _drain_key(cell: Cell, shard: int) -> str:
    return f"drain:{cell.name}:{shard}"


def drain_no_more(s: Scheduler, cell: Cell) -> None:
    """Nobody is asked any longer; what they answer is of an order that is over."""
    for shard in cell.undrained:
        s.promises.answered(_drain_key(cell, shard))
    cell.undrained.clear()


def flip(s: Scheduler, cell: Cell, to: Role, now: float) -> None:
    version = str(s.version) if to is Role.ROLLOUT else ""
    order = m.FlipCell(cell=cell.name, to=to, epoch=cell.epoch, version=version)
    s.promises.keep(f"flip:{cell.name}", Send(f"celld:{cell.name}", order), now)


def drained(s: Scheduler, event: m.CellDrained, now: float) -> None:
    cell = s.cells.get(event.cell)
    if cell is None or event.epoch != cell.epoch or event.shard not in cell.undrained:
        return
    cell.undrained.discard(event.shard)
    s.promises.answered(_drain_key(cell, event.shard))
    cell.moved += event.moved
    s.totals["moved"] += event.moved
    s.totals["moved_mid_generation"] += event.moved_mid_generation
    if cell.draining:
        return
    if cell.name in s.job.drained:
        cell_down(s, cell, now, "drained by order of the operator: its node may be given back")
    elif cell.role is Role.TO_TRAIN:
        flip(s, cell, Role.TRAIN, now)
    elif cell.role is Role.TO_ROLLOUT:
        order = m.UpdateEngine(cell=cell.name, epoch=cell.epoch, version=str(s.version))
        s.promises.keep(f"flip:{cell.name}", Send(f"celld:{cell.name}", order), now)


def role_changed(s: Scheduler, event: m.RoleChanged, now: float) -> None:
    cell = s.cells.get(event.cell)
    fresh = cell is not None and cell.role in (Role.STARTING, Role.DOWN)
    if cell is None or cell.name in s.job.out() or (event.epoch < cell.epoch and not fresh):
        return
    if cell.role is Role.DOWN:
        become(s, cell, Role.STARTING, now, "its agent is back")
    s.promises.answered(f"flip:{cell.name}")
    if cell.order == 0 and event.version:
        core_version(s, PolicyVersion.parse(event.version))
    if cell.role in (Role.TO_TRAIN, Role.TO_ROLLOUT):
        s.switch_times.append(
            {"cell": cell.name, "to": event.role.value, "seconds": now - cell.since, "phases_s": event.phases_s}
        )
    arrived_late = cell.role is Role.STARTING
    cell.refused = "" if arrived_late else cell.refused
    cell.epoch, cell.phases_s = max(cell.epoch, event.epoch), event.phases_s
    if event.role is Role.ROLLOUT:
        cell.version, cell.url = event.version, event.engine_url
        s.changes += 1
        if cell.role is not Role.ROLLOUT:
            become(s, cell, Role.ROLLOUT, now, f"serves {event.version}")
    elif arrived_late:  # an agent that trains although we restarted: take it back into the order of things
        become(s, cell, Role.ROLLOUT, now, "found in training after a restart")
        become(s, cell, Role.TO_TRAIN, now, "found in training after a restart")
        become(s, cell, Role.TRAIN, now, "found in training after a restart")
    elif cell.role is not Role.TRAIN:
        become(s, cell, Role.TRAIN, now, cell.reason)
    publish_engines(s)


def core_version(s: Scheduler, version: PolicyVersion) -> None:
    """The core's word on the newest weights: it goes back in steps only together with a new lineage."""
    if version.lineage > s.version.lineage:
        s.version = version
        s.burst_end = max(s.burst_end, version.step)


def cell_down(s: Scheduler, cell: Cell, now: float, why: str) -> None:
    if cell.role is Role.DOWN:
        return
    drain_no_more(s, cell)
    become(s, cell, Role.DOWN, now, why)
    s.promises.answered(f"flip:{cell.name}")
    publish_engines(s)


def cell_fault(s: Scheduler, event: m.CellFault, now: float) -> None:
    cell = s.cells.get(event.cell)
    if cell is not None and cell.name not in s.job.out():
        cell_down(s, cell, now, f"{event.what}: {event.detail}")
        become(s, cell, Role.STARTING, now, f"its agent restarts the {event.what}")


def switch_refused(s: Scheduler, event: m.SwitchRefused, now: float) -> None:
    """It would not fit. The cell serves on and is not asked again, until another agent of it may know better."""
    cell = s.cells.get(event.cell)
    if cell is None or event.epoch != cell.epoch or cell.role is not Role.TO_TRAIN:
        return
    cell.refused = event.why
    s.promises.answered(f"flip:{cell.name}")
    become(s, cell, Role.ROLLOUT, now, f"its agent refuses to train: {event.why}")
    publish_engines(s)


def engine_lost(s: Scheduler, event: m.EngineLost, now: float) -> None:
    """proxyd has moved the calls; the agent watches its own engine and says so itself: here only the reason is
    kept.
    """
    cell = s.cells.get(event.cell)
    if cell is not None:
        cell.story.append(f"{now:.3f} proxyd lost {event.url}: {event.why}")


def publish_engines(s: Scheduler) -> None:
    s.table_number += 1
    engines = tuple(
        m.Engine(cell=c.name, url=c.url, version=c.version, order=c.order, slots=c.slots, serving=c.serves)
        for c in s.cells.values()
        if c.url
    )
    s.say(Send(ALL, m.EngineTable(number=s.table_number, engines=engines)))


def update_one_engine(s: Scheduler, now: float) -> None:
    """Engines that never turned load the newest weights one at a time, by the drain path, at a burst's end."""
    if s.engines_checked == (s.changes, s.boundary):
        return
    s.engines_checked = (s.changes, s.boundary)
    if any(c.role is Role.TO_ROLLOUT for c in s.cells.values()):
        return
    for cell in s.cells.values():
        if cell.role is Role.ROLLOUT and PolicyVersion.parse(cell.version) < s.boundary:
            cell.epoch += 1
            become(s, cell, Role.TO_ROLLOUT, now, f"never turned: loads {s.version} (had {cell.version})")
            drain(s, cell, now)
            return
