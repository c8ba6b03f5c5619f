"""The scheduler: one `handle(event, now) -> commands`, no IO, no clock, no chance of its own.

Phases of a run: starting -> eval-before -> training -> eval-after -> done. Within training, bursts of m steps:
dispatch at the boundary, lend cells as the water level falls, take them back when the burst's last step is done.
`check()` states the invariants; the simulation in the tests calls it after every event.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable
from typing import Any

from cellctl import policies
from cellctl.job import JobState
from cellctl.ledger import Ledger, TaskQueue
from cellctl.operator import obey
from cellctl.roles import Cell
from gyre_base import messages as m
from gyre_base.config import Config, from_tree
from gyre_base.daemon import Answer, PeerLost, Send, Tick, WakeAt
from gyre_base.ids import PolicyVersion
from gyre_base.vocabulary import Outcome, Purpose, Role

RESEND_S = 5.0  # an unanswered command goes out again after this long


class Unexpected(RuntimeError):
    """An event nobody expects is a bug upstream, not a log line."""


@m.message("cellctl.start")
class Start:
    """shell -> core, once, first in the journal: what the run is. A replay needs nothing else."""

    config: dict[str, Any]
    train: tuple[str, ...]
    heldout: tuple[str, ...]


@m.message("cellctl.restart")
class Restart:
    """shell -> core after a replay: peers' connections are gone, their state is unknown until they say hello."""

    life: int


@dataclasses.dataclass
class Executor:
    """An executor process as the scheduler sees it."""

    name: str
    slots: int
    held: int = 0


class Scheduler:
    """State of one run. Public attributes are read by `view.py`; only `handle` changes them."""

    def __init__(self) -> None:
        self.config = Config()
        self.phase = "new"
        self.cells: dict[str, Cell] = {}
        self.executors: dict[str, Executor] = {}
        self.present: set[str] = set()
        self.lives: dict[str, int] = {}
        self.ledger = Ledger(retry_budget=0)
        self.queue = TaskQueue((), 0)
        self.heldout: tuple[str, ...] = ()
        self.policy: policies.Policy = policies.Colocate()
        self.policy_note = ""
        self.rules = policies.Rules(steps_total=0, steps_per_burst=1, groups_per_batch=1)
        self.version = PolicyVersion(0, 0)
        self.burst_end = 0
        self.boundary = PolicyVersion(0, 0)  # weights at the last burst boundary: no engine serves older ones for long
        self.groups_packed = 0  # closed, packed and with enough valid executions, since the run began
        self.owed_groups = 0
        self.frozen = False
        self.job = JobState()
        self.table_number = 0
        self.pending: dict[str, tuple[Send, float]] = {}
        self.waiting: deque[str] = deque()  # executions without an executor
        self.totals: dict[str, float] = {
            "switches": 0,
            "moved": 0,
            "moved_mid_generation": 0,
            "harness_errors": 0,
            "calls": 0,
        }
        self.steps: list[dict[str, float]] = []
        self.group_scores: list[dict[str, Any]] = []
        self.evals: dict[str, list[dict[str, Any]]] = {}
        self.switch_times: list[dict[str, Any]] = []
        self.saved = ""
        self.changes = 0  # counts changes of any cell's role or weights: what was made from cells is made anew
        self._out: list[Any] = []
        self._wake_at = 0.0
        self._resend_at = 0.0
        self._pool: tuple[int, policies.Pool] = (-1, policies.Pool.of(()))
        self._engines_checked: tuple[int, PolicyVersion] = (-1, self.boundary)
        self._handlers = self._table()

    # ---- entry ----------------------------------------------------------------------------------------------------

    def handle(self, event: Any, now: float) -> list[Any]:
        self._out = []
        self._dispatch_event(event, now)
        if self.phase not in ("new", "done"):
            self._advance(now)
        self._resend(now)
        return self._out

    def _dispatch_event(self, event: Any, now: float) -> None:
        handler = self._handlers.get(type(event))
        if handler is None:
            raise Unexpected(f"cellctl: {event!r} in phase {self.phase}")
        handler(event, now)

    def _table(self) -> dict[type, Callable[[Any, float], None]]:
        return {
            Start: self._start,
            Restart: self._restart,
            Tick: lambda _event, _now: None,
            m.Hello: self._hello,
            m.Goodbye: lambda e, t: self._lost(PeerLost(kind=e.kind, name=e.name, why="left"), t),
            PeerLost: self._lost,
            m.ExecutionFinished: self._finished,
            m.CellDrained: self._drained,
            m.RoleChanged: self._role_changed,
            m.CellFault: self._cell_fault,
            m.EngineLost: self._engine_lost,
            m.GroupPacked: self._packed,
            m.StepDone: self._step_done,
            m.CheckpointSaved: self._checkpoint_saved,
            m.JobFacts: self._job_facts,
            m.LeaveJob: self._leave_job,
            m.OperatorOrder: lambda e, t: self._say(Answer(obey(self, e, t))),
        }

    def _say(self, command: Any) -> None:
        self._out.append(command)

    # ---- start, peers ---------------------------------------------------------------------------------------------

    def _start(self, event: Start, now: float) -> None:
        self.config = from_tree(event.config)
        scheduler = self.config.scheduler
        count = self.config.cluster.cells
        slots = scheduler.cell_slots or (scheduler.slots_per_cell,) * count
        lent = count - scheduler.standalone_cells
        made = [Cell(name=f"c{i}", order=i, slots=slots[i], standalone=i >= lent, since=now) for i in range(count)]
        self.cells = {cell.name: cell for cell in made}
        self.policy, self.policy_note = policies.make(scheduler.policy, count)
        self.rules = policies.Rules(
            steps_total=scheduler.steps,
            steps_per_burst=scheduler.steps_per_burst,
            groups_per_batch=scheduler.groups_per_batch,
            group_size=scheduler.group_size,
            look_ahead=scheduler.look_ahead_groups,
            staleness_bound=scheduler.staleness_bound,
            streaming=scheduler.streaming,
            async_train_cells=scheduler.async_train_cells,
        )
        self.ledger = Ledger(scheduler.retry_budget)
        self.queue = TaskQueue(event.train, scheduler.seed)
        self.heldout = event.heldout[: self.config.evaluation.tasks]
        self.phase = "starting"

    def _restart(self, event: Restart, now: float) -> None:
        self.present.clear()
        self.executors.clear()
        self.job.facts, self.job.leaving = None, ""  # of an earlier life of the job, until the supervisor tells
        self.pending = {key: word for key, word in self.pending.items() if key.startswith("group:")}
        for cell in self.cells.values():
            cell.draining = False
            if cell.role not in (Role.DOWN, Role.STARTING):
                self._become(cell, Role.STARTING, now, f"cellctl restarted (life {event.life}); waiting for its agent")

    def _hello(self, event: m.Hello, now: float) -> None:
        known = f"{event.kind}:{event.name}"
        if event.kind == "celld" and event.name in self.job.out():
            return  # fenced: its node was given up, and what it does counts no more
        reborn = event.life != self.lives.get(known, event.life)
        self.lives[known] = event.life
        self.present.add(known)
        if event.kind == "executor":
            self._executor_joined(event, now)
        elif event.kind == "proxyd":
            self._inform_proxyd()
        elif event.kind == "trajd":
            for key in [k for k in self.pending if k.startswith("group:")]:  # it may have died with our first word
                self._until_answered(key, self.pending[key][0], now)
        elif event.kind == "celld" and event.name in self.cells:
            cell = self.cells[event.name]
            if reborn and cell.role is not Role.STARTING:
                self._cell_down(cell, now, f"its agent started again (life {event.life})")
            if cell.role is Role.DOWN:
                self._become(cell, Role.STARTING, now, "its agent is back")

    def _executor_joined(self, event: m.Hello, now: float) -> None:
        self.executors.setdefault(event.name, Executor(event.name, event.slots)).slots = event.slots
        for execution in list(self.ledger.held_by(event.name)):
            if execution.id not in event.holds:
                self._end_attempt(execution.id, Outcome.INFRA_FAILED, None, 0.0, now)
        for held in event.holds:
            if held not in self.ledger.in_flight:
                self._say(Send(f"executor:{event.name}", m.CancelExecution(execution=held, why="superseded")))
        self._count_held()

    def _inform_proxyd(self) -> None:
        for execution in self.ledger.in_flight.values():
            self._say(Send("proxyd:proxyd", self._opening(execution.id, execution.purpose)))
        self._publish_engines()
        for key in [k for k in self.pending if k.startswith("drain:")]:
            self._say(self.pending[key][0])

    def _opening(self, execution: str, purpose: Purpose) -> m.OpenExecution:
        temperature = 0.0 if purpose is Purpose.EVAL_GREEDY else self.config.rollout.temperature
        return m.OpenExecution(execution=execution, purpose=purpose, temperature=temperature)

    def _lost(self, event: PeerLost, now: float) -> None:
        self.present.discard(f"{event.kind}:{event.name}")
        if event.kind == "executor":
            self.executors.pop(event.name, None)
            for execution in list(self.ledger.held_by(event.name)):
                self._end_attempt(execution.id, Outcome.INFRA_FAILED, None, 0.0, now)
        elif event.kind == "celld" and event.name in self.cells:
            self._cell_down(self.cells[event.name], now, f"its agent is lost: {event.why}")

    # ---- executions -----------------------------------------------------------------------------------------------

    def _dispatch(self, tasks: list[str], size: int, purpose: Purpose, now: float) -> None:
        for task in tasks:
            for execution in self.ledger.open_group(task, size, purpose, str(self.version), now):
                self._say(Send("proxyd:proxyd", self._opening(execution.id, purpose)))
                self.waiting.append(execution.id)

    def _assign(self) -> None:
        """Give waiting executions to the executor with the fewest. Executors queue beyond their own concurrency."""
        while self.waiting and self.executors:
            execution = self.ledger.in_flight.get(self.waiting.popleft())
            if execution is None:
                continue
            executor = min(self.executors.values(), key=lambda e: (e.held / max(1, e.slots), e.name))
            executor.held += 1
            execution.executor = executor.name
            self._say(Send(f"executor:{executor.name}", self._order(execution.id)))

    def _order(self, execution: str) -> m.ExecutionOrder:
        record = self.ledger.in_flight[execution]
        return m.ExecutionOrder(
            execution=execution,
            group=record.group,
            task={"id": self.ledger.groups[record.group].task},
            attempt=record.attempt,
            purpose=record.purpose,
            limit_s=self.config.tasks.harness_limit_s,
        )

    def _finished(self, event: m.ExecutionFinished, now: float) -> None:
        record = self.ledger.in_flight.get(event.execution)
        if record is not None:
            executor = record.executor
            self.totals["harness_errors"] += event.harness_errors
            self.totals["calls"] += event.calls
            self._end_attempt(event.execution, event.outcome, event.score, event.wall_s, now)
            self._say(Send("proxyd:proxyd", m.CloseExecution(execution=event.execution)))
            if executor in self.executors:
                self.executors[executor].held -= 1
            self._say(Send(f"executor:{executor}", m.ExecutionNoted(execution=event.execution)))
        else:  # a repeat, or an attempt that was replaced: it may be forgotten there
            self._say(Send("executor:*", m.ExecutionNoted(execution=event.execution)))

    def _end_attempt(self, name: str, outcome: Outcome, score: float | None, wall_s: float, now: float) -> None:
        record = self.ledger.in_flight[name]
        again = self.ledger.finish(name, outcome, score, wall_s, now)
        if again is not None:
            self._say(Send("proxyd:proxyd", m.CloseExecution(execution=name)))
            self._say(Send("proxyd:proxyd", self._opening(again.id, again.purpose)))
            self.waiting.append(again.id)
        elif self.ledger.closes(record.group):
            self._close_group(record.group, now)

    def _close_group(self, name: str, now: float) -> None:
        group = self.ledger.groups[name]
        final = self.ledger.close(name)
        scores = [e.score for e in final if e.outcome and e.outcome.counts and e.score is not None]
        row = {"group": name, "task": group.task, "scores": scores, "version": group.version}
        if group.purpose is not Purpose.TRAIN:
            self.evals.setdefault(f"{self.phase}:{group.purpose.value}", []).append(row)
            del self.ledger.groups[name]
            return
        self.group_scores.append(row)
        self._until_answered(f"group:{name}", Send("trajd:trajd", self._closing(name, final)), now)

    def _closing(self, name: str, final: list[Any]) -> m.GroupClosed:
        group = self.ledger.groups[name]
        members = tuple(
            m.FinalExecution(execution=e.id, outcome=e.outcome or Outcome.UNSCORED, score=e.score) for e in final
        )
        return m.GroupClosed(
            group=name, task=group.task, serial=group.serial, dispatched_version=group.version, executions=members
        )

    def _packed(self, event: m.GroupPacked, now: float) -> None:
        group = self.ledger.groups.get(event.group)
        self.pending.pop(f"group:{event.group}", None)
        self._say(Answer(m.Done()))
        if group is None or group.packed:
            return
        self.ledger.pack(event.group, event.enough)
        if event.enough:
            self.groups_packed += 1
        elif not self.policy.replaces:
            self.owed_groups += 1

    def _count_held(self) -> None:
        for executor in self.executors.values():
            executor.held = sum(1 for _ in self.ledger.held_by(executor.name))

    # ---- cells ----------------------------------------------------------------------------------------------------

    def _become(self, cell: Cell, role: Role, now: float, why: str) -> None:
        self.changes += 1
        cell.become(role, now, why)

    def _turn(self, decision: policies.Decision, now: float) -> None:
        cell = self.cells[decision.cell]
        cell.epoch += 1
        cell.switches += 1
        self.totals["switches"] += 1
        if decision.to is Role.TRAIN:
            self._become(cell, Role.TO_TRAIN, now, decision.why)
            self._drain(cell, now)
        else:
            self._become(cell, Role.TO_ROLLOUT, now, decision.why)
            self._flip(cell, Role.ROLLOUT, now)

    def _drain(self, cell: Cell, now: float) -> None:
        cell.draining = True
        self._publish_engines()
        self._until_answered(
            f"drain:{cell.name}", Send("proxyd:proxyd", m.DrainCell(cell=cell.name, epoch=cell.epoch)), now
        )

    def _flip(self, cell: Cell, to: Role, now: float) -> None:
        version = str(self.version) if to is Role.ROLLOUT else ""
        order = m.FlipCell(cell=cell.name, to=to, epoch=cell.epoch, version=version)
        self._until_answered(f"flip:{cell.name}", Send(f"celld:{cell.name}", order), now)

    def _drained(self, event: m.CellDrained, now: float) -> None:
        cell = self.cells.get(event.cell)
        if cell is None or event.epoch != cell.epoch or not cell.draining:
            return
        cell.draining = False
        if cell.name in self.job.drained:
            self._cell_down(cell, now, "drained by order of the operator: its node may be given back")
            return
        cell.moved += event.moved
        self.pending.pop(f"drain:{cell.name}", None)
        self.totals["moved"] += event.moved
        self.totals["moved_mid_generation"] += event.moved_mid_generation
        if cell.role is Role.TO_TRAIN:
            self._flip(cell, Role.TRAIN, now)
        elif cell.role is Role.TO_ROLLOUT:
            order = m.UpdateEngine(cell=cell.name, epoch=cell.epoch, version=str(self.version))
            self._until_answered(f"flip:{cell.name}", Send(f"celld:{cell.name}", order), now)

    def _role_changed(self, event: m.RoleChanged, now: float) -> None:
        cell = self.cells.get(event.cell)
        fresh = cell is not None and cell.role in (Role.STARTING, Role.DOWN)
        if cell is None or cell.name in self.job.out() or (event.epoch < cell.epoch and not fresh):
            return
        if cell.role is Role.DOWN:
            self._become(cell, Role.STARTING, now, "its agent is back")
        self.pending.pop(f"flip:{cell.name}", None)
        if cell.order == 0 and event.version:
            self._core_version(PolicyVersion.parse(event.version))
        if cell.role in (Role.TO_TRAIN, Role.TO_ROLLOUT):
            self.switch_times.append(
                {"cell": cell.name, "to": event.role.value, "seconds": now - cell.since, "phases_s": event.phases_s}
            )
        arrived_late = cell.role is Role.STARTING
        cell.epoch, cell.phases_s = max(cell.epoch, event.epoch), event.phases_s
        if event.role is Role.ROLLOUT:
            cell.version, cell.url = event.version, event.engine_url
            self.changes += 1
            if cell.role is not Role.ROLLOUT:
                self._become(cell, Role.ROLLOUT, now, f"serves {event.version}")
        elif arrived_late:  # an agent that trains although we restarted: take it back into the order of things
            self._become(cell, Role.ROLLOUT, now, "found in training after a restart")
            self._become(cell, Role.TO_TRAIN, now, "found in training after a restart")
            self._become(cell, Role.TRAIN, now, "found in training after a restart")
        elif cell.role is not Role.TRAIN:
            self._become(cell, Role.TRAIN, now, cell.reason)
        self._publish_engines()

    def _core_version(self, version: PolicyVersion) -> None:
        """The core's word on the newest weights: it goes back in steps only together with a new lineage."""
        if version.lineage > self.version.lineage:
            self.version = version
            self.burst_end = max(self.burst_end, version.step)

    def _cell_down(self, cell: Cell, now: float, why: str) -> None:
        if cell.role is Role.DOWN:
            return
        cell.draining = False
        self._become(cell, Role.DOWN, now, why)
        for kind in ("drain", "flip"):
            self.pending.pop(f"{kind}:{cell.name}", None)
        self._publish_engines()

    def _cell_fault(self, event: m.CellFault, now: float) -> None:
        cell = self.cells.get(event.cell)
        if cell is not None and cell.name not in self.job.out():
            self._cell_down(cell, now, f"{event.what}: {event.detail}")
            self._become(cell, Role.STARTING, now, f"its agent restarts the {event.what}")

    def _engine_lost(self, event: m.EngineLost, now: float) -> None:
        """proxyd has moved the calls; the agent watches its own engine and says so itself: here only the reason is
        kept.
        """
        cell = self.cells.get(event.cell)
        if cell is not None:
            cell.story.append(f"{now:.3f} proxyd lost {event.url}: {event.why}")

    def _publish_engines(self) -> None:
        self.table_number += 1
        engines = tuple(
            m.Engine(cell=c.name, url=c.url, version=c.version, order=c.order, slots=c.slots, serving=c.serves)
            for c in self.cells.values()
            if c.url
        )
        self._say(Send("proxyd:proxyd", m.EngineTable(number=self.table_number, engines=engines)))

    # ---- training -------------------------------------------------------------------------------------------------

    @property
    def groups_ready(self) -> int:
        """Groups packed and not yet trained: from what is known of both, since the word of a step may overtake the
        word of
        the groups that it trained, or be lost with the core."""
        return max(0, self.groups_packed - self.version.step * self.config.scheduler.groups_per_batch)

    def _step_done(self, event: m.StepDone, now: float) -> None:
        self._say(Answer(m.Done()))
        version = PolicyVersion.parse(event.version)
        if version <= self.version:
            return
        self.version = version
        self.steps.append({"at": now, "step": version.step, "batch": event.batch, **event.metrics})
        self.job.micro_step_s = max(self.job.micro_step_s, event.metrics.get("micro_step_s", 0.0))
        if self.job.save_is_due(now):
            self._save("the time between two saves is over", now)

    def _checkpoint_saved(self, event: m.CheckpointSaved, now: float) -> None:
        self.pending.pop("save", None)
        self.saved = event.version
        self.job.saved(event, now)

    def _save(self, why: str, now: float) -> None:
        """Asks the core for it once; `saved` is the answer."""
        if "save" not in self.pending:
            core = next(iter(self.cells))
            self._until_answered("save", Send(f"celld:{core}", m.SaveCheckpoint(why=why)), now)

    # ---- the job around the run -------------------------------------------------------------------------------------

    def _job_facts(self, event: m.JobFacts, now: float) -> None:
        self._say(Answer(m.Done()))
        self.job.saved_at = self.job.saved_at or now
        self.job.facts = event
        for name in event.lost:
            if name in self.cells:
                self._cell_down(self.cells[name], now, "its node left the job")

    def _leave_job(self, event: m.LeaveJob, now: float) -> None:
        self._say(Answer(m.Done()))
        if not self.job.leaving:
            self.job.leaving = event.why
            self._save(event.why, now)

    # ---- what to do next ------------------------------------------------------------------------------------------

    def view(self) -> policies.View:
        """What the policy sees."""
        return policies.View(
            self.rules,
            self.pool(),
            self.ledger.level(),
            self.version.step,
            self.burst_end,
            self.groups_ready,
            self.ledger.groups_open(),
        )

    def pool(self) -> policies.Pool:
        """The cells that are up, with their sums; the same object until a cell changes."""
        if self._pool[0] != self.changes:
            up = (c for c in self.cells.values() if c.role not in (Role.DOWN, Role.STARTING))
            views = (policies.CellView(name=c.name, role=c.role, slots=c.slots, standalone=c.standalone) for c in up)
            self._pool = (self.changes, policies.Pool.of(views))
        return self._pool[1]

    def _advance(self, now: float) -> None:
        if self.version.step >= self.burst_end or self.policy.name == "async":
            self.boundary = self.version
        if not self.frozen and not self.job.leaving:
            before = ""
            while before != self.phase:
                before = self.phase
                self._next_phase(now)
            if self.phase == "training":
                self._train(now)
        self._update_one_engine(now)
        self._assign()

    def _next_phase(self, now: float) -> None:
        if self.phase == "starting" and self._everyone_is_here():
            self._enter("eval-before", now)
        elif self.phase == "eval-before" and self.ledger.level() == 0:
            self._enter("training", now)
        elif self.phase == "training" and self.version.step >= self.config.scheduler.steps:
            if self._saved(now) and self._all_serve_newest():
                self._enter("eval-after", now)
        elif self.phase == "eval-after" and self.ledger.level() == 0:
            self._enter("done", now)

    def _enter(self, phase: str, now: float) -> None:
        self.phase = phase
        evaluation = self.config.evaluation
        if phase in ("eval-before", "eval-after") and self.heldout:
            if evaluation.sampled:
                self._dispatch(list(self.heldout), 1, Purpose.EVAL_SAMPLED, now)
            if evaluation.greedy:
                self._dispatch(list(self.heldout), 1, Purpose.EVAL_GREEDY, now)

    def _everyone_is_here(self) -> bool:
        daemons = {"proxyd:proxyd", "trajd:trajd"} <= self.present
        awaited = [c for c in self.cells.values() if c.name not in self.job.out()]
        return daemons and bool(self.executors) and all(c.role is Role.ROLLOUT for c in awaited)

    def _all_serve_newest(self) -> bool:
        newest = str(self.version)
        up = [c for c in self.cells.values() if c.role is not Role.DOWN]
        return bool(up) and all(c.role is Role.ROLLOUT and c.version == newest for c in up)

    def _saved(self, now: float) -> bool:
        """Whether the last weights are on disk, so that no fault can take them back; asks for it once if not."""
        if self.saved == str(self.version):
            return True
        self._save("the run is done", now)
        return False

    def _train(self, now: float) -> None:
        view = self.view()
        if view.step >= view.burst_end and self._turn_cells(view, now):
            view = self.view()  # back, before the next burst begins and hides that the last one ended
        if self._dispatch_groups(view, now):
            view = self.view()
        self._turn_cells(view, now)

    def _turn_cells(self, view: policies.View, now: float) -> int:
        decisions = self._owed(view) or self.policy.turns(view)
        for decision in decisions:
            self._turn(decision, now)
        return len(decisions)

    def _dispatch_groups(self, view: policies.View, now: float) -> bool:
        """Whether anything changed: groups went out, or a burst began."""
        count = self.policy.groups_to_dispatch(view)
        at_boundary = view.step >= view.burst_end
        if at_boundary:
            self.owed_groups = 0  # a new burst asks for all its groups anyway
        elif self.owed_groups and view.water_level == 0 and view.pool.serving:
            count, self.owed_groups = self.owed_groups, 0
        if view.step >= self.rules.steps_total or not (count or at_boundary):
            return False
        if at_boundary:
            self.burst_end = min(view.step + self.policy.burst_steps(view, count), self.rules.steps_total)
        if count:
            self._dispatch([self.queue.next() for _ in range(count)], self.rules.group_size, Purpose.TRAIN, now)
        return True

    def _owed(self, view: policies.View) -> list[policies.Decision]:
        """Groups must be made up but nobody serves: the last cell that trains comes back to serve them."""
        if not self.owed_groups or not view.pool.training:
            return []
        if any(c.role in (Role.TO_ROLLOUT, Role.ROLLOUT) for c in view.pool.cells):  # somebody serves, or will soon
            return []
        why = f"{self.owed_groups} groups had too few valid executions and are replaced"
        return [policies.Decision(cell=view.pool.training[-1].name, to=Role.ROLLOUT, why=why)]

    def _update_one_engine(self, now: float) -> None:
        """Engines that never turned load the newest weights one at a time, by the drain path, at a burst's end."""
        if self._engines_checked == (self.changes, self.boundary):
            return
        self._engines_checked = (self.changes, self.boundary)
        if any(c.role is Role.TO_ROLLOUT for c in self.cells.values()):
            return
        for cell in self.cells.values():
            if cell.role is Role.ROLLOUT and PolicyVersion.parse(cell.version) < self.boundary:
                cell.epoch += 1
                self._become(cell, Role.TO_ROLLOUT, now, f"never turned: loads {self.version} (had {cell.version})")
                self._drain(cell, now)
                return

    # ---- promises: again until answered -----------------------------------------------------------------------------

    def _until_answered(self, key: str, send: Send, now: float) -> None:
        self.pending[key] = (send, now)
        self._resend_at = min(self._resend_at, now + RESEND_S)
        self._say(send)

    def _resend(self, now: float) -> None:
        if self.phase == "new":
            return
        if now >= self._resend_at:
            self._resend_due(now)
        if now >= self._wake_at and (self.pending or self.phase != "done"):
            self._wake_at = now + RESEND_S
            self._say(WakeAt(at=self._wake_at))

    def _resend_due(self, now: float) -> None:
        for key, (send, at) in list(self.pending.items()):
            if now - at >= RESEND_S:
                self._say(send)
                self.pending[key] = (send, now)
        self._resend_at = min((at for _, at in self.pending.values()), default=now) + RESEND_S

    # ---- invariants -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises AssertionError if the state contradicts DESIGN 5. Called after every event in tests and simulation."""
        for name, execution in self.ledger.in_flight.items():
            group = self.ledger.groups[execution.group]
            assert not group.closed, f"{name} runs in closed group {group.id}"
            assert group.members[execution.place] == name, f"{name} was replaced and is still in flight"
        for executor in self.executors.values():
            assert executor.held == sum(1 for _ in self.ledger.held_by(executor.name)), "executors' counts drifted"
        assert self.version.step <= self.config.scheduler.steps, "stepped beyond the run"
