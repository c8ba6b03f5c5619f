"""`gyre status` without a run: this user's runs, with their state and the time left. Reads files and the queue; asks no
daemon, so it works from anywhere and when everything is down.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gyre_cli import registry, slurm

TAIL_BYTES = 8192


@dataclass(frozen=True)
class Progress:
    """The last word of a run's timeline: optimizer step, phase, and when that was."""

    step: int
    phase: str
    at: float


def rows(folder: Path = Path("runs")) -> tuple[list[dict[str, Any]], str]:
    """(one row per run, the queue's complaint or ""): runs that were noted, lie in `folder`, or have a job."""
    complaint = ""
    jobs: list[slurm.Job] = []
    if slurm.here():
        try:
            jobs = slurm.my_jobs()
        except slurm.SlurmError as error:
            complaint = str(error)
    entries = {entry.run: entry for entry in registry.entries()}
    here = (path.parent for path in folder.glob("*/run.json") if is_run(path.parent))
    names = dict.fromkeys([*entries, *(str(path.resolve()) for path in here), *(job.run for job in jobs if job.run)])
    out = []
    for name in names:
        noted = entries[name].job if name in entries else ""
        mine = [job for job in jobs if job.run == name or job.id == noted]
        job = next((j for j in mine if j.state == "RUNNING"), mine[0] if mine else None)
        if job is not None or (Path(name) / "run.json").exists():
            out.append(row(Path(name), job, "" if complaint else noted))  # no further call to a silent controller
    return sorted(out, key=lambda r: (ORDER.index(r["state"]) if r["state"] in ORDER else 0, r["run"])), complaint


def is_run(folder: Path) -> bool:
    """Whether it was ever supervised: `gyre exec --task` makes a run directory without."""
    return not folder.is_symlink() and (folder / "lives" / "supervisor.lock").exists()


ORDER = ("running", "pending", "stopped", "done")


def row(run: Path, job: slurm.Job | None, noted: str = "") -> dict[str, Any]:
    """`noted` is the run's last job, of which the queue may know nothing any more."""
    progress = last_progress(run / "metrics" / "timeline.jsonl")
    now = state(run, job)
    return {
        "run": str(run),
        "state": now,
        "step": f"{progress.step if progress else 0}/{wanted_steps(run)}",
        "phase": progress.phase if progress else "",
        "job": job.id if job else noted if now == "stopped" else "",
        "nodes": job.nodes or str(job.count) if job else "",
        "left_s": job.left_s if job and job.state == "RUNNING" else None,
        "changed_s": round(time.time() - progress.at) if progress else None,
        "why": why(job) if job else how_it_ended(noted) if now == "stopped" else "",
    }


def state(run: Path, job: slurm.Job | None) -> str:
    """running, pending, stopped or done; Slurm's own word in small letters where it is neither (completing, ...)."""
    if (run / "summary.json").exists():
        return "done"
    if job is not None:
        return job.state.lower()
    return "running" if supervised(run / "lives" / "supervisor.lock") else "stopped"


def what_is_left(run: Path) -> str:
    """Why none of its daemons answers, and what to do; "" while somebody works on it."""
    now = state(run, None)
    if now == "done":
        return f"the run is done: gyre report --run {run}"
    if now == "stopped":
        found = row(run, None)
        return f"nobody supervises this run, it is at step {found['step']}: what started it goes on with it"
    return ""


def how_it_ended(noted: str) -> str:
    end = slurm.end_of(noted) if noted and slurm.here() else ""
    if end == "COMPLETED":  # and the run is not done: nothing else ends a job of ours with 0
        return f"job {noted} was stopped by order (gyre stop)"
    return f"job {noted} ended {end}" if end else ""


def why(job: slurm.Job) -> str:
    """What a waiting job waits for, in Slurm's words and ours."""
    if job.state == "RUNNING":
        return ""
    begin = "BeginTime" in job.reason
    return f"{job.reason}: requeued, starts again by itself" if begin else job.reason


def supervised(lock: Path) -> bool:
    """Whether somebody holds the run's lock: on this machine, or wherever the file system's locks reach."""
    with contextlib.suppress(OSError), lock.open("r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def last_progress(timeline: Path) -> Progress | None:
    """From the last whole line: a timeline may be long and its last line torn."""
    try:
        with timeline.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return None
    for line in reversed(lines):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            found = json.loads(line)
            return Progress(int(found["step"]), str(found["phase"]), float(found["at"]))
    return None


def wanted_steps(run: Path) -> str:
    try:
        return str(json.loads((run / "run.json").read_text())["scheduler"]["steps"])
    except (OSError, ValueError, KeyError):
        return "?"


def duration(value_s: float | None) -> str:
    """`3 d 04:05`, `1:02:03` or `4:05` for people."""
    if value_s is None:
        return ""
    days, rest = divmod(int(value_s), 86400)
    hours, rest = divmod(rest, 3600)
    minutes, seconds = divmod(rest, 60)
    if days:
        return f"{days} d {hours:02d}:{minutes:02d}"
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def for_people(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same rows with times as a person reads them."""
    return [
        {
            **{key: value for key, value in one.items() if key not in ("left_s", "changed_s", "why")},
            "left": duration(one["left_s"]),
            "last change": f"{duration(one['changed_s'])} ago" if one["changed_s"] is not None else "",
            "why": one["why"],
        }
        for one in found
    ]
