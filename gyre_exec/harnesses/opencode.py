"""opencode, headless, over Chat Completions through its own provider package (part of the program)."""

from __future__ import annotations

import json

from gyre_exec.harness import PATH, Launch
from gyre_exec.harnesses.programs import Program

PROGRAM = Program(
    harness="opencode",
    package="opencode-ai",
    version="1.18.33",
    file="node_modules/opencode-linux-x64/bin/opencode",
)


class Opencode:
    """`words` are more arguments; `env` wins over ours."""

    def __init__(self, words: tuple[str, ...], env: dict[str, str]) -> None:
        self._words, self._env = words, env

    def visible(self) -> tuple[str, ...]:
        return (PROGRAM.shown(),)

    def prepare(self, launch: Launch) -> None:
        folder = launch.host_folder / "home" / ".config" / "opencode"
        folder.mkdir(parents=True, exist_ok=True)
        limit = {"context": launch.context_tokens, "output": launch.max_new_tokens}
        models = {name: {"name": name, "limit": limit} for name in (launch.model, f"{launch.model}-side")}
        settings = {
            "$schema": "https://opencode.ai/config.json",
            "model": f"gyre/{launch.model}",
            "small_model": f"gyre/{launch.model}-side",
            "agent": {"compaction": {"model": f"gyre/{launch.model}"}},  # a summary is the model's own work
            "autoupdate": False,
            "share": "disabled",
            "permission": "allow",
            "provider": {
                "gyre": {
                    "npm": "@ai-sdk/openai-compatible",
                    "name": "gyre",
                    "options": {"baseURL": f"{launch.base_url}/v1", "apiKey": launch.token, "timeout": False},
                    "models": models,
                }
            },
        }
        (folder / "opencode.json").write_text(json.dumps(settings, indent=1))

    def argv(self, launch: Launch) -> list[str]:
        return [str(PROGRAM.path()), "run", "--format", "json", *self._words, launch.task.instruction]

    def env(self, launch: Launch) -> dict[str, str]:
        home = launch.folder / "home"
        flags = ("AUTOUPDATE", "MODELS_FETCH", "LSP_DOWNLOAD", "SHARE", "DEFAULT_PLUGINS")
        return {
            "PATH": PATH,
            "HOME": str(home),
            "XDG_CONFIG_HOME": str(home / ".config"),
            "XDG_DATA_HOME": str(home / ".local" / "share"),
            "XDG_CACHE_HOME": str(home / ".cache"),
            "XDG_STATE_HOME": str(home / ".local" / "state"),
            "TMPDIR": str(launch.folder / "tmp"),
            "LANG": "C.UTF-8",
            **{f"OPENCODE_DISABLE_{flag}": "1" for flag in flags},
        } | self._env
