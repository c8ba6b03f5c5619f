"""What people and pictures see of the scheduler: plain rows, made from its state and nothing else."""

from __future__ import annotations

import math
from statistics import fmean
from typing import Any

from cellctl.core import Scheduler
from cellctl.roles import Cell
from gyre_base.vocabulary import Purpose, Role

LOOKED_AT = 500  # executions in flight whose end is forecast
RECENT_SWITCHES = 8


def status(scheduler: Scheduler, now: float) -> list[dict[str, Any]]:
    """One row for the run, one per cell, one per executor, one per alarm."""
    return [
        run_row(scheduler, now),
        *(cell_row(scheduler, name, now) for name in scheduler.cells),
        *({"executor": e.name, "slots": e.slots, "held": e.held} for e in scheduler.executors.values()),
        *(alarm.row(peer, now) for peer, alarm in scheduler.alarms.items()),
    ]


def run_row(s: Scheduler, now: float) -> dict[str, Any]:
    """The whole run in one object."""
    last = s.steps[-1] if s.steps else {}
    return {
        "run": s.phase,
        "policy": s.policy.name,
        "policy_note": s.policy_note,
        "frozen": s.frozen,
        "step": s.version.step,
        "steps": s.config.scheduler.steps,
        "version": str(s.version),
        "burst_end": s.burst_end,
        "water_level": s.ledger.level(),
        "paused": s.ledger.paused,
        "serving_slots": sum(c.slots for c in s.cells.values() if c.serves),
        "waiting_for_executor": len(s.waiting),
        "groups_open": s.ledger.groups_open(),
        "groups_ready": s.groups_ready,
        "groups_per_batch": s.config.scheduler.groups_per_batch,
        "batch_filled": min(1.0, s.groups_ready / s.config.scheduler.groups_per_batch),
        "executions": s.ledger.outcomes,
        "retries": s.ledger.retries,
        "mean_staleness": mean_staleness(s),
        "score": recent_score(s),
        "evaluated": {key: len(rows) for key, rows in s.evals.items()},
        "last_step": last,
        "saved": s.saved,
        "saving": "save" in s.promises,
        **s.job.row(now),
        **s.totals,
        "to_train_s": switch_seconds(s, Role.TRAIN),
        "to_rollout_s": switch_seconds(s, Role.ROLLOUT),
        "forecast": forecast(s),
        "next_turn_s": next_turn_s(s, now),
        "alarms": len(s.alarms),
        "now": now,
    }


def cell_row(s: Scheduler, name: str, now: float) -> dict[str, Any]:
    cell = s.cells[name]
    return {
        "cell": name,
        "role": cell.role.value,
        "since_s": round(now - cell.since, 3),
        "epoch": cell.epoch,
        "version": cell.version,
        "slots": cell.slots,
        "switches": cell.switches,
        "moved": cell.moved,
        "url": cell.url,
        "phases_s": cell.phases_s,
        "why": cell.reason,
    }


def explain(s: Scheduler, name: str, now: float) -> list[dict[str, Any]]:
    """Why a cell did or did not turn: its last decisions, and what the next turn waits for."""
    rows: list[dict[str, Any]] = []
    for cell in s.cells.values():
        if name and cell.name != name:
            continue
        why, stays = cell.reason, why_it_stays(s, cell)
        rows.append({"cell": cell.name, "role": cell.role.value, "why": why, "stays": stays, "story": list(cell.story)})
    if not rows:
        return [{"error": f"no cell is called {name!r}: {', '.join(s.cells)}"}]
    return [*rows, {"next": forecast(s), "next_turn_s": next_turn_s(s, now)}]


def why_it_stays(s: Scheduler, cell: Cell) -> str:
    """Why a cell does not turn now; "" where it is on its way or not up."""
    if cell.role is Role.TRAIN:
        return f"trains until step {s.burst_end} is done" if s.policy.name != "async" else "trains for ever"
    if cell.role is not Role.ROLLOUT or s.phase != "training":
        return ""
    if cell.standalone:
        return "is standalone: only ever serves"
    if cell.refused:
        return f"can't train: {cell.refused}"
    if s.policy.name == "async":
        return "serves for ever"
    first, _ = _next_to_train(s)
    if first is None or first is cell or s.policy.name == "colocate":
        return forecast(s)
    return f"{first.name} is before it in the cells' order, and {forecast(s).removeprefix(first.name).strip()}"


def forecast(s: Scheduler) -> str:
    """What the next turn waits for, in words."""
    if s.phase != "training":
        return f"no turn in phase {s.phase}"
    if s.frozen:
        return "frozen by the operator"
    if s.policy.name == "async":
        return "no turn: the pools are fixed in the async policy"
    cell, left = _next_to_train(s)
    if cell is None:
        return f"cells come back when step {s.burst_end} is done"
    what = "the whole pool turns" if s.policy.name == "colocate" else f"{cell.name} turns"
    return f"{what} to train when the water level ({s.ledger.level()}) is at most {left}"


def _next_to_train(s: Scheduler) -> tuple[Cell | None, int]:
    """(the cell whose turn it is, the water level at which it turns); None if none is lent before the burst's end."""
    serving = [c for c in s.cells.values() if c.role is Role.ROLLOUT]
    first = next((c for c in serving if not c.standalone), None)
    if first is None or s.version.step >= s.burst_end:
        return None, 0
    return first, 0 if s.policy.name == "colocate" else sum(c.slots for c in serving) - first.slots


def next_turn_s(s: Scheduler, now: float) -> float | None:
    """Seconds until that, by the forecast durations of what is in flight; None if nobody can say.

    Of more than `LOOKED_AT` executions every so many is looked at.
    """
    cell, left = _next_to_train(s)
    running = list(s.ledger.in_flight.values())
    knows = bool(s.ledger.outcomes.get(Purpose.TRAIN.value)) and s.phase == "training" and s.policy.name != "async"
    if not knows or cell is None or len(running) <= left:
        return None
    every = len(running) // LOOKED_AT + 1
    limit_s = s.config.tasks.harness_limit_s
    remaining = sorted(
        s.forecast.remaining_s(s.ledger.groups[e.group].task, now - e.dispatched_at, limit_s) for e in running[::every]
    )
    ends = (len(running) - left) / len(running) * len(remaining)  # so many of these must end
    return round(remaining[min(len(remaining), math.ceil(ends)) - 1], 1)


def switch_seconds(s: Scheduler, to: Role) -> float | None:
    """Mean of the last switches to a role."""
    last = [row["seconds"] for row in s.switch_times if row["to"] == to.value][-RECENT_SWITCHES:]
    return round(fmean(last), 3) if last else None


def mean_staleness(s: Scheduler) -> float:
    """E[d] over the steps done so far, in optimizer steps."""
    values = [row["staleness_mean"] for row in s.steps if "staleness_mean" in row]
    return fmean(values) if values else 0.0


def recent_score(s: Scheduler, groups: int = 8) -> float | None:
    scores = [x for row in s.group_scores[-groups:] for x in row["scores"]]
    return fmean(scores) if scores else None


def timeline_row(s: Scheduler, now: float) -> dict[str, Any]:
    """One sample for the picture of the run."""
    return {
        "at": now,
        "phase": s.phase,
        "step": s.version.step,
        "water_level": s.ledger.level(),
        "roles": {c.name: c.role.value for c in s.cells.values()},
    }


def results(s: Scheduler) -> list[dict[str, Any]]:
    """What reports are made of: steps, scores of groups, evaluations, switches."""
    return [
        {"kind": "steps", "rows": s.steps},
        {"kind": "groups", "rows": s.group_scores},
        {"kind": "evals", "rows": [{"key": key, "groups": rows} for key, rows in s.evals.items()]},
        {"kind": "switches", "rows": s.switch_times},
    ]
