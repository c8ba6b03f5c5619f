"""Measures what an execution left: the task's evaluator as its own process, its score file read with suspicion.

A crash, rubbish or a hang is a failure of the evaluator and never a zero. Owns executions/<id>/scoring, which exists
only while an evaluator runs. `--workspace {workspace} --tests {tests} --out {out}` is added to a command that names
none of them.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import math
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gyre_exec import child as children
from gyre_exec.events import Evaluated
from gyre_exec.harness import PATH
from gyre_exec.rulers import bases, fill
from gyre_exec.tasks import Task
from gyre_exec.workspace import WorkspaceError, remove_tree, write_files

MAX_SCORE_BYTES = 1 << 20
MAX_PARTS = 10_000
MAX_PRINTED_BYTES = 64 << 10


class BadScore(ValueError):
    """The score file is not what the contract says."""


@dataclass(frozen=True)
class Reading:
    """A valid score file. `score` is None for `no_artifact`."""

    score: float | None
    parts: dict[str, float]


def read_score(path: Path) -> Reading:
    """{"score": finite number, "parts": {name: finite number or bool}} or {"no_artifact": true}. Raises BadScore."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_SCORE_BYTES + 1)
    except OSError as error:
        raise BadScore(f"wrote no score file ({error.strerror})") from None
    if len(data) > MAX_SCORE_BYTES:
        raise BadScore(f"wrote a score file of more than {MAX_SCORE_BYTES >> 20} MiB")
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadScore(f"wrote a score file that is not JSON ({error})") from None
    if not isinstance(body, dict):
        raise BadScore(f"wrote a {type(body).__name__} where an object was expected")
    if body.get("no_artifact") is True:
        return Reading(None, {})
    return Reading(_number(body.get("score"), "score"), _parts(body.get("parts", {})))


def _parts(body: Any) -> dict[str, float]:
    if not isinstance(body, dict) or len(body) > MAX_PARTS:
        raise BadScore("wrote `parts` that are not an object of numbers")
    return {
        name: float(value) if isinstance(value, bool) else _number(value, f"parts[{name!r}]")
        for name, value in body.items()
    }


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadScore(f"wrote {name} = {str(value)[:80]!r}, not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise BadScore(f"wrote {name} = {number}, not a finite number")
    return number


@functools.lru_cache(maxsize=4096)
def _digest_of_file(path: str, mtime_ns: int, size: int) -> bytes:
    return hashlib.sha256(Path(path).read_bytes()).digest()


def version_of(task: Task) -> str:
    """Hash of the command, the hidden tests and the scripts it names: the same ruler has the same version."""
    digest = hashlib.sha256()
    for argument in fill(task.evaluator.command, {"task_file_dir": task.folder}, bases=bases(task.folder)):
        try:
            found = os.stat(argument) if argument.startswith("/") and argument != sys.executable else None
        except OSError:
            found = None
        if found is not None:
            digest.update(_digest_of_file(argument, found.st_mtime_ns, found.st_size))
        else:
            digest.update(argument.encode("utf-8", "surrogateescape") + b"\0")
    for path, text in sorted(task.evaluator.tests.items()):
        digest.update(f"{path}\0{len(text)}\0{text}".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:16]


def command_of(task: Task, places: Mapping[str, str]) -> list[str]:
    """The full argv."""
    argv = fill(task.evaluator.command, {**places, "python": sys.executable}, bases=bases(task.folder))
    if not any(f"{{{name}}}" in part for part in task.evaluator.command for name in ("workspace", "tests", "out")):
        argv += ["--workspace", places["workspace"], "--tests", places["tests"], "--out", places["out"]]
    return argv


async def evaluate(execution: str, task: Task, folder: Path, workspace: Path, limit_s: float) -> Evaluated:
    """One run of the evaluator over `workspace`. Never raises for what the evaluator does."""
    scoring = folder / "scoring"
    places = {
        "workspace": str(workspace),
        "tests": str(scoring / "tests"),
        "out": str(scoring / "score.json"),
        "task_file_dir": task.folder,
    }
    blank = Evaluated(execution=execution, verdict="failed", evaluator=task.evaluator.name, version=version_of(task))
    try:
        remove_tree(scoring)
        (scoring / "tests").mkdir(parents=True, mode=0o700)
        write_files(scoring / "tests", task.evaluator.tests)
        verdict, error = await _run(command_of(task, places), scoring, task.evaluator.timeout_s or limit_s)
        if verdict != "ended":
            return replace(blank, verdict=verdict, error=error)
        reading = read_score(scoring / "score.json")
    except BadScore as problem:
        return replace(blank, error=f"the evaluator {problem}")
    except (OSError, WorkspaceError) as problem:
        return replace(blank, error=f"the evaluator could not be started: {problem}")
    finally:
        remove_tree(scoring)
    if reading.score is None:
        return replace(blank, verdict="no_artifact")
    return replace(blank, verdict="scored", score=reading.score, parts=reading.parts)


async def _run(argv: list[str], scoring: Path, timeout_s: float) -> tuple[str, str]:
    """("ended" | "failed" | "hung", error text)."""
    out, err = children.Sink(None, MAX_PRINTED_BYTES), children.Sink(None, MAX_PRINTED_BYTES)
    env = {
        "PATH": PATH,
        "HOME": str(scoring),
        "TMPDIR": str(scoring),
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    child = children.spawn(argv, cwd=scoring, env=env, stdout=out, stderr=err, marker=str(scoring))
    hung = False

    def time_up() -> None:
        nonlocal hung
        hung = True
        child.signal(signal.SIGKILL)

    timer = asyncio.get_running_loop().call_later(timeout_s, time_up)
    try:
        code = await asyncio.shield(child.exited)
    except asyncio.CancelledError:
        child.signal(signal.SIGKILL)
        raise
    finally:
        timer.cancel()
    if hung:
        return "hung", f"the evaluator did not end within {timeout_s:g} s and was killed"
    if code != 0:
        return "failed", f"the evaluator ended with exit code {code}: {err.tail() or out.tail()}"
    return "ended", ""
