"""What a submission would be: the job script and the configuration read together, where everything would run, what
memory and time it would take. Reads files; asks nobody.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import orjson

from gyre_base import config as configuration
from gyre_base import saving
from gyre_base.config import Config, ConfigError
from gyre_base.shards import proxyd_names
from gyre_cli import common, listing, memory, runs, script, slurm
from gyre_cli.script import Script

SIGNAL_EARLY_S = 60.0  # Slurm looks every half minute, so its warning comes up to this much before it was asked for
JOURNAL_TAIL_BYTES = 32 * 2**20


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a submission would be. `more` are further words for sbatch; `unused` are keys that the configuration says
    otherwise than the run, which goes on with what it was started with.
    """

    script: Script
    config_file: Path
    config: Config
    run: Path
    more: tuple[str, ...]
    unused: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What an earlier life of the run took, in seconds; None where it never came so far."""

    save_s: float | None = None
    step_s: float | None = None


def make_plan(path: Path, more: tuple[str, ...]) -> Plan:
    """Read everything; the script's own process start says which configuration and run. Raises ConfigError."""
    job = script.parse(path, more)
    if not job.command:
        raise ConfigError(f"{path} starts no `gyre up`; `gyre init` writes a script that does")
    config_file = job.folder / (job.argument("--config") or "gyre.toml")
    run = (job.folder / (job.argument("--run") or "runs/run")).resolve()
    config = configuration.load(config_file)
    unused: list[str] = []
    if (run / "run.json").exists():
        written, config = config, configuration.from_json((run / "run.json").read_text())
        unused = runs.differences(config, written)
    return Plan(script=job, config_file=config_file, config=config, run=run, more=more, unused=tuple(unused))


# ---- what is known --------------------------------------------------------------------------------------------------


def measure(run: Path) -> Measured:
    """From the journal and the timeline of earlier lives."""
    saves = [event.get("seconds", 0.0) for event in journal_events(run / "journal" / "cellctl.jsonl", b'"saved"')]
    steps = list(step_times(run / "metrics" / "timeline.jsonl"))
    took = [later - earlier for earlier, later in pairwise(steps)]
    return Measured(save_s=max((s for s in saves if s), default=None), step_s=median(took) if took else None)


def journal_events(path: Path, word: bytes) -> Iterator[dict[str, Any]]:
    """Events near the journal's end whose line has `word`."""
    for line in tail_lines(path):
        if word in line:
            try:
                yield orjson.loads(line)["event"]
            except (orjson.JSONDecodeError, KeyError):
                continue


def step_times(path: Path) -> Iterator[float]:
    """When each step of the newest stretch began, in seconds since the epoch; pauses between lives are left out by the
    median over them."""
    last = -1
    for line in tail_lines(path):
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue
        if row.get("step", last) > last:
            last = row["step"]
            yield float(row["at"])


def tail_lines(path: Path) -> list[bytes]:
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - JOURNAL_TAIL_BYTES))
            return file.read().splitlines()
    except OSError:
        return []


def gpus_per_cell(plan: Plan) -> int:
    """Of the cell that has fewest; 0 without GPUs."""
    nodes, cells = plan.script.nodes, plan.config.cluster.cells
    return (plan.script.gpus or 0) // max(1, -(-cells // nodes))


def engine_gpus(config: Config) -> int:
    """GPUs that the engine of a cell works on; 0 for one that needs none."""
    engine = config.engine
    return engine.tensor_parallel if engine.kind == "sglang" and engine.device == "cuda" else 0


def memory_rows(plan: Plan) -> list[dict[str, Any]]:
    """A row per role, with the GPUs of the cell that it is spread over and its share on one of them; none where the
    role lives in the node's memory.
    """
    model = memory.read_model(Path(plan.config.model.path))
    if model is None:
        return []
    engine, trainer = plan.config.engine, plan.config.trainer
    rows = memory.roles(
        model,
        context_length=engine.context_length,
        running=engine.max_running_requests,
        micro_step_tokens=trainer.micro_step_tokens,
        copies=trainer.context_parallel,
        expert_copies=trainer.context_parallel // trainer.expert_parallel,
        dtype=trainer.dtype,
    )
    for row in rows:
        gpus = (engine_gpus(plan.config) if row["role"] == "rollout" else trainer.ranks) if plan.script.gpus else 0
        row |= {"gpus": gpus, "per_gpu_gib": round(row["least_gib"] / gpus, 4) if gpus else None}
    return rows


def time_budget(plan: Plan, measured: Measured) -> dict[str, Any]:
    """Seconds of one life: all, for leaving, for work, between saves."""
    limit_s = slurm.seconds(plan.script.options.get("time", ""))
    own = saving.plan(
        save_s=measured.save_s or 0.0,
        micro_step_s=0.0,
        ends_at=limit_s or 0.0,
        now=0.0,
        began_at=0.0,
        window_s=plan.config.cluster.save_window_s,
    )
    signal = plan.script.options.get("signal", "").rpartition("@")[2]
    warned_s = float(signal) + SIGNAL_EARLY_S if signal.isdigit() else 0.0
    leave_s = max(own.window_s, warned_s)
    return {
        "limit_s": limit_s,
        "leave_s": leave_s,
        "work_s": limit_s - leave_s if limit_s is not None else None,
        "save_every_s": own.every_s,
        "save_s": measured.save_s,
        "step_s": measured.step_s,
    }


# ---- the plan on paper ----------------------------------------------------------------------------------------------


def plan_rows(plan: Plan) -> list[dict[str, Any]]:
    """One row for the job, one per node, role and port, one for the time."""
    options, config = plan.script.options, plan.config
    job = {
        "job": options.get("job-name", plan.script.path.name),
        "script": str(plan.script.path),
        "run": str(plan.run),
        "config": str(plan.config_file),
        "partition": options.get("partition", "the site's default"),
        "nodes": plan.script.nodes,
        "gpus_per_node": plan.script.gpus or 0,
        "cells": config.cluster.cells,
        "policy": config.scheduler.policy,
        "steps": config.scheduler.steps,
    }
    return [
        job,
        *node_rows(plan),
        *memory_rows(plan),
        *port_rows(config),
        {"time": "one life", **time_budget(plan, measure(plan.run))},
    ]


def node_rows(plan: Plan) -> list[dict[str, Any]]:
    """What runs where, by the supervisor's own rule."""
    from gyre_cli.cluster import place

    cluster, gpus = plan.config.cluster, plan.script.gpus or 0
    names = [str(number) for number in range(1, plan.script.nodes + 1)]
    try:
        places = place(cluster.cells, names)
    except ConfigError:
        return []
    beside = [] if cluster.executor_partition else [f"ex{i}" for i in range(cluster.executors)]
    shards = proxyd_names(plan.config.proxyd.shards)
    rows = []
    for name in names:
        cells = [cell for cell, node in places.items() if node == name]
        services = ["supervisor", "cellctl", "trajd", *shards, *beside] if name == names[0] else []
        rows.append({"node": name, "cells": cells, "core": "c0" in cells, "services": services, "gpus": gpus})
    if cluster.executor_partition:
        executors = [f"ex{i}" for i in range(cluster.executors)]
        partition = f"partition {cluster.executor_partition}"
        rows.append({"node": partition, "cells": [], "core": False, "services": executors, "gpus": 0})
    return rows


def port_rows(config: Config) -> list[dict[str, Any]]:
    """No port is fixed: every listener takes a free one and writes it into the run directory."""
    free = "a free one, in endpoints/"
    return [
        {"port": free, "of": "cellctl, trajd, celld and its rank", "from": "all daemons", "what": "ZeroMQ with CURVE"},
        {"port": free, "of": "proxyd", "from": "executors' relays", "what": "HTTP with a token per execution"},
        {"port": free, "of": f"engines ({config.engine.kind})", "from": "proxyd", "what": "HTTP"},
    ]


def show_plan(rows: list[dict[str, Any]]) -> None:
    """For people: no table is wider than a terminal."""
    for row in rows:
        if "time" in row:
            row = {key: listing.duration(value) if key.endswith("_s") else value for key, value in row.items()}
            common.print_facts({key.removesuffix("_s"): value for key, value in row.items()})
        elif "job" in row:
            common.print_facts(row)
    for kind in ("node", "role", "port"):
        table = [row for row in rows if next(iter(row)) == kind]
        if table:
            common.print_table(table)
