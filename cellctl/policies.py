"""When cells turn and how much is dispatched: three policies behind one interface, the same objects live and simulated.

Pure: they look at a `View` and answer with decisions; a decision always carries its reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from gyre_base.vocabulary import Role


@dataclass(frozen=True, kw_only=True)
class CellView:
    """What a policy may know of a cell."""

    name: str
    role: Role
    slots: int


@dataclass(frozen=True, kw_only=True)
class View:
    """The state that decisions depend on. `cells` in fixed order, core first, without those that are down."""

    cells: tuple[CellView, ...]
    water_level: int
    step: int  # optimizer steps done
    burst_end: int  # step at which the burst ends
    steps_total: int
    steps_per_burst: int
    groups_per_batch: int
    groups_ready: int  # closed and packed, not yet trained
    groups_open: int  # dispatched, not closed

    def serving(self) -> list[CellView]:
        return [c for c in self.cells if c.role is Role.ROLLOUT]


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Turn `cell` to `to`, because of `why`."""

    cell: str
    to: Role
    why: str


class Policy(Protocol):
    """One way to share the cells."""

    name: str

    def groups_to_dispatch(self, view: View) -> int:
        """How many groups go out now; 0 inside a burst."""
        ...

    def turns(self, view: View) -> list[Decision]:
        """Cells that should start turning now."""
        ...


def _boundary_dispatch(view: View) -> int:
    """All groups of the next burst, at its boundary only: then the water level only falls within a burst."""
    if view.step < view.burst_end or view.groups_open or view.groups_ready:
        return 0
    steps = min(view.steps_per_burst, view.steps_total - view.step)
    return steps * view.groups_per_batch


def _all_back(view: View, why: str) -> list[Decision]:
    return [Decision(cell=c.name, to=Role.ROLLOUT, why=why) for c in view.cells if c.role is Role.TRAIN]


class Elastic:
    """Lend a cell as soon as the others can carry what is left (DESIGN 5; paper, water level)."""

    name = "elastic"

    def groups_to_dispatch(self, view: View) -> int:
        return _boundary_dispatch(view)

    def turns(self, view: View) -> list[Decision]:
        if view.step >= view.burst_end:
            return _all_back(view, f"burst ended at step {view.step}: serve the next groups")
        serving = view.serving()
        capacity = sum(c.slots for c in serving)
        decisions = []
        for cell in serving:
            if capacity - cell.slots < view.water_level:
                break
            capacity -= cell.slots
            why = f"water level {view.water_level} <= {capacity} slots of the cells that go on serving"
            decisions.append(Decision(cell=cell.name, to=Role.TRAIN, why=why))
        return decisions


class Colocate:
    """The whole pool serves, then the whole pool trains."""

    name = "colocate"

    def groups_to_dispatch(self, view: View) -> int:
        return _boundary_dispatch(view)

    def turns(self, view: View) -> list[Decision]:
        if view.step >= view.burst_end:
            return _all_back(view, f"burst ended at step {view.step}: the whole pool serves")
        if view.water_level > 0:
            return []
        why = "no execution is in flight: the whole pool trains"
        return [Decision(cell=c.name, to=Role.TRAIN, why=why) for c in view.serving()]


class Async:
    """Fixed pools: the core trains for ever, the others serve for ever; one batch of look-ahead bounds staleness."""

    name = "async"

    def groups_to_dispatch(self, view: View) -> int:
        in_pipeline = view.groups_open + view.groups_ready
        wanted = min(2, view.steps_total - view.step) * view.groups_per_batch
        return max(0, wanted - in_pipeline)

    def turns(self, view: View) -> list[Decision]:
        if not view.cells:
            return []
        core, *others = view.cells
        back = [
            Decision(cell=c.name, to=Role.ROLLOUT, why="serves for ever in the async policy")
            for c in others
            if c.role is Role.TRAIN
        ]
        if view.step >= view.steps_total and core.role is Role.TRAIN:
            return [*back, Decision(cell=core.name, to=Role.ROLLOUT, why="the last step is done")]
        work = view.groups_open or view.groups_ready
        if view.step < view.steps_total and core.role is Role.ROLLOUT and work:
            return [*back, Decision(cell=core.name, to=Role.TRAIN, why="trains for ever in the async policy")]
        return back


def make(name: str, cells: int) -> tuple[Policy, str]:
    """The policy and a sentence for people if it is not quite what was asked for."""
    if cells == 1 and name != "colocate":
        return Colocate(), f"{name} needs two cells to lend one: with one cell the whole pool switches"
    policies: dict[str, Policy] = {"elastic": Elastic(), "colocate": Colocate(), "async": Async()}
    return policies[name], ""
