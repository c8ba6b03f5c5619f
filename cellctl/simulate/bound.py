"""How few hours per step any schedule can reach at a mean staleness: a bound for every rule, also one that knows all.

    python -m cellctl.simulate.bound [--profile qwengyre-2.4t] [--staleness 1.5] [--steps 4] [--arm E0]

A group that is trained in step j at staleness d was dispatched after step j-1-d, so the d + 1 intervals that end with
step j last at least its own hours and the training of its own executions; and no interval is shorter than one step's
training on all nodes, since gradients are computed at the weights of the step before. Nothing else is asked of a
schedule: cells turn in no time, slots are free, every duration is known, any group goes into any step. For every way to
space the steps of a cycle, groups are given to steps so that the mean staleness is least.

Spacings are tried on a grid of `GRID` parts of the cycle; windows count as longer by one part, so that no spacing
between the grid's does better. Durations are those of one arm's groups in simulation. With the elastic arm's that is
generous: a schedule with fewer hours per step has fewer slot-hours for the same executions, so more load, not less.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from bisect import bisect_left
from collections.abc import Iterator

import numpy as np

from cellctl.simulate.fit import mean_hours
from cellctl.simulate.profile import Arm, Profile, load
from cellctl.simulate.world import World

GRID = 20
TOLERANCE_H = 0.005


def durations_h(profile: Profile, arm: Arm, seeds: int) -> list[float]:
    """Of every group in an arm's simulation: the hours of its longest member, ascending."""
    worlds = [World(profile, arm, seed).run() for seed in range(seeds)]
    return sorted(hours for world in worlds for _, hours in world.places)


def quantiles(values: list[float], count: int) -> list[float]:
    """`count` groups that stand for all, ascending."""
    return [float(v) for v in np.quantile(values, (np.arange(count) + 0.5) / count)]


def cheapest(costs: list[list[int]], room: int) -> int:
    """The least sum of costs when every row takes one column and every column `room` rows: successive shortest paths.

    `costs[row][column]`; rows = columns * room.
    """
    columns = range(len(costs[0]))
    held: list[list[int]] = [[] for _ in columns]
    for row in reversed(range(len(costs))):
        best = list(costs[row])
        came: dict[int, tuple[int, int]] = {}  # column: (the column that gives a row to it, the row)
        for _ in columns:
            for j, k in itertools.permutations(columns, 2):
                extra, other = min(((costs[h][k] - costs[h][j], h) for h in held[j]), default=(0, -1))
                if other >= 0 and best[j] + extra < best[k]:
                    best[k], came[k] = best[j] + extra, (j, other)
        k = min((j for j in columns if len(held[j]) < room), key=lambda j: best[j])
        while k in came:
            j, other = came.pop(k)
            held[j].remove(other)
            held[k].append(other)
            k = j
        held[k].append(row)
    return sum(costs[row][j] for j in columns for row in held[j])


def least_staleness(intervals: list[float], needed: list[float]) -> float:
    """Mean staleness of the best assignment for a cycle of steps with these intervals before them; hours.

    `needed`: hours from dispatch to step of every group of the cycle, ascending, equally many per step.
    """
    count = len(intervals)
    most = int(needed[-1] // sum(intervals) + 1) * count + count
    windows = [
        list(itertools.accumulate(intervals[(step - d) % count] for d in range(most + 1))) for step in range(count)
    ]
    costs = [[bisect_left(window, hours) for window in windows] for hours in needed]
    return cheapest(costs, len(needed) // count) / len(needed)


def spacings(count: int, cycle_h: float, shortest_h: float) -> Iterator[list[float]]:
    """Ways to space `count` steps in a cycle, none shorter than `shortest_h`; the longest interval comes first."""
    part = (cycle_h - count * shortest_h) / GRID
    for bars in itertools.combinations(range(GRID + count - 1), count - 1):
        edges = (-1, *bars, GRID + count - 1)
        parts = [after - before - 1 for before, after in itertools.pairwise(edges)]
        if parts[0] + 1 >= max(parts):  # the grid can make the longest look one part shorter
            yield [shortest_h + n * part for n in parts]


def bound(profile: Profile, hours: list[float], hours_per_step: float, steps: int) -> float:
    """The least mean staleness of any cycle of `steps` steps with this mean interval; infinite if training alone takes
    longer.
    """
    laws, nodes = profile.laws, sum(profile.arms[0].nodes)
    train_h = laws.train_node_h / nodes
    shortest_h = train_h + laws.step_s / 3600.0
    slack_h = steps * (hours_per_step - shortest_h)
    if slack_h < 0.0:
        return float("inf")
    own_h = train_h / profile.groups_per_batch + (laws.step_s + laws.pack_s) / 3600.0
    needed = [h + own_h - slack_h / GRID for h in quantiles(hours, steps * profile.groups_per_batch)]
    return min(least_staleness(each, needed) for each in spacings(steps, steps * hours_per_step, shortest_h))


def least_hours(profile: Profile, hours: list[float], staleness: float, steps: int) -> float:
    """The fewest hours per step at which the bound allows this mean staleness, by bisection."""
    low, high = 0.0, max(hours) + profile.laws.train_node_h
    while high - low > TOLERANCE_H:
        middle = (low + high) / 2.0
        low, high = (low, middle) if bound(profile, hours, middle, steps) <= staleness else (middle, high)
    return low


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--profile", default="qwengyre-2.4t", help="shipped profile or file")
    options.add_argument("--arm", help="whose durations groups have (default: the profile's first)")
    options.add_argument("--staleness", type=float, default=1.5)
    options.add_argument("--hours-per-step", type=float, help="instead: the least mean staleness at these")
    options.add_argument("--steps", type=int, default=4, help="longest cycle that is looked at; 4 takes minutes")
    options.add_argument("--seeds", type=int, default=8)
    given = options.parse_args()
    profile = load(given.profile)
    hours = durations_h(profile, profile.arm(given.arm) if given.arm else profile.arms[0], given.seeds)
    if given.hours_per_step:
        for steps in range(1, given.steps + 1):
            staleness = bound(profile, hours, given.hours_per_step, steps)
            row = {"steps_per_cycle": steps, "hours_per_step": given.hours_per_step, "least_staleness": staleness}
            print(json.dumps(row), flush=True)
        return 0
    took = {a.name: mean_hours(profile, a.name, given.seeds) / profile.steps for a in profile.arms}
    for steps in range(1, given.steps + 1):
        least = least_hours(profile, hours, given.staleness, steps)
        row = {"steps_per_cycle": steps, "staleness": given.staleness, "least_hours_per_step": round(least, 3)}
        print(json.dumps({**row, **{f"{name}_over_it": round(h / least, 3) for name, h in took.items()}}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
