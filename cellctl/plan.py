"""Before a GPU hour is spent: which cells, bursts, slots and standalone share pay for given durations, by simulation.

The candidates are simulated on the same seeded workloads at the same staleness as the baselines. The search goes in two
rounds: cells and bursts on one workload, then slots, standalone cells and a smaller last cell around the best ones, on
all of them. Elasticity that does not pay beyond its own spread over seeds is called not worth it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from cellctl.simulate.profile import Arm, Profile, even, with_last
from cellctl.simulate.world import Stuck, World

WORTH = 0.03  # a gain below this share of the time is not worth a second kind of operation
CELL_COUNTS = (2, 3, 4, 6, 8)
CURVE = (1, *CELL_COUNTS)
BURSTS = (1, 2, 3, 4, 6, 8)
FINALISTS = 3  # of the first round
SLOTS = (0.8, 1.25)  # of what engines serve well: lend later, lend sooner


@dataclass(frozen=True, kw_only=True)
class Site:
    """What the user has."""

    nodes: int
    least_nodes_per_cell: int = 1  # below this the training layout does not fit
    staleness: float = 1.5  # mean steps that the user accepts
    seeds: int = 3


@dataclass(frozen=True)
class Tried:
    """An arm and its hours per step, one per seed."""

    arm: Arm
    hours: list[float]

    @property
    def mean(self) -> float:
        return fmean(self.hours)


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


def at_staleness(arm: Arm, staleness: float) -> Arm | None:
    """The arm with the look-ahead that gives this mean staleness; None if its burst alone is staler."""
    ahead = staleness - (arm.steps_per_burst - 1) / 2.0
    return dataclasses.replace(arm, look_ahead=ahead) if ahead >= 0.0 else None


def baselines(site: Site) -> list[Arm]:
    """Whole-pool switching, alone and with engines that go on serving, and fixed pools: each at its best burst, split
    and streaming for the same staleness.
    """
    most = max(m for m in BURSTS if (m - 1) / 2.0 <= site.staleness)
    whole = Arm(name="colocate", policy="colocate", nodes=(site.nodes,), steps_per_burst=most, streaming=False)
    shares = sorted({max(1, round(site.nodes * share)) for share in (0.25, 0.375, 0.5)} - {site.nodes})
    pools = [Arm(name="async", policy="async", nodes=(n, site.nodes - n), steps_per_burst=1) for n in shares]
    apart = max(1, site.nodes // 8)
    if site.nodes - apart >= site.least_nodes_per_cell and site.nodes > 1:
        nodes = (site.nodes - apart, apart)
        pools.append(Arm(name="colocate", policy="colocate", nodes=nodes, standalone=1, steps_per_burst=1))
    return [whole, *(a for pool in pools if (a := at_staleness(pool, site.staleness)))]


def first_round(site: Site) -> Iterator[Arm]:
    """Elastic arms of even cells within memory and staleness."""
    for cells in CELL_COUNTS:
        if site.nodes // cells < site.least_nodes_per_cell:
            continue
        for m in BURSTS:
            made = Arm(name=f"{cells} cells, m={m}", policy="elastic", nodes=even(site.nodes, cells), steps_per_burst=m)
            arm = at_staleness(made, site.staleness)
            if arm is not None:
                yield arm


def second_round(site: Site, arm: Arm) -> Iterator[Arm]:
    """The arm itself, and with one thing changed each."""
    yield arm
    for slots in SLOTS:
        yield dataclasses.replace(arm, slots=slots)
    cells = len(arm.nodes)
    last = max(site.least_nodes_per_cell, min(arm.nodes) // 4)
    if last < min(arm.nodes):
        nodes = with_last(site.nodes, cells, last)
        yield dataclasses.replace(arm, nodes=nodes)
        yield dataclasses.replace(arm, nodes=nodes, tail_load=2.0)
        yield dataclasses.replace(arm, nodes=nodes, standalone=1)
    if cells > 2:
        yield dataclasses.replace(arm, standalone=1)


def run(profile: Profile, arm: Arm, seeds: int) -> Tried | None:
    """None if the arm can't work on this workload."""
    bursts = max(1, round(profile.steps / arm.steps_per_burst))
    whole = dataclasses.replace(profile, steps=bursts * arm.steps_per_burst)
    try:
        return Tried(arm, [World(whole, arm, seed).run().now / 3600.0 / whole.steps for seed in range(seeds)])
    except Stuck:
        return None


def best(tried: list[Tried | None]) -> list[Tried]:
    return sorted((t for t in tried if t is not None), key=lambda t: t.mean)


def plan(profile: Profile, site: Site) -> dict[str, Any]:
    """The best arm beside the baselines, with the verdict in words."""
    first = best([run(profile, arm, 1) for arm in first_round(site)])
    if not first:
        why = f"{site.nodes} units (nodes, or GPUs of one node) hold no second cell of {site.least_nodes_per_cell}"
        return {"worth_it": False, "why": f"{why}: the whole pool switches"}
    around = {arm: None for t in first[:FINALISTS] for arm in second_round(site, t.arm)}
    chosen = best([run(profile, arm, site.seeds) for arm in around])[0]
    rivals: dict[str, list[Tried]] = {}
    for found in best([run(profile, arm, site.seeds) for arm in baselines(site)]):
        rivals.setdefault(found.arm.policy, []).append(found)
    return {
        **_row(profile, site, chosen),
        **_gains(chosen, {name: tried[0] for name, tried in rivals.items()}),
        "tried": len(first) + len(around),
    }


def _row(profile: Profile, site: Site, chosen: Tried) -> dict[str, Any]:
    arm, laws = chosen.arm, profile.laws
    in_flight = (arm.steps_per_burst + arm.look_ahead) * profile.groups_per_batch * profile.group_size
    return {
        "cells": len(arm.nodes),
        "nodes_per_cell": list(arm.nodes),
        "steps_per_burst": arm.steps_per_burst,
        "look_ahead_groups": round(arm.look_ahead * profile.groups_per_batch),
        "cell_slots": [max(1, round(n * laws.slots_per_node * arm.slots)) for n in arm.nodes],
        "executions_per_node_at_dispatch": round(in_flight / site.nodes, 1),
        "standalone_cells": arm.standalone,
        "tail_load": arm.tail_load,
        "hours_per_step": round(chosen.mean, 4),
    }


def _gains(chosen: Tried, rivals: dict[str, Tried]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    gains = {name: _over(rival, chosen) for name, rival in rivals.items()}
    for name in ("colocate", "async"):
        found = gains.get(name, [])
        out[f"gain_over_{name}"] = round(fmean(found), 3) if found else None
        out[f"gain_over_{name}_range"] = [round(min(found), 3), round(max(found), 3)] if found else None
    least = min(fmean(found) for found in gains.values())
    worth = least > 1.0 + WORTH and all(min(found) > 1.0 for found in gains.values())
    percent = max(0.0, 100.0 * (least - 1.0))
    better = min(rivals.values(), key=lambda t: t.mean).arm
    why = f"{percent:.1f} % over the better baseline ({better.policy}, nodes {list(better.nodes)})"
    return {**out, "worth_it": worth, "why": why + ("" if worth else ": not worth it here")}


def _over(rival: Tried, chosen: Tried) -> list[float]:
    return [r / c for r, c in zip(rival.hours, chosen.hours, strict=True)]


def break_even(
    profile: Profile, nodes: int, cells: tuple[int, ...] = CURVE, seeds: int = 3, m: int = 4
) -> Iterator[dict[str, Any]]:
    """Gain over whole-pool switching for K cells on the same nodes, same burst, same staleness."""
    whole = Arm(name="c", policy="colocate", nodes=(nodes,), streaming=False, steps_per_burst=m)
    base = run(profile, whole, seeds)
    for k in (k for k in cells if k <= nodes):
        took = run(profile, Arm(name=f"{k}", policy="elastic", nodes=even(nodes, k), steps_per_burst=m), seeds)
        if base is None or took is None:
            continue
        gains = _over(base, took)
        yield {
            "cells": k,
            "gain_over_colocate": round(fmean(gains), 3),
            "range": [round(min(gains), 3), round(max(gains), 3)],
        }
