"""Feed a journal to a fresh scheduler and compare: the same events give the same commands, or the line that differs
is shown.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cellctl.core import Scheduler
from gyre_base import wire
from gyre_base.journal import Damaged, command_json, read


@dataclass(frozen=True)
class Difference:
    """The first place where a replay leaves its journal."""

    line: int
    event: dict[str, Any]
    recorded: list[dict[str, Any]]
    replayed: list[dict[str, Any]]


def replay(path: Path) -> tuple[int, Difference | None]:
    """(entries replayed, first difference or None). Raises Damaged for a file that is no journal."""
    core = Scheduler()
    count = 0
    for count, entry in enumerate(read(path), start=1):
        try:
            event = wire.from_json(entry.event)
        except ValueError as error:
            raise Damaged(f"{path}:{count}: not an event of this version: {error}") from None
        commands = [_plain(c) for c in core.handle(event, entry.at)]
        if commands != entry.commands:
            return count, Difference(count, entry.event, entry.commands, commands)
    return count, None


def _plain(command: Any) -> dict[str, Any]:
    """Through JSON and back, so that tuples and lists compare equal."""
    import orjson

    return dict(orjson.loads(orjson.dumps(command_json(command))))
