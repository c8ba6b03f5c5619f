"""A whole cluster in virtual time around the real scheduler core: executors, proxyd, cells, trajd and trainers as
small models.

Seeded. Faults are events like any other. After every event the scheduler's own invariants and the promises of DESIGN
5 are checked.
"""

from __future__ import annotations

import heapq
import itertools
import random
from typing import Any

from cellctl.core import Scheduler, Start
from gyre_base import messages as m
from gyre_base.daemon import Answer, PeerLost, Send, Tick, WakeAt
from gyre_base.ids import PolicyVersion
from gyre_base.vocabulary import Outcome, Role


class World:
    """`run()` drives it to phase done; `trace` holds (time, what) for assertions."""

    def __init__(self, seed: int, *, faults: bool = False, **scheduler: Any) -> None:
        self.random = random.Random(seed)
        self.core = Scheduler()
        self.queue: list[tuple[float, int, Any]] = []
        self.number = itertools.count()
        self.now = 0.0
        self.faults = faults
        self.odds = self.random.choice([(8, 1, 1), (3, 1, 6)])  # now and then an evaluator that fails most of the time
        self.events: list[tuple[float, Any]] = []
        self.running: dict[str, float] = {}
        self.roles: dict[str, Role] = {}
        self.epochs: dict[str, int] = {}
        self.engine_versions: dict[str, str] = {}
        self.trained: list[list[str]] = []
        self.ready: list[str] = []
        self.packed: dict[str, m.GroupPacked] = {}
        self.version = PolicyVersion(0, 0)
        self.stepping = False
        self.saved = PolicyVersion(-1, 0)
        self.finished: dict[str, int] = {}
        self.trajd_is_dead = False
        cells = scheduler.pop("cells", 3)
        heldout = scheduler.pop("heldout", 4)
        tree = {
            "cluster": {"cells": cells},
            "scheduler": {"steps": 6, "group_size": 4, "groups_per_batch": 2, "slots_per_cell": 8, **scheduler},
            "evaluation": {"tasks": heldout},
        }
        self.put(0.0, Start(config=tree, train=tuple(f"t{i}" for i in range(5)), heldout=("h0", "h1", "h2", "h3")))
        for kind, name in (("proxyd", "0"), ("trajd", "trajd")):
            self.put(self.delay(), m.Hello(kind=kind, name=name, life=1, pid=1))
        self.put(self.delay(), m.Hello(kind="executor", name="ex0", life=1, pid=1, slots=64))
        for i in range(cells):
            self.start_cell(f"c{i}", life=1)

    # ---- time -----------------------------------------------------------------------------------------------------

    def put(self, after: float, event: Any) -> None:
        heapq.heappush(self.queue, (self.now + after, next(self.number), event))

    def delay(self, mean: float = 0.2) -> float:
        return self.random.expovariate(1 / mean)

    def run(self, limit: int = 60_000) -> World:
        for _ in range(limit):
            if self.core.phase == "done":
                return self
            self.run_one()
        raise AssertionError(f"not done after {limit} events: {self.core.phase}, step {self.core.version}")

    def run_one(self) -> None:
        self.now, _, event = heapq.heappop(self.queue)
        if callable(event):
            event()
        else:
            self.feed(event)

    def feed(self, event: Any) -> None:
        before = self.core.version
        self.events.append((self.now, event))
        for command in self.core.handle(event, self.now):
            self.obey(command)
        self.core.check()
        self.check(before)
        if self.faults and self.random.random() < 0.02:
            faults = [self.kill_executor, self.kill_satellite, self.kill_core, self.kill_trajd, self.repeat]
            self.random.choice(faults)()

    # ---- what the others do -----------------------------------------------------------------------------------------

    def obey(self, command: Any) -> None:
        match command:
            case WakeAt(at=at):
                self.put(max(0.0, at - self.now), Tick())
            case Answer():
                pass
            case Send(message=m.ExecutionOrder() as order):
                self.execute(order)
            case Send(message=m.DrainCell(cell=cell, epoch=epoch)):
                self.put(
                    self.delay(), m.CellDrained(cell=cell, epoch=epoch, moved=1, moved_mid_generation=1, seconds=0.1)
                )
            case Send(message=m.FlipCell(cell=cell, to=to, epoch=epoch, version=version)):
                self.flip(cell, to, epoch, version)
            case Send(message=m.UpdateEngine(cell=cell, epoch=epoch, version=version)):
                self.flip(cell, Role.ROLLOUT, epoch, version)
            case Send(message=m.GroupClosed() as closed):
                self.pack(closed)
            case Send(message=m.SaveCheckpoint()):
                self.put(self.delay(), self.save)

    def execute(self, order: m.ExecutionOrder) -> None:
        def end() -> None:
            if order.execution not in self.running:
                return
            if Role.ROLLOUT not in self.roles.values():  # its calls are held until a cell serves
                self.put(1.0, end)
                return
            self.feed(m.ExecutionEnded(execution=order.execution))
            self.put(self.random.choice([0.0, 0.5, 3.0]), score_it)

        def score_it() -> None:
            if self.running.pop(order.execution, None) is None:
                return
            outcome = self.random.choices([Outcome.SCORED, Outcome.PARTIAL, Outcome.EVALUATOR_FAILED], self.odds)[0]
            score = self.random.random() if outcome.counts else None
            error = "" if outcome.counts else "the tests are gone\nTraceback"
            self.feed(m.ExecutionFinished(execution=order.execution, outcome=outcome, score=score, error=error))

        self.running[order.execution] = self.now
        self.put(self.random.lognormvariate(1.0, 0.6), end)

    def flip(self, cell: str, to: Role, epoch: int, version: str) -> None:
        if epoch <= self.epochs[cell] and self.roles[cell] is to:
            return
        self.epochs[cell] = epoch
        answer = m.RoleChanged(
            cell=cell, role=to, epoch=epoch, version=version or str(self.version), engine_url=f"http://{cell}"
        )

        def turned() -> None:
            if self.epochs[cell] != epoch:
                return
            self.roles[cell] = to
            if to is Role.ROLLOUT:
                self.engine_versions[cell] = version
            self.feed(answer)
            self.try_step()

        self.put(self.delay(0.5), turned)

    def pack(self, closed: m.GroupClosed) -> None:
        if self.trajd_is_dead:
            return
        if closed.group in self.packed:
            self.put(self.delay(), self.packed[closed.group])
            return
        valid = sum(e.outcome.counts for e in closed.executions)
        self.packed[closed.group] = m.GroupPacked(
            group=closed.group, enough=valid >= 2, counted=valid, micro_steps=1, owned_tokens=10
        )

        def answer() -> None:
            if valid >= 2:
                self.ready.append(closed.group)
            self.feed(self.packed[closed.group])
            self.try_step()

        self.put(self.delay(), answer)

    def try_step(self) -> None:
        size = self.core.config.scheduler.groups_per_batch
        if self.stepping or len(self.ready) < size or self.roles.get("c0") is not Role.TRAIN:
            return
        self.stepping = True
        life = self.version.lineage

        def step() -> None:
            self.stepping = False
            if self.version.lineage != life or self.roles["c0"] is not Role.TRAIN:
                return
            batch, self.ready = self.ready[:size], self.ready[size:]
            self.trained.append(batch)
            self.version = PolicyVersion(self.version.lineage, self.version.step + 1)
            self.feed(
                m.StepDone(batch=len(self.trained) - 1, version=str(self.version), metrics={"staleness_mean": 0.5})
            )
            self.try_step()

        self.put(self.delay(1.0), step)

    # ---- faults -----------------------------------------------------------------------------------------------------

    def start_cell(self, name: str, life: int) -> None:
        self.roles[name], self.epochs[name] = Role.STARTING, 0

        def up() -> None:
            self.roles[name] = Role.ROLLOUT
            self.engine_versions[name] = str(self.version)
            self.feed(m.Hello(kind="celld", name=name, life=life, pid=1))
            self.feed(
                m.RoleChanged(
                    cell=name, role=Role.ROLLOUT, epoch=0, version=str(self.version), engine_url=f"http://{name}"
                )
            )

        self.put(1.0 + self.delay(), up)

    def kill_executor(self) -> None:
        self.running.clear()
        self.feed(PeerLost(kind="executor", name="ex0", why="killed"))
        self.put(2.0, m.Hello(kind="executor", name="ex0", life=len(self.events), pid=1, slots=64))

    def kill_satellite(self) -> None:
        if len(self.roles) > 1:
            self.kill_cell(self.random.choice([c for c in self.roles if c != "c0"]))

    def kill_trajd(self) -> None:
        """What it is told until it is back is lost."""

        def back() -> None:
            self.trajd_is_dead = False
            self.feed(m.Hello(kind="trajd", name="trajd", life=len(self.events), pid=1))

        self.trajd_is_dead = True
        self.put(1.0, back)

    def save(self) -> None:
        if self.roles["c0"] is not Role.STARTING:
            self.saved = self.version
            self.feed(m.CheckpointSaved(version=str(self.version), path=""))

    def kill_core(self) -> None:
        if self.version.step and self.saved != self.version:
            self.version = PolicyVersion(self.version.lineage + 1, self.version.step - 1)
            self.ready = [*self.trained.pop(), *self.ready]
        else:
            self.version = PolicyVersion(self.version.lineage + 1, self.version.step)
        self.saved = self.version  # what it starts again from
        self.kill_cell("c0")

    def kill_cell(self, name: str) -> None:
        if self.roles[name] is Role.STARTING:
            return
        self.epochs[name] = 1 << 30  # what was under way is void
        self.feed(PeerLost(kind="celld", name=name, why="killed"))
        self.start_cell(name, life=len(self.events))

    def repeat(self) -> None:
        """A message that was sent twice."""
        kinds = (m.ExecutionFinished, m.StepDone, m.GroupPacked, m.RoleChanged, m.CellDrained)
        old = [event for _, event in self.events[-200:] if isinstance(event, kinds)]
        if old:
            self.feed(self.random.choice(old))

    # ---- promises ---------------------------------------------------------------------------------------------------

    def check(self, before: PolicyVersion) -> None:
        core = self.core
        if core.policy.name == "elastic" and not self.faults and core.phase == "training":
            turning = [c for c in core.cells.values() if c.role is Role.TO_TRAIN and c.since == self.now]
            if turning:
                serving = sum(c.slots for c in core.cells.values() if c.serves)
                assert serving >= core.ledger.level(), "lent a cell that the executions in flight needed"
        if core.version.lineage == before.lineage:
            assert core.version >= before


def main() -> None:
    """One run with faults, told on stdout: `make sim SEED=7`."""
    import sys

    seed = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    world = World(seed, policy="elastic", faults=True, steps_per_burst=2, slots_per_cell=12).run()
    for at, event in world.events:
        if isinstance(event, (PeerLost, m.StepDone, m.RoleChanged)):
            print(f"{at:10.3f} {event}")
    print(f"seed {seed}: done at {world.now:.1f} s, version {world.core.version}, retries {world.core.ledger.retries}")


if __name__ == "__main__":
    main()
