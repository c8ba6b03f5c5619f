"""cellctl: the elastic scheduler's commands."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gyre_cli import common
from gyre_cli.common import guarded, json_option, run_option

if TYPE_CHECKING:
    from cellctl.simulate.profile import Profile


@click.group(
    epilog=common.examples(
        "cellctl status --watch",
        "cellctl explain c1",
        "cellctl events | jq -c .event",
        "cellctl simulate --profile qwengyre-122b --seeds 1",
        "cellctl plan --gpus 64 --durations d.jsonl",
    )
)
def main() -> None:
    """The elastic scheduler: which cell serves, which trains, and why."""


@main.command()
@run_option
@guarded
def run(run_dir: str | None) -> None:
    """Run the daemon for a run directory until TERM."""
    from cellctl.daemon import run_cellctl
    from gyre_base.daemon import run_main

    root = common.run_root(run_dir)
    run_main(lambda: run_cellctl(root))


@main.command()
@run_option
@json_option
@click.option("--watch", is_flag=True, help="Print again every second until interrupted.")
@guarded
def status(run_dir: str | None, as_json: bool, watch: bool) -> None:
    """Cells, roles, water level, version, staleness, and what the next turn waits for."""
    while True:
        rows = common.view(run_dir, "cellctl", "status")
        if watch and not as_json:
            click.clear()
        common.print_json(rows) if as_json else common.print_tables(
            rows, hidden=("last_step", "now", "url", "phases_s")
        )
        if not watch:
            return
        time.sleep(1.0)


@main.command()
@click.argument("cell", default="")
@run_option
@json_option
@guarded
def explain(cell: str, run_dir: str | None, as_json: bool) -> None:
    """Why a cell did or did not turn."""
    rows = common.view(run_dir, "cellctl", "explain", cell)
    if as_json:
        common.print_json(rows)
        return
    for row in rows:
        if "next" in row:
            click.echo(f"next: {row['next']}{_when(row['next_turn_s'])}")
            continue
        click.echo(f"{row['cell']}  {row['role']}: {row['why']}")
        if row["stays"]:
            click.echo(f"    stays: {row['stays']}")
        for line in row["story"]:
            at, _, what = line.partition(" ")
            click.echo(f"    {time.strftime('%H:%M:%S', time.localtime(float(at)))} {what}")


def _when(seconds: float | None) -> str:
    """Of a forecast; what lasts longer than anything before may end at any moment."""
    if seconds is None:
        return ""
    return f", in about {seconds:.0f} s" if seconds >= 1.0 else ", any moment now by the durations so far"


@main.command()
@click.argument("cell")
@click.option("--to", type=click.Choice(["train", "rollout"]), required=True)
@run_option
@guarded
def flip(cell: str, to: str, run_dir: str | None) -> None:
    """Turn one cell by hand; refused with the numbers if the executions in flight need it."""
    common.order(run_dir, "cellctl", "flip", cell, to=to)


@main.command()
@run_option
@guarded
def freeze(run_dir: str | None) -> None:
    """Dispatch nothing and turn nothing until `cellctl thaw`; what runs goes on."""
    common.order(run_dir, "cellctl", "freeze")


@main.command()
@run_option
@guarded
def thaw(run_dir: str | None) -> None:
    """End a freeze."""
    common.order(run_dir, "cellctl", "thaw")


@main.command()
@click.argument("cell")
@click.option("--reason", default="", help="Kept in the cell's story: `cellctl explain CELL` tells it.")
@click.option("--force", is_flag=True, help="Even if no other cell serves what is in flight.")
@run_option
@guarded
def drain(cell: str, reason: str, force: bool, run_dir: str | None) -> None:
    """Move a cell's calls to the others and leave it idle, so that its node can be given back to Slurm.

    Refused (exit 4) if no other cell serves what is in flight, if the cell is the core, or if it does not serve now.
    """
    common.order(run_dir, "cellctl", "drain", cell, reason=reason, force="yes" if force else "")


@main.command()
@click.argument("cell")
@run_option
@guarded
def undrain(cell: str, run_dir: str | None) -> None:
    """Take a drained cell back."""
    common.order(run_dir, "cellctl", "undrain", cell)


@main.command()
@click.argument("execution")
@run_option
@guarded
def pause(execution: str, run_dir: str | None) -> None:
    """Hold the calls of an execution: what it has is kept, no slot is used, its limit stands still."""
    common.order(run_dir, "cellctl", "pause", execution)


@main.command()
@click.argument("execution")
@run_option
@guarded
def resume(execution: str, run_dir: str | None) -> None:
    """Let a paused execution go on."""
    common.order(run_dir, "cellctl", "resume", execution)


@main.command()
@click.argument("journal", type=click.Path(dir_okay=False, path_type=Path))
@json_option
@guarded
def replay(journal: Path, as_json: bool) -> None:
    """Feed JOURNAL to a fresh scheduler: exit 0 if it gives the same commands, 1 with the first difference if not."""
    from cellctl.replay import replay as run_replay

    count, difference = run_replay(journal)
    if difference is None:
        row = {"entries": count, "same": True}
        common.print_json([row]) if as_json else click.echo(f"{count} entries, the same commands")
        return
    if as_json:
        common.print_json([{"entries": count, "same": False, **difference.__dict__}])
    else:
        click.echo(f"{journal}:{difference.line}: {difference.event}")
        click.echo(f"  recorded {difference.recorded}")
        click.echo(f"  replayed {difference.replayed}")
    raise SystemExit(common.NO)


@main.command()
@run_option
@click.option("--follow", "-f", is_flag=True, help="Go on as events come.")
@guarded
def events(run_dir: str | None, follow: bool) -> None:
    """The scheduler's journal, one JSON object per event."""
    from gyre_base.rundir import RunDir

    path = RunDir.open(common.run_root(run_dir)).path("journal", "cellctl.jsonl")
    if not path.exists():
        common.fail(f"no journal at {path}: the scheduler of this run has never started", common.NO)
    with path.open() as file:
        while True:
            line = file.readline()
            if line.endswith("\n"):
                click.echo(line, nl=False)
            elif not follow:
                return
            else:
                time.sleep(0.2)


@main.command()
@click.option("--profile", "name", required=True, metavar="NAME|FILE", help="A shipped profile or a TOML file.")
@click.option("--arm", "arms", multiple=True, help="Only this arm; may be repeated (default: all).")
@click.option(
    "--policy",
    "policies",
    multiple=True,
    type=click.Choice(["elastic", "colocate", "async"]),
    help="The first arm's cluster under this policy instead of the profile's arms; may be repeated.",
)
@click.option(
    "--seeds", type=click.IntRange(1), default=8, show_default=True, help="Workloads; every arm sees the same."
)
@click.option("--steps", type=click.IntRange(1), help="Measured optimizer steps (default: the profile's).")
@click.option(
    "--durations", type=click.Path(exists=True, dir_okay=False), help="Recorded durations instead of the model."
)
@click.option("--svg", type=click.Path(dir_okay=False, path_type=Path), help="Write a picture of the first workload.")
@click.option("--ablate", is_flag=True, help="Instead: what each option of the scheduler is worth, policy by policy.")
@click.option("--sensitivity", is_flag=True, help="Instead: change of hours when one number is 10 % larger.")
@json_option
@guarded
def simulate(
    name: str,
    arms: tuple[str, ...],
    policies: tuple[str, ...],
    seeds: int,
    steps: int | None,
    durations: str | None,
    svg: Path | None,
    ablate: bool,
    sensitivity: bool,
    as_json: bool,
) -> None:
    """What each way to share the cells would take, in virtual time around the real scheduler."""
    import dataclasses

    from cellctl.simulate import picture, profile, run
    from cellctl.simulate.world import Stuck, World

    common.check_writable(svg)
    setting = profile.load(name)
    if steps:
        setting = dataclasses.replace(setting, steps=steps)
    if durations:
        setting = dataclasses.replace(setting, durations=dataclasses.replace(setting.durations, file=durations))
    if ablate or sensitivity:
        found = _ablation(setting, seeds) if ablate else _sensitivity(setting, seeds)
        common.print_json(found) if as_json else common.print_tables(list(found))
        return
    chosen = run.with_policy(setting, policies) if policies else [setting.arm(a) for a in arms] or list(setting.arms)
    try:
        rows = list(run.rows(setting, chosen, seeds))
        if svg:
            svg.write_text(picture.draw([World(setting, arm, 0, trace=True).run() for arm in chosen]))
    except Stuck as error:
        common.fail(str(error), common.NO)
    if as_json:
        common.print_json(rows)
    else:
        common.print_tables(rows, hidden=("gpu_s", "policy"))


def _ablation(setting: Profile, seeds: int) -> Iterator[dict[str, Any]]:
    from cellctl.simulate import ablate

    return ablate.rows(setting, seeds)


def _sensitivity(setting: Profile, seeds: int) -> Iterator[dict[str, Any]]:
    from cellctl.simulate import fit

    for row in fit.sensitivity(setting, seeds):
        yield {"parameter": row.parameter, "value": row.value, **row.change_percent}


@main.command()
@click.option("--gpus", type=click.IntRange(1), required=True, help="GPUs for serving and training together.")
@click.option(
    "--durations",
    type=click.Path(exists=True, dir_okay=False),
    help="JSON lines with hours or duration_s, and task; trajtools stats --json prints such.",
)
@click.option(
    "--profile", "name", default="qwengyre-122b", show_default=True, help="Laws of load, training and switching."
)
@click.option("--limit-h", type=float, help="Overall limit of an execution (default: the profile's).")
@click.option(
    "--train-node-hours",
    type=float,
    help="Forward and backward per optimizer step (default: the profile's per execution).",
)
@click.option("--memory-per-cell", type=float, default=0.0, help="GiB that one cell must hold to train.")
@click.option("--gpu-memory", type=float, default=80.0, show_default=True, help="GiB per GPU.")
@click.option(
    "--staleness", type=float, default=1.5, show_default=True, help="Mean staleness that you accept, in steps."
)
@click.option("--seeds", type=click.IntRange(1), default=3, show_default=True)
@click.option(
    "--curve", type=click.Path(dir_okay=False, path_type=Path), help="Write a picture of the gain for 1 to 8 cells."
)
@json_option
@guarded
def plan(
    gpus: int,
    durations: str | None,
    name: str,
    limit_h: float | None,
    train_node_hours: float | None,
    memory_per_cell: float,
    gpu_memory: float,
    staleness: float,
    seeds: int,
    curve: Path | None,
    as_json: bool,
) -> None:
    """Cells, burst and slots for your durations, with the gain to expect; exit 1 where it is not worth it."""
    import math

    from cellctl import plan as planner
    from cellctl.simulate import profile

    common.check_writable(curve)
    site_profile, units = planner.small_site(profile.load(name), gpus, durations or "", limit_h, train_node_hours)
    least = max(1, math.ceil(memory_per_cell / (gpu_memory * site_profile.gpus_per_node)))
    site = planner.Site(nodes=units, least_nodes_per_cell=least, staleness=staleness, seeds=seeds)
    row = {"gpus": gpus, "gpus_per_unit": site_profile.gpus_per_node, **planner.plan(site_profile, site)}
    common.print_json([row]) if as_json else common.print_tables([row])
    if curve:
        from cellctl.simulate import curve as picture

        m = max(m for m in planner.BURSTS if (m - 1) / 2.0 <= staleness)
        line = list(planner.break_even(site_profile, units, seeds=seeds, m=m))
        curve.write_text(picture.draw({f"{gpus} GPUs": line}))
    if not row["worth_it"]:
        raise SystemExit(common.NO)


if __name__ == "__main__":
    main()
