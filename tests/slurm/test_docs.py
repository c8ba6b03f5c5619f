"""The pages for cluster users, followed top to bottom on a real Slurm: every command in them runs here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gyre_cli import listing, planning
from tests import pages
from tests.slurm.minislurm import Cluster, until
from tests.slurm.running import START_S
from tests.system.running import ROOT

DOCS = ROOT / "docs"


@pytest.fixture
def reader(quiet_slurm: Cluster, tmp_path: Path) -> Iterator[dict[str, str]]:
    """A user on the login node, in the checkout's environment."""
    env = quiet_slurm.env
    path = f"{Path(sys.executable).parent}:{env['PATH']}"
    yield {**env, "PATH": path, "PYTHONPATH": str(ROOT), "GYRE": str(ROOT), "XDG_STATE_HOME": str(tmp_path / "state")}


def test_from_laptop_to_cluster(reader: dict[str, str], tmp_path: Path) -> None:
    said = pages.run(DOCS / "cluster.md", tmp_path, reader, timeout_s=900.0)
    done = tmp_path / "first" / "runs" / "run"
    assert json.loads((done / "summary.json").read_text())["steps"] == 3
    assert "would be submitted" in said and "what the run amounted to" in said
    seen = planning.measure(done)
    assert seen.save_s and seen.step_s  # what the next `gyre submit` judges by


def test_what_to_ask_of_the_admin(reader: dict[str, str], tmp_path: Path) -> None:
    said = pages.run(DOCS / "admin.md", tmp_path, reader)
    assert "KillWait" in said and "PartitionName=spot" in said


def test_a_failed_run_is_read(quiet_slurm: Cluster, reader: dict[str, str], tmp_path: Path, model: Path) -> None:
    """Killed hard in the middle: no daemon had a last word."""
    project = tmp_path / "project"
    shutil.copytree(ROOT / "examples" / "quickstart", project)
    small = "cluster.cells = 2\nscheduler = { steps = 50, groups_per_batch = 1, group_size = 2, steps_per_burst = 1 }\n"
    paths = f'model = {{ path = "{model}" }}\nengine.context_length = 512\nrollout.max_new_tokens = 32\n'
    tasks = 'tasks = { train = "tasks/train.jsonl", harness = ["python", "-I", "-S", "start.py"] }\n'
    (project / "gyre.toml").write_text(f"{small}{paths}{tasks}evaluation.tasks = 0\n")

    def gyre(*words: str) -> str:
        line = [sys.executable, "-m", "gyre_cli.gyre", *words]
        return subprocess.check_output(line, cwd=project, env={**os.environ, **reader}, text=True, timeout=120)

    gyre("init", "--nodes", "2", "--time", "00:20:00")
    job, run = gyre("submit").strip(), project / "runs" / "run"
    until(lambda: list(run.glob("executions/*/outcome.json")), START_S, "no execution ends")
    quiet_slurm.run("scancel", "--signal=KILL", "--full", job)
    quiet_slurm.run("scancel", job, check=False)
    until(lambda: not quiet_slurm.run("squeue", "-h", "--me"), 60, "the job does not end")
    said = pages.run(DOCS / "failed-run.md", project, {**reader, "RUN": str(run), "JOB": job})
    assert "stopped" in said and "the same commands" in said
    before = listing.last_progress(run / "metrics" / "timeline.jsonl")
    until(lambda: listing.last_progress(run / "metrics" / "timeline.jsonl") != before, START_S, "it does not go on")
