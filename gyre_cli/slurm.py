"""Slurm's own clients: a time limit on each, and the few facts we need by the text forms that are stable over releases.

Owns no decision. Every call can fail in a controller outage: `SlurmError` says which command and what it said.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

CALL_S = 10.0  # a client whose controller is gone would wait for minutes
COMMENT = "gyre:"  # a job's comment is this and its run directory: squeue then tells which run a job is
FORMAT = "%i|%T|%P|%D|%N|%L|%e|%r|%j|%k"
OPTIONS_IN_ENVIRONMENT = ("SLURM_", "SBATCH_", "SALLOC_", "SRUN_", "SQUEUE_", "SINFO_")
LIVING = ("RUNNING", "COMPLETING", "SUSPENDED")


class SlurmError(RuntimeError):
    """A Slurm command is missing, silent, or says no; its own words."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One line of squeue. `left_s` is None where there is no limit or none yet."""

    id: str
    state: str
    partition: str
    count: int
    nodes: str
    left_s: float | None
    end: str
    reason: str
    name: str
    run: str  # run directory, or "" if the comment is not ours


@functools.cache
def here() -> bool:
    """Whether this machine belongs to a Slurm cluster: clients and a configuration. Asks no controller."""
    if shutil.which("squeue") is None or shutil.which("srun") is None:
        return False
    try:
        return bool(call("scontrol", "show", "hostnames", "a", timeout_s=3.0))
    except SlurmError:
        return False


def clean_environment() -> dict[str, str]:
    """Ours without what a surrounding job or a user's habits left in it: the clients would take that for options."""
    return {
        key: value
        for key, value in os.environ.items()
        if key == "SLURM_CONF" or not key.startswith(OPTIONS_IN_ENVIRONMENT)
    }


def call(*words: str, timeout_s: float = CALL_S, cwd: Path | None = None) -> str:
    """Standard output of one client. Raises SlurmError."""
    return _call(words, timeout_s, cwd).stdout


def call_both(*words: str, timeout_s: float = CALL_S, cwd: Path | None = None) -> str:
    """As `call`, with standard error: where `sbatch --test-only` says when a job would start."""
    done = _call(words, timeout_s, cwd)
    return done.stdout + done.stderr


def _call(words: tuple[str, ...], timeout_s: float, cwd: Path | None) -> subprocess.CompletedProcess[str]:
    environment = clean_environment()
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=timeout_s, env=environment, cwd=cwd, check=False
        )
    except FileNotFoundError:
        raise SlurmError(f"{words[0]} is not here: this is no machine of a Slurm cluster") from None
    except subprocess.TimeoutExpired:
        raise SlurmError(f"{words[0]} gives no answer within {timeout_s:g} s: the controller may be down") from None
    if done.returncode:
        raise SlurmError(f"{words[0]}: {said(done.stderr) or f'exit code {done.returncode}'}")
    return done


def said(stderr: str) -> str:
    """A client's complaint on one line, without its own prefixes."""
    lines = [re.sub(r"^(\w+: )?(error|fatal): ", "", line.strip()) for line in stderr.splitlines()]
    return "; ".join(line for line in lines if line)


def parse_jobs(text: str) -> list[Job]:
    """Lines of `squeue -h -o FORMAT`. The last field may hold any character."""
    out = []
    for line in text.splitlines():
        fields = line.split("|", 9)
        if len(fields) < 10:
            continue
        ident, state, partition, count, nodes, left, end, reason, name, comment = fields
        out.append(
            Job(
                id=ident,
                state=state,
                partition=partition,
                count=int(count) if count.isdigit() else 0,
                nodes=nodes,
                left_s=seconds(left),
                end="" if end in ("N/A", "NONE") else end,
                reason="" if reason == "None" else reason,
                name=name,
                run=comment.removeprefix(COMMENT) if comment.startswith(COMMENT) else "",
            )
        )
    return out


def seconds(text: str) -> float | None:
    """`D-HH:MM:SS`, `HH:MM:SS`, `MM:SS` or `MM` (a limit in minutes) in seconds; None if it is none of these."""
    days, dash, rest = text.rpartition("-")
    parts = rest.split(":")
    if not all(part.isdigit() for part in parts) or (dash and not days.isdigit()) or len(parts) > 3:
        return None
    numbers = [int(part) for part in parts]
    units: tuple[int, ...] = (3600, 60, 1)  # D-HH, D-HH:MM, D-HH:MM:SS
    if not dash:
        units = {1: (60,), 2: (60, 1), 3: (3600, 60, 1)}[len(parts)]
    return float(int(days or 0) * 86400 + sum(n * unit for n, unit in zip(numbers, units, strict=False)))


def my_jobs() -> list[Job]:
    """All jobs of this user that are queued or run. Raises SlurmError."""
    return parse_jobs(call("squeue", "-h", "--me", "-o", FORMAT))


def job(ident: str) -> Job | None:
    """One job while squeue knows it. Raises SlurmError."""
    try:
        return next(iter(parse_jobs(call("squeue", "-h", "-j", ident, "-o", FORMAT))), None)
    except SlurmError as error:
        if "Invalid job id" in str(error):
            return None
        raise


def end_of(ident: str) -> str:
    """How a job ended, in Slurm's word, while the controller remembers it (MinJobAge); "" after that, or while it
    lives."""
    try:
        record = parse_record(call("scontrol", "-o", "show", "job", ident))
    except SlurmError:
        return ""
    state = record.get("JobState", "")
    return "" if state in (*LIVING, "PENDING") else state


def hostnames(nodelist: str) -> list[str]:
    """`node[1-3]` as names. Works without the controller."""
    return call("scontrol", "show", "hostnames", nodelist).split() if nodelist else []


def parse_settings(text: str) -> dict[str, str]:
    """`scontrol show config` by key."""
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line)
    return {key.strip(): value.strip() for key, _, value in pairs}


def settings() -> dict[str, str]:
    """The cluster's configuration. Raises SlurmError."""
    return parse_settings(call("scontrol", "show", "config"))


def parse_record(text: str) -> dict[str, str]:
    """One `scontrol -o show ...` line by key; values hold no spaces except in the last word of a key's run."""
    return dict(pair.partition("=")[::2] for pair in text.split() if "=" in pair)


def partitions() -> dict[str, dict[str, str]]:
    """`scontrol show partition` by name. Raises SlurmError."""
    records = [parse_record(line) for line in call("scontrol", "-o", "show", "partition").splitlines()]
    return {record["PartitionName"]: record for record in records if "PartitionName" in record}


def step(
    job_id: str, command: list[str], *, nodes: int = 1, options: tuple[str, ...] = (), gpus: bool = False
) -> list[str]:
    """The srun line that runs `command` once on each of `nodes` nodes inside a running job, beside all that runs there;
    with `gpus` it sees those of the job.

    Everything is said: what srun is not told it takes from the environment or from the job.
    """
    words = ["srun", f"--jobid={job_id}", "--overlap", f"-N{nodes}", f"-n{nodes}", "--ntasks-per-node=1"]
    return [*words, "-c1", *([] if gpus else ["--gres=none"]), "--mpi=none", "--quiet", *options, *command]
