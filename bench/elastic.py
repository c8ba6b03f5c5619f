"""Elastic, colocate and async lived through by the real daemons, beside what the simulator says of the same set-up.

    python -m bench.elastic [--json] [--quick] [--profile bench/elastic.toml] [--seconds-per-hour 38] [--seed 1]

Every arm is a whole run (`gyre emulate`): scheduler, router, ledger, executors, harness processes, agents; only engines
and trainers are emulated, in scaled time. All arms have the same tasks with the same durations, and so has the
simulation. They run side by side, which gives each three times the seconds per hour: what the control path costs is
fixed seconds. Each begins when the one before has dispatched, so that no start of daemons delays the first calls.
`live_vs_X` is X's time over elastic's. The overheads say what the real control path adds to the times of the profile,
in the worst arm: of executions (start, relay, router, log, evaluator, report), of micro-steps (claim, lease, commit),
of cells (switches); `executions_X` is where in the life of an execution the first lies, mean of the arms.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import signal
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from bench.figures import Figure, figure, show
from cellctl.simulate import profile as profiles
from cellctl.simulate.profile import Profile
from cellctl.simulate.world import World
from gyre_base.daemon import die_with_parent

HERE = Path(__file__).parent
ARMS = ("elastic", "colocate", "async")
NEAR = 0.05  # live and predicted ratios
OVERHEAD = 0.01
STOP_S = 60.0


class Ended(RuntimeError):
    """An arm ended without a result; says which and its exit code."""


class Live:
    """One arm as a `gyre emulate` of its own. `dispatched` is set when executions are in flight, or when it ended."""

    def __init__(self, arm: str, steps: int, given: argparse.Namespace, folder: Path) -> None:
        self.arm, self.dispatched = arm, asyncio.Event()
        words = {
            "--profile": given.profile,
            "--arm": arm,
            "--steps": steps,
            "--seed": given.seed,
            "--seconds-per-hour": given.seconds_per_hour,
            "--run": folder / arm,
        }
        self._command = [sys.executable, "-m", "gyre_cli.gyre", "emulate", "--json"]
        self._command += [str(word) for pair in words.items() for word in pair]

    async def run(self) -> dict[str, Any]:
        """Its row. Raises Ended."""
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *self._command, stdout=pipe, stderr=pipe, preexec_fn=die_with_parent, start_new_session=True
        )
        try:
            assert process.stdout is not None
            out, _, code = await asyncio.gather(process.stdout.read(), self._watch(process.stderr), process.wait())
        finally:
            self.dispatched.set()
            await _stopped(process)
        if code != 0:
            raise Ended(f"{self.arm} ended with exit code {code}")
        row: dict[str, Any] = json.loads(out)
        return row

    async def _watch(self, words: asyncio.StreamReader | None) -> None:
        assert words is not None
        async for line in words:
            text = line.decode()
            print(text, end="", file=sys.stderr, flush=True)
            if "in flight" in text and ", 0 executions" not in text:
                self.dispatched.set()


async def _stopped(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.terminate()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), STOP_S)


async def live(arms: list[str], steps: int, given: argparse.Namespace, folder: Path) -> dict[str, dict[str, Any]]:
    """Every arm's row. When one ends without, the others are stopped. Raises Ended, CancelledError (a signal)."""
    this = asyncio.current_task()
    assert this is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, this.cancel)
    running: dict[str, asyncio.Task[dict[str, Any]]] = {}
    try:
        async with asyncio.TaskGroup() as group:
            for arm in arms:
                one = Live(arm, steps, given, folder)
                running[arm] = group.create_task(one.run())
                await one.dispatched.wait()
    except* Ended as errors:
        raise errors.exceptions[0] from None
    return {arm: task.result() for arm, task in running.items()}


def figures_of(lived: dict[str, dict[str, Any]]) -> list[Figure]:
    hours = {arm: row["predicted_hours"] for arm, row in lived.items()}
    out: list[Figure] = []
    for arm in ARMS[1:]:
        predicted = hours[arm] / hours["elastic"]
        measured = lived[arm]["hours"] / lived["elastic"]["hours"]
        out.append(figure(f"predicted_vs_{arm}", [predicted], "x"))
        out.append(figure(f"live_vs_{arm}", [measured], "x", f"{predicted:.3f} +- 5 %", partial(is_near, predicted)))
    for arm in ARMS:
        row = lived[arm]
        out.append(figure(f"live_h_{arm}", [row["hours"]], "h", f"~ {hours[arm]:.3f}"))
        mean = row["predicted_mean_staleness"]
        out.append(figure(f"live_mean_staleness_{arm}", [row["mean_staleness"]], "steps", f"~ {mean:.3f}"))
    for name in ("overhead_executions", "overhead_training", "overhead_switching"):
        worst = max(row[name] for row in lived.values())
        out.append(figure(name, [worst], "of time", f"< {OVERHEAD}", lambda v: v < OVERHEAD))
    for part in lived["elastic"]["overhead_parts"]:
        out.append(figure(f"executions_{part}", [row["overhead_parts"][part] for row in lived.values()], "of time"))
    return out


def is_near(predicted: float, measured: float) -> bool:
    return abs(measured / predicted - 1.0) <= NEAR


def longest_first(profile: Profile, seed: int) -> list[str]:
    """The arm that takes longest begins, so that its start is all that the others' cost."""
    hours = {arm: World(profile, profile.arm(arm), seed).run().now for arm in ARMS}
    return sorted(ARMS, key=lambda arm: -hours[arm])


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--json", action="store_true")
    options.add_argument("--quick", action="store_true", help="one burst at 8 s per hour: shows that it runs, no more")
    options.add_argument("--profile", default=str(HERE / "elastic.toml"), help="needs arms elastic, colocate and async")
    options.add_argument("--seconds-per-hour", type=float, default=38.0, help="larger: less overhead, longer run")
    options.add_argument("--seed", type=int, default=1)
    given = options.parse_args()
    profile = profiles.load(given.profile)
    if given.quick:
        given.seconds_per_hour, profile = 8.0, dataclasses.replace(profile, steps=4)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gyre-bench-") as folder:
        try:
            lived = asyncio.run(live(longest_first(profile, given.seed), profile.steps, given, Path(folder)))
        except (Ended, asyncio.CancelledError) as error:
            print(str(error) or "stopped", file=sys.stderr)
            return 1
    figures = [*figures_of(lived), figure("bench_s", [time.monotonic() - began], "s", "< 600", lambda v: v < 600.0)]
    return show(figures, as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
