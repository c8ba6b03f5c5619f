"""Elastic, colocate and async lived through by the real daemons, beside what the simulator says of the same set-up.

    python -m bench.elastic [--json] [--quick] [--profile bench/elastic.toml] [--seconds-per-hour 12] [--seed 1]

Every arm is a whole run: scheduler, router, ledger, executors, harness processes, agents; only engines and trainers
are emulated, in scaled time. All arms have the same tasks with the same durations, and so has the simulation.
`live_vs_X` is X's time over elastic's. The overheads say what the real control path adds to the times of the profile,
in the worst arm: of executions (start, relay, router, log, evaluator, report), of micro-steps (claim, lease, commit),
of cells (switches).
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from bench.figures import Figure, figure, show
from cellctl.simulate import profile as profiles
from cellctl.simulate.profile import Profile
from cellctl.simulate.world import World
from gyre_cli import emulate

HERE = Path(__file__).parent
ARMS = ("elastic", "colocate", "async")
NEAR = 0.05  # live and predicted ratios
OVERHEAD = 0.01


def live(profile: Profile, arm: str, given: argparse.Namespace) -> emulate.Lived:
    """One arm with real processes."""
    with tempfile.TemporaryDirectory(prefix="gyre-bench-") as folder:
        root = Path(folder) / "run"
        run, config = emulate.prepare(profile, profile.arm(arm), given.seed, root, given.seconds_per_hour)
        return emulate.live(run, config, profile.steps, arm, lambda words: print(words, file=sys.stderr, flush=True))


def figures_of(profile: Profile, lived: dict[str, emulate.Lived], seed: int) -> list[Figure]:
    worlds = {arm: World(profile, profile.arm(arm), seed).run() for arm in lived}
    hours = {arm: world.now / 3600.0 for arm, world in worlds.items()}
    out: list[Figure] = []
    for arm in ARMS[1:]:
        predicted = hours[arm] / hours["elastic"]
        measured = lived[arm].hours / lived["elastic"].hours
        out.append(figure(f"predicted_vs_{arm}", [predicted], "x"))
        out.append(figure(f"live_vs_{arm}", [measured], "x", f"{predicted:.3f} +- 5 %", partial(is_near, predicted)))
    for arm, one in lived.items():
        out.append(figure(f"live_h_{arm}", [one.hours], "h", f"~ {hours[arm]:.3f}"))
        mean = sum(worlds[arm].staleness) / len(worlds[arm].staleness)
        out.append(figure(f"live_mean_staleness_{arm}", [one.mean_staleness], "steps", f"~ {mean:.3f}"))
    for name in ("overhead_executions", "overhead_training", "overhead_switching"):
        worst = max(getattr(one, name) for one in lived.values())
        out.append(figure(name, [worst], "of time", f"< {OVERHEAD}", lambda v: v < OVERHEAD))
    return out


def is_near(predicted: float, measured: float) -> bool:
    return abs(measured / predicted - 1.0) <= NEAR


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--json", action="store_true")
    options.add_argument("--quick", action="store_true", help="one burst at 4 s per hour: shows that it runs, no more")
    options.add_argument("--profile", default=str(HERE / "elastic.toml"), help="needs arms elastic, colocate and async")
    options.add_argument("--seconds-per-hour", type=float, default=12.0, help="larger: less overhead, longer run")
    options.add_argument("--seed", type=int, default=1)
    given = options.parse_args()
    profile = profiles.load(given.profile)
    if given.quick:
        given.seconds_per_hour, profile = 4.0, dataclasses.replace(profile, steps=4)
    began = time.monotonic()
    try:
        lived = {arm: live(profile, arm, given) for arm in ARMS}
    except emulate.Interrupted as error:
        print(error, file=sys.stderr)
        return 1
    figures = figures_of(profile, lived, given.seed)
    figures.append(figure("bench_s", [time.monotonic() - began], "s", "< 600", lambda v: v < 600.0))
    return show(figures, as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
