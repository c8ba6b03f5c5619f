"""A run as a Slurm user starts it: a configuration, a job script, sbatch; what the tests do to it and read of it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import re
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gyre_base.bus import NoAnswer
from gyre_base.rundir import RunDir, RunDirError
from tests.slurm.minislurm import Cluster, until
from tests.system.running import RAMBLING, ROOT, Run, Tree, changed

STEPS = 6
SMALL: Tree = {
    **RAMBLING,
    "cluster": {"cells": 2, "peer_timeout_s": 8.0, "dead_man_s": 12.0},
    "scheduler": {"steps": STEPS, "steps_per_burst": 2, "groups_per_batch": 2, "group_size": 4, "slots_per_cell": 6},
    "rollout": {"max_new_tokens": 100},
    "evaluation": {"tasks": 0},
}
HOUR_S = 12.0  # that an hour of an emulated execution takes
EMULATED: Tree = {
    **SMALL,
    "engine": {"kind": "emulate", "context_length": 1 << 20, "stream_interval": 1 << 20},
    "emulate": {"time_scale": HOUR_S / 3600, "execution_node_s": 60.0},
    "rollout": {"max_new_tokens": 1 << 19},
    "trainer": {"micro_step_tokens": 1, "checkpoint_every_steps": 3},
}
HEADER = "--requeue --no-kill --open-mode=append --ntasks-per-node=1 --cpus-per-task=2"
START_S = 240.0  # of four cells on two cores that others use too


def setting(**changes: Any) -> Tree:
    """Real engines and trainers, of a very small network."""
    return changed(SMALL, **changes)


def emulated(folder: Path, **changes: Any) -> Tree:
    """Engines and trainers that take time and do no arithmetic: every process, message and file is the real one."""
    folder.mkdir(parents=True, exist_ok=True)
    hours, tasks = folder / "hours", folder / "tasks.jsonl"
    hours.write_text("".join(" ".join(f"{0.05 + 0.02 * i:.2f}" for i in range(4)) + "\n" for _ in range(80)))
    evaluator = {"command": ["/bin/cp", "{workspace}/score.json", "{out}"], "name": "emulated"}
    rows = ({"id": f"t{i}", "instruction": str(i), "workspace": {}, "evaluator": evaluator} for i in range(80))
    tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
    harness = [sys.executable, "-I", "-S", str(ROOT / "celld" / "emulate" / "harness.py"), "128", "3", str(hours)]
    return changed({**EMULATED, "tasks": {"train": str(tasks), "harness": harness}}, **changes)


class JobRun(Run):
    """One run directory and the Slurm job that serves it. Use as a context manager: nothing is left after it."""

    def __init__(self, slurm: Cluster, folder: Path, model: Path, tree: Tree, *, run: Path | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__(folder, model, tree)
        self.slurm, self.folder, self.nodes = slurm, folder, tree["cluster"]["cells"]
        self.root = run or folder / "run"
        self.job = ""

    def __exit__(self, *rest: object) -> None:
        if self.job:
            self.slurm.run("scancel", self.job, check=False)
            until(lambda: self.state() not in ("RUNNING", "PENDING", "COMPLETING"), 60, f"job {self.job} does not end")
        super().__exit__(*rest)

    def submit(self, *options: str, time_limit: str = "20", signal: str = "B:USR1@60") -> JobRun:
        """sbatch of a script as `gyre init` writes it."""
        script = self.folder / "gyre.sbatch"
        words = [
            sys.executable,
            "-u",
            "-m",
            "gyre_cli.gyre",
            "up",
            "--config",
            str(self.config),
            "--run",
            str(self.root),
        ]
        warn = f"--signal={signal}" if signal else ""
        script.write_text(
            f"#!/bin/bash\n#SBATCH --job-name=gyre --nodes={self.nodes} {HEADER}\n"
            f"#SBATCH --time={time_limit} {warn}\n"
            f'#SBATCH --output="{self.folder}/out"\n'
            f"export PYTHONPATH={shlex.quote(str(ROOT))}\nexec {shlex.join(words)}\n"
        )
        self.job = self.slurm.run("sbatch", "--parsable", *options, str(script), cwd=Path("/"))
        return self

    # ---- what Slurm says --------------------------------------------------------------------------------------------

    def record(self) -> dict[str, str]:
        text = self.slurm.run("scontrol", "-o", "show", "job", self.job, check=False)
        return dict(re.findall(r"(\w+)=(\S*)", text))

    def state(self) -> str:
        return self.record().get("JobState", "")

    def restarts(self) -> int:
        return int(self.record().get("Restarts") or 0)

    def until_life(self, restarts: int, timeout_s: float = 90.0) -> None:
        """Until the job runs again after so many requeues."""
        self.wait_for(lambda: self.restarts() >= restarts and self.state() == "RUNNING", timeout_s)

    # ---- what the run says ------------------------------------------------------------------------------------------

    def err(self) -> str:
        path = self.folder / "out"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_for(self, what: Callable[[], Any], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not what():
            assert time.monotonic() < deadline, f"never so in {timeout_s:g} s; job: {self.record()}\n{self.story()}"
            time.sleep(0.2)

    def until(self, what: Callable[[dict[str, Any]], Any], timeout_s: float = START_S) -> dict[str, Any]:
        """The first status for which `what` holds; the job must not end before."""
        found: list[dict[str, Any]] = []

        def holds() -> bool:
            assert self.state() in ("PENDING", "RUNNING", "COMPLETING"), f"job {self.record()}\n{self.story()}"
            with contextlib.suppress(NoAnswer, OSError, RunDirError):
                status = self.status(timeout_s=3.0)
                found[:] = [status]
                return bool(what(status))
            return False

        try:
            self.wait_for(holds, timeout_s)
        except AssertionError as error:
            raise AssertionError(f"the last status was {found}\n{error}") from None
        return found[0]

    def status(self, timeout_s: float = 20.0) -> dict[str, Any]:
        rows = self.rows("cellctl", timeout_s=timeout_s)
        return {**rows[0], "roles": {row["cell"]: row["role"] for row in rows if "cell" in row}}

    def finish(self, timeout_s: float = 400.0) -> dict[str, Any]:
        """Until it is done: its summary."""
        self.wait_for(lambda: self.state() not in ("PENDING", "RUNNING", "COMPLETING"), timeout_s)
        assert self.state() == "COMPLETED", f"{self.record()}\n{self.story()}"
        return super().finish()

    def wait(self, timeout_s: float = 0.0) -> int:
        return int(self.record()["ExitCode"].partition(":")[0])

    # ---- what is done to it -----------------------------------------------------------------------------------------

    def node_of(self, name: str) -> str:
        """The node whose address a daemon advertises."""
        endpoint = RunDir(self.root).endpoint(name)
        assert endpoint is not None, f"{name} has no endpoint"
        host = endpoint.address.removeprefix("tcp://").partition(":")[0]
        return next(node for node in self.slurm.nodes if self.slurm.address(node) == host)

    def kill(self, name: str, number: int = 9) -> None:
        """On its own node, whose process numbers are its own."""
        pid = self.pid(name)
        cell = name.removeprefix("engine-")
        node = self.node_of(f"celld-{cell}" if name.startswith("engine-") else name)
        self.slurm.on_node(node, "kill", f"-{number}", str(pid))

    # ---- evidence ---------------------------------------------------------------------------------------------------

    def held_locks(self) -> list[str]:
        """Locks of the run directory that somebody holds."""
        held = []
        for path in (self.root / "lives").glob("*.lock"):
            with path.open("r+") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    held.append(path.name)
        return held

    def until_nothing_is_left(self, timeout_s: float = 40.0) -> None:
        self.wait_for(lambda: not self.left(), timeout_s)
        assert self.held_locks() == []

    def addresses(self) -> dict[str, list[str]]:
        """Everything that daemons advertise: of bus and HTTP by name."""
        out = {}
        for path in (self.root / "endpoints").glob("*.json"):
            out[path.stem] = re.findall(r"(?:tcp|http)://([^:/\"]+)", path.read_text())
        return out


def whole(summary: dict[str, Any], steps: int = STEPS) -> None:
    """Nothing lost, nothing trained twice."""
    assert summary["steps"] == steps
    assert summary["tokens_trained_twice"] == 0
    assert not summary["context_mismatches"]  # None where engines and trainers are emulated
    assert abs(summary["weights_sum_min"] - 1) < 1e-9


def unharmed(summary: dict[str, Any], steps: int) -> None:
    """Whole, and every execution came to its score; with a retry budget of 0 no failure was charged to any."""
    whole(summary, steps)
    assert set(summary["executions"]["train"]) == {"scored"}
