"""What happened to executions, as their executors' journals tell it: the order with its task, and each event's time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from gyre_base.rundir import RunDir
from gyre_exec.tasks import Task, from_order

OTHERS = ("cellctl", "proxyd", "trajd", "celld-")  # journals that are no executor's


@dataclass
class Story:
    """One execution at one executor. `moments` are (seconds since the epoch, event as JSON) in their order."""

    execution: str
    executor: str
    order: dict[str, Any]
    moments: list[tuple[float, dict[str, Any]]] = field(default_factory=list)
    finished: dict[str, Any] | None = None

    @property
    def task_id(self) -> str:
        return str(self.order["task"].get("id", ""))

    def at(self, tag: str) -> float | None:
        """When the first event of this tag came."""
        return next((at for at, event in self.moments if event["tag"] == tag), None)

    def task(self, folder: str) -> Task:
        """As it was ordered; `folder` is where its file lies. Raises TaskError."""
        body = self.order["task"]
        return from_order(body, folder=str(body.get("task_file_dir", folder)), where=f"order of {self.execution}")


def stories(run: RunDir, execution: str | None = None) -> Iterator[Story]:
    """All of a run's, or those of one execution (one per executor that had it), in the order of the journals."""
    for path in sorted(run.path("journal").glob("*.jsonl")):
        if not path.name.startswith(OTHERS):
            yield from _read(path, execution)


def _read(path: Path, execution: str | None) -> Iterator[Story]:
    told: dict[str, Story] = {}
    needle = f'"execution":"{execution}"'.encode() if execution else b'"execution":"'
    with open(path, "rb") as journal:
        for line in journal:
            if needle not in line or not line.endswith(b"\n"):
                continue
            entry = orjson.loads(line)
            _take(told, path.stem, entry, execution)
    yield from told.values()


def _take(told: dict[str, Story], executor: str, entry: dict[str, Any], execution: str | None) -> None:
    event = entry["event"]
    name = event.get("execution")
    for command in entry["commands"]:
        if command["tag"] == "execution.finished" and command["execution"] in told:
            told[command["execution"]].finished = command
    if name is None or execution not in (None, name):
        return
    if event["tag"] == "execution.order" and name not in told:
        told[name] = Story(name, executor, event)
    if name in told:
        told[name].moments.append((entry["at"], event))


def names(run: RunDir) -> list[str]:
    """Every execution that left a folder."""
    return sorted(p.name for p in run.path("executions").iterdir() if p.is_dir())
