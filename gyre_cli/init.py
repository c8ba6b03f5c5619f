"""`gyre init`: a commented gyre.toml and a job script that fits the partition. Never writes over anything unasked."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from gyre_base.config import ConfigError
from gyre_cli import common, script, slurm
from gyre_cli.script import header_word, shell_word
from gyre_cli.template import commented

DEFAULT_TIME = "04:00:00"
CONTAINERS = {"apptainer": "gyre.sif", "pyxis": "gyre.sqsh"}


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """The options of `gyre init`; None and "" are filled in from the cluster."""

    template: str
    name: str
    run: str
    nodes: int | None
    gpus: int | None
    cpus: int | None
    time: str
    grace_s: int
    partition: str
    account: str
    qos: str
    constraint: str
    image: str
    executors: int
    executor_partition: str
    more: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Partition:
    """What one node of a partition has, as sinfo says it."""

    name: str
    default: bool
    gpus: int
    cpus: int
    limit_s: float | None


def parse_partitions(text: str) -> list[Partition]:
    """Lines of `sinfo -h -o '%P|%G|%c|%l'`; of a partition with several kinds of nodes the one with most GPUs."""
    best: dict[str, Partition] = {}
    for line in text.splitlines():
        name, gres, cpus, limit = line.split("|")
        found = Partition(
            name=name.rstrip("*"),
            default=name.endswith("*"),
            gpus=gpus_of(gres),
            cpus=int(re.match(r"\d+", cpus)[0]) if cpus[:1].isdigit() else 1,  # type: ignore[index]
            limit_s=slurm.seconds(limit),
        )
        if found.name not in best or found.gpus > best[found.name].gpus:
            best[found.name] = found
    return list(best.values())


def gpus_of(gres: str) -> int:
    """GPUs in a list such as `gpu:h100:8(S:0-1),nvme:1`."""
    counts = re.findall(r"(?:^|,)gpu(?::[^:,(]+)?:(\d+)", gres)
    return sum(int(count) for count in counts)


def choose(partitions: list[Partition], wanted: str, *, gpus: bool) -> Partition | None:
    """The partition named; else one with (or without) GPUs, the default first. Raises ConfigError for an unknown."""
    if wanted:
        for partition in partitions:
            if partition.name == wanted:
                return partition
        if partitions:
            raise ConfigError(f"no partition is called {wanted!r}: {', '.join(p.name for p in partitions)}")
        return None
    ranked = sorted(partitions, key=lambda p: (bool(p.gpus) is not gpus, not p.default))
    return ranked[0] if ranked else None


def values(wishes: Wishes, found: Partition | None, folder: Path, config: str) -> dict[str, str]:
    """What fills the holes of a template; `config` is the configuration's name in `folder`. Raises ConfigError."""
    run = (folder / wishes.run).resolve()
    return {
        "name": header_word(wishes.name),
        "nodes": str(wishes.nodes or 2),
        "resources": resource_words(wishes, found),
        "time": time_limit(wishes.time, found),
        "grace_s": str(wishes.grace_s),
        "folder": header_word(str(folder)),
        "comment": header_word(f"{slurm.COMMENT}{run}"),
        "site": "\n".join(site_lines(wishes, found)),
        "python": shell_word(sys.executable),
        "config": shell_word(config),
        "run": shell_word(wishes.run),
        "constraint": header_word(f"[{wishes.constraint}]") if wishes.constraint else "",
        "binds": shell_word(",".join(dict.fromkeys([str(folder), str(outermost(run, folder))]))),
        "last": str(wishes.executors - 1),
    }


def outermost(run: Path, folder: Path) -> Path:
    """What a container has to see of the run directory: it does not exist yet, its parent does."""
    return folder if run.is_relative_to(folder) else run.parent


def resource_words(wishes: Wishes, found: Partition | None) -> str:
    """What each node gives: CPUs, GPUs where there are any, and all of its memory (executors share their nodes)."""
    cpus = wishes.cpus or (found.cpus if found else 8)
    if wishes.template == "executors":
        return f"--cpus-per-task={min(cpus, wishes.cpus or 16)}"
    gpus = wishes.gpus if wishes.gpus is not None else (found.gpus if found else 8)
    return " ".join([f"--cpus-per-task={cpus}", *([f"--gres=gpu:{gpus}"] if gpus else []), "--mem=0"])


def time_limit(wanted: str, found: Partition | None) -> str:
    """As wanted; the default is cut to the partition's limit. Raises ConfigError."""
    if wanted:
        if slurm.seconds(wanted) is None:
            raise ConfigError(f"--time {wanted}: write D-HH:MM:SS, HH:MM:SS or minutes")
        return wanted
    most = found.limit_s if found else None
    if most is None or most >= (slurm.seconds(DEFAULT_TIME) or 0):
        return DEFAULT_TIME
    minutes = int(most // 60)
    return f"{minutes // 60:02d}:{minutes % 60:02d}:00"


def site_lines(wishes: Wishes, found: Partition | None) -> list[str]:
    """Further headers: only what was asked for, or what differs from the site's default."""
    named = wishes.partition or (found.name if found and not found.default else "")
    pairs = (("partition", named), ("account", wishes.account), ("qos", wishes.qos))
    lines = [f"#SBATCH --{key}={header_word(value)}" for key, value in pairs if value]
    if wishes.constraint and wishes.template != "uneven":
        lines.append(f"#SBATCH --constraint={header_word(wishes.constraint)}")
    return lines + [f"#SBATCH {option}" for option in wishes.more]


def chosen(wishes: Wishes, found: Partition | None, folder: Path) -> dict[str, Any]:
    """Configuration keys that follow from the wishes, by dotted key."""
    out: dict[str, Any] = {}
    if wishes.template == "one-node":
        gpus = wishes.gpus if wishes.gpus is not None else (found.gpus if found else 8)
        out["cluster.cells"] = 2 if gpus else 3
    elif wishes.template != "executors":
        out["cluster.cells"] = wishes.nodes or 2
    if wishes.executors > 1:
        out["cluster.executors"] = wishes.executors
    if wishes.executor_partition:
        out["cluster.executor_partition"] = wishes.executor_partition
    image = str((folder / (wishes.image or CONTAINERS.get(wishes.template, ""))).resolve())
    if wishes.template == "apptainer":
        out["cluster.python"] = ("apptainer", "exec", "--nv", image, "python3")
    if wishes.template == "pyxis":
        run = outermost((folder / wishes.run).resolve(), folder)
        mounts = ",".join(dict.fromkeys(f"{path}:{path}" for path in (folder, run)))
        out["cluster.python"] = ("python3",)
        out["cluster.srun_options"] = (
            f"--container-image={image}",
            f"--container-mounts={mounts}",
            "--no-container-mount-home",
        )
    return out


def write(path: Path, wishes: Wishes, *, force: bool) -> None:
    """gyre.toml at `path` and the job script beside it. An existing gyre.toml is kept if only the script is missing."""
    if wishes.template not in script.templates():
        raise ConfigError(f"no template is called {wishes.template!r}: {', '.join(script.templates())}")
    if wishes.template == "uneven" and not wishes.constraint:
        raise ConfigError('--template uneven needs --constraint, such as "a100*2&l40*2" (features: sinfo -o "%N %f")')
    folder = path.parent.resolve()
    job = folder / ("executors.sbatch" if wishes.template == "executors" else "gyre.sbatch")
    if job.exists() and not force:
        there = f"{path} exists and so does {job}" if path.exists() else f"{job} exists"
        common.fail(f"{there}; choose another folder, or --force to replace the job script", common.REFUSED)
    found = find_partition(wishes)
    text = script.render(wishes.template, values(wishes, found, folder, path.name))
    try:
        if path.exists():
            click.echo(f"kept {path}", err=True)
        elif wishes.template != "executors":
            write_new(path, commented(chosen(wishes, found, folder)))
        if job.exists():
            os.replace(job, job.with_suffix(".sbatch.old"))
            click.echo(f"the former {job} is now {job.with_suffix('.sbatch.old')}", err=True)
        write_new(job, text)
    except OSError as error:
        common.fail(f"cannot write {error.filename or path}: {error.strerror}", common.USAGE)
    say_next(job, found)


def find_partition(wishes: Wishes) -> Partition | None:
    """None where there is no Slurm (yet): then the script has common values, to be looked through."""
    if not slurm.here():
        return None
    try:
        partitions = parse_partitions(slurm.call("sinfo", "-h", "-o", "%P|%G|%c|%l"))
    except slurm.SlurmError as error:
        click.echo(f"the partitions are not known ({error}); look through the job script's header", err=True)
        return None
    return choose(partitions, wishes.partition, gpus=wishes.template != "executors")


def write_new(path: Path, text: str) -> None:
    with path.open("x") as file:
        file.write(text)
    click.echo(f"wrote {path}", err=True)


def say_next(job: Path, found: Partition | None) -> None:
    if found is None:
        click.echo(f"no Slurm here: look through the header of {job.name} on the cluster", err=True)
    else:
        click.echo(
            f"resources as a node of partition {found.name} has them: {found.cpus} CPUs, {found.gpus} GPUs", err=True
        )
