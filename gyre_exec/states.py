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


class StateError(Exception):
    """What an execution left can't be read."""


@dataclass(frozen=True)
class Kept:
    """A state that is still there. `reference` says where, for the score that was made of it."""

    reference: str
    folder: Path

    def copy_to(self, target: Path) -> None:
        """Raises StateError."""
        copy_state(self.folder, target)


def find(run: RunDir, execution: str) -> Kept | None:
    """What `execution` left, or None if it is not kept."""
    folder = run.path("executions", execution, "workspace")
    return Kept(f"executions/{execution}/workspace", folder) if folder.is_dir() else None


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
