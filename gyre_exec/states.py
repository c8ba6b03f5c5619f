"""The state that an agent left: found again in a run, and copied for each evaluator, so that none of them changes what
another one sees.
"""

from __future__ import annotations

import os
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

from gyre_base.rundir import RunDir
from gyre_exec.gitobjects import SnapshotError
from gyre_exec.snapshot import FOLDER, Change, Entry, Store


class StateError(Exception):
    """What an execution left can't be read."""


@dataclass(frozen=True)
class Kept:
    """A state that is still there: a snapshot, or the directory itself. `reference` says where, for the score that was
    made of it.
    """

    reference: str
    store: Store
    commit: str | None
    folder: Path

    def copy_to(self, target: Path) -> None:
        """Raises StateError."""
        if self.commit is None:
            copy_state(self.folder, target)
            return
        try:
            self.store.restore(self.commit, target)
        except SnapshotError as error:
            raise StateError(str(error)) from None

    def changes(self) -> list[Change] | None:
        """What differs from its start, without reading what does not; None if no start is kept. Raises StateError."""
        if self.commit is None:
            return None
        try:
            start, end = self.store.trees(self.commit)
            return list(self.store.changes(start, end)) if start else None
        except SnapshotError as error:
            raise StateError(str(error)) from None

    def content(self, entry: Entry, limit: int) -> tuple[bytes | None, int]:
        """What a file of `changes` holds, None if that is more than `limit` bytes, and its size. Raises StateError."""
        kept: list[bytes] = []
        size = 0
        try:
            for chunk in self.store.objects.chunks(entry.oid):
                size += len(chunk)
                if size <= limit:
                    kept.append(chunk)
        except SnapshotError as error:
            raise StateError(str(error)) from None
        return (b"".join(kept) if size <= limit else None), size


def find(run: RunDir, execution: str) -> Kept | None:
    """What `execution` left, or None if it is not kept."""
    store, folder = Store(run.root), run.path("executions", execution, "workspace")
    commit = store.find(execution)
    if commit is not None:
        return Kept(f"{FOLDER}@{commit[:12]}", store, commit, folder)
    return Kept(f"executions/{execution}/workspace", store, None, folder) if folder.is_dir() else None


def copy_state(source: Path, target: Path) -> None:
    """Files, directories and links (as links, never followed); sockets, pipes and devices stay behind.

    A file that can't be read is left out (the agent chose its mode), and so is one that vanishes meanwhile. Raises
    StateError if there is no such directory.
    """
    if not source.is_dir() or source.is_symlink():
        raise StateError(f"no workspace is kept at {source}")
    target.mkdir(parents=True, mode=0o700)
    _copy_folder(source, target)


def _copy_folder(source: Path, target: Path) -> None:
    pending = [(source, target)]
    while pending:
        here, there = pending.pop()
        try:
            entries = list(os.scandir(here))
        except (PermissionError, FileNotFoundError):
            continue
        for entry in entries:
            copy = there / entry.name
            if entry.is_symlink():
                copy.symlink_to(Path(entry.path).readlink())
            elif entry.is_dir(follow_symlinks=False):
                copy.mkdir(mode=0o700)
                pending.append((here / entry.name, copy))
            elif stat.S_ISREG(entry.stat(follow_symlinks=False).st_mode):
                try:
                    shutil.copy2(entry.path, copy, follow_symlinks=False)
                except (PermissionError, FileNotFoundError):
                    continue
