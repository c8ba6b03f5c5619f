"""Arms of a profile over seeds, as rows for people and programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from statistics import fmean
from typing import Any

from cellctl.simulate.profile import Arm, Profile
from cellctl.simulate.world import World


def worlds(profile: Profile, arm: Arm, seeds: int) -> list[World]:
    return [World(profile, arm, seed).run() for seed in range(seeds)]


def rows(profile: Profile, arms: list[Arm], seeds: int) -> Iterator[dict[str, Any]]:
    """One per arm; every figure is a mean over seeds, `speedup` compares the first arm with this one on the same
    workloads.
    """
    first: list[float] = []
    for arm in arms:
        done = worlds(profile, arm, seeds)
        hours = [w.now / 3600.0 for w in done]
        first = first or hours
        yield {
            **row(profile, arm, done),
            "speedup": round(fmean(h / f for h, f in zip(hours, first, strict=True)), 4),
        }


def row(profile: Profile, arm: Arm, done: list[World]) -> dict[str, Any]:
    hours = [w.now / 3600.0 for w in done]
    mean = fmean(hours)
    gpus = profile.gpus_per_node
    return {
        "arm": arm.name,
        "hours": round(mean, 3),
        "published_hours": arm.hours or None,
        "miss_percent": round(100.0 * (mean / arm.hours - 1.0), 2) if arm.hours else None,
        "source": arm.source,
        "idle_share": round(fmean(w.meter.idle_share() for w in done), 4),
        "mean_staleness": round(fmean(fmean(w.staleness) for w in done), 3),
        "switches": round(fmean(w.core.totals["switches"] for w in done), 1),
        "gpu_s": {k: round(gpus * fmean(w.meter.totals[k] for w in done)) for k in done[0].meter.totals},
        "hours_min": round(min(hours), 3),
        "hours_max": round(max(hours), 3),
        "timed_out_share": round(fmean(w.observed.statistics()["timed_out"] for w in done), 4),
        "policy": arm.policy,
        "seeds": len(done),
    }


def with_policy(profile: Profile, policies: tuple[str, ...]) -> list[Arm]:
    """The first arm's cluster under other policies: for a user's own profile, which has one arm or none of these
    names.
    """
    base = profile.arms[0]
    total = sum(base.nodes)
    train = max(1, round(0.375 * len(base.nodes)))
    made = {
        "elastic": base,
        "colocate": dataclasses.replace(base, policy="colocate", nodes=(total,), standalone=0, streaming=False),
        "async": dataclasses.replace(base, policy="async", train_cells=train, look_ahead=1.5, steps_per_burst=1),
    }
    return [dataclasses.replace(made[p], name=p, policy=p, hours=0.0, source="") for p in policies]
