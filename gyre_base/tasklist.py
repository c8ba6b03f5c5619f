"""The tasks of a run as they travel: their ids in the order of the file, and what an execution order says of each.

A JSONL is carried line by line; a Harbor task directory as its place, to be read where it runs. Checks nothing beyond
what that needs (gyre_exec does).
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import orjson


def entries(path: str | Path) -> dict[str, dict[str, Any]]:
    """Payloads by id. Nothing for an empty path. Raises OSError, ValueError."""
    if not str(path):
        return {}
    place = Path(path)
    if place.is_dir():
        return {
            task_id(folder): {"id": task_id(folder), "task_dir": str(folder.absolute())} for folder in folders(place)
        }
    rows = [orjson.loads(line) for line in place.read_bytes().splitlines() if line.strip()]
    return {row["id"]: row for row in rows}


def is_task(folder: Path) -> bool:
    """Whether this looks like a Harbor task directory."""
    return (folder / "task.toml").is_file() or (folder / "instruction.md").is_file()


def folders(path: Path) -> list[Path]:
    """The task directories at `path`: itself, or those in it."""
    if is_task(path):
        return [path]
    return sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith((".", "_")))


def task_id(folder: Path) -> str:
    """The folder's name; one that can't be an id keeps what it can and gets a mark, so that two never meet."""
    name = folder.absolute().name
    plain = re.sub(r"[^A-Za-z0-9._-]+", "_", name).lstrip("._-")[:100] or "task"
    return plain if plain == name else f"{plain}-{hashlib.sha256(name.encode('utf-8', 'replace')).hexdigest()[:6]}"
