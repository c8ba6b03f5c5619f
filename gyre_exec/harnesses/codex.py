"""Codex, headless, over the Responses API. Its settings are a file in its own home."""

from __future__ import annotations

import json

from gyre_exec.harness import PATH, Launch
from gyre_exec.harnesses.programs import Program

PROGRAM = Program(
    harness="codex",
    package="@openai/codex",
    version="0.171.0",
    file="node_modules/@openai/codex-linux-x64/vendor/x86_64-unknown-linux-musl/bin/codex",
)
DAY_MS = 86_400_000
CONFIG = """\
model = {model}
model_provider = "gyre"
model_context_window = {context}
model_auto_compact_token_limit = {compact}
check_for_update_on_startup = false

[analytics]
enabled = false

[otel]
exporter = "none"

[model_providers.gyre]
name = "gyre"
base_url = {base_url}
env_key = "GYRE_KEY"
wire_api = "responses"
stream_idle_timeout_ms = {day_ms}
request_max_retries = 50
stream_max_retries = 50
"""
COMPACT_SHARE = 0.9  # of the context, at which it summarises


class Codex:
    """`words` are more arguments, such as ["-c", "key=value"]; `env` wins over ours."""

    def __init__(self, words: tuple[str, ...], env: dict[str, str]) -> None:
        self._words, self._env = words, env

    def visible(self) -> tuple[str, ...]:
        return (PROGRAM.shown(),)

    def prepare(self, launch: Launch) -> None:
        home = launch.host_folder / "home"
        home.mkdir(exist_ok=True)
        (home / "config.toml").write_text(
            CONFIG.format(
                model=json.dumps(launch.model),
                context=launch.context_tokens,
                compact=int(launch.context_tokens * COMPACT_SHARE),
                base_url=json.dumps(f"{launch.base_url}/v1"),
                day_ms=DAY_MS,
            )
        )

    def argv(self, launch: Launch) -> list[str]:
        options = ["--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
        return [str(PROGRAM.path()), "exec", *options, *self._words, launch.task.instruction]

    def env(self, launch: Launch) -> dict[str, str]:
        return {
            "PATH": PATH,
            "HOME": str(launch.folder / "home"),
            "CODEX_HOME": str(launch.folder / "home"),
            "TMPDIR": str(launch.folder / "tmp"),
            "LANG": "C.UTF-8",
            "GYRE_KEY": launch.token,
        } | self._env
