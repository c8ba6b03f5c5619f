"""Making a run directory from a configuration, and finding what a run was made from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from gyre_base import config as configuration
from gyre_base.config import Config, ConfigError
from gyre_base.keys import make_keys
from gyre_base.rundir import RunDir
from gyre_cli.common import LATEST


def create(root: str, config_file: Path, overrides: dict[str, Any] | None = None) -> tuple[RunDir, Config]:
    """A new run, or the one that is there already (its own run.json wins). Raises ConfigError, RunDirError."""
    if (Path(root) / "run.json").exists():
        return reopen(root)
    config = configuration.load(config_file, overrides)
    check(config)
    run = RunDir.create(root)
    make_keys(run)
    run.write_atomic("run.toml", config_file.read_text())
    run.write_atomic("run.json", configuration.to_json(config))
    point_latest(run)
    return run, config


def reopen(root: str) -> tuple[RunDir, Config]:
    run = RunDir.open(root)
    point_latest(run)
    return run, configuration.from_json(run.path("run.json").read_text())


def check(config: Config) -> None:
    """What can be known to fail before anything starts. Raises ConfigError."""
    needed = {
        "model.path": Path(config.model.path) / "config.json" if config.model.path else None,
        "tasks.train": Path(config.tasks.train) if config.tasks.train else None,
    }
    for key, path in needed.items():
        if path is None:
            raise ConfigError(f"{key} is not set; see the comments that `gyre init` writes")
        if not path.exists():
            raise ConfigError(f"{key}: no such file: {path}")
    if not config.tasks.harness:
        raise ConfigError('tasks.harness is not set: the command that runs your agent, such as ["python3", "agent.py"]')
    from gyre_exec.tasks import check as check_tasks

    paths = [Path(p) for p in (config.tasks.train, config.tasks.heldout) if p]
    problems = check_tasks(paths)
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ConfigError(f"{problems[0]}{more}")


def point_latest(run: RunDir) -> None:
    """runs/latest -> this run, if the run lies in a folder called runs: `cellctl status` then needs no --run."""
    if run.root.parent.name != LATEST.parent.name:
        return
    link = run.root.parent / LATEST.name
    temporary = link.with_name(f".latest.{os.getpid()}")
    temporary.symlink_to(run.root.name)
    os.replace(temporary, link)
