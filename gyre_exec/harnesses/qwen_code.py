"""Qwen Code, headless, over Chat Completions. Its memory agent is off: it would call the model after the end."""

from __future__ import annotations

import json
import shutil

from gyre_exec.harness import PATH, Launch
from gyre_exec.harnesses.programs import HarnessMissing, Program

PROGRAM = Program(
    harness="qwen-code",
    package="@qwen-code/qwen-code",
    version="0.24.4",
    file="node_modules/@qwen-code/qwen-code/cli-entry.js",
)
DAY_MS = 86_400_000


class QwenCode:
    """`words` are more arguments; `env` wins over ours."""

    def __init__(self, words: tuple[str, ...], env: dict[str, str]) -> None:
        self._words, self._env = words, env

    def visible(self) -> tuple[str, ...]:
        return (PROGRAM.shown(), _node())

    def prepare(self, launch: Launch) -> None:
        folder = launch.host_folder / "home" / ".qwen"
        folder.mkdir(parents=True, exist_ok=True)
        generation = {
            "contextWindowSize": launch.context_tokens,
            "timeout": DAY_MS,
            "maxRetries": 20,
            "samplingParams": {"max_tokens": launch.max_new_tokens},
        }
        settings = {
            "security": {"auth": {"selectedType": "openai"}},
            "memory": {"enableManagedAutoMemory": False, "enableManagedAutoDream": False},
            "privacy": {"usageStatisticsEnabled": False},
            "telemetry": {"enabled": False},
            "general": {"disableAutoUpdate": True, "disableUpdateNag": True},
            "model": {"name": launch.model, "generationConfig": generation},
        }
        (folder / "settings.json").write_text(json.dumps(settings, indent=1))

    def argv(self, launch: Launch) -> list[str]:
        options = ["--yolo", "--output-format", "stream-json"]
        return [_node(), str(PROGRAM.path()), "-p", launch.task.instruction, *options, *self._words]

    def env(self, launch: Launch) -> dict[str, str]:
        return {
            "PATH": PATH,
            "HOME": str(launch.folder / "home"),
            "TMPDIR": str(launch.folder / "tmp"),
            "LANG": "C.UTF-8",
            "OPENAI_BASE_URL": f"{launch.base_url}/v1",
            "OPENAI_API_KEY": launch.token,
            "OPENAI_MODEL": launch.model,
            "QWEN_TELEMETRY_ENABLED": "false",
            "QWEN_SANDBOX": "false",
            "NO_UPDATE_NOTIFIER": "1",
            "QWEN_STREAM_IDLE_TIMEOUT_MS": str(DAY_MS),
            "QWEN_STREAM_MAX_LIFETIME_MS": str(DAY_MS),
        } | self._env


def _node() -> str:
    node = shutil.which("node")
    if node is None:
        raise HarnessMissing("qwen-code runs on node 20 or newer, which is not on this node's path")
    return node
