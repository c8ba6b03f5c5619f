"""Which runs this user has: one small file per run directory under the user's state folder, with the last job of it.

A convenience for listing and for finding a run's job: a run never needs it, so a folder that can't be written is
passed over, aloud once.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import click


@dataclass(frozen=True, kw_only=True)
class Entry:
    """`run` is the run directory, links resolved; `job` its last Slurm job or ""; `noted` its last start, in seconds
    since the epoch.
    """

    run: str
    job: str
    noted: float


def folder() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "gyre" / "runs"


def note(run: Path, job: str = "") -> None:
    """Remember a start. Never raises for a folder that can't be written."""
    entry = Entry(run=str(run.resolve()), job=job, noted=time.time())
    path = folder() / f"{hashlib.sha256(entry.run.encode()).hexdigest()[:16]}.json"
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary.write_text(json.dumps(asdict(entry)))
        os.replace(temporary, path)
    except OSError as error:
        click.echo(f"this run will be missing in `gyre status`: cannot write {path}: {error.strerror}", err=True)


def entries() -> list[Entry]:
    """All runs known, the last started first. What can't be read is left out."""
    out = []
    for path in folder().glob("*.json"):
        try:
            out.append(Entry(**json.loads(path.read_text())))
        except (OSError, ValueError, TypeError):
            continue
    return sorted(out, key=lambda entry: -entry.noted)


def job_of(run: Path) -> str:
    """The run's last job as far as it was noted."""
    return next((entry.job for entry in entries() if entry.run == str(run.resolve())), "")
