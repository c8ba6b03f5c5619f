"""An execution whose harness has ended needs no engine, whatever its evaluator still does."""

from __future__ import annotations

from cellctl.ledger import Ledger
from gyre_base.vocabulary import Outcome, Purpose, Role
from tests.cellctl.world import World


def test_the_water_level_is_of_those_that_still_call() -> None:
    ledger = Ledger(retry_budget=1)
    a, b, c = ledger.open_group("t", 3, Purpose.TRAIN, "0.0", 0.0)
    ledger.end_calls(a.id)
    ledger.end_calls(a.id)
    ledger.end_calls("of another life")
    assert ledger.level() == 2
    ledger.finish(a.id, Outcome.SCORED, 1.0, 1.0, 1.0)
    assert ledger.level() == 2
    ledger.end_calls(b.id)
    ledger.end_calls(c.id)
    assert ledger.level() == 1, "while one may still be lost, somebody must be left to serve it again"
    again = ledger.finish(c.id, Outcome.INFRA_FAILED, None, 1.0, 1.0)
    assert again is not None and not again.calls_no_more and ledger.level() == 1
    for execution in (b, again):
        ledger.finish(execution.id, Outcome.SCORED, 1.0, 1.0, 1.0)
    assert ledger.level() == 0


def test_cells_train_while_executions_are_scored() -> None:
    """Where evaluations take their time, a cell turns although more executions are open than the rest serves."""
    lent_early = False
    for seed in range(12):
        world = World(seed, policy="elastic", cells=3, steps_per_burst=2, heldout=0)
        feed = world.feed

        def watched(event: object, world: World = world, feed: object = feed) -> None:
            nonlocal lent_early
            feed(event)  # type: ignore[operator]
            core = world.core
            serving = sum(cell.slots for cell in core.cells.values() if cell.serves)
            trains = any(cell.role is Role.TRAIN for cell in core.cells.values())
            lent_early = lent_early or (trains and len(core.ledger.in_flight) > serving >= core.ledger.level())

        world.feed = watched  # type: ignore[method-assign, assignment]
        world.run()
    assert lent_early
