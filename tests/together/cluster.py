"""All five cores of gyre in one virtual time: scheduler, routers (one a shard), ledger, agents, executor. Only what is
outside of them is modelled: engines, ranks, harnesses, the packing, the wire. Seeded; any process may die at any time.

Links keep their order, as the bus does; what is sent to a dead process is lost. A restart does what the real shell
does: cellctl and trajd replay their journals, proxyd opens again what its journal has open, agents and executors begin
empty.
After every event every core's own invariants are checked.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cellctl.core import Restart, Scheduler, Start
from celld.agent import core as agents
from celld.agent.core import Agent
from gyre_base import messages as m
from gyre_base.daemon import Answer, PeerLost, Send, Tick, WakeAt
from gyre_base.ids import PolicyVersion
from gyre_base.shards import ALL, proxyd_name, proxyd_names, proxyd_peer, shard_of
from gyre_base.vocabulary import Role
from gyre_exec import events as ex
from gyre_exec.core import ExecutorCore, Limits
from proxyd import events as px
from proxyd.core import Router
from tests.trajd.builders import packed
from tests.trajd.model import CoreRank, Rank
from trajtools.trajd import events as tj
from trajtools.trajd.core import TrajdCore

LOST_AFTER_S = 3.0
AGAIN_S = 1.0
STEPS, BATCH, SIZE = 4, 2, 3


@dataclass
class Engine:
    """One engine process. `life` tells a new one from its predecessor."""

    up: bool = False
    life: int = 0
    version: str = ""
    released: bool = False
    running: dict[tuple[str, int], int] = field(default_factory=dict)  # submission -> tokens it still has to sample


@dataclass
class Cell:
    """An agent with its children."""

    agent: Agent
    rank: Rank
    engine: Engine = field(default_factory=Engine)
    life: int = 1
    up: bool = True
    rank_up: bool = False
    training: bool = False
    computing: bool = False
    asking: int = 0  # the question to trajd that waits for its answer
    switch: int = 0  # number of the newest switch: an older one is cancelled


@dataclass
class Harness:
    """Calls that are left, and the one that is open."""

    life: int
    calls_left: int
    open: m.OpenExecution | px.CallArrived | None = None
    done: int = 0


def known_as(name: str) -> tuple[str, str]:
    """Kind and name in a hello of a process that is no agent's."""
    kind, _, number = name.partition("-")
    return ("executor", name) if name == "ex0" else (kind, number or name)


class Cluster:
    """`run()` until the scheduler is done."""

    def __init__(self, seed: int, policy: str = "elastic", cells: int = 3, faults: int = 0, shards: int = 1) -> None:
        self.random = random.Random(seed)
        self.now, self.queue, self.number = 0.0, [], itertools.count()  # type: ignore[var-annotated]
        self.links: dict[tuple[str, str], float] = {}
        self.faults_left, self.odds = faults, self.random.choice([0.002, 0.01, 0.05])
        self.story: list[tuple[float, str]] = []
        self.shards = shards
        self.alive = dict.fromkeys(("cellctl", *proxyd_names(shards), "trajd", "ex0"), True)
        self.lives = dict.fromkeys(self.alive, 1)
        self.scheduler, self.journal = Scheduler(), []  # type: ignore[var-annotated]
        self.routers = [Router(0, shard, shards) for shard in range(shards)]
        self.opened: list[dict[str, m.OpenExecution]] = [{} for _ in range(shards)]
        self.trajd, self.trajd_journal, self.packing = TrajdCore(BATCH), [], set()  # type: ignore[var-annotated]
        self.executor = ExecutorCore(Limits(slots=64))
        self.harnesses: dict[str, Harness] = {}
        core = CoreRank("c0", core=True)
        core.start()
        ranks = [core, *(Rank(f"c{i}") for i in range(1, cells))]
        self.core = core
        self.cells = {rank.cell: Cell(Agent(cell=rank.cell), rank) for rank in ranks}
        tree = {
            "cluster": {"cells": cells},
            "proxyd": {"shards": shards},
            "scheduler": {
                "policy": policy,
                "steps": STEPS,
                "steps_per_burst": 2,
                "groups_per_batch": BATCH,
                "group_size": SIZE,
                "slots_per_cell": 5,
                "retry_budget": 20,
            },
            "evaluation": {"tasks": 0},
        }
        self.to_scheduler(Start(config=tree, train=tuple(f"t{i}" for i in range(4)), heldout=()))
        for shard in range(shards):
            self.to_router(shard, px.Restarted(life=1))
        for name in (*proxyd_names(shards), "trajd", "ex0"):
            self.greet(name)
        for name in self.cells:
            self.greet(name)
            self.to_agent(name, agents.Start())

    # ---- time and wire ----------------------------------------------------------------------------------------------

    def at(self, delay: float, call: Callable[[], Any]) -> None:
        heapq.heappush(self.queue, (self.now + delay, next(self.number), call))

    def soon(self, mean: float = 0.1) -> float:
        return self.random.expovariate(1.0 / mean)

    def wire(self, source: str, target: str, deliver: Callable[[], Any]) -> None:
        """In order per link."""
        due = max(self.now + self.soon(0.02), self.links.get((source, target), 0.0) + 1e-6)
        self.links[source, target] = due
        self.at(due - self.now, deliver)

    def run(self, limit: int = 60_000) -> Cluster:
        for _ in range(limit):
            if self.scheduler.phase == "done" and self.alive["cellctl"]:
                return self
            self.now, _, call = heapq.heappop(self.queue)
            call()
            self.check()
            if self.faults_left and self.random.random() < self.odds and self.scheduler.phase == "training":
                self.faults_left -= 1
                self.fault()
        raise AssertionError(f"not done at {self.now:.0f} s: {self.where()}")

    def where(self) -> str:
        s = self.scheduler
        cells = {name: (c.role.value, list(c.story)[-2:]) for name, c in s.cells.items()}
        return f"{s.phase} {s.version} level {s.ledger.level()} ready {s.groups_ready} {cells} {self.story[-12:]}"

    def check(self) -> None:
        self.scheduler.check()
        self.executor.check()
        self.trajd.ledger.check()

    # ---- cellctl ----------------------------------------------------------------------------------------------------

    def to_scheduler(self, event: Any, answer: Callable[[Any], None] | None = None) -> None:
        if not self.alive["cellctl"]:
            return
        self.journal.append((event, self.now))
        for command in self.scheduler.handle(event, self.now):
            match command:
                case WakeAt(at=at):
                    self.at(max(0.0, at - self.now) + 0.002, lambda: self.to_scheduler(Tick()))
                case Answer(message=message):
                    if answer is not None:
                        answer(message)
                case Send(to=to, message=message):
                    for one in map(proxyd_peer, range(self.shards)) if to == ALL else (to,):
                        self.wire("cellctl", one, lambda to=one, message=message: self.deliver(to, message))

    def deliver(self, to: str, message: Any) -> None:
        kind, _, name = to.partition(":")
        if kind == "celld":
            self.to_agent(name, message)
        elif kind == "proxyd":
            self.to_router(int(name), message)
        elif kind == "trajd":
            self.to_trajd(message)
        else:
            self.to_executor(message)

    def say(self, source: str, message: Any, answer: Callable[[Any], None] | None = None) -> None:
        self.wire(source, "cellctl", lambda: self.to_scheduler(message, answer))

    def until_answered(self, source: str, message: Any, still: Callable[[], bool], done: Callable[[], None]) -> None:
        """A promise of the kind `again`."""
        answered: list[bool] = []

        def heard(_: Any) -> None:
            if not answered:
                answered.append(True)
                done()

        def again() -> None:
            if not answered and still():
                self.say(source, message, heard)
                self.at(AGAIN_S, again)

        again()

    def greet(self, name: str) -> None:
        """A hello, as after a start or when cellctl is another one."""
        if name in self.cells:
            cell = self.cells[name]
            self.say(name, m.Hello(kind="celld", name=name, life=cell.life, pid=1))
            self.at(self.soon(), lambda: self.to_agent(name, agents.Welcomed()))
            return
        kind, called = known_as(name)
        holds = tuple(self.executor.held) if name == "ex0" else ()
        self.say(name, m.Hello(kind=kind, name=called, life=self.lives[name], pid=1, slots=64, holds=holds))
        if name == "ex0":
            self.to_executor(m.Welcome(life=self.lives["cellctl"]))

    # ---- proxyd and engines -----------------------------------------------------------------------------------------

    def shard_of(self, call: str) -> int:
        """By the execution, with which the call's id begins."""
        return shard_of(call.partition("/")[0], self.shards)

    def to_router(self, shard: int, event: Any) -> None:
        name = proxyd_name(shard)
        if not self.alive[name]:
            return
        if isinstance(event, m.OpenExecution | m.CloseExecution):
            assert shard_of(event.execution, self.shards) == shard, f"{event} is not for shard {shard}"
        if isinstance(event, m.OpenExecution):
            self.opened[shard][event.execution] = event
        elif isinstance(event, m.CloseExecution):
            self.opened[shard].pop(event.execution, None)
        for command in self.routers[shard].handle(event, self.now):
            match command:
                case WakeAt(at=at):
                    self.at(max(0.0, at - self.now) + 0.002, lambda: self.to_router(shard, Tick()))
                case px.Submit():
                    self.submit(command, name)
                case px.Abort(call=call, number=number) | px.Cut(call=call, number=number):
                    key, life = (call, number), self.lives[name]
                    self.at(
                        self.soon(),
                        lambda key=key, life=life: self.lives[name] == life and self.end_submission(key, "cut"),
                    )
                case px.Finish(call=call):
                    self.answered(call, True)
                case px.Refuse(call=call):
                    self.answered(call, False)
                case Answer():
                    pass
                case _:
                    self.say(name, command)

    def submit(self, submit: px.Submit, name: str) -> None:
        engine, key, life = self.cells[submit.cell].engine, (submit.call, submit.number), self.lives[name]
        shard = self.shard_of(submit.call)
        if not engine.up or engine.released or submit.url != self.url(submit.cell):
            ended = px.SubmissionEnded(call=key[0], number=key[1], how="cut", sampled=0, lost=True, why="gone")
            self.at(self.soon(), lambda: self.lives[name] == life and self.to_router(shard, ended))
            return
        engine.running[key] = 30 - submit.sampled
        self.at(self.soon(2.0), lambda: self.lives[name] == life and self.end_submission(key, "finished"))

    def url(self, cell: str) -> str:
        return f"http://{cell}/{self.cells[cell].engine.life}"

    def end_submission(self, key: tuple[str, int], how: str, *, lost: bool = False) -> None:
        for cell in self.cells.values():
            if key in cell.engine.running:
                budget = cell.engine.running.pop(key)
                sampled = budget if how == "finished" else self.random.randrange(max(1, budget))
                finish = "stop" if how == "finished" else ""
                word = px.SubmissionEnded(
                    call=key[0], number=key[1], how=how, sampled=sampled, finish=finish, lost=lost
                )
                self.to_router(self.shard_of(key[0]), word)
                return

    # ---- executor and harnesses -------------------------------------------------------------------------------------

    def to_executor(self, event: Any) -> None:
        if not self.alive["ex0"]:
            return
        life = self.lives["ex0"]

        def later(word: Any, mean: float = 0.1) -> None:
            self.at(self.soon(mean), lambda: self.lives["ex0"] == life and self.to_executor(word))

        for command in self.executor.handle(event, self.now):
            match command:
                case WakeAt(at=at):
                    self.at(
                        max(0.0, at - self.now) + 0.002, lambda: self.lives["ex0"] == life and self.to_executor(Tick())
                    )
                case m.ExecutionFinished():
                    self.say("ex0", command)
                case ex.Prepare(execution=name):
                    later(ex.Prepared(execution=name))
                case ex.Start(execution=name):
                    self.harnesses[name] = Harness(life, self.random.randint(1, 3))
                    self.at(self.soon(), lambda name=name: self.started(name, life))
                case ex.Evaluate(execution=name):
                    score = round(self.random.random(), 3)
                    later(ex.Evaluated(execution=name, verdict="scored", score=score, evaluator="e", version="1"))
                case ex.ReadClock(execution=name):
                    later(ex.ClockRead(execution=name, waited_s=0.0, call_open=False))
                case ex.StopHarness(execution=name):
                    self.end_harness(name, life)

    def started(self, name: str, life: int) -> None:
        """Its process is known before it can call or end."""
        if self.lives["ex0"] == life:
            self.to_executor(ex.Started(execution=name, pid=1))
            self.at(0.5 + self.soon(), lambda: self.next_call(name, life))

    def next_call(self, name: str, life: int) -> None:
        harness = self.harnesses.get(name)
        if harness is None or harness.life != life or self.lives["ex0"] != life:
            return
        if harness.calls_left == 0:
            self.end_harness(name, life)
            return
        harness.calls_left -= 1
        harness.done += 1
        call = f"{name}/{life}/{harness.done}"
        harness.open = px.CallArrived(call=call, execution=name, prompt_tokens=10, budget=30)
        self.to_router(self.shard_of(call), harness.open)

    def answered(self, call: str, well: bool) -> None:
        """By the relay's rule a refusal is shown to the harness, which gives up."""
        name = call.partition("/")[0]
        harness = self.harnesses.get(name)
        if harness is None or harness.open is None or harness.open.call != call:  # type: ignore[union-attr]
            return
        harness.open = None
        harness.calls_left = harness.calls_left if well else 0
        self.at(self.soon(), lambda: self.next_call(name, harness.life))

    def end_harness(self, name: str, life: int) -> None:
        harness = self.harnesses.pop(name, None)
        if harness is not None and self.lives["ex0"] == life:
            self.to_executor(ex.HarnessEnded(execution=name, exit_code=0, calls=harness.done))

    # ---- trajd and ranks --------------------------------------------------------------------------------------------

    def to_trajd(self, event: Any, answer: Callable[[Any], None] | None = None) -> None:
        if not self.alive["trajd"]:
            return
        before = self.trajd.ledger.changes
        commands = self.trajd.handle(event, self.now)
        if self.trajd.ledger.changes != before:
            self.trajd_journal.append(event)
        for command in commands:
            match command:
                case Answer(message=message):
                    if answer is not None:
                        answer(message)
                case tj.Pack(group=group):
                    self.pack(group)
                case Send(message=message):
                    self.report(message)

    def pack(self, group: str) -> None:
        """The same group gives the same steps, also in a later life."""
        life = self.lives["trajd"]
        if (group, life) in self.packing:
            return
        self.packing.add((group, life))
        closed = self.trajd.ledger.lots.groups[group].closed
        valid = sum(e.outcome.counts for e in closed.executions)
        word = packed(group, valid, enough=valid >= 2)
        self.at(self.soon(0.3), lambda: self.lives["trajd"] == life and self.to_trajd(word))

    def report(self, message: m.GroupPacked) -> None:
        life = self.lives["trajd"]
        self.until_answered(
            "trajd",
            message,
            lambda: self.lives["trajd"] == life,
            lambda: self.lives["trajd"] == life and self.to_trajd(tj.Reported(group=message.group)),
        )

    def rank_turn(self, name: str, life: int) -> None:
        """The oldest word that is not answered, else a claim if it trains, else nothing for a while."""
        cell = self.cells[name]
        rank = cell.rank
        if not cell.rank_up or rank.life != life:
            return
        if cell.computing or not (rank.unsaid or rank.hand or cell.training):
            cell.asking = 0  # a claim that nobody answered is given up
            self.at(0.3, lambda: self.rank_turn(name, life))
            return
        rank.asked += 1
        number, word = rank.asked, rank.next()
        cell.asking = number

        def heard(answer: Any) -> None:
            self.wire("trajd", f"rank:{name}", lambda: self.rank_hears(name, life, number, word, answer))

        self.wire(f"rank:{name}", "trajd", lambda: self.to_trajd(word, heard))
        self.at(AGAIN_S, lambda: cell.asking == number and self.rank_turn(name, life))

    def rank_hears(self, name: str, life: int, number: int, word: Any, answer: Any) -> None:
        cell = self.cells[name]
        rank = cell.rank
        if not cell.rank_up or rank.life != life or cell.asking != number:
            return
        cell.asking = 0
        pause = 0.05
        if isinstance(answer, m.BatchComplete):
            dead = {other for other, its in self.cells.items() if not its.rank_up}
            self.core.step(answer, {n: c.rank for n, c in self.cells.items()}, dead)
        else:
            rank.hear(answer, self.core)
            if isinstance(answer, m.MicroStepLease):
                cell.computing, pause = True, self.soon(0.8)
            elif isinstance(word, m.BatchApplied) and isinstance(answer, m.Done):
                self.stepped(word, life)

        def next_turn() -> None:
            if rank.life == life:
                cell.computing = False
                self.rank_turn(name, life)

        self.at(pause, next_turn)

    def stepped(self, applied: m.BatchApplied, life: int) -> None:
        metrics = {"staleness_mean": 0.0, "cells": 1.0}
        done = m.StepDone(batch=applied.batch, version=applied.version, metrics=metrics)
        self.until_answered("rank:c0", done, lambda: self.core.life == life, lambda: None)
        if len(self.core.weights) % 2 == 0:
            self.core.save()

    # ---- agents -----------------------------------------------------------------------------------------------------

    def to_agent(self, name: str, event: Any) -> None:
        cell = self.cells[name]
        if not cell.up:
            return
        for command in cell.agent.handle(event, self.now):
            match command:
                case Send(message=message):
                    self.say(name, message)
                case agents.Launch(child=child):
                    self.launch(name, child, cell.life)
                case agents.End(child=child):
                    self.end_child(name, child)
                case agents.Switch():
                    cell.switch += 1
                    self.switch(name, command, cell.switch, cell.life)
                case agents.Save():
                    self.save(name)

    def launch(self, name: str, child: str, life: int) -> None:
        cell = self.cells[name]
        cell.switch += 1  # what was under way is cancelled
        self.end_child(name, child)

        def up() -> None:
            if not cell.up or cell.life != life:
                return
            if child == "engine" and not self.cells["c0"].rank_up:
                self.at(0.5, up)  # nobody has weights to give
                return
            if child == "rank":
                self.rank_up(name)
                version = cell.rank.version
            else:
                cell.training = False
                engine = cell.engine
                engine.up, engine.released, engine.life = True, False, engine.life + 1
                version = engine.version = self.core.version
            self.to_agent(name, agents.ChildUp(child=child, version=version, url=self.url(name)))

        self.at(0.5 + self.soon(0.5), up)

    def rank_up(self, name: str) -> None:
        cell = self.cells[name]
        rank = cell.rank
        if rank.asked:  # not its first life
            rank.asked += 1
            if rank is self.core:
                self.core.restart()
            else:
                rank.life, rank.unsaid, rank.version = rank.life + 1, [], ""
                rank.drop()
        rank.asked += 1
        cell.rank_up, cell.training, cell.computing, cell.asking = True, False, False, 0
        self.to_trajd(m.Hello(kind="rank", name=name, life=rank.life, pid=1))
        self.rank_turn(name, rank.life)

    def end_child(self, name: str, child: str) -> None:
        cell = self.cells[name]
        if child == "engine":
            cell.engine.up = False
            for key in list(cell.engine.running):
                self.end_submission(key, "cut", lost=True)
        elif cell.rank_up:
            cell.rank_up = cell.training = False
            self.missed(name)

    def missed(self, name: str) -> None:
        """trajd takes a rank's silence for its death."""
        cell, life, watching = self.cells[name], self.cells[name].rank.life, self.lives["trajd"]

        def lost() -> None:
            if not cell.rank_up and cell.rank.life == life and self.lives["trajd"] == watching:
                self.to_trajd(PeerLost(kind="rank", name=name, why="silent"))

        self.at(LOST_AFTER_S, lost)

    def heard_of(self, name: str) -> None:
        """A trajd that is new hears of a rank by its next heartbeat, or by its silence."""
        cell = self.cells[name]
        if cell.rank_up:
            self.to_trajd(m.Hello(kind="rank", name=name, life=cell.rank.life, pid=1))
        else:
            self.missed(name)

    def switch(self, name: str, order: agents.Switch, number: int, life: int) -> None:
        """As celld/agent/switching.py: what it waits for it polls, and it stops when it is cancelled."""
        cell = self.cells[name]
        engine = cell.engine

        def again() -> None:
            self.at(0.2, lambda: self.switch(name, order, number, life))

        if not cell.up or cell.life != life or cell.switch != number:
            return
        if order.to is Role.TRAIN:
            if engine.running:
                return again()
            engine.released = cell.training = True
            version = cell.rank.version
        else:
            cell.training = False
            wanted = PolicyVersion.parse(order.version or "0.0")
            busy = not order.update_only and (cell.computing or cell.rank.hand or cell.asking)
            if busy or not self.cells["c0"].rank_up or PolicyVersion.parse(self.core.version) < wanted:
                return again()
            assert not engine.running, f"{name} updates weights under {list(engine.running)}"
            engine.released, version = False, self.core.version
            engine.version = version
        word = agents.Switched(to=order.to, epoch=order.epoch, version=version, phases_s={})
        self.at(self.soon(0.2), lambda: cell.switch == number and cell.life == life and self.to_agent(name, word))
        return None

    def save(self, name: str) -> None:
        if name == "c0" and self.cells["c0"].rank_up:
            self.core.save()
            self.at(self.soon(), lambda: self.to_agent(name, agents.Saved(version=self.core.version, path="")))

    # ---- faults -----------------------------------------------------------------------------------------------------

    def fault(self) -> None:
        kind = self.random.choice([*self.alive, "celld", "engine", "rank", "rank"])
        name = self.random.choice(list(self.cells))
        self.story.append((round(self.now, 2), f"{kind} {name if kind in ('celld', 'engine', 'rank') else ''}"))
        if kind == "celld":
            self.kill_agent(name)
        elif kind in ("engine", "rank"):
            if self.cells[name].up and kind in self.cells[name].agent.up:
                self.end_child(name, kind)
                self.to_agent(name, agents.ChildDied(child=kind, detail="killed"))
        elif self.alive[kind]:
            self.kill(kind)

    def kill(self, name: str) -> None:
        self.alive[name] = False
        self.lives[name] += 1
        life = self.lives[name]
        if name == "ex0":
            self.harnesses.clear()
        elif name in proxyd_names(self.shards):  # engines abort what nobody listens to any more
            for cell in self.cells.values():
                for key in [k for k in cell.engine.running if proxyd_name(self.shard_of(k[0])) == name]:
                    del cell.engine.running[key]
        kind, called = known_as(name)
        lost = PeerLost(kind=kind, name=called, why="silent")
        self.at(LOST_AFTER_S, lambda: not self.alive[name] and self.lives[name] == life and self.to_scheduler(lost))
        self.at(0.5 + self.soon(3.0), lambda: self.start_again(name))

    def start_again(self, name: str) -> None:
        self.alive[name] = True
        if name == "cellctl":
            self.scheduler = Scheduler()
            for event, at in self.journal:
                self.scheduler.handle(event, at)
            self.to_scheduler(Restart(life=self.lives[name]))
            for peer in (*(n for n in self.alive if n != name and self.alive[n]), *self.cells):
                self.at(self.soon(0.5), lambda peer=peer: self.still_up(peer) and self.greet(peer))
        elif name in proxyd_names(self.shards):
            self.start_shard(int(known_as(name)[1]))
        elif name == "trajd":
            self.trajd = TrajdCore(BATCH)
            for event in self.trajd_journal:
                self.trajd.handle(event, self.now)
            self.to_trajd(tj.Restarted(life=self.lives[name]))
            self.greet(name)
            for cell in self.cells:
                self.at(self.soon(), lambda cell=cell: self.heard_of(cell))
        else:
            self.executor = ExecutorCore(Limits(slots=64))
            self.greet(name)

    def start_shard(self, shard: int) -> None:
        """It opens what its journal has open; the relay sends again what is not answered."""
        name = proxyd_name(shard)
        self.routers[shard] = Router(0, shard, self.shards)
        for event in (px.Restarted(life=self.lives[name]), *list(self.opened[shard].values())):
            self.to_router(shard, event)
        self.greet(name)
        for execution, harness in list(self.harnesses.items()):
            if harness.open is not None and self.shard_of(execution) == shard:
                self.to_router(shard, harness.open)

    def still_up(self, peer: str) -> bool:
        return self.cells[peer].up if peer in self.cells else self.alive[peer]

    def kill_agent(self, name: str) -> None:
        """Its children die with it."""
        cell = self.cells[name]
        if not cell.up:
            return
        cell.up = False
        cell.switch += 1
        for child in ("engine", "rank"):
            self.end_child(name, child)
        life = cell.life
        lost = PeerLost(kind="celld", name=name, why="silent")
        self.at(LOST_AFTER_S, lambda: not cell.up and cell.life == life and self.to_scheduler(lost))

        def back() -> None:
            cell.life, cell.up, cell.agent = cell.life + 1, True, Agent(cell=name)
            self.greet(name)
            self.to_agent(name, agents.Start())

        self.at(0.5 + self.soon(3.0), back)
