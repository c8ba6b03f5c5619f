"""A run with all its real processes, as a person starts it; what the tests ask it, do to it and read of it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gyre_base import messages as m
from gyre_base.bus import NoAnswer
from gyre_base.rundir import RunDir, RunDirError
from gyre_base.runfile import Call, RunReader
from gyre_cli import common

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
EXAMPLE = ROOT / "examples" / "quickstart"
Rows = list[dict[str, Any]]
Tree = dict[str, dict[str, Any]]

RAMBLING: Tree = {
    "cluster": {"cells": 3, "peer_timeout_s": 8.0},
    "scheduler": {"steps": 4, "steps_per_burst": 2, "groups_per_batch": 2, "group_size": 4, "slots_per_cell": 6},
    "engine": {"context_length": 1024, "stream_interval": 8},
    "rollout": {"max_new_tokens": 160},
    "trainer": {"micro_step_tokens": 512, "checkpoint_every_steps": 3},
    "evaluation": {"tasks": 2},
    "tasks": {"harness": ["python", "-I", "-S", str(HERE / "rambler.py")], "evaluation_limit_s": 10.0},
}


def changed(setting: Tree, **changes: Any) -> Tree:
    """`section__key=value`."""
    tree = {section: dict(values) for section, values in setting.items()}
    for name, value in changes.items():
        section, _, key = name.partition("__")
        tree.setdefault(section, {})[key] = value
    return tree


class Run:
    """One run directory and the supervisor that serves it. Use as a context manager: nothing is left after it."""

    def __init__(self, folder: Path, model: Path, setting: Tree, **changes: Any) -> None:
        self.root, self._folder = folder / "run", folder
        tree = {**changed(setting, **changes), "model": {"path": str(model)}}
        if "train" not in tree["tasks"]:
            tree["tasks"] |= rambling_tasks(folder)
        self.config = folder / "gyre.toml"
        self.config.write_text(toml(tree))
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for pid, _ in self.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    # ---- start and end ----------------------------------------------------------------------------------------------

    def start(self, *words: str, **environment: str) -> Run:
        """`gyre up`, or `words` instead of `up --config FILE`."""
        command = [sys.executable, "-m", "gyre_cli.gyre", *(words or ("up", "--config", str(self.config)))]
        command += ["--run", str(self.root)]
        with open(self._folder / "out", "ab") as out, open(self._folder / "err", "ab") as err:
            environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
            self.process = subprocess.Popen(command, stdout=out, stderr=err, start_new_session=True, env=environment)
        return self

    def wait(self, timeout_s: float = 400.0) -> int:
        """The exit code of the supervisor."""
        assert self.process is not None
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not done after {timeout_s:g} s\n{self.story()}") from None

    def finish(self, timeout_s: float = 400.0) -> dict[str, Any]:
        """Until it is done: its summary."""
        code = self.wait(timeout_s)
        assert code == 0, f"exit code {code}\n{self.story()}"
        return dict(json.loads((self.root / "summary.json").read_text()))

    def out(self) -> str:
        """What the supervisor said on stdout."""
        return (self._folder / "out").read_text()

    def err(self) -> str:
        """What the supervisor told people."""
        return (self._folder / "err").read_text()

    def story(self) -> str:
        """What a person would look at first."""
        words = [f"run {self.root}", self.err()[-1500:]]
        with contextlib.suppress(NoAnswer, OSError, RunDirError):
            words += [json.dumps(row) for row in self.rows("cellctl", "explain")]
        for path in sorted((self.root / "log").glob("*")):
            text = path.read_text(errors="replace")
            bad = [line for line in text.splitlines() if "Error" in line or "CRITICAL" in line]
            words += [f"{path.name}: {line}" for line in bad[-4:]]
        return "\n".join(words)

    def left(self) -> list[tuple[int, str]]:
        """Processes that speak of this run in their command line or environment; a `trajtools` that another test
        runs over
        its calls is not the run's."""
        found, mark = [], os.fsencode(self.root)
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit() and int(folder.name) != os.getpid():
                with contextlib.suppress(OSError):
                    command = (folder / "cmdline").read_bytes()
                    if b"gyre_cli.trajtools" in command:
                        continue
                    if mark in command or mark in (folder / "environ").read_bytes():
                        found.append((int(folder.name), command.replace(b"\0", b" ").decode(errors="replace")))
        return found

    # ---- questions --------------------------------------------------------------------------------------------------

    def rows(self, server: str, what: str = "status", timeout_s: float = 20.0) -> Rows:
        reply = common.ask(str(self.root), server, m.StatusRequest(what=what), timeout_s)
        return [dict(row) for row in reply.rows]

    def status(self) -> dict[str, Any]:
        """The scheduler's row for the run, with `roles` by cell."""
        rows = self.rows("cellctl")
        return {**rows[0], "roles": {row["cell"]: row["role"] for row in rows if "cell" in row}}

    def until(self, what: Callable[[dict[str, Any]], Any], timeout_s: float = 300.0) -> dict[str, Any]:
        """The first status for which `what` holds; the run must not end before."""
        deadline = time.monotonic() + timeout_s
        status: dict[str, Any] = {}
        while time.monotonic() < deadline:
            assert self.process is None or self.process.poll() is None, f"the run ended before\n{self.story()}"
            with contextlib.suppress(NoAnswer, OSError, RunDirError):
                status = self.status()
                if what(status):
                    return status
            time.sleep(0.05)
        raise AssertionError(f"never so in {timeout_s:g} s; the last status was {status}\n{self.story()}")

    def pid(self, name: str) -> int:
        """A daemon's or a rank's process; `engine-c1` is asked of its agent."""
        if name.startswith("engine-"):
            return int(self.rows(f"celld-{name.removeprefix('engine-')}")[0]["engine_pid"])
        endpoint = RunDir(self.root).endpoint(name)
        assert endpoint is not None, f"{name} has no endpoint"
        return endpoint.pid

    def life(self, name: str) -> int:
        return int((self.root / "lives" / name).read_text())

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid(name), number)

    def until_reborn(self, name: str, life: int, timeout_s: float = 200.0) -> None:
        """Until `name` listens in a life after `life`."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            endpoint = RunDir(self.root).endpoint(name)
            if endpoint is not None and endpoint.life > life:
                return
            time.sleep(0.05)
        raise AssertionError(f"{name} did not come back\n{self.story()}")

    # ---- evidence ---------------------------------------------------------------------------------------------------

    def journal(self, daemon: str) -> Iterator[dict[str, Any]]:
        """Events of a daemon's journal."""
        for line in (self.root / "journal" / f"{daemon}.jsonl").read_text().splitlines():
            yield json.loads(line)["event"]

    def executions_in_log(self, shard: str) -> set[str]:
        """Executions with a call in the log of a shard of proxyd, whatever its life."""
        readers = [RunReader(path) for path in (self.root / "calls").glob(f"{shard}-*")]
        records = [located.record for reader in readers for located in reader.records()]
        return {record.exec for record in records if isinstance(record, Call)}

    def batches(self) -> list[int]:
        """Batches in the order in which optimizer steps were reported to the scheduler."""
        return [event["batch"] for event in self.journal("cellctl") if event["tag"] == "step.done"]


def command(*words: str, run: Path | None = None, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    """One of gyre's commands as another process: `command("cellctl", "status", "--json", run=root)`."""
    module, *arguments = words
    line = [sys.executable, "-m", f"gyre_cli.{module}", *arguments, *(["--run", str(run)] if run else [])]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(line, capture_output=True, text=True, timeout=timeout_s, env=environment, check=False)


def rambling_tasks(folder: Path) -> dict[str, str]:
    """tasks.train and tasks.heldout of the rambler: two turns of one long call each."""
    paths = {"train": folder / "train.jsonl", "heldout": folder / "heldout.jsonl"}
    for name, path in paths.items():
        path.write_text("".join(json.dumps(rambling_task(f"{name}-{i}")) + "\n" for i in range(8)))
    return {name: str(path) for name, path in paths.items()}


def rambling_task(name: str, turns: int = 2) -> dict[str, Any]:
    return {
        "id": name,
        "instruction": json.dumps({"turns": turns, "task": name}),
        "workspace": {"readme.md": "ramble"},
        "evaluator": {"command": ["python", "-I", "-S", str(HERE / "judge.py")], "tests": {"none": ""}},
    }


def toml(tree: dict[str, dict[str, Any]]) -> str:
    """Enough TOML for a configuration."""
    lines = []
    for section, values in tree.items():
        lines.append(f"[{section}]")
        for key, value in values.items():
            if isinstance(value, dict):
                value = "{" + ", ".join(f"{k} = {json.dumps(v)}" for k, v in value.items()) + "}"
                lines.append(f"{key} = {value}")
            else:
                lines.append(f"{key} = {json.dumps(value)}")
    return "\n".join(lines) + "\n"
