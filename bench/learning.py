"""Does the quickstart learn, and is it the advantages that teach? Seeds, a control, Jmax and policies, each a real run.

    python -m bench.learning [--json] [--quick] [--only ARM ...] [--steps N]

Arms: `elastic` (3 seeds), `shuffled` (advantages permuted within the group: nothing to learn), `jmax1`, `jmax_none`,
`colocate`, `async`.
A run takes six to nine minutes on two cores; `--quick` takes 12 steps and one seed, which is too few to learn and
proves only
that every arm runs.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.figures import Figure, figure, show


@dataclass(frozen=True)
class Arm:
    """One setting; `options` go to `gyre quickstart`."""

    name: str
    options: tuple[str, ...]
    seeds: tuple[int, ...]
    target: str = ""
    holds: Callable[[float], bool] | None = None


ARMS = (
    Arm("elastic", (), (0, 1, 2), ">= 0.20", lambda gain: gain >= 0.20),
    Arm("shuffled", ("--set", "trajectories.shuffle_advantages=true"), (0,), "<= 0.05", lambda gain: gain <= 0.05),
    Arm("jmax1", ("--set", "trajectories.jmax=1"), (0,)),
    Arm("jmax_none", ("--set", "trajectories.jmax=0"), (0,)),
    Arm("colocate", ("--policy", "colocate"), (0,)),
    Arm("async", ("--policy", "async"), (0,)),
)


def quickstart(options: tuple[str, ...], seed: int, steps: int | None, folder: Path) -> dict[str, Any] | None:
    """summary.json of one run plus the mean gradient norm; None if it failed (its words are on stderr)."""
    root = folder / "run"
    shutil.rmtree(root, ignore_errors=True)
    command = [
        sys.executable,
        "-m",
        "gyre_cli.gyre",
        "quickstart",
        "--run",
        str(root),
        "--seed",
        str(seed),
        "--json",
        *options,
    ]
    if steps is not None:
        command += ["--steps", str(steps)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        return None
    results = {row["kind"]: row["rows"] for row in json.loads((root / "results.json").read_text())}
    norms = [row["grad_norm"] for row in results["steps"] if "grad_norm" in row]
    return {**json.loads(done.stdout), "grad_norm": fmean(norms)}


def figures_of(arm: Arm, summaries: list[dict[str, Any]]) -> list[Figure]:
    gains = [s["heldout_pass_after"] - s["heldout_pass_before"] for s in summaries]
    return [
        figure(f"{arm.name}_heldout_gain", gains, "pass rate", arm.target, arm.holds),
        figure(f"{arm.name}_heldout_pass_after", [s["heldout_pass_after"] for s in summaries], "pass rate"),
        figure(f"{arm.name}_grad_norm", [s["grad_norm"] for s in summaries], "norm"),
        figure(f"{arm.name}_mean_staleness", [s["mean_staleness"] for s in summaries], "steps"),
        figure(f"{arm.name}_training_s", [s["seconds"]["training"] for s in summaries], "s"),
    ]


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--json", action="store_true")
    options.add_argument("--quick", action="store_true")
    options.add_argument("--only", nargs="+", choices=[arm.name for arm in ARMS])
    options.add_argument("--steps", type=int)
    given = options.parse_args()
    steps = given.steps or (12 if given.quick else None)
    code = 0
    with tempfile.TemporaryDirectory(prefix="gyre-bench-") as folder:
        for arm in ARMS:
            if given.only and arm.name not in given.only:
                continue
            seeds = arm.seeds[:1] if given.quick else arm.seeds
            runs = [quickstart(arm.options, seed, steps, Path(folder)) for seed in seeds]
            summaries = [s for s in runs if s is not None]
            if summaries:
                code = max(code, show(figures_of(arm, summaries), as_json=given.json))
            code = max(code, int(len(summaries) < len(seeds)))
    return code


if __name__ == "__main__":
    sys.exit(main())
