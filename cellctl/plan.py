"""Before a GPU hour is spent: which cells, bursts and standalone share pay for given durations, by simulation.

The candidates are simulated on the same seeded workloads at the same staleness as the baselines. Elasticity that does
not pay beyond its own spread over seeds is called not worth it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from cellctl.simulate.profile import Arm, Profile
from cellctl.simulate.world import Stuck, World

WORTH = 0.03  # a gain below this share of the time is not worth a second kind of operation
CELL_COUNTS = (2, 3, 4, 6, 8)
BURSTS = (1, 2, 3, 4, 6, 8)


@dataclass(frozen=True, kw_only=True)
class Site:
    """What the user has."""

    nodes: int
    least_nodes_per_cell: int = 1  # below this the training layout does not fit
    staleness: float = 1.5  # mean steps that the user accepts
    seeds: int = 3


def small_site(
    base: Profile, gpus: int, durations: str, limit_h: float | None, train_node_h: float | None
) -> tuple[Profile, int]:
    """The base profile's laws for `gpus` GPUs and recorded durations, and the number of units that cells are made of.

    Units are nodes, or single GPUs where there are fewer than two nodes. A batch is what a quarter of the slots hold.
    """
    per_unit = base.gpus_per_node if gpus >= 2 * base.gpus_per_node else 1
    units = gpus // per_unit
    part = per_unit / base.gpus_per_node
    slots = base.laws.slots_per_node * part
    groups = max(1, round(units * slots / (4 * base.group_size)))
    cost = (
        train_node_h if train_node_h is not None else base.laws.train_node_h * groups / base.groups_per_batch
    ) / part
    laws = dataclasses.replace(base.laws, slots_per_node=slots, train_node_h=cost, replica_nodes=1)
    times = dataclasses.replace(base.durations, file=durations, limit_h=limit_h or base.durations.limit_h)
    return dataclasses.replace(
        base, name="site", gpus_per_node=per_unit, groups_per_batch=groups, laws=laws, durations=times, arms=()
    ), units


def even(nodes: int, cells: int) -> tuple[int, ...]:
    """Cells that differ by at most one node, larger ones first: the last one, which holds the tail, is the smallest."""
    return tuple(nodes // cells + (i < nodes % cells) for i in range(cells))


def at_staleness(arm: Arm, staleness: float) -> Arm | None:
    """The arm with the look-ahead that gives this mean staleness; None if its burst alone is staler."""
    ahead = staleness - (arm.steps_per_burst - 1) / 2.0
    return dataclasses.replace(arm, look_ahead=ahead) if ahead >= 0.0 else None


def baselines(site: Site) -> list[Arm]:
    """Whole-pool switching and fixed pools, each at its best burst, split and streaming for the same staleness."""
    most = max(m for m in BURSTS if (m - 1) / 2.0 <= site.staleness)
    colocate = Arm(name="colocate", policy="colocate", nodes=(site.nodes,), steps_per_burst=most, streaming=False)
    shares = sorted({max(1, round(site.nodes * share)) for share in (0.25, 0.375, 0.5)} - {site.nodes})
    pools = [Arm(name="async", policy="async", nodes=(n, site.nodes - n), steps_per_burst=1) for n in shares]
    return [colocate, *(a for pool in pools if (a := at_staleness(pool, site.staleness)))]


def candidates(site: Site) -> Iterator[Arm]:
    """Elastic arms within memory and staleness."""
    for cells in CELL_COUNTS:
        if site.nodes // cells < site.least_nodes_per_cell:
            continue
        for m in BURSTS:
            nodes = even(site.nodes, cells)
            made = Arm(name=f"{cells}x m={m}", policy="elastic", nodes=nodes, steps_per_burst=m)
            arm = at_staleness(made, site.staleness)
            if arm is not None and (arm.look_ahead in (0.0, site.staleness) or m == 2):
                yield arm


def hours(profile: Profile, arm: Arm, seeds: int) -> list[float]:
    """Per seed; empty if the arm can't work on this workload."""
    try:
        return [World(profile, arm, seed).run().now / 3600.0 for seed in range(seeds)]
    except Stuck:
        return []


def slots_wanted(profile: Profile, arm: Arm, nodes: int) -> float:
    """Executions per node right after a dispatch: engines with fewer good slots than this run overloaded at first."""
    return (arm.steps_per_burst + arm.look_ahead) * profile.groups_per_batch * profile.group_size / nodes


def plan(profile: Profile, site: Site) -> dict[str, Any]:
    """The best arm beside the baselines, with the verdict in words."""
    known = {f"{a.name} {a.nodes}": (a, hours(profile, a, site.seeds)) for a in baselines(site)}
    best_colocate = known.pop(next(iter(known)))
    best_async = min((v for v in known.values() if v[1]), key=lambda v: fmean(v[1]), default=None)
    tried = [(a, h) for a in candidates(site) if (h := hours(profile, a, site.seeds))]
    if not tried:
        why = f"{site.nodes} units (nodes, or GPUs of one node) hold no second cell of {site.least_nodes_per_cell}"
        return {"worth_it": False, "why": f"{why}: the whole pool switches"}
    arm, took = min(tried, key=lambda pair: fmean(pair[1]))
    over_colocate = [c / t for c, t in zip(best_colocate[1], took, strict=True)]
    over_async = [c / t for c, t in zip(best_async[1], took, strict=True)] if best_async else []
    return {**_row(profile, site, arm, took), **_gains(over_colocate, over_async)}


def _row(profile: Profile, site: Site, arm: Arm, took: list[float]) -> dict[str, Any]:
    return {
        "cells": len(arm.nodes),
        "nodes_per_cell": list(arm.nodes),
        "steps_per_burst": arm.steps_per_burst,
        "look_ahead_batches": arm.look_ahead,
        "slots_per_node": round(slots_wanted(profile, arm, site.nodes), 2),
        "standalone_cells": arm.standalone,
        "hours_per_step": round(fmean(took) / profile.steps, 4),
    }


def _gains(over_colocate: list[float], over_async: list[float]) -> dict[str, Any]:
    rivals = [gains for gains in (over_colocate, over_async) if gains]
    least = min(fmean(gains) for gains in rivals)
    worth = least > 1.0 + WORTH and all(min(gains) > 1.0 for gains in rivals)
    percent = max(0.0, 100.0 * (least - 1.0))
    return {
        "gain_over_colocate": round(fmean(over_colocate), 3),
        "gain_over_colocate_range": [round(min(over_colocate), 3), round(max(over_colocate), 3)],
        "gain_over_async": round(fmean(over_async), 3) if over_async else None,
        "gain_over_async_range": [round(min(over_async), 3), round(max(over_async), 3)] if over_async else None,
        "worth_it": worth,
        "why": f"{percent:.1f} % over the better baseline" + ("" if worth else ": not worth it here"),
    }


def break_even(
    profile: Profile, nodes: int, cells: tuple[int, ...] = (1, 2, 3, 4, 6, 8), seeds: int = 3
) -> Iterator[dict[str, Any]]:
    """Gain over whole-pool switching for K cells on the same nodes, same burst, same staleness."""
    base = hours(profile, Arm(name="c", policy="colocate", nodes=(nodes,), streaming=False), seeds)
    for k in cells:
        took = hours(profile, Arm(name=f"{k}", policy="elastic", nodes=even(nodes, k)), seeds)
        gains = [b / t for b, t in zip(base, took, strict=True)]
        yield {
            "cells": k,
            "gain_over_colocate": round(fmean(gains), 3),
            "range": [round(min(gains), 3), round(max(gains), 3)],
        }
