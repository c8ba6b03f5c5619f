"""The scheduler and several shards of proxyd: each hears of its own executions, all drain a cell before it turns."""

from __future__ import annotations

from typing import Any

import pytest

from cellctl.core import Scheduler, Start
from gyre_base import messages as m
from gyre_base.daemon import PeerLost, Send
from gyre_base.shards import shard_of
from gyre_base.vocabulary import Outcome, Role

SHARDS = 3
PEERS = [f"proxyd:{shard}" for shard in range(SHARDS)]


def hello(kind: str, name: str, life: int = 1) -> m.Hello:
    return m.Hello(kind=kind, name=name, life=life, pid=1, slots=64)


def started(*shards: int) -> tuple[Scheduler, list[Send]]:
    """Two cells with room for all, and what was sent once these shards had said hello."""
    core = Scheduler()
    tree = {
        "cluster": {"cells": 2},
        "proxyd": {"shards": SHARDS},
        "scheduler": {"group_size": 8, "groups_per_batch": 1, "steps_per_burst": 1, "slots_per_cell": 4},
        "evaluation": {"tasks": 0},
    }
    events: list[Any] = [
        Start(config=tree, train=("t",), heldout=()),
        hello("trajd", "trajd"),
        hello("executor", "ex0"),
    ]
    for cell in ("c0", "c1"):
        events.append(m.RoleChanged(cell=cell, role=Role.ROLLOUT, epoch=0, version="0.0", engine_url=f"http://{cell}"))
    events += [hello("proxyd", str(shard)) for shard in shards]
    return core, [c for event in events for c in core.handle(event, 1.0) if isinstance(c, Send)]


def until_a_cell_turns(core: Scheduler) -> list[Send]:
    """Executions end until the core is lent."""
    sent: list[Send] = []
    for name in list(core.ledger.in_flight):
        if core.cells["c0"].role is not Role.ROLLOUT:
            break
        ended = m.ExecutionFinished(execution=name, outcome=Outcome.SCORED, score=1.0)
        sent += [c for c in core.handle(ended, 2.0) if isinstance(c, Send)]
    return sent


def drained(shard: int, epoch: int = 1, moved: int = 1) -> m.CellDrained:
    return m.CellDrained(cell="c0", epoch=epoch, moved=moved, moved_mid_generation=0, seconds=0.1, shard=shard)


def of(sent: list[Any], kind: type) -> list[Send]:
    return [c for c in sent if isinstance(c, Send) and isinstance(c.message, kind)]


def test_a_run_begins_when_every_shard_is_there() -> None:
    core, sent = started(0, 2)
    assert core.phase == "starting" and not of(sent, m.ExecutionOrder)
    core.handle(hello("proxyd", "7"), 1.0)
    assert core.phase == "starting", "a shard that the run does not have is none of them"
    sent = core.handle(hello("proxyd", "1"), 1.0)
    assert core.phase == "training" and of(sent, m.ExecutionOrder)


def test_what_is_said_of_an_execution_goes_to_its_shard_and_tables_go_to_all() -> None:
    core, sent = started(0, 1, 2)
    sent += until_a_cell_turns(core)
    about = [*of(sent, m.OpenExecution), *of(sent, m.CloseExecution)]
    assert {send.to for send in about} == set(PEERS), "the executions of this test are spread"
    assert all(send.to == f"proxyd:{shard_of(send.message.execution, SHARDS)}" for send in about)
    assert {send.to for send in of(sent, m.EngineTable)} == {"proxyd:*"}


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_a_cell_turns_when_the_last_shard_has_drained_it(order: tuple[int, ...]) -> None:
    core, _ = started(0, 1, 2)
    sent = until_a_cell_turns(core)
    assert [send.to for send in of(sent, m.DrainCell)] == PEERS
    *early, last = order
    for shard in early:
        assert not of(core.handle(drained(shard), 3.0), m.FlipCell)
        assert not of(core.handle(drained(shard), 3.0), m.FlipCell), "said twice"
    assert not of(core.handle(drained(last, epoch=0), 3.0), m.FlipCell), "of an older order"
    assert [send.to for send in of(core.handle(drained(last), 3.0), m.FlipCell)] == ["celld:c0"]
    assert (core.cells["c0"].moved, core.totals["moved"]) == (3, 3), "each counted once"


def test_a_shard_that_was_killed_hears_its_own_executions_and_the_drain_it_owes() -> None:
    core, _ = started(0, 1, 2)
    until_a_cell_turns(core)
    core.handle(drained(0), 3.0)
    core.handle(PeerLost(kind="proxyd", name="1", why="silent"), 3.0)
    core.handle(drained(2), 3.0)
    again = core.handle(hello("proxyd", "1", life=2), 4.0)
    theirs = {name for name in core.ledger.in_flight if shard_of(name, SHARDS) == 1}
    assert {send.message.execution for send in of(again, m.OpenExecution)} == theirs and theirs
    assert [send.to for send in of(again, m.DrainCell)] == ["proxyd:1"]
    assert not of(core.handle(hello("proxyd", "0", life=2), 4.0), m.DrainCell), "it has answered"
    repeats = of(core.handle(hello("trajd", "trajd", life=2), 9.0), m.DrainCell)
    assert [send.to for send in repeats] == ["proxyd:1"], "only what is owed is said again"
    assert of(core.handle(drained(1), 10.0), m.FlipCell)


def test_a_cell_that_goes_down_is_drained_by_nobody_any_more() -> None:
    core, _ = started(0, 1, 2)
    until_a_cell_turns(core)
    core.handle(drained(1), 3.0)
    core.handle(PeerLost(kind="celld", name="c0", why="silent"), 3.0)
    assert not core.cells["c0"].draining and not core.promises.of("drain")
    assert not of(core.handle(drained(0), 4.0), m.FlipCell)
