"""One run of one arm: the real scheduler core in virtual time, its commands carried out by models.

No message is lost here and every command is answered, so the core's own alarms (`WakeAt`) are left out but for those
of a staggered dispatch: a year fits in a minute.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import correlation
from typing import Any

from cellctl.core import Scheduler, Start
from cellctl.simulate import workload
from cellctl.simulate.meter import Meter, Observed
from cellctl.simulate.profile import Arm, Profile
from cellctl.simulate.serving import Serving
from cellctl.simulate.training import Training, Waiting
from gyre_base import messages as m
from gyre_base.daemon import Send, Tick
from gyre_base.ids import PolicyVersion
from gyre_base.reserve import Reserve
from gyre_base.vocabulary import Outcome, Role

ROUNDING_H = 1e-6
EARLIER = 1 << 20  # the visit of a task that an earlier run made
MAX_EVENTS_PER_STEP = 200_000  # a world that goes round in circles says so instead of running for ever


class Stuck(RuntimeError):
    """Nothing is left to happen and the steps are not done: the arm can't work as described."""


@dataclass
class Trace:
    """What happened, for pictures and tests."""

    roles: list[tuple[float, str, Role]] = field(default_factory=list)
    levels: list[tuple[float, int]] = field(default_factory=list)
    steps: list[tuple[float, float]] = field(default_factory=list)  # (time, mean staleness)


def scheduler_tree(profile: Profile, arm: Arm, seed: int) -> dict[str, Any]:
    """The configuration that a live run of this arm would have."""
    laws, batch = profile.laws, profile.groups_per_batch
    ahead = round(arm.look_ahead * batch)
    own = -1 if arm.look_ahead == 0.0 and arm.policy != "async" else ahead
    beyond = arm.steps_per_burst + math.ceil(arm.look_ahead) + 1  # the run goes on after the measured steps
    return {
        "cluster": {"cells": len(arm.nodes)},
        "scheduler": {
            "policy": arm.policy,
            "steps": profile.steps + beyond,
            "steps_per_burst": arm.steps_per_burst,
            "groups_per_batch": batch,
            "group_size": profile.group_size,
            "look_ahead_groups": own,
            "cell_slots": [max(1, round(n * laws.slots_per_node * arm.slots)) for n in arm.nodes],
            "standalone_cells": arm.standalone,
            "streaming": arm.streaming,
            "async_train_cells": arm.train_cells,
            "dispatch_order": arm.dispatch_order,
            "stagger_s": arm.stagger_h * 3600.0,
            "water_level": arm.water_level,
            "tail_load": arm.tail_load,
            "head_start_groups": round(arm.head_start * batch),
            "seed": seed,
        },
        "trajectories": {"order": arm.order, "reserve_groups": arm.reserve_groups},
        "tasks": {"harness_limit_s": profile.durations.limit_h * 3600.0},
        "evaluation": {"tasks": 0},
    }


class World:
    """`run()` drives it until the measured steps are done."""

    def __init__(self, profile: Profile, arm: Arm, seed: int, *, trace: bool = False) -> None:
        self.profile, self.arm, self.laws = profile, arm, profile.laws
        self.now = 0.0
        self.core = Scheduler()
        self.trace = Trace() if trace else None
        self.meter = Meter()
        self.events = 0
        self.finished = 0
        self.observed = Observed()
        self.staleness: list[float] = []
        self.step_times: list[float] = []
        self.places: list[tuple[int, float]] = []  # of each trained group: steps since its dispatch, its hours
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        self._per_execution_s = self.laws.train_node_h * 3600.0 / (profile.groups_per_batch * profile.group_size)
        self._work = workload.make(profile.durations, seed)
        self._hours: dict[str, list[float]] = {}
        self._visits: Counter[int] = Counter()
        self._walls: dict[str, list[float]] = {}  # of groups that are open
        self.serving = Serving(self.laws.load_slope, self.laws.load_floor, profile.durations.limit_h * 3600.0)
        names = [f"c{i}" for i in range(len(arm.nodes))]
        self.nodes = dict(zip(names, arm.nodes, strict=True))
        self.roles = dict.fromkeys(names, Role.ROLLOUT)
        self._by_role = dict.fromkeys(Role, 0)
        self._by_role[Role.ROLLOUT] = sum(arm.nodes)
        reserve: Reserve[Waiting] = Reserve(arm.order, arm.reserve_groups, profile.groups_per_batch)
        self.training = Training(self.laws, self.nodes, arm.streaming, reserve, self, self._stepped)
        self._alarm = 0.0  # the newest time for which the core was promised a tick
        self._heard: dict[str, int] = {}  # newest epoch by kind of command and cell: the core repeats itself after 5 s
        self._packing: set[str] = set()
        self._obey: dict[type, Callable[[Any], None]] = {
            m.ExecutionOrder: self._execute,
            m.OpenExecution: self._open,
            m.DrainCell: self._drain,
            m.FlipCell: self._flip,
            m.UpdateEngine: self._update,
            m.GroupClosed: self._pack,
        }
        self._begin(scheduler_tree(profile, arm, seed))

    def _begin(self, tree: dict[str, Any]) -> None:
        self._slots = {cell: max(1, round(n * self.laws.slots_per_node)) for cell, n in self.nodes.items()}
        self.serving.add_slots(sum(self._slots.values()))
        tasks, limit_h = range(self.profile.tasks), self.profile.durations.limit_h
        earlier = {t: self._work.group(t, EARLIER, self.arm.known) for t in tasks} if self.arm.known else {}
        known = {f"t{t}": tuple(min(h, limit_h) * 3600.0 for h in hours) for t, hours in earlier.items()}
        self.feed(Start(config=tree, train=tuple(f"t{t}" for t in tasks), heldout=(), durations_s=known))
        for kind, name in (("proxyd", "0"), ("trajd", "trajd")):
            self.feed(m.Hello(kind=kind, name=name, life=1, pid=1))
        self.feed(m.Hello(kind="executor", name="ex0", life=1, pid=1, slots=1 << 20))
        for cell in self.nodes:
            self.feed(m.RoleChanged(cell=cell, role=Role.ROLLOUT, epoch=0, version="0.0", engine_url=f"http://{cell}"))

    def duration_by_place(self) -> float:
        """Correlation of a trained group's hours with the steps since its dispatch; 0 where one does not vary."""
        places, hours = zip(*self.places, strict=True)
        varies = len(set(places)) > 1 and len(set(hours)) > 1
        return correlation(places, hours) if varies else 0.0

    # ---- time -----------------------------------------------------------------------------------------------------

    def at(self, delay_s: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + delay_s, next(self._number), call))

    def run(self) -> World:
        limit = MAX_EVENTS_PER_STEP * self.profile.steps
        while len(self.step_times) < self.profile.steps:
            end = self.serving.next_end()
            timer = self._queue[0][0] if self._queue else math.inf
            if min(end, timer) == math.inf or self.events > limit:
                done = f"step {len(self.step_times)} of {self.profile.steps}"
                raise Stuck(f"arm {self.arm.name}: {done} at {self.now / 3600:.2f} h")
            self._advance(min(end, timer))
            if end <= timer:
                self._end_one()
            else:
                heapq.heappop(self._queue)[2]()
        return self

    def _advance(self, to: float) -> None:
        self.events += 1
        if to > self.now:
            by = self._by_role
            busy = self.training.busy_nodes
            turning = by[Role.TO_TRAIN] + by[Role.TO_ROLLOUT]
            self.meter.advance(
                to, by[Role.ROLLOUT], self.serving.load, by[Role.TRAIN], min(busy, by[Role.TRAIN]), turning
            )
            self.now = to
        self.serving.advance(to)

    def feed(self, event: Any) -> None:
        for command in self.core.handle(event, self.now):
            if type(command) is Send:
                obey = self._obey.get(type(command.message))
                if obey is not None:
                    obey(command.message)
        if self.core.staggered and self.core.staggered[0][0] > self._alarm:
            self._alarm = self.core.staggered[0][0]
            self.at(self._alarm - self.now, lambda: self.feed(Tick()))
        if self.trace is not None:
            self.trace.levels.append((self.now, self.core.ledger.level()))

    # ---- executions -------------------------------------------------------------------------------------------------

    def _execute(self, order: m.ExecutionOrder) -> None:
        record = self.core.ledger.executions[order.execution]
        hours = self._hours.get(order.group)
        if hours is None:
            task = int(self.core.ledger.groups[order.group].task[1:])
            visit, self._visits[task] = self._visits[task], self._visits[task] + 1
            hours = self._hours[order.group] = self._work.group(task, visit, self.profile.group_size)
        self.serving.start(order.execution, hours[record.place] * 3600.0)
        if record.paused:
            self.serving.pause(order.execution)

    def _open(self, order: m.OpenExecution) -> None:
        """Of one that runs: it pauses, or goes on."""
        self.serving.pause(order.execution) if order.paused else self.serving.resume(order.execution)

    def _end_one(self) -> None:
        execution, timed_out, wall_s = self.serving.end()
        self.finished += 1
        self._walls.setdefault(self.core.ledger.executions[execution].group, []).append(wall_s / 3600.0)
        outcome = Outcome.PARTIAL if timed_out else Outcome.SCORED
        self.feed(m.ExecutionFinished(execution=execution, outcome=outcome, score=0.0, wall_s=wall_s))

    def _pack(self, closed: m.GroupClosed) -> None:
        if closed.group in self._packing:
            return
        self._packing.add(closed.group)
        walls = self._walls.pop(closed.group)
        self.observed.add(walls, self.profile.durations.limit_h - ROUNDING_H)
        costs = [self._cost_s(h) for h in self._hours.pop(closed.group)]
        dispatched = PolicyVersion.parse(closed.dispatched_version).step

        def packed() -> None:
            self._packing.discard(closed.group)
            count = len(costs)
            self.feed(m.GroupPacked(group=closed.group, enough=True, counted=count, micro_steps=count, owned_tokens=1))
            self.training.packed(Waiting(dispatched, costs, max(walls)), closed.to_come)

        self.at(self.laws.pack_s, packed)

    def _cost_s(self, hours: float) -> float:
        """Node-seconds to train one execution: longer ones have more tokens."""
        share = self.laws.size_share
        relative = 1.0 - share + share * min(hours, self.profile.durations.limit_h) / self._work.mean_h
        return self._per_execution_s * relative

    # ---- cells ----------------------------------------------------------------------------------------------------

    def _set_role(self, cell: str, role: Role) -> None:
        before, nodes = self.roles[cell], self.nodes[cell]
        self._by_role[before] -= nodes
        self._by_role[role] += nodes
        self.roles[cell] = role
        if (before is Role.ROLLOUT) != (role is Role.ROLLOUT):
            self.serving.add_slots(self._slots[cell] if role is Role.ROLLOUT else -self._slots[cell])
        if self.trace is not None:
            self.trace.roles.append((self.now, cell, role))

    def _is_new(self, kind: str, cell: str, epoch: int) -> bool:
        key = f"{kind}:{cell}"
        new = epoch > self._heard.get(key, -1)
        self._heard[key] = epoch
        return new

    def _drain(self, order: m.DrainCell) -> None:
        if not self._is_new("drain", order.cell, order.epoch):
            return
        to = Role.TO_TRAIN if self.core.cells[order.cell].role is Role.TO_TRAIN else Role.TO_ROLLOUT
        self._set_role(order.cell, to)
        done = m.CellDrained(
            cell=order.cell, epoch=order.epoch, moved=0, moved_mid_generation=0, seconds=self.laws.drain_s
        )
        self.at(self.laws.drain_s, lambda: self.feed(done))

    def _flip(self, order: m.FlipCell) -> None:
        if not self._is_new("flip", order.cell, order.epoch):
            return
        if order.to is Role.TRAIN:
            self.at(self.laws.to_train_s - self.laws.drain_s, lambda: self._trains(order))
            return
        rest_s = self.training.leave(order.cell, self.now)

        def turn() -> None:
            self._set_role(order.cell, Role.TO_ROLLOUT)
            self.at(self.laws.to_rollout_s, lambda: self._serves(order.cell, order.epoch, order.version))

        self.at(rest_s, turn) if rest_s else turn()

    def _update(self, order: m.UpdateEngine) -> None:
        if not self._is_new("flip", order.cell, order.epoch):
            return
        self.at(self.laws.to_rollout_s, lambda: self._serves(order.cell, order.epoch, order.version))

    def _trains(self, order: m.FlipCell) -> None:
        self._set_role(order.cell, Role.TRAIN)
        self.training.join(order.cell)
        self.feed(m.RoleChanged(cell=order.cell, role=Role.TRAIN, epoch=order.epoch, version=f"0.{self.training.step}"))

    def _serves(self, cell: str, epoch: int, version: str) -> None:
        self._set_role(cell, Role.ROLLOUT)
        url = f"http://{cell}"
        self.feed(m.RoleChanged(cell=cell, role=Role.ROLLOUT, epoch=epoch, version=version, engine_url=url))

    def _stepped(self, groups: list[Waiting]) -> None:
        step = self.training.step
        staleness = sum(step - 1 - g.dispatched for g in groups) / len(groups)
        self.staleness.append(staleness)
        self.places.extend((step - 1 - g.dispatched, g.hours) for g in groups)
        self.step_times.append(self.now)
        if self.trace is not None:
            self.trace.steps.append((self.now, staleness))
        self.feed(m.StepDone(batch=step - 1, version=f"0.{step}", metrics={"staleness_mean": staleness}))
