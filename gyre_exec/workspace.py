"""Where an execution works: executions/<id>/workspace, and apart from it executions/<id>/scoring for hidden tests.

`plain` is a directory and no wall: for trusted toy models only. Other kinds come behind the same interface. Owns
creation and removal; refuses any path that leads out; never follows a link that the agent left.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from gyre_exec.fields import path_problem
from gyre_exec.tasks import Task


class WorkspaceError(Exception):
    """The workspace can't be made: infrastructure, not the agent."""


class Workspace(Protocol):
    """One execution's place to work."""

    root: Path

    def prepare(self, task: Task) -> None: ...

    def destroy(self) -> None: ...


class Plain:
    """A directory."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "workspace"
        self._folder = folder

    def prepare(self, task: Task) -> None:
        """A fresh directory with the task's files; leftovers of an earlier life go first."""
        if task.container:
            raise WorkspaceError(f"task {task.id} needs a container; workspace `plain` has none")
        try:
            remove_tree(self._folder)
            self._folder.mkdir(mode=0o700, parents=True)
            self.root.mkdir(mode=0o700)
            (self._folder / "tmp").mkdir(mode=0o700)
            write_files(self.root, task.workspace)
        except OSError as error:
            raise WorkspaceError(f"cannot make the workspace {self.root}: {error.strerror or error}") from None

    def destroy(self) -> None:
        remove_tree(self.root)
        remove_tree(self._folder / "tmp")


KINDS: dict[str, type[Plain]] = {"plain": Plain}


def write_files(root: Path, files: Mapping[str, str]) -> None:
    """Texts by relative path into a fresh directory. Raises WorkspaceError on a path that leads out."""
    base = str(root)
    made = {base}
    for relative, text in files.items():
        why = path_problem(relative)
        if why:
            raise WorkspaceError(f"{relative!r}: {why}")
        target = f"{base}/{relative}"
        parent = target.rpartition("/")[0]
        if parent not in made:
            Path(parent).mkdir(parents=True, exist_ok=True)
            made.add(parent)
        with open(target, "wb") as file:
            file.write(text.encode("utf-8", "surrogateescape"))


def remove_tree(path: Path) -> None:
    """Gone, whatever modes the agent set. A link is removed, not followed. Raises OSError if it can't be done."""
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not path.is_dir():
        path.unlink()
        return
    try:
        shutil.rmtree(path)
    except OSError:
        for folder, _, _ in os.walk(path):  # a directory without write permission: open it, then once more
            os.chmod(folder, stat.S_IRWXU)
        shutil.rmtree(path)
