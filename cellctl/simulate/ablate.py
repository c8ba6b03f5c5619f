"""What each option of the scheduler is worth on a profile, for every policy it applies to, on the same workloads.

An option that can't change a policy's course is left out for it: without streaming or with every cell away there is
nobody for whom an earlier dispatch or a longer tail would matter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from statistics import fmean
from typing import Any

from cellctl.simulate.profile import Arm, Profile, with_last
from cellctl.simulate.world import World

BATCH_RESERVE = 1.0  # batches that the orders hold back
KNOWN = 4  # executions of every task in an earlier run
ELASTIC, ALL = ("elastic",), ("elastic", "colocate", "async")


@dataclasses.dataclass(frozen=True)
class Option:
    """A name, what it changes of an arm, the policies it applies to."""

    name: str
    changes: dict[str, Any]
    policies: tuple[str, ...] = ALL


def options(profile: Profile) -> list[Option]:
    reserve = round(BATCH_RESERVE * profile.groups_per_batch)
    longest = {"dispatch_order": "longest"}
    known = {**longest, "known": KNOWN}
    return [
        Option("as it is", {}),
        Option("dispatch_order longest", longest),
        Option("stagger_s 1800", {"stagger_h": 0.5}),
        Option("stagger_s 1800, longest first, tasks known", {"stagger_h": 0.5, **known}),
        Option("head_start_groups 1/4 batch", {"head_start": 0.25}, ELASTIC),
        Option("head_start_groups 1/4 batch, longest", {"head_start": 0.25, **longest}, ELASTIC),
        Option("head_start_groups 1/4 batch, longest, tasks known", {"head_start": 0.25, **known}, ELASTIC),
        Option("water_level work", {"water_level": "work"}, ELASTIC),
        Option("tail_load 2", {"tail_load": 2.0}, ELASTIC),
        Option("last cell a quarter", {"nodes": "small tail"}, ELASTIC),
        Option("last cell a quarter, tail_load 2", {"nodes": "small tail", "tail_load": 2.0}, ELASTIC),
        Option("m = 3, look-ahead 1/2 batch", {"steps_per_burst": 3, "look_ahead": 0.5}, ELASTIC),
        Option("order shuffle", {"order": "shuffle", "reserve_groups": reserve}),
        Option("order stratified", {"order": "stratified", "reserve_groups": reserve}),
        Option("m = 5", {"steps_per_burst": 5}, ("elastic", "colocate")),
        Option("m = 6", {"steps_per_burst": 6}, ("elastic", "colocate")),
    ]


def with_option(arm: Arm, option: Option) -> Arm:
    changes = dict(option.changes)
    if changes.get("nodes") == "small tail":
        cells, nodes = len(arm.nodes), sum(arm.nodes)
        changes["nodes"] = with_last(nodes, cells, max(1, nodes // cells // 4))
    return dataclasses.replace(arm, **changes)


def rows(profile: Profile, seeds: int) -> Iterator[dict[str, Any]]:
    """One per option and policy. `gain`: its arm's hours over this; `over_colocate`: against colocate as it is, at the
    same steps per burst.
    """
    first = {arm.policy: arm for arm in reversed(profile.arms)}
    colocate: dict[int, list[float]] = {}
    for policy in reversed(ALL):
        base: list[float] = []
        for option in options(profile):
            if policy not in first or policy not in option.policies:
                continue
            arm = with_option(first[policy], option)
            worlds = [World(_whole_bursts(profile, arm), arm, seed).run() for seed in range(seeds)]
            took = [w.now / w.profile.steps for w in worlds]
            base = base or took
            if policy == "colocate" and not set(option.changes) - {"steps_per_burst"}:
                colocate[arm.steps_per_burst] = took
            rival = colocate.get(option.changes.get("steps_per_burst", 0)) or colocate.get(
                first[policy].steps_per_burst
            )
            yield {
                "policy": policy,
                "option": option.name,
                "hours_per_step": round(fmean(took) / 3600.0, 4),
                "gain": _ratio(base, took),
                "over_colocate": _ratio(rival, took) if rival and policy == "elastic" else None,
                **_measured(worlds),
            }


def _whole_bursts(profile: Profile, arm: Arm) -> Profile:
    """So many steps that the last burst is as long as the others."""
    bursts = max(1, round(profile.steps / arm.steps_per_burst))
    return dataclasses.replace(profile, steps=bursts * arm.steps_per_burst)


def _ratio(base: list[float], took: list[float]) -> float:
    return round(fmean(b / t for b, t in zip(base, took, strict=True)), 4)


def _measured(worlds: list[World]) -> dict[str, Any]:
    return {
        "mean_staleness": round(fmean(fmean(w.staleness) for w in worlds), 3),
        "timed_out_share": round(fmean(w.observed.statistics()["timed_out"] for w in worlds), 4),
        "idle_share": round(fmean(w.meter.idle_share() for w in worlds), 4),
        "duration_by_place": round(fmean(w.duration_by_place() for w in worlds), 3),
    }
