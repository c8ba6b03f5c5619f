"""Scores of executions that still run, as a metric: what another hour of them buys. Off unless tasks.progress_every_s.

Measures a copy of each running workspace by the ruler for partial work, one at a time, beside everything else; writes
executions/<id>/progress.jsonl. Never a score of the execution: nothing but the page of `gyre show` reads it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from gyre_exec.evaluator import evaluate
from gyre_exec.tasks import Task
from gyre_exec.workspace import Workspace

log = logging.getLogger(__name__)
NAME = "progress.jsonl"


@dataclass(frozen=True, kw_only=True)
class Running:
    """An execution whose harness runs now."""

    execution: str
    task: Task
    place: Workspace
    started_at: float


class Progress:
    """`run` until cancelled."""

    def __init__(self, every_s: float, limit_s: float, running: Callable[[], list[Running]]) -> None:
        self._every_s, self._limit_s, self._running = every_s, limit_s, running

    async def run(self) -> None:
        if self._every_s <= 0:
            return
        while True:
            await asyncio.sleep(self._every_s)
            for one in self._running():
                await self._measure(one)

    async def _measure(self, one: Running) -> None:
        if one.task.partial is None:
            return
        at = time.time()
        scorer = type(one.place)(folder=one.place.folder / "progress", settings=one.place.settings)
        done = await evaluate(one.execution, one.task, one.task.partial, one.place.root, scorer, self._limit_s)
        if one.place.root.exists():  # else it ended meanwhile, and its folder is no longer ours to write to
            row = {"at": at, "ran_s": round(at - one.started_at, 1), "verdict": done.verdict, "score": done.score}
            _append(one.place.folder / NAME, {**row, "evaluator": done.evaluator, "version": done.version})


def _append(path: Path, row: dict[str, Any]) -> None:
    try:
        with open(path, "ab") as file:
            file.write(orjson.dumps(row) + b"\n")
    except OSError as error:
        log.warning("%s: %s", path, error)


def read(folder: Path) -> list[dict[str, Any]]:
    """What was measured of an execution while it ran; a torn last line is left out."""
    try:
        lines = (folder / NAME).read_bytes().splitlines(keepends=True)
    except OSError:
        return []
    return [orjson.loads(line) for line in lines if line.endswith(b"\n")]
