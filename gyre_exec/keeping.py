"""What stays of an execution on disk. By default outcome.json alone; a failure keeps what its harness printed."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import orjson

from gyre_base import messages as m
from gyre_base import wire
from gyre_base.vocabulary import Outcome
from gyre_exec import child as children
from gyre_exec.workspace import remove_tree

log = logging.getLogger(__name__)
PRINTED = ("stdout", "stderr", "transcript.json")
TRANSCRIPT_BYTES = 4 << 20


def write_outcome(folder: Path, finished: m.ExecutionFinished) -> None:
    """By rename, not forced to disk: cellctl's journal is what a restart believes."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = folder / ".outcome.json"
    temporary.write_bytes(orjson.dumps(wire.to_json(finished)) + b"\n")
    os.replace(temporary, folder / "outcome.json")


def tidy(folder: Path, finished: m.ExecutionFinished | None, *, keep: bool) -> None:
    """Remove what need not stay. Never raises: disk trouble here must not cost an outcome."""
    doomed = ["scoring", "pid"] if keep else ["scoring", "pid", "workspace", "tmp"]
    clean = finished is not None and (finished.outcome.counts or finished.outcome is Outcome.CANCELLED)
    if not keep and clean and not (finished and finished.exit_code):
        doomed += PRINTED
    elif _size(folder / "transcript.json") > TRANSCRIPT_BYTES:
        doomed.append("transcript.json")
    for name in doomed:
        try:
            remove_tree(folder / name)
        except OSError as error:
            log.warning("%s stays: %s", folder / name, error)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def note_pid(folder: Path, owner: str, pid: int) -> None:
    """For a later life of `owner`: which process group this was."""
    (folder / "pid").write_text(f"{owner} {pid} {children.birth_of(pid)}")


def sweep(executions: Path, owner: str) -> int:
    """At start: end what an earlier life of `owner` left running and remove its workspaces. Gives their number."""
    found = 0
    for entry in os.scandir(executions):
        folder = Path(entry.path)
        if (folder / "pid").exists() and children.kill_stale(folder / "pid", owner):
            tidy(folder, None, keep=False)
            found += 1
    return found
