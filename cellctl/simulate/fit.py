"""Fit a profile's free numbers to some published arms and to the published durations; everything else is then a
prediction.

    python -m cellctl.simulate.fit [--profile qwengyre-122b] [--seeds N]

What is fitted to what stands in the profile (`[fit]`). Two stages, repeated. (1) The duration model is solved for the
published statistics. They were measured under load, so what counts is what the first arm's executions take in
simulation: the closed form only shows the way, and is aimed so far aside as the simulation was off the round before.
(2) The other numbers are moved by Gauss-Newton until the fitted arms show the published hours in simulation.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from cellctl.simulate.profile import Durations, Fit, Profile, load, replaced
from cellctl.simulate.world import World

Floats = NDArray[np.float64]
STEP = {"limit_h": 0.1, "train_node_h": 0.05, "load_slope": 0.07}  # below 0.06: of the value
SCALE = {"mean_h": 1.0, "query_mean_h": 1.0, "queries_from_4h": 0.05, "timed_out": 0.005, "queries_timed_out": 0.05}
BOUNDS = {"limit_h": (4.0, 8.0), "train_node_h": (5.0, 400.0), "load_slope": (0.0, 0.8)}
GRID = 2000


def normal_cdf(x: Floats) -> Floats:
    """By the complementary error function's series of Abramowitz and Stegun 7.1.26 (absolute error below 2e-7)."""
    z = np.abs(x) / np.sqrt(2.0)
    t = 1.0 / (1.0 + 0.3275911 * z)
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    upper = 0.5 * series * np.exp(-z * z)
    below: Floats = np.where(x >= 0, 1.0 - upper, upper)
    return below


def statistics(d: Durations, size: int) -> dict[str, float]:
    """What the model gives at nominal load, by quadrature over the task effect."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(41)
    weights = weights / weights.sum()
    hours = np.linspace(1e-6, d.limit_h, GRID)
    single, longest = np.zeros(GRID), np.zeros(GRID)
    for share, factor in ((1.0 - d.hard_share, 1.0), (d.hard_share, d.hard_factor)):
        centre = np.log(d.median_h * factor) + d.task_sigma * nodes
        below = normal_cdf((np.log(hours)[None, :] - centre[:, None]) / d.rollout_sigma)
        single += share * (weights[:, None] * below).sum(axis=0)
        longest += share * (weights[:, None] * below**size).sum(axis=0)
    return {
        "mean_h": float(np.trapezoid(1.0 - single, hours)),
        "query_mean_h": float(np.trapezoid(1.0 - longest, hours)),
        "queries_from_4h": float(1.0 - np.interp(4.0, hours, longest)),
        "timed_out": float(1.0 - single[-1]),
        "queries_timed_out": float(1.0 - longest[-1]),
    }


def newton(residuals: Callable[[Floats], Floats], start: Floats, step: Floats, rounds: int, tolerance: float) -> Floats:
    """Gauss-Newton with differences; steps that make it worse are halved."""
    at, now = start, residuals(start)
    for _ in range(rounds):
        if float(np.abs(now).max()) < tolerance:
            break
        columns = [(residuals(at + unit) - now) / unit.sum() for unit in np.diag(step)]
        move = np.linalg.lstsq(np.array(columns).T, -now, rcond=None)[0]
        for _ in range(6):
            there = residuals(at + move)
            if np.abs(there).sum() < np.abs(now).sum():
                at, now = at + move, there
                break
            move = move / 2.0
    return at


def solve_durations(d: Durations, plan: Fit, size: int, aim: dict[str, float]) -> Durations:
    """The model whose statistics at nominal load are `aim`; numbers that `plan` does not name stay."""
    scale = np.array([SCALE[n] for n in aim])
    wanted = np.array(list(aim.values()))

    def made(x: Floats) -> Durations:
        return replaced(d, dict(zip(plan.durations, (float(v) for v in np.exp(x)), strict=True)))

    def residuals(x: Floats) -> Floats:
        got = statistics(made(x), size)
        misses: Floats = (np.array([got[n] for n in aim]) - wanted) / scale
        return misses

    start = np.log([getattr(d, n) for n in plan.durations])
    return made(newton(residuals, start, np.full(len(start), 0.01), rounds=40, tolerance=1e-4))


def mean_hours(profile: Profile, arm: str, seeds: int) -> float:
    return fmean(World(profile, profile.arm(arm), seed).run().now / 3600.0 for seed in range(seeds))


def observed(profile: Profile, arm: str, seeds: int) -> dict[str, float]:
    """Statistics of what executions took in simulation, all seeds together."""
    seen = [World(profile, profile.arm(arm), seed).run().observed.statistics() for seed in range(seeds)]
    return {name: fmean(one[name] for one in seen) for name in seen[0]}


def bounded(names: tuple[str, ...], values: Floats) -> dict[str, float]:
    return {n: min(max(float(v), BOUNDS[n][0]), BOUNDS[n][1]) for n, v in zip(names, values, strict=True)}


def fit(profile: Profile, seeds: int, rounds: int = 4) -> Profile:
    """The fitted profile; progress on stderr."""
    aim = dict(profile.fit.observed)
    for round_ in range(rounds):
        values = _fit_hours(profile, aim, seeds)
        profile = _with(profile, values, aim)
        seen = observed(profile, profile.arms[0].name, seeds)
        aim = {name: max(1e-5, aim[name] + wanted - seen[name]) for name, wanted in profile.fit.observed.items()}
        print(f"round {round_}: {values} {profile.durations}", file=sys.stderr)
    return profile


def _with(profile: Profile, values: dict[str, float], aim: dict[str, float]) -> Profile:
    changed = profile.changed(**values)
    return dataclasses.replace(
        changed, durations=solve_durations(changed.durations, profile.fit, profile.group_size, aim)
    )


def _fit_hours(profile: Profile, aim: dict[str, float], seeds: int) -> dict[str, float]:
    plan = profile.fit

    def residuals(values: Floats) -> Floats:
        made = _with(profile, bounded(plan.numbers, values), aim)
        return np.array([mean_hours(made, a, seeds) - made.arm(a).hours for a in plan.arms])

    now = {**dataclasses.asdict(profile.durations), **dataclasses.asdict(profile.laws)}
    start = np.array([now[n] for n in plan.numbers])
    step = np.array([STEP[n] * (start[i] if STEP[n] < 0.06 else 1.0) for i, n in enumerate(plan.numbers)])
    return bounded(plan.numbers, newton(residuals, start, step, rounds=2, tolerance=0.02))


@dataclasses.dataclass(frozen=True)
class Sensitivity:
    """Change of every arm's hours, in percent, when one number is 10 % larger."""

    parameter: str
    value: float
    change_percent: dict[str, float]


def sensitivity(profile: Profile, seeds: int) -> Iterator[Sensitivity]:
    base = {arm.name: mean_hours(profile, arm.name, seeds) for arm in profile.arms}
    numbers = {**dataclasses.asdict(profile.durations), **dataclasses.asdict(profile.laws)}
    for name, value in numbers.items():
        if isinstance(value, float) and value:
            larger = profile.changed(**{name: value * 1.1})
            change = {a: round(100.0 * (mean_hours(larger, a, seeds) / base[a] - 1.0), 1) for a in base}
            yield Sensitivity(name, value, change)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--profile", default="qwengyre-122b")
    options.add_argument("--seeds", type=int, default=8)
    given = options.parse_args()
    profile = load(given.profile)
    fitted = fit(profile, given.seeds)
    print(json.dumps({"observed": observed(fitted, fitted.arms[0].name, given.seeds)}))
    print(json.dumps({"durations": dataclasses.asdict(fitted.durations), "laws": dataclasses.asdict(fitted.laws)}))
    for arm in fitted.arms:
        print(
            json.dumps(
                {"arm": arm.name, "hours": round(mean_hours(fitted, arm.name, given.seeds), 3), "published": arm.hours}
            )
        )


if __name__ == "__main__":
    main()
