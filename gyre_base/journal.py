"""What a daemon's core was told and what it answered, a JSON object per line: the bug report, the replay, the restart.

Bulk is never written, only its length. Append-only; a torn last line (a crash in mid-write) is cut off at the next
start and kept beside the journal.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from gyre_base import wire


class Damaged(ValueError):
    """A journal that can't be read: its words name the file and the line."""


@dataclass(frozen=True)
class Entry:
    """One event: when it arrived (s since the epoch), the event, and the commands that followed."""

    at: float
    event: dict[str, Any]
    commands: list[dict[str, Any]]


class Journal:
    """Appends entries; `sync` decides when they must be on disk before the commands go out.

    `held` entries go out with the next one that is not, or by `flush`: a crash loses them, so only what a restart does
    not need may be held, and no longer than a turn of the loop.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        mend_tail(path)
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - lives as long as the daemon
        self._held: list[bytes] = []

    def write(self, at: float, event: Any, commands: list[Any], *, durable: bool = False, held: bool = False) -> None:
        said = b",".join(map(_command_text, commands))
        self._held.append(b'{"at":%b,"event":%b,"commands":[%b]}\n' % (orjson.dumps(at), wire.to_text(event), said))
        if not held:
            self.flush()
        if durable:
            self.sync()

    def flush(self) -> None:
        if self._held:
            self._file.write(b"".join(self._held))
            self._held.clear()

    def sync(self) -> None:
        """Everything written so far is on disk when this returns. May run in a thread beside `write`."""
        os.fdatasync(self._file.fileno())

    def close(self) -> None:
        self.flush()
        os.fsync(self._file.fileno())
        self._file.close()


def command_json(command: Any) -> dict[str, Any]:
    """A command as journals and replays compare it: an addressed message carries `peer`, an answer `peer: asker`."""
    if hasattr(command, "TAG"):
        return wire.to_json(command)
    return {"peer": getattr(command, "to", "asker"), **wire.to_json(command.message)}


def _command_text(command: Any) -> bytes:
    return wire.to_text(command) if hasattr(command, "TAG") else orjson.dumps(command_json(command))


def mend_tail(path: Path) -> int:
    """Cut a torn last line into `<name>.torn`; returns how many bytes were cut."""
    if not path.exists():
        return 0
    data = path.read_bytes()
    keep = data.rfind(b"\n") + 1
    if keep == len(data):
        return 0
    with open(path.with_suffix(path.suffix + ".torn"), "ab") as torn:
        torn.write(data[keep:] + b"\n")
    with open(path, "r+b") as file:
        file.truncate(keep)
    return len(data) - keep


def read(path: Path) -> Iterator[Entry]:
    """All whole entries. Raises Damaged naming the line if one in the middle is no entry."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                body = json.loads(line)
                entry = Entry(float(body["at"]), dict(body["event"]), list(body["commands"]))
            except (ValueError, RecursionError, TypeError, KeyError):
                raise Damaged(f"{path}:{number}: not a journal entry") from None
            yield entry
