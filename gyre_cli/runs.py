"""Making a run directory from a configuration, and finding what a run was made from."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
from pathlib import Path
from typing import Any

import click

from gyre_base import config as configuration
from gyre_base.allocation import Allocation, own_address
from gyre_base.config import Config, ConfigError
from gyre_base.keys import make_keys
from gyre_base.routing import shape_of
from gyre_base.rundir import RunDir
from gyre_cli import registry
from gyre_cli.common import LATEST


def create(root: str, config_file: Path, overrides: dict[str, Any] | None = None) -> tuple[RunDir, Config]:
    """A new run, or the one that is there already (its own run.json wins, aloud). Raises ConfigError, RunDirError."""
    if (Path(root) / "run.json").exists():
        run, config = reopen(root)
        if config_file.exists() and (other := differences(config, configuration.load(config_file, overrides))):
            words = f"{run.root} goes on with its own run.json; not used: {', '.join(other)}"
            click.echo(f"{words}. Another --run starts anew.", err=True)
        return run, config
    config = configuration.load(config_file, overrides)
    check(config)
    run = RunDir.create_new(root)
    make_keys(run)
    run.write_atomic("run.toml", config_file.read_text())
    run.write_atomic("run.json", configuration.to_json(config))
    remember(run)
    return run, config


def differences(old: Config, new: Config) -> list[str]:
    """`key = value` for each key of which `new` says something else."""
    before, after = (dataclasses.asdict(config) for config in (old, new))
    pairs = (key.partition(".") for key in configuration.keys())
    return [f"{s}.{k} = {after[s][k]!r}" for s, _, k in pairs if before[s][k] != after[s][k]]


def reopen(root: str) -> tuple[RunDir, Config]:
    run = RunDir.open(root)
    remember(run)
    return run, configuration.from_json(run.path("run.json").read_text())


def check(config: Config, *, here: bool = True) -> None:
    """What can be known to fail before anything starts; with `here` on this very machine. Raises ConfigError."""
    needed = {
        "model.path": Path(config.model.path) / "config.json" if config.model.path else None,
        "tasks.train": Path(config.tasks.train) if config.tasks.train else None,
        **({"tasks.heldout": Path(config.tasks.heldout)} if config.tasks.heldout else {}),
        **({"scheduler.forecast_from": Path(known)} if (known := config.scheduler.forecast_from) else {}),
        **({"model.tokenizer": Path(config.model.tokenizer) / "tokenizer.json"} if config.model.tokenizer else {}),
    }
    for key, path in needed.items():
        if path is None:
            raise ConfigError(f"{key} is not set; see the comments that `gyre init` writes")
        if not path.exists():
            raise ConfigError(f"{key}: no such file: {path}")
    if not config.tasks.harness:
        raise ConfigError('tasks.harness is not set: the command that runs your agent, such as ["python3", "agent.py"]')
    if here:
        check_address(own_address(config.cluster.bind))
    from celld.sglang.launch import check_model
    from celld.trainer.layout import check_layout
    from gyre_exec.tasks import check as check_tasks

    model = json.loads((Path(config.model.path) / "config.json").read_text())
    check_layout(config.trainer, model)
    shape_of(config)
    if config.engine.kind == "sglang":
        check_model(model)
    paths = [Path(p) for p in (config.tasks.train, config.tasks.heldout) if p]
    problems = check_tasks(paths)
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ConfigError(f"{problems[0]}{more}")


def check_address(bind: str) -> None:
    """Whether this machine, on which all daemons of `gyre up` run, has the address."""
    with socket.socket() as probe:
        try:
            probe.bind((bind, 0))
        except OSError as error:
            words = f"cluster.bind: cannot listen on {bind}: {error.strerror}; name an address of this machine"
            raise ConfigError(words) from None


def remember(run: RunDir) -> None:
    """For `gyre status`, and for commands that name no run."""
    point_latest(run)
    around = Allocation.here()
    registry.note(run.root, job=around.job if around else "")


def point_latest(run: RunDir) -> None:
    """runs/latest -> this run, if the run lies in a folder called runs: `cellctl status` then needs no --run."""
    if run.root.parent.name != LATEST.parent.name:
        return
    link = run.root.parent / LATEST.name
    temporary = link.with_name(f".latest.{os.getpid()}")
    temporary.symlink_to(run.root.name)
    os.replace(temporary, link)
