"""What people and pictures see of the scheduler: plain rows, made from its state and nothing else."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from cellctl.core import Scheduler
from gyre_base.vocabulary import Role


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
        "serving_slots": sum(c.slots for c in s.cells.values() if c.serves),
        "groups_ready": s.groups_ready,
        "groups_per_batch": s.config.scheduler.groups_per_batch,
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
        "forecast": forecast(s),
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
        rows.append({"cell": cell.name, "role": cell.role.value, "why": cell.reason, "story": list(cell.story)})
    if not rows:
        return [{"error": f"no cell is called {name!r}: {', '.join(s.cells)}"}]
    return [*rows, {"next": forecast(s)}]


def forecast(s: Scheduler) -> str:
    """What the next turn waits for, in words."""
    if s.phase != "training":
        return f"no turn in phase {s.phase}"
    if s.frozen:
        return "frozen by the operator"
    serving = [c for c in s.cells.values() if c.role is Role.ROLLOUT]
    if s.version.step >= s.burst_end or not serving:
        return f"cells come back when step {s.burst_end} is done"
    left = sum(c.slots for c in serving) - serving[0].slots
    return f"{serving[0].name} turns to train when the water level ({s.ledger.level()}) is at most {left}"


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
