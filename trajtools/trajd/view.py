"""What trajd says of itself: rows for `trajd status` and `trajd batches`. Reads the core, changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from trajtools.trajd.core import TrajdCore
from trajtools.trajd.lots import Group

VIEWS = ("status", "batches", "groups")
_TOTALS = ("tokens_recorded", "tokens_stored", "tokens_sampled", "tokens_owned", "tokens_packed", "calls")


def rows(core: TrajdCore, what: str, about: dict[str, Any]) -> list[dict[str, Any]]:
    """One view. `about`: what only the shell knows (its life, the index)."""
    match what:
        case "status":
            return [{**about, **status(core)}, *_cells(core)]
        case "batches":
            return batches(core)
        case "groups":
            return [_group_row(core, group) for group in core.ledger.lots.groups.values()]
    return [{"error": f"no view is called {what!r}: {', '.join(VIEWS)}"}]


def status(core: TrajdCore) -> dict[str, Any]:
    ledger = core.ledger
    groups = list(ledger.lots.groups.values())
    packed = [group.packed for group in groups if group.packed is not None]
    totals = {key: sum(int(p.summary.get(key, 0)) for p in packed) for key in _TOTALS}
    sums = [b.weights_sum for b in ledger.applied if b.weights_sum is not None]
    return {
        "version": ledger.version,
        "open_batch": ledger.open_batch,
        "batches_applied": len(ledger.applied),
        "batches_retired": ledger.retired_below,
        "groups_closed": len(groups),
        "groups_packing": len(groups) - len(packed),
        "groups_enough": sum(p.enough for p in packed),
        "groups_short": sum(not p.enough for p in packed),
        "groups_in_reserve": len(ledger.lots.reserve),
        "open_groups": f"{len(ledger.lots.lot(ledger.open_batch))}/{ledger.lots.size}",
        "micro_steps_pool": len(ledger.pool()),
        "micro_steps_leased": len(ledger.leased),
        "micro_steps_computed": len(ledger.computed),
        **totals,
        "tokens_context": totals["tokens_packed"] - totals["tokens_owned"],
        "tokens_trained": ledger.trained.tokens,
        "tokens_trained_twice": ledger.trained.twice,
        "trained_by_class": _trained_by_class(core),
        "weights_sum_min": min(sums, default=None),
        "weights_sum_max": max(sums, default=None),
        "weights_sum_last": sums[-1] if sums else None,
        "order": ledger.lots.reserve.order,
        **ledger.lots.bias(len(ledger.applied)),
        "breaks": _added(p.summary.get("breaks", {}) for p in packed),
        "removed": _added(p.summary.get("removed", {}) for p in packed),
        "damage": _added(p.summary.get("damage", {}) for p in packed),
    }


def batches(core: TrajdCore) -> list[dict[str, Any]]:
    """One row per applied batch."""
    lots = core.ledger.lots
    return [
        {
            "batch": b.batch,
            "base_version": b.base_version,
            "version": b.version,
            "groups": [group.name for group in lots.lot(b.batch)],
            "micro_steps": len(b.ids),
            "executions": b.executions,
            "owned_tokens": b.owned_tokens,
            "weights_sum": b.weights_sum,
            "staleness_mean": b.staleness["mean"],
            "staleness_max": b.staleness["max"],
            "mean_group_s": _mean([group.closed.seconds for group in lots.lot(b.batch)]),
            "mean_score": _mean([group.content.summary.get("mean_score", 0.0) for group in lots.lot(b.batch)]),
        }
        for b in core.ledger.applied
    ]


def _cells(core: TrajdCore) -> list[dict[str, Any]]:
    """Who holds what of the open batch."""
    ledger = core.ledger
    return [
        {
            "cell": holder.cell,
            "life": holder.life,
            "leased": next((i for i, h in ledger.leased.items() if h == holder), ""),
            "computed": sum(h == holder for h in ledger.computed.values()),
        }
        for holder in sorted({*ledger.leased.values(), *ledger.computed.values()})
    ]


def _group_row(core: TrajdCore, group: Group) -> dict[str, Any]:
    packed = group.packed
    row = {"group": group.name, "serial": group.closed.serial, "loaded": group.loaded, "reported": group.reported}
    if packed is None:
        return {**row, "state": "packing"}
    counts = {"counted": packed.counted, "micro_steps": len(packed.steps), "owned_tokens": packed.owned_tokens}
    return {**row, "state": "enough" if packed.enough else "short", **counts, **packed.summary}


def _trained_by_class(core: TrajdCore) -> dict[str, float]:
    """Share of the trained tokens by class: many compactions must not let `main` starve unseen."""
    lots = core.ledger.lots
    groups = [g for batch in range(core.ledger.open_batch) for g in lots.lot(batch)]
    by_class = _added(group.content.summary.get("owned_by_class", {}) for group in groups)
    total = sum(by_class.values())
    return {kind: n / total for kind, n in by_class.items()} if total else {}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _added(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    out: Counter[str] = Counter()
    for one in counts:
        out.update(one)
    return dict(out)
