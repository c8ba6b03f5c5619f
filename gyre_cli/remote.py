"""From a login node that can't reach the ports of compute nodes: the same command once more, as a step inside the job.

Used only after a daemon gave no answer. The step has the same arguments and the same output, so nothing else changes;
a word on stderr says which way it went.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import click

from gyre_base import config as configuration
from gyre_base.allocation import Allocation
from gyre_base.rundir import RunDir
from gyre_cli import common, registry, slurm

INSIDE = "GYRE_INSIDE_JOB"  # set in the step: it does not try again
PROBE_S = 1.0
STEP_S = 60.0  # a step that does not start by then waits for a node that is gone
ENDED = re.compile(r"srun: error: .*Exited with exit code \d+")  # said by our exit code too
FOLLOWS = ("--watch", "--follow", "-f", "top", "stop")  # commands that go on for longer than one answer


def job_around(root: Path) -> slurm.Job | None:
    """The running job of a run, by what was noted at its start, else by the comment of the job."""
    if not slurm.here():
        return None
    noted = registry.job_of(root)
    try:
        jobs = slurm.my_jobs()
    except slurm.SlurmError:
        return None
    mine = [job for job in jobs if job.id == noted or job.run == str(root)]
    return next((job for job in mine if job.state == "RUNNING"), None)


def may_help(root: Path) -> bool:
    """Whether we are outside of a cluster job, where a step inside may see more than we do."""
    return INSIDE not in os.environ and Allocation.here() is None and (root / "run.json").exists() and slurm.here()


def reachable(address: str) -> bool:
    """Whether a TCP connection to a published address opens within a second."""
    parts = urlsplit(address)
    try:
        with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=PROBE_S):
            return True
    except OSError:
        return False


def again_inside(run_dir: str) -> int | None:
    """Run this very command inside the job of the run; its exit code, or None if there is no such job."""
    root = Path(run_dir).resolve()
    if not may_help(root):
        return None
    job = job_around(root)
    if job is None:
        return None
    click.echo(f"no answer from here; asking inside job {job.id}", err=True)
    line = slurm.step(job.id, inner_command(RunDir(root)), options=options(RunDir(root)))
    environment = {**slurm.clean_environment(), "GYRE_RUN": str(root), INSIDE: job.id}
    return follow(line, environment) if set(FOLLOWS) & set(sys.argv[1:]) else ask(line, environment)


def inner_command(run: RunDir) -> list[str]:
    """This command without its --run, which goes by the environment: a path here may not be one there."""
    name = (click.get_current_context().find_root().info_name or "").split()[-1].split(".")[-1]
    words = iter(sys.argv[1:])
    arguments = []
    for word in words:
        if word == "--run":
            next(words, None)
        elif not word.startswith("--run="):
            arguments.append(word)
    python = configuration.from_json(run.path("run.json").read_text()).cluster.python or (sys.executable,)
    return [*python, "-m", f"gyre_cli.{name}", *arguments]


def options(run: RunDir) -> tuple[str, ...]:
    more = configuration.from_json(run.path("run.json").read_text()).cluster.srun_options
    return (f"--chdir={run.root}", *more)


def ask(line: list[str], environment: dict[str, str]) -> int:
    """One answer. srun's exit code may be 0 though the node was lost: then there is an error of srun and no data."""
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=STEP_S, env=environment, check=False)
    except subprocess.TimeoutExpired:
        click.echo(f"error: the step inside the job gave no answer within {STEP_S:g} s", err=True)
        return common.NO_ANSWER
    click.echo(done.stdout, nl=False)
    click.echo("".join(line for line in done.stderr.splitlines(True) if not ENDED.search(line)), nl=False, err=True)
    lost = "srun: error" in done.stderr and not done.stdout
    return common.NO_ANSWER if lost and done.returncode in (0, 1) else done.returncode


def follow(line: list[str], environment: dict[str, str]) -> int:
    """One that goes on until interrupted, on this terminal if there is one."""
    how = "--pty" if sys.stderr.isatty() else "--unbuffered"
    return subprocess.call([line[0], how, *line[1:]], env=environment)
