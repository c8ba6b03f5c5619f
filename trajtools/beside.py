"""What a run directory says beside its call log: how each execution ended (`executions/<id>/outcome.json`).

Owns finding it. The call log alone has no outcomes: the executor learns them when nothing more is logged.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from gyre_base.ids import is_safe_name
from gyre_base.runfile import ExecEnd, ExecStart, Record, Reward


def files_of(source: str | Path) -> list[Path]:
    """The run files behind a path: itself, or every *.jsonl and *.gtr of a folder (or of a run's calls/) by name."""
    path = Path(source)
    folder = path / "calls" if (path / "calls").is_dir() else path
    return sorted([*folder.glob("*.jsonl"), *folder.glob("*.gtr")]) if folder.is_dir() else [folder]


class Outcomes:
    """Of the run that a folder of calls belongs to; empty for any other source."""

    def __init__(self, source: Any) -> None:
        path = Path(source) if isinstance(source, (str, Path)) else None
        folders = [] if path is None or not path.is_dir() else [path / "executions", path.parent / "executions"]
        self._folder = next((folder for folder in folders if folder.is_dir()), None)

    def records(self, execution: str) -> list[Record]:
        """Its group, outcome and wall time; nothing if it has not ended."""
        if self._folder is None or not is_safe_name(execution):
            return []
        try:
            told = orjson.loads((self._folder / execution / "outcome.json").read_bytes())
        except (OSError, orjson.JSONDecodeError):
            return []
        if not isinstance(told, dict) or not isinstance(told.get("outcome"), str):
            return []
        evaluator = {"name": told.get("evaluator"), "version": told.get("evaluator_version")}
        return [
            ExecStart(exec=execution, group=execution.rpartition("-")[0]),
            Reward(
                exec=execution,
                status=told["outcome"],
                value=told.get("score"),
                parts=told.get("parts") or {},
                evaluator={k: v for k, v in evaluator.items() if v},
                error=told.get("error") or None,
            ),
            ExecEnd(exec=execution, status="finished", extra={"wall_s": told.get("wall_s")}),
        ]
