"""Looks at what running executions take of disk and processes, and says who takes too much.

No privilege is needed and any file system will do, at the price of noticing late: disk within some seconds (within
two when the file system's free space falls fast), processes within two. What looking costs is bounded: an execution
whose files take t to walk is walked again after 100 t at the earliest.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from gyre_exec import child as children

EVERY_S = 2.0
WALK_EVERY_S = 10.0
WALK_SHARE = 100  # a walk takes at most one part in so many of the time
ENTRY_BYTES = 512  # what an entry costs although it may hold nothing


@dataclass(frozen=True)
class Watched:
    """One running execution."""

    name: str
    pid: int
    folders: tuple[Path, ...]


@dataclass
class Watch:
    """`over` is called with (execution, why), possibly again until it is no longer running."""

    disk_bytes: int
    processes: int
    running: Callable[[], Iterable[Watched]]
    over: Callable[[str, str], None]
    root: Path  # on the file system whose free space is watched
    _next: dict[str, float] = field(default_factory=dict)  # when an execution's files are due
    _free: int = 0

    async def run(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            await self.look()

    async def look(self) -> None:
        """Once over all."""
        watched = list(self.running())
        self._forget(watched)
        children.reap()
        tree = children.process_tree() if watched else {}
        for one in watched:
            count = len(children.descendants(one.pid, tree)) + 1
            if count > self.processes:
                self.over(one.name, f"{count} processes at once; the run allows {self.processes} (tasks.processes)")
        due = self._due(watched, time.monotonic())
        for name, used in (await asyncio.to_thread(self._walk, due)) if due else ():
            why = f"{used / (1 << 20):.0f} MiB on disk; the run allows {self.disk_bytes >> 20} (tasks.disk_mib)"
            self.over(name, why)

    def _forget(self, watched: list[Watched]) -> None:
        names = {one.name for one in watched}
        for name in [n for n in self._next if n not in names]:
            del self._next[name]

    def _due(self, watched: list[Watched], now: float) -> list[Watched]:
        """Whose files are walked now: in turn, or all of them when the disk fills fast."""
        space = os.statvfs(self.root)
        free, before = space.f_bavail * space.f_frsize, self._free
        self._free = free
        hurry = before - free > self.disk_bytes // 4
        return [one for one in watched if hurry or self._next.setdefault(one.name, now) <= now]

    def _walk(self, due: list[Watched]) -> list[tuple[str, int]]:
        found = []
        for one in due:
            began = time.monotonic()
            used = sum(usage(folder, self.disk_bytes) for folder in one.folders)
            ended = time.monotonic()
            self._next[one.name] = ended + max(WALK_EVERY_S, WALK_SHARE * (ended - began))
            if used > self.disk_bytes:
                found.append((one.name, used))
        return found


def usage(folder: Path, enough: int) -> int:
    """Bytes on disk below `folder`, links not followed; stops counting somewhere above `enough`."""
    total, pending = 0, [str(folder)]
    while pending and total <= enough:
        try:
            with os.scandir(pending.pop()) as entries:
                for entry in entries:
                    total += ENTRY_BYTES + entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
        except OSError:  # it is changing under our eyes, or the agent closed it
            continue
    return total
