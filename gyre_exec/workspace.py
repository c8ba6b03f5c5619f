"""Where an execution works, and what of the machine its harness can see.

    executions/<id>/workspace   the task's files; what is scored
    executions/<id>/harness     the harness's own: settings, transcript; tmp/ below it
    executions/<id>/scoring     hidden tests, only while an evaluator runs

One small interface: prepare, command (the line that runs a program in there), destroy. `plain` is a directory and no
wall, for trusted toy models only; the walled kinds are in workspace_kinds.py. Owns creation and removal; refuses any
path that leads out; never follows a link that the agent left.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gyre_exec.fields import path_problem
from gyre_exec.restless import remove_tree
from gyre_exec.tasks import Task

MARK = "GYRE_FOLDER"  # in the environment of the processes around a sandbox, not of those in it
SOCKET = "{socket}"  # in an argv: the number of a descriptor, known when the process is started


class WorkspaceError(Exception):
    """The workspace can't be made: infrastructure, not the agent."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a run says of all its workspaces (config `tasks`)."""

    image: str = ""  # a directory or image file for tasks that name none
    images: str = ""  # a directory of images, by the name that a task gives (`/` and `:` written as `_`)
    visible: tuple[str, ...] = ()  # more of this machine that a sandbox shows, read-only
    file_bytes: int = 0  # the largest single file; 0 = no bound
    processes: int = 0  # 0 = no bound


@dataclass(frozen=True, kw_only=True)
class CommandLine:
    """What the executor starts."""

    argv: list[str]
    env: dict[str, str]
    walled: bool = False  # the harness is in a process namespace of its own, below a process or two of ours
    hands_over: bool = False  # {socket} in argv is the descriptor over which the listening socket comes
    relay_socket: Path | None = None  # a Unix socket of the relay that must listen before the start
    warning: tuple[str, ...] = ()  # what warns the harness, where a signal to our process does not reach it


@dataclass
class Workspace(ABC):
    """One execution's place to work."""

    folder: Path  # executions/<id>
    settings: Settings = field(default_factory=Settings)

    @property
    def root(self) -> Path:
        """The workspace on this machine."""
        return self.folder / "workspace"

    @property
    def harness(self) -> Path:
        """The harness's own folder on this machine."""
        return self.folder / "harness"

    @property
    def inside(self) -> Path:
        """The workspace as the harness sees it."""
        return self.root

    @property
    def harness_inside(self) -> Path:
        """Its own folder as the harness sees it."""
        return self.harness

    def prepare(self, task: Task) -> None:
        """A fresh directory with the task's files; leftovers of an earlier life go first. Raises WorkspaceError."""
        self.accept(task)
        try:
            remove_tree(self.folder)
            self.folder.mkdir(mode=0o700, parents=True)
            self.harness.mkdir(mode=0o700)
            (self.harness / "tmp").mkdir(mode=0o700)
            self.fill(task)
            write_files(self.root, task.workspace)
        except OSError as error:
            raise WorkspaceError(f"cannot make the workspace {self.root}: {error.strerror or error}") from None

    @abstractmethod
    def accept(self, task: Task) -> None:
        """Raises WorkspaceError if this kind can't give the task what it needs."""

    def fill(self, task: Task) -> None:
        """The directory as the task's image has it, before the task's own files."""
        self.root.mkdir(mode=0o700)

    @abstractmethod
    def base_url(self, execution: str, host_url: str) -> str:
        """Where the harness finds its model; `host_url` is the relay's on this machine."""

    @abstractmethod
    def command(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        binds: Mapping[str, str] | None = None,
        reach: bool = True,
    ) -> CommandLine:
        """The line that runs `argv` in there.

        `binds` {path on this machine: path inside} is shown as well, writable: so an evaluator brings its tests and
        takes its score out. `reach`: whether it has the relay's port; an evaluator has no business with it.
        """

    def destroy(self) -> None:
        remove_tree(self.root)
        remove_tree(self.harness)


class Plain(Workspace):
    """A directory."""

    def accept(self, task: Task) -> None:
        if task.container:
            raise WorkspaceError(
                f"task {task.id} needs a container; workspace `plain` has none: "
                "set tasks.workspace to bwrap, apptainer or pyxis"
            )

    def base_url(self, execution: str, host_url: str) -> str:
        return host_url

    def command(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        binds: Mapping[str, str] | None = None,
        reach: bool = True,
    ) -> CommandLine:
        if binds:
            raise WorkspaceError("a plain workspace can't show a file at another path")
        return CommandLine(argv=list(argv), env=dict(env))


def kinds() -> dict[str, type[Workspace]]:
    """All of them, by the word in the configuration."""
    from gyre_exec.workspace_kinds import Apptainer, Bwrap, Pyxis

    return {"plain": Plain, "bwrap": Bwrap, "apptainer": Apptainer, "pyxis": Pyxis}


# ---- files --------------------------------------------------------------------------------------------------------


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
