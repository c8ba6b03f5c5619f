"""Harness adapters: how a black box is started and told where its model is. One small class each, in one table.

`command` takes anything that reads a base URL from its environment; the instruction is its last argument unless the
command places it with {instruction}.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gyre_exec.rulers import bases, fill
from gyre_exec.tasks import Task

PATH = "/usr/local/bin:/usr/bin:/bin"


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What an adapter may know of an execution."""

    execution: str
    task: Task
    workspace: Path  # as the harness sees it
    folder: Path  # the harness's own, as it sees it: settings, transcript, tmp/
    host_folder: Path  # the same on this machine: where an adapter writes
    base_url: str  # http://127.0.0.1:PORT/x/{execution}; dialects add /v1 themselves or not
    token: str
    model: str
    start_folder: str  # where the executor was started: relative files of the harness command


class Adapter(Protocol):
    """Argv and environment of one start."""

    def argv(self, launch: Launch) -> list[str]: ...

    def env(self, launch: Launch) -> dict[str, str]: ...


class Command:
    """Any program. Raises ValueError if there is none."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        if not command:
            raise ValueError("tasks.harness is empty: write the command that starts the agent")
        self._command, self._env = tuple(command), dict(env)

    def argv(self, launch: Launch) -> list[str]:
        argv = fill(self._command, self._values(launch), bases=(launch.start_folder, *bases(launch.task.folder)))
        placed = any("{instruction}" in part for part in self._command)
        return argv if placed else [*argv, launch.task.instruction]

    def env(self, launch: Launch) -> dict[str, str]:
        values = self._values(launch)
        return {
            "PATH": PATH,
            "HOME": str(launch.workspace),
            "TMPDIR": str(launch.folder / "tmp"),
            "LANG": "C.UTF-8",
            "OPENAI_BASE_URL": f"{launch.base_url}/v1",
            "OPENAI_API_KEY": launch.token,
            "OPENAI_MODEL": launch.model,
            "ANTHROPIC_BASE_URL": launch.base_url,
            "ANTHROPIC_AUTH_TOKEN": launch.token,
            "ANTHROPIC_MODEL": launch.model,
        } | {key: fill(("", text), values)[1] for key, text in self._env.items()}

    def _values(self, launch: Launch) -> dict[str, str]:
        return {
            "python": sys.executable,
            "workspace": str(launch.workspace),
            "task_file_dir": launch.task.folder,
            "instruction": launch.task.instruction,
            "transcript": str(launch.folder / "transcript.json"),
        }


ADAPTERS: dict[str, type[Command]] = {"command": Command}


def adapter_for(command: Sequence[str], env: Mapping[str, str]) -> Adapter:
    """A named adapter if the first word is one, else `command`."""
    if command and command[0] in ADAPTERS:
        return ADAPTERS[command[0]](command[1:], env)
    return Command(command, env)
