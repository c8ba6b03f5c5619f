"""Harness adapters: how a black box is started and told where its model is. One small class each, in one table.

`command` takes anything that reads a base URL from its environment; the instruction is its last argument unless the
command places it with {instruction}.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gyre_base.config import Config
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
    context_tokens: int  # of the model: harnesses summarise before it is full
    max_new_tokens: int  # of one answer


class Adapter(Protocol):
    """One harness: what it needs to be there, its argv and its environment."""

    def visible(self) -> tuple[str, ...]:
        """Files and folders of this machine that a walled workspace must show. Raises ValueError."""

    def prepare(self, launch: Launch) -> None:
        """Write its settings below `launch.host_folder`."""

    def argv(self, launch: Launch) -> list[str]: ...

    def env(self, launch: Launch) -> dict[str, str]: ...


class Command:
    """Any program. Raises ValueError if there is none."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        if not command:
            raise ValueError("tasks.harness is empty: write the command that starts the agent")
        self._command, self._env = tuple(command), dict(env)

    def visible(self) -> tuple[str, ...]:
        return ()

    def prepare(self, launch: Launch) -> None:
        """Its settings are its own."""

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


ADAPTERS = {
    "command": "gyre_exec.harness:Command",
    "claude-code": "gyre_exec.harnesses.claude_code:ClaudeCode",
    "codex": "gyre_exec.harnesses.codex:Codex",
    "qwen-code": "gyre_exec.harnesses.qwen_code:QwenCode",
    "opencode": "gyre_exec.harnesses.opencode:Opencode",
    "mini-swe-agent": "gyre_exec.harnesses.mini_swe_agent:MiniSweAgent",
}


def adapter_for(command: Sequence[str], env: Mapping[str, str]) -> Adapter:
    """A named adapter if the first word is one, with the other words as its arguments; else `command`."""
    if not command or command[0] not in ADAPTERS:
        return Command(command, env)
    module, _, name = ADAPTERS[command[0]].partition(":")
    adapter: Adapter = getattr(importlib.import_module(module), name)(tuple(command[1:]), dict(env))
    return adapter


def showing(settings: Config, adapter: Adapter) -> Config:
    """`settings` whose walled workspaces show what the harness needs. Raises ValueError if it is not installed."""
    visible = tuple(dict.fromkeys((*settings.tasks.visible, *adapter.visible())))
    return dataclasses.replace(settings, tasks=dataclasses.replace(settings.tasks, visible=visible))
