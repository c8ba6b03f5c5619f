"""Claude Code, headless. Pinned to 2.1.220; 2.1.332 works with the same settings.

Sub-agents and side calls ask for models of other names, by which proxyd labels them. Calls may be held for minutes: all
four of the program's own watchdogs are off. Its background agents are off: a run's tree then has one order.
"""

from __future__ import annotations

from gyre_exec.harness import PATH, Launch
from gyre_exec.harnesses.programs import Program

PROGRAM = Program(
    harness="claude-code",
    package="@anthropic-ai/claude-code",
    version="2.1.220",
    file="node_modules/@anthropic-ai/claude-code-linux-x64/claude",
)
DAY_MS = "86400000"


class ClaudeCode:
    """`words` are more arguments, such as ["--tools", "Bash,Edit,Read,Write,Agent"]; `env` wins over ours."""

    def __init__(self, words: tuple[str, ...], env: dict[str, str]) -> None:
        self._words, self._env = words, env

    def visible(self) -> tuple[str, ...]:
        return (PROGRAM.shown(),)

    def prepare(self, launch: Launch) -> None:
        (launch.host_folder / "home").mkdir(exist_ok=True)

    def argv(self, launch: Launch) -> list[str]:
        options = ["--output-format", "stream-json", "--verbose", "--dangerously-skip-permissions"]
        return [str(PROGRAM.path()), "-p", launch.task.instruction, *options, *self._words]

    def env(self, launch: Launch) -> dict[str, str]:
        sub, side = f"{launch.model}-sub", f"{launch.model}-side"
        return {
            "PATH": PATH,
            "HOME": str(launch.folder / "home"),
            "TMPDIR": str(launch.folder / "tmp"),
            "LANG": "C.UTF-8",
            "IS_SANDBOX": "1",  # else it refuses to skip permissions as root
            "ANTHROPIC_BASE_URL": launch.base_url,
            "ANTHROPIC_AUTH_TOKEN": launch.token,
            "ANTHROPIC_MODEL": launch.model,
            "CLAUDE_CODE_SUBAGENT_MODEL": sub,
            **{f"ANTHROPIC_DEFAULT_{size}_MODEL": sub for size in ("SONNET", "OPUS", "FABLE")},
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": side,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_TELEMETRY": "1",
            "DISABLE_ERROR_REPORTING": "1",
            "DISABLE_AUTOUPDATER": "1",
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # a block that changes would break every prefix
            "DISABLE_PROMPT_CACHING": "1",
            "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS": "1",
            "CLAUDE_CODE_DISABLE_BACKGROUND_TASKS": "1",
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(launch.context_tokens),
            "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(launch.context_tokens),
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(launch.max_new_tokens),
            "API_TIMEOUT_MS": DAY_MS,
            "API_FORCE_IDLE_TIMEOUT": "0",
            "CLAUDE_STREAM_IDLE_TIMEOUT_MS": DAY_MS,
            "CLAUDE_ENABLE_STREAM_WATCHDOG": "0",
        } | self._env
