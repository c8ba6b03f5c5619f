"""The state that an agent left: found again in a run, and copied for each evaluator, so that none of them changes what
another one sees.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

from gyre_base.rundir import RunDir
from gyre_exec.gitobjects import SnapshotError
from gyre_exec.restless import LEFT_OUT, listed, open_plainly, too_deep
from gyre_exec.snapshot import FOLDER, Change, Entry, Store

COPY_BYTES = 1 << 20


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

    What can't be read is left out (the agent chose its mode), and so is what vanishes meanwhile or is too deep,
    as in a snapshot. Raises StateError if there is no such directory, OSError if the copy can't be written.
    """
    if not source.is_dir() or source.is_symlink():
        raise StateError(f"no workspace is kept at {source}")
    target.mkdir(parents=True, mode=0o700)
    _copy_folder(source, None, target, "")


def _copy_folder(name: str | Path, above: int | None, target: Path, inside: str) -> None:
    """`above`: descriptor of the directory in which `name` is. `inside`: its path in the workspace."""
    try:
        with listed(name, above) as (here, entries):
            for entry in entries:
                _copy(entry, here, target / entry.name, inside)
    except OSError as error:
        if error.errno not in LEFT_OUT:
            raise


def _copy(entry: os.DirEntry[str], here: int, copy: Path, inside: str) -> None:
    """One entry of the directory `here`. Nothing where it vanishes or becomes something else meanwhile."""
    if entry.is_symlink():
        with contextlib.suppress(OSError):  # no link any more
            copy.symlink_to(os.readlink(entry.name, dir_fd=here))
    elif entry.is_dir(follow_symlinks=False):
        below = f"{inside}{entry.name}/"
        if not too_deep(below):
            copy.mkdir(mode=0o700)
            _copy_folder(entry.name, here, copy, below)
    elif entry.is_file(follow_symlinks=False):
        _copy_file(entry.name, here, copy)


def _copy_file(name: str, here: int, copy: Path) -> None:
    """With its mode and times."""
    file = open_plainly(name, here)
    if file is not None:
        with file:
            with open(copy, "wb") as out:
                shutil.copyfileobj(file, out, COPY_BYTES)
            found = os.fstat(file.fileno())
            os.chmod(copy, stat.S_IMODE(found.st_mode))
            os.utime(copy, ns=(found.st_atime_ns, found.st_mtime_ns))
