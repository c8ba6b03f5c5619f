"""Commands as a shell sees them: another process, its exit code, its two streams."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gyre_base import config as configuration
from gyre_base.keys import make_keys
from gyre_base.rundir import RunDir

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "quickstart"
Said = subprocess.CompletedProcess[str]


def say(*words: str, cwd: Path | None = None, **environment: str) -> Said:
    """`say("cellctl", "status")` runs that command."""
    module, *arguments = words
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    env.pop("GYRE_RUN", None)
    line = [sys.executable, "-m", f"gyre_cli.{module}", *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=60, env=env, cwd=cwd, check=False)


def complains(said: Said, code: int, *words: str) -> None:
    """Nothing on stdout, one line on stderr, which holds every one of `words`."""
    assert (said.returncode, said.stdout) == (code, ""), said.stderr
    lines = said.stderr.splitlines()
    assert len(lines) == 1, said.stderr
    assert lines[0].startswith("error: ")
    for word in words:
        assert word in lines[0]


@pytest.fixture
def idle_run(tmp_path: Path) -> Path:
    """A run directory in which nothing has been started."""
    return make_run(tmp_path / "idle")


def make_run(root: Path, **cluster: object) -> Path:
    """The tokenizer stands for a model: what is asked here never loads one."""
    tree = {
        "cluster": {"cells": 2, **cluster},
        "model": {"path": str(EXAMPLE / "tokenizer")},
        "tasks": {"train": str(EXAMPLE / "tasks" / "train.jsonl"), "harness": ["true"]},
    }
    run = RunDir.create(root)
    make_keys(run)
    run.write_atomic("run.json", configuration.to_json(configuration.from_tree(tree)))
    with run.lock("supervisor"):  # somebody worked on it
        return run.root


@pytest.fixture(scope="session")
def scheduler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run of which the scheduler alone is up."""
    root = make_run(tmp_path_factory.mktemp("lone") / "run")
    line = [sys.executable, "-m", "gyre_cli.cellctl", "run", "--run", str(root)]
    with subprocess.Popen(line, env={**os.environ, "PYTHONPATH": str(ROOT)}) as process:
        until(lambda: RunDir(root).endpoint("cellctl") is not None)
        yield root
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def until(what: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.05)
