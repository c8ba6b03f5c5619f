"""The scheduler: one `handle(event, now) -> commands`, no IO, no clock, no chance of its own.

Phases of a run: starting -> eval-before -> training -> eval-after -> done. Within training, bursts of m steps:
dispatch at the boundary, lend cells as the water level falls, take them back when the burst's last step is done.
`check()` states the invariants; the simulation in the tests calls it after every event.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from cellctl import alarms, executions, policies, turning
from cellctl.alarms import Alarm, PeerMoves, PeerStalled, StacksKept
from cellctl.executions import Executor
from cellctl.forecast import Forecast, WorkLevel
from cellctl.job import JobState
from cellctl.ledger import Ledger, TaskQueue
from cellctl.operator import obey
from cellctl.promises import Promises
from cellctl.roles import Cell
from gyre_base import messages as m
from gyre_base.config import Config, from_tree
from gyre_base.daemon import Answer, PeerLost, Send, Tick
from gyre_base.ids import PolicyVersion
from gyre_base.shards import proxyd_peer
from gyre_base.vocabulary import Purpose, Role

LEFT = "left"  # why a peer is gone that said goodbye


class Unexpected(RuntimeError):
    """An event nobody expects is a bug upstream, not a log line."""


@m.message("cellctl.start")
class Start:
    """shell -> core, once, first in the journal: what the run is. A replay needs nothing else."""

    config: dict[str, Any]
    train: tuple[str, ...]
    heldout: tuple[str, ...]
    durations_s: dict[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)  # of an earlier run, by task


@m.message("cellctl.restart")
class Restart:
    """shell -> core after a replay: peers' connections are gone, their state is unknown until they say hello."""

    life: int


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
        self.barren_groups = 0  # in a row, with too few valid executions
        self.last_failure = ""  # of an execution that counts for nothing: its outcome and why
        self.frozen = False
        self.job = JobState()
        self.table_number = 0
        self.promises = Promises(self.say)
        self.alarms: dict[str, Alarm] = {}
        self.waiting: deque[str] = deque()  # executions without an executor
        self.staggered: list[tuple[float, str]] = []  # heap: executions that go out later
        self.forecast = Forecast()
        self.work_level = WorkLevel()
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
        self._pool: tuple[int, policies.Pool] = (-1, policies.Pool.of(()))
        self.engines_checked: tuple[int, PolicyVersion] = (-1, self.boundary)
        self._handlers = self._table()

    # ---- entry ----------------------------------------------------------------------------------------------------

    def handle(self, event: Any, now: float) -> list[Any]:
        self._out = []
        self._dispatch_event(event, now)
        if self.phase not in ("new", "done"):
            self._advance(now)
        if self.phase != "new":
            self.promises.due(now, is_over=self.phase == "done")
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
            m.Goodbye: lambda e, t: self._lost(PeerLost(kind=e.kind, name=e.name, why=LEFT), t),
            PeerLost: self._lost,
            m.ExecutionEnded: partial(executions.ended, self),
            m.ExecutionFinished: partial(executions.finished, self),
            m.CellDrained: partial(turning.drained, self),
            m.RoleChanged: partial(turning.role_changed, self),
            m.CellFault: partial(turning.cell_fault, self),
            m.SwitchRefused: partial(turning.switch_refused, self),
            m.EngineLost: partial(turning.engine_lost, self),
            m.GroupPacked: partial(executions.packed, self),
            m.StepDone: self._step_done,
            m.CheckpointSaved: self._checkpoint_saved,
            m.JobFacts: self._job_facts,
            m.LeaveJob: self._leave_job,
            PeerStalled: partial(alarms.stalled, self),
            PeerMoves: partial(alarms.moves, self),
            StacksKept: partial(alarms.stacks_kept, self),
            m.OperatorOrder: lambda e, t: self.say(Answer(obey(self, e, t))),
        }

    def say(self, command: Any) -> None:
        """A command or an answer goes out when this event is through."""
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
            tail_load=scheduler.tail_load,
            head_start=scheduler.head_start_groups,
        )
        self.ledger = Ledger(scheduler.retry_budget)
        self.queue = TaskQueue(event.train, scheduler.seed)
        self.heldout = event.heldout[: self.config.evaluation.tasks]
        for task, seconds in event.durations_s.items():
            for one in seconds:
                self.forecast.learn(task, one)
        self.phase = "starting"

    def _restart(self, event: Restart, now: float) -> None:
        self.present.clear()
        self.alarms.clear()
        alarms.barren(self, now)
        self.executors.clear()
        self.job.facts, self.job.leaving = None, ""  # of an earlier life of the job, until the supervisor tells
        self.promises.forget_all_but("group")
        for cell in self.cells.values():
            cell.undrained.clear()
            if cell.role not in (Role.DOWN, Role.STARTING):
                why = f"cellctl restarted (life {event.life}); waiting for its agent"
                turning.become(self, cell, Role.STARTING, now, why)

    def _hello(self, event: m.Hello, now: float) -> None:
        known = f"{event.kind}:{event.name}"
        if event.kind == "celld" and event.name in self.job.out():
            return  # fenced: its node was given up, and what it does counts no more
        reborn = event.life != self.lives.get(known, event.life)
        self.lives[known] = event.life
        self.present.add(known)
        self.alarms.pop(known, None)
        if event.kind == "executor":
            executions.executor_joined(self, event, now, reborn=reborn)
        elif event.kind == "proxyd":
            self._inform_proxyd(event.name)
        elif event.kind == "trajd":
            for key, send in self.promises.of("group").items():  # it may have died with our first word
                self.promises.keep(key, send, now)
        elif event.kind == "celld" and event.name in self.cells:
            cell = self.cells[event.name]
            if reborn and cell.role is not Role.STARTING:
                turning.cell_down(self, cell, now, f"its agent started again (life {event.life})")
            if cell.role is Role.DOWN:
                turning.become(self, cell, Role.STARTING, now, "its agent is back")

    def _inform_proxyd(self, shard: str) -> None:
        """Its own executions and the drains that it has not answered; a new table is for all."""
        peer = f"proxyd:{shard}"
        for execution in self.ledger.in_flight.values():
            if executions.proxyd_of(self, execution.id) == peer:
                self.say(Send(peer, executions.opening(self, execution.id, execution.purpose)))
        turning.publish_engines(self)
        for send in self.promises.of("drain").values():
            if send.to == peer:
                self.say(send)

    def _lost(self, event: PeerLost, now: float) -> None:
        self.present.discard(f"{event.kind}:{event.name}")
        if event.why != LEFT:
            alarms.silent(self, f"{event.kind}:{event.name}", event.why, now)
        if event.kind == "executor":
            executions.executor_lost(self, event.name, now, left=event.why == LEFT)
        elif event.kind == "celld" and event.name in self.cells:
            turning.cell_down(self, self.cells[event.name], now, f"its agent is lost: {event.why}")

    # ---- training -------------------------------------------------------------------------------------------------

    @property
    def groups_ready(self) -> int:
        """Groups packed and not yet trained: from what is known of both, since the word of a step may overtake the
        word of
        the groups that it trained, or be lost with the core."""
        return max(0, self.groups_packed - self.version.step * self.config.scheduler.groups_per_batch)

    def _step_done(self, event: m.StepDone, now: float) -> None:
        self.say(Answer(m.Done()))
        version = PolicyVersion.parse(event.version)
        if version <= self.version:
            return
        self.version = version
        self.steps.append({"at": now, "step": version.step, "batch": event.batch, **event.metrics})
        self.job.micro_step_s = max(self.job.micro_step_s, event.metrics.get("micro_step_s", 0.0))
        if self.job.save_is_due(now):
            self.save("the time between two saves is over", now)

    def _checkpoint_saved(self, event: m.CheckpointSaved, now: float) -> None:
        self.promises.answered("save")
        self.saved = event.version
        self.job.saved(event, now)

    def turn(self, decision: policies.Decision, now: float) -> None:
        """Carry out a policy's or a person's decision."""
        turning.turn(self, decision, now)

    def save(self, why: str, now: float) -> None:
        """Asks the core for it once; `saved` is the answer."""
        if "save" not in self.promises:
            core = next(iter(self.cells))
            self.promises.keep("save", Send(f"celld:{core}", m.SaveCheckpoint(why=why)), now)

    # ---- the job around the run -------------------------------------------------------------------------------------

    def _job_facts(self, event: m.JobFacts, now: float) -> None:
        self.say(Answer(m.Done()))
        self.job.saved_at = self.job.saved_at or now
        self.job.facts = event
        for name in event.lost:
            if name in self.cells:
                turning.cell_down(self, self.cells[name], now, "its node left the job")

    def _leave_job(self, event: m.LeaveJob, now: float) -> None:
        self.say(Answer(m.Done()))
        if not self.job.leaving:
            self.job.leaving = event.why
            self.save(event.why, now)

    # ---- what to do next ------------------------------------------------------------------------------------------

    def view(self, now: float) -> policies.View:
        """What the policy sees."""
        by_work = self.config.scheduler.water_level == "work"
        return policies.View(
            self.rules,
            self.pool(),
            self.work_level.of(self, now) if by_work else self.ledger.level(),
            self.version.step,
            self.burst_end,
            self.groups_ready,
            self.ledger.groups_open(),
        )

    def pool(self) -> policies.Pool:
        """The cells that are up, with their sums; the same object until a cell changes."""
        if self._pool[0] != self.changes:
            up = (c for c in self.cells.values() if c.role not in (Role.DOWN, Role.STARTING))
            views = (policies.CellView(name=c.name, role=c.role, slots=c.slots, standalone=c.only_serves) for c in up)
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
        turning.update_one_engine(self, now)
        executions.release(self, now)
        executions.assign(self, now)

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
                executions.dispatch(self, list(self.heldout), 1, Purpose.EVAL_SAMPLED, now)
            if evaluation.greedy:
                executions.dispatch(self, list(self.heldout), 1, Purpose.EVAL_GREEDY, now)

    def _everyone_is_here(self) -> bool:
        daemons = {"trajd:trajd", *map(proxyd_peer, range(self.config.proxyd.shards))} <= self.present
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
        self.save("the run is done", now)
        return False

    def _train(self, now: float) -> None:
        view = self.view(now)
        if view.step >= view.burst_end and self._turn_cells(view, now):
            view = self.view(now)  # back, before the next burst begins and hides that the last one ended
        if self._dispatch_groups(view, now):
            view = self.view(now)
        if self._pause_executions(view):
            view = self.view(now)
        self._turn_cells(view, now)

    def _turn_cells(self, view: policies.View, now: float) -> int:
        decisions = self._owed(view) or self.policy.turns(view)
        for decision in decisions:
            self.turn(decision, now)
        return len(decisions)

    def _pause_executions(self, view: policies.View) -> bool:
        """Whether anything changed."""
        orders = self.policy.pauses(view, partial(executions.in_flight, self))
        return sum(executions.pause(self, order) for order in orders) > 0

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
            tasks = self._next_tasks(count)
            spread_s = self.config.scheduler.stagger_s
            executions.dispatch(self, tasks, self.rules.group_size, Purpose.TRAIN, now, spread_s=spread_s)
        return True

    def _next_tasks(self, count: int) -> list[str]:
        """In the queue's order, or of each burst's tasks those first that are forecast to take longest."""
        if self.config.scheduler.dispatch_order == "queue":
            return [self.queue.next() for _ in range(count)]
        burst = self.rules.steps_per_burst * self.rules.groups_per_batch
        return [self.queue.next_by(self.forecast.seconds, burst) for _ in range(count)]

    def _owed(self, view: policies.View) -> list[policies.Decision]:
        """Executions must be served but nobody does: the last cell that trains comes back. Either groups must be made
        up, or the cell that served is gone.
        """
        if view.pool.serving or not view.pool.training or self.policy.name == "async":
            return []
        coming = (Role.TO_ROLLOUT, Role.STARTING)
        if any(c.role in coming and c.name not in self.job.out() for c in self.cells.values()):
            return []
        if self.owed_groups:
            why = f"{self.owed_groups} groups had too few valid executions and are replaced"
        elif view.water_level:
            why = f"no cell serves the {view.water_level} executions in flight: the one that did is gone"
        else:
            return []
        return [policies.Decision(cell=view.pool.training[-1].name, to=Role.ROLLOUT, why=why)]

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
