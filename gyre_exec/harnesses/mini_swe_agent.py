"""mini-swe-agent, headless, through its own model library, which comes with it and never into gyre's environment.

It does not stream: nothing keeps a held call alive but its read timeout, which is set to a day.
"""

from __future__ import annotations

import sys

from gyre_exec.harness import PATH, Launch
from gyre_exec.harnesses.programs import Program

PROGRAM = Program(harness="mini-swe-agent", package="mini-swe-agent", version="2.4.6", file="bin/mini", registry="pip")
DAY_S = 86_400


class MiniSweAgent:
    """`words` are more arguments; `env` wins over ours."""

    def __init__(self, words: tuple[str, ...], env: dict[str, str]) -> None:
        self._words, self._env = words, env

    def visible(self) -> tuple[str, ...]:
        return (PROGRAM.shown(), sys.base_prefix)  # its interpreter is a link to ours

    def prepare(self, launch: Launch) -> None:
        (launch.host_folder / "home").mkdir(exist_ok=True)

    def argv(self, launch: Launch) -> list[str]:
        python = str(PROGRAM.path().with_name("python"))
        model = ["-m", f"openai/{launch.model}", "-c", "mini.yaml", "-c", f"model.model_kwargs.timeout={DAY_S}"]
        options = ["-y", "--exit-immediately", "-o", str(launch.folder / "transcript.json")]
        return [python, str(PROGRAM.path()), "-t", launch.task.instruction, *model, *options, *self._words]

    def env(self, launch: Launch) -> dict[str, str]:
        return {
            "PATH": PATH,
            "HOME": str(launch.folder / "home"),
            "TMPDIR": str(launch.folder / "tmp"),
            "LANG": "C.UTF-8",
            "MSWEA_SILENT_STARTUP": "1",
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "OPENAI_API_KEY": launch.token,
            "OPENAI_API_BASE": f"{launch.base_url}/v1",
            "OPENAI_BASE_URL": f"{launch.base_url}/v1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "LITELLM_TELEMETRY": "False",
        } | self._env
