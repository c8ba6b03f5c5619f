"""When cells turn and how much is dispatched: three policies behind one interface, the same objects live and simulated.

Pure: they look at a `View` and answer with decisions; a decision always carries its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from gyre_base.vocabulary import Purpose, Role


@dataclass(frozen=True, kw_only=True)
class CellView:
    """What a policy may know of a cell. A standalone cell only ever serves."""

    name: str
    role: Role
    slots: int
    standalone: bool = False


@dataclass(frozen=True)
class Pool:
    """The cells that are up, in fixed order, core first, with the sums that every event needs. Made once per change
    of a role.
    """

    cells: tuple[CellView, ...]
    serving: tuple[CellView, ...]
    training: tuple[CellView, ...]
    capacity: int  # slots of the cells that serve
    standalone_slots: int  # of these, slots that never leave

    @classmethod
    def of(cls, cells: Iterable[CellView]) -> Pool:
        every = tuple(cells)
        serving = tuple(c for c in every if c.role is Role.ROLLOUT)
        return cls(
            cells=every,
            serving=serving,
            training=tuple(c for c in every if c.role is Role.TRAIN),
            capacity=sum(c.slots for c in serving),
            standalone_slots=sum(c.slots for c in serving if c.standalone),
        )


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What does not change in a run."""

    steps_total: int
    steps_per_burst: int
    groups_per_batch: int
    group_size: int = 1
    look_ahead: int = -1  # groups in the pipeline beyond the burst's own; -1 = the policy's own number
    staleness_bound: int = 0  # steps of older work that a dispatch may queue behind; 0 = no bound
    streaming: bool = True  # train groups as they come instead of whole bursts
    async_train_cells: int = 1
    tail_load: float = 1.0  # executions per slot that the last serving cell may carry
    head_start: int = 0  # groups of the next burst that go out before this one's last step


@dataclass(frozen=True)
class View:
    """The state that decisions depend on."""

    rules: Rules
    pool: Pool
    water_level: int
    step: int  # optimizer steps done
    burst_end: int  # step at which the burst ends
    groups_ready: int  # closed and packed, not yet trained
    groups_open: int  # dispatched, not closed

    @property
    def in_pipeline(self) -> int:
        return self.groups_open + self.groups_ready

    def bounded(self, groups: int) -> int:
        """How many groups may go out if `groups` are wanted in the pipeline: never beyond the run's end or the
        staleness bound.
        """
        wanted = min(groups, (self.rules.steps_total - self.step) * self.rules.groups_per_batch)
        if self.rules.staleness_bound:
            wanted = min(wanted, (self.rules.staleness_bound + 1) * self.rules.groups_per_batch)
        return max(0, wanted - self.in_pipeline)


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Turn `cell` to `to`, because of `why`."""

    cell: str
    to: Role
    why: str


@dataclass(frozen=True, kw_only=True)
class ExecutionView:
    """What a policy may know of an execution that still calls."""

    name: str
    task: str
    group: str
    purpose: Purpose
    dispatched_at: float
    paused: bool


@dataclass(frozen=True, kw_only=True)
class Pause:
    """Hold the calls of `execution` from now on, or with `paused` False let them go on, because of `why`."""

    execution: str
    paused: bool
    why: str


class Policy(Protocol):
    """One way to share the cells. It is asked after every event, so it may move any cell in either direction and pause
    any execution in the middle of a burst.
    """

    name: str
    replaces: bool  # its dispatch looks at the pipeline, where a group with too few valid executions is missing already

    def groups_to_dispatch(self, view: View) -> int:
        """How many groups go out now; 0 inside a burst."""
        ...

    def burst_steps(self, view: View, dispatched: int) -> int:
        """How many steps the burst that begins now has; 0 = it can't begin yet."""
        ...

    def turns(self, view: View) -> list[Decision]:
        """Cells that should start turning now."""
        ...

    def pauses(self, view: View, in_flight: Callable[[], list[ExecutionView]]) -> list[Pause]:
        """Executions to pause or to let go on; asked before `turns`, whose water level counts no paused ones.

        `in_flight` makes the list when it is called: a rule that needs none costs nothing.
        """
        ...


class _LetsAllRun:
    """The rule of the paper and its baselines: an execution is never paused."""

    def pauses(self, view: View, in_flight: Callable[[], list[ExecutionView]]) -> list[Pause]:
        return []


class _Bursts(_LetsAllRun):
    """Dispatch at burst boundaries only: then the water level only falls within a burst. A head start is the exception
    that was asked for: some groups of the next burst go out one step early, if anybody serves them by then.
    """

    replaces = False

    def groups_to_dispatch(self, view: View) -> int:
        rules, ahead = view.rules, max(0, view.rules.look_ahead)
        if view.step < view.burst_end:
            starts = rules.head_start and view.step == view.burst_end - 1 and view.pool.serving
            return view.bounded(rules.groups_per_batch + ahead + rules.head_start) if starts else 0
        if view.in_pipeline and not (ahead or rules.head_start):
            return 0
        return view.bounded(rules.steps_per_burst * rules.groups_per_batch + ahead)

    def burst_steps(self, view: View, dispatched: int) -> int:
        if dispatched or (view.in_pipeline and (view.rules.look_ahead > 0 or view.rules.head_start)):
            return min(view.rules.steps_per_burst, view.rules.steps_total - view.step)
        return 0


def _back(cells: Iterable[CellView], why: str) -> list[Decision]:
    return [Decision(cell=c.name, to=Role.ROLLOUT, why=why) for c in cells]


class Elastic(_Bursts):
    """Lend a cell as soon as the others can carry what is left (DESIGN 5; paper, water level)."""

    name = "elastic"

    def turns(self, view: View) -> list[Decision]:
        if view.step >= view.burst_end:
            stays = self._core_stays(view)
            returning = view.pool.training[1:] if stays else view.pool.training
            return _back(returning, f"burst ended at step {view.step}: serve the next groups")
        capacity = view.pool.capacity
        decisions: list[Decision] = []
        for cell in view.pool.serving:
            if cell.standalone:
                continue
            left = len(view.pool.serving) - len(decisions) - 1
            rest = int((capacity - cell.slots) * (view.rules.tail_load if left == 1 else 1.0))
            if rest < view.water_level:
                break
            capacity -= cell.slots
            why = f"water level {view.water_level} <= {rest} slots of the cells that go on serving"
            decisions.append(Decision(cell=cell.name, to=Role.TRAIN, why=why))
        return decisions

    def _core_stays(self, view: View) -> bool:
        """At a boundary: the next batch is ready and the other cells cover what is pending."""
        first = next(iter(view.pool.cells), None)
        if first is None or first.role is not Role.TRAIN or view.groups_ready < view.rules.groups_per_batch:
            return False
        pending = view.water_level + self.groups_to_dispatch(view) * view.rules.group_size
        return view.step < view.rules.steps_total and sum(c.slots for c in view.pool.cells[1:]) >= pending


class Colocate(_Bursts):
    """The whole pool serves, then the whole pool trains; engines that are standalone go on serving."""

    name = "colocate"

    def turns(self, view: View) -> list[Decision]:
        if view.step >= view.burst_end:
            return _back(view.pool.training, f"burst ended at step {view.step}: the whole pool serves")
        why = self._time_to_train(view)
        leaving = [c for c in view.pool.serving if not c.standalone] if why else []
        return [Decision(cell=c.name, to=Role.TRAIN, why=why) for c in leaving]

    def _time_to_train(self, view: View) -> str:
        if view.water_level == 0:
            return "no execution is in flight: the whole pool trains"
        if not view.pool.standalone_slots:
            return ""
        steps = 1 if view.rules.streaming else view.burst_end - view.step
        if view.groups_ready < steps * view.rules.groups_per_batch:
            return ""
        return f"{view.groups_ready} groups are ready: the pool trains, standalone engines carry {view.water_level}"


class Async(_LetsAllRun):
    """Fixed pools: the first cells train for ever, the others serve for ever; look-ahead (one batch) bounds
    staleness.
    """

    name = "async"
    replaces = True

    def groups_to_dispatch(self, view: View) -> int:
        ahead = view.rules.groups_per_batch if view.rules.look_ahead < 0 else view.rules.look_ahead
        return view.bounded(view.rules.groups_per_batch + ahead)

    def burst_steps(self, view: View, dispatched: int) -> int:
        return -(-dispatched // view.rules.groups_per_batch)

    def turns(self, view: View) -> list[Decision]:
        pool = view.pool
        trainers = pool.cells[: view.rules.async_train_cells]
        others = pool.cells[view.rules.async_train_cells :]
        back = (
            _back((c for c in others if c.role is Role.TRAIN), "serves for ever in the async policy")
            if self._astray(view)
            else []
        )
        if view.step >= view.rules.steps_total:
            return [*back, *_back((c for c in trainers if c.role is Role.TRAIN), "the last step is done")]
        leaving = [c for c in trainers if c.role is Role.ROLLOUT] if view.in_pipeline else []
        why = "trains for ever in the async policy"
        return [*back, *(Decision(cell=c.name, to=Role.TRAIN, why=why) for c in leaving)]

    def _astray(self, view: View) -> bool:
        return (
            len(view.pool.training) > 0
            and view.pool.training[-1] not in view.pool.cells[: view.rules.async_train_cells]
        )


def make(name: str, cells: int) -> tuple[Policy, str]:
    """The policy and a sentence for people if it is not quite what was asked for."""
    if cells == 1 and name != "colocate":
        return Colocate(), f"{name} needs two cells to lend one: with one cell the whole pool switches"
    policies: dict[str, Policy] = {"elastic": Elastic(), "colocate": Colocate(), "async": Async()}
    return policies[name], ""
