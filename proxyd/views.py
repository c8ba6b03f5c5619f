"""Rows for `proxyd status|routes|sessions|tail`. Pure reads of the daemon's state; no text of any call."""

from __future__ import annotations

from typing import Any

from proxyd.core import Router
from proxyd.metrics import LoopLag
from proxyd.service import Service
from proxyd.state import State

VIEWS = ("status", "routes", "sessions", "tail")
Row = dict[str, Any]


def rows(what: str, argument: str, core: Router, service: Service, lag: LoopLag, now: float) -> list[Row]:
    """One view, each row with its shard. An unknown name gives a row that says so."""
    match what:
        case "status":
            found = [_status(core, service, lag)]
        case "routes":
            found = _engines(core, now)
        case "sessions":
            found = _sessions(core, service, argument)
        case "tail":
            found = [row for row in service.tail if argument in ("", row["execution"])]
        case _:
            return [{"error": f"no view is called {what!r}: {', '.join(VIEWS)}"}]
    return [{"shard": core.shard, **row} for row in found]


def _status(core: Router, service: Service, lag: LoopLag) -> Row:
    states = [call.state for call in core.calls.values()]
    return {
        "life": core.life,
        "table": core.table_number,
        "engines_serving": sum(e.serving for e in core.engines.values()),
        "executions_open": len(core.executions),
        "calls_running": states.count(State.RUNNING),
        "calls_held": states.count(State.HELD),
        "calls_moving": states.count(State.ABORTING),
        "calls_finished": core.finished,
        "calls_moved": core.moved,
        "log_trouble": service.log_trouble,
        "loop_lag_p99_ms": round(1000 * lag.quantile_s(0.99), 2),
    }


def _engines(core: Router, now: float) -> list[Row]:
    homes: dict[str, int] = {}
    for opened in core.executions.values():
        homes[opened.home] = homes.get(opened.home, 0) + 1
    out: list[Row] = []
    for engine in sorted(core.engines.values(), key=lambda e: e.order):
        drain = core.drains.get(engine.cell)
        failures, until = core.suspect.get(engine.url, (0, 0.0))
        out.append(
            {
                "cell": engine.cell,
                "url": engine.url,
                "version": engine.version,
                "serving": engine.serving,
                "routable": core.usable(engine, now),
                "drain_epoch": drain.epoch if drain is not None and not drain.over else None,
                "failures": failures,
                "paused_s": round(max(0.0, until - now), 2),
                "in_flight": len(core.on_cell.get(engine.cell, ())),
                "executions": homes.get(engine.cell, 0),
                "slots": engine.slots,
            }
        )
    return out


def _sessions(core: Router, service: Service, argument: str) -> list[Row]:
    open_calls: dict[str, list[str]] = {}
    for call in core.calls.values():
        open_calls.setdefault(call.execution, []).append(call.story[-1] if call.story else call.state.value)
    out: list[Row] = []
    for execution in sorted({*core.executions, *service.forests}):
        if argument not in ("", execution):
            continue
        forest, opened = service.forests.get(execution), core.executions.get(execution)
        nodes = list(forest.calls.values()) if forest is not None else []
        out.append(
            {
                "execution": execution,
                "home": opened.home if opened is not None else None,
                "temperature": opened.temperature if opened is not None else None,
                "calls": len(nodes),
                "agents": len({n.agent.id for n in nodes}),
                "tokens": sum(len(n.tail.ids) + len(n.completion.ids) for n in nodes),
                "sampled": sum(len(n.completion.ids) for n in nodes),
                "open": open_calls.get(execution, []),
            }
        )
    return out
