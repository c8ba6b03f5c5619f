"""gyre: start, watch, stop and report a run."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import click

from gyre_cli import common
from gyre_cli.common import guarded, json_option, run_option
from gyre_cli.executions import execute, rescore, show
from gyre_cli.harness import harness
from gyre_cli.tasks import tasks

STOP_S = 180.0  # a job saves first


@click.group(
    epilog=common.examples(
        "gyre quickstart --steps 2",
        "gyre exec --task tasks.jsonl:fix-the-sum --script answers.json -- python agent.py",
        "gyre init --nodes 4 && gyre submit --dry-run",
        "gyre status --run runs/run --json",
        "gyre show g00003-01.0 --run runs/run",
    )
)
@click.version_option(package_name="gyre-rl")
def main() -> None:
    """Reinforcement learning for coding agents whose executions take hours. `gyre quickstart` shows it on this
    machine.
    """


@main.command()
@click.argument("path", default="gyre.toml", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--template",
    default="gyre",
    show_default=True,
    metavar="NAME",
    help="gyre, one-node, uneven, apptainer, pyxis, executors.",
)
@click.option("--name", default="gyre", show_default=True, help="Name of the job.")
@click.option("--run", default="runs/run", show_default=True, metavar="DIR", help="Run directory of the job.")
@click.option("--nodes", type=click.IntRange(1), help="Nodes of the job (default 2); as many cells.")
@click.option("--gpus", type=click.IntRange(0), help="GPUs per node (default: all that the partition's nodes have).")
@click.option("--cpus", type=click.IntRange(1), help="CPUs per node (default: all).")
@click.option("--time", default="", metavar="TIME", help="Time limit (default 04:00:00, or the partition's).")
@click.option(
    "--grace-s",
    type=click.IntRange(60, 65535),
    default=180,
    show_default=True,
    help="Slurm's warning before the time limit, should gyre's own clock fail.",
)
@click.option("--partition", default="", help="Partition (default: the site's, or one with GPUs).")
@click.option("--account", default="", help="Account to charge.")
@click.option("--qos", default="", help="Quality of service.")
@click.option("--constraint", default="", metavar="LIST", help="Features of nodes; for uneven, counted: a100*2&l40*2.")
@click.option("--image", default="", metavar="FILE", help="Container image, for apptainer and pyxis.")
@click.option("--executors", type=click.IntRange(1), default=1, show_default=True, help="Executor processes.")
@click.option("--executor-partition", default="", help="Partition of the executors' own jobs (default: beside gyre).")
@click.option("--sbatch", "more", multiple=True, metavar="OPTION", help="A further header, such as --exclusive.")
@click.option("--force", is_flag=True, help="Replace an existing job script; the old one is kept beside it.")
@guarded
def init(path: Path, force: bool, **wishes: Any) -> None:
    """Write a commented configuration to PATH and a job script beside it, ready for `gyre submit` or sbatch."""
    from gyre_cli import init as initial

    initial.write(path, initial.Wishes(**wishes), force=force)


@main.command()
@click.option(
    "--config", "config_file", default="gyre.toml", show_default=True, type=click.Path(dir_okay=False, path_type=Path)
)
@click.option(
    "--run",
    "run_dir",
    default="runs/run",
    show_default=True,
    metavar="DIR",
    help="Run directory; an existing run goes on.",
)
@click.option("--here", is_flag=True, help="All on this machine, although a Slurm job is around us.")
@guarded
def up(config_file: Path, run_dir: str, here: bool) -> None:
    """Start all daemons of a run and stay until it is done; INT or TERM stops it, `gyre up` again goes on.

    In a Slurm job: one celld step per cell on the job's nodes, everything else beside the batch script. Near its end
    the job saves and requeues itself.
    """
    from gyre_base.allocation import Allocation
    from gyre_cli import quickstart, runs

    run, config = runs.create(run_dir, config_file)
    allocation = None if here else Allocation.here()
    code = quickstart.serve_and_report(run, config, title=run.root.name, quiet=False, allocation=allocation)
    raise SystemExit(code)


@main.command()
@click.argument("script", default="gyre.sbatch", type=click.Path(dir_okay=False, path_type=Path))
@click.argument("sbatch_options", nargs=-1, type=click.UNPROCESSED)
@click.option("--dry-run", is_flag=True, help="Print the plan and what would be refused; submit nothing.")
@click.option("--gpu-memory", "gpu_memory_gib", type=float, metavar="GIB", help="Of one GPU: then memory is judged.")
@json_option
@guarded
def submit(
    script: Path, sbatch_options: tuple[str, ...], dry_run: bool, gpu_memory_gib: float | None, as_json: bool
) -> None:
    """Check the job script and what it starts, hand it to sbatch, print the job's id. Options for sbatch go after `--`
    and win over the script's. Exit 4 if refused; with --dry-run 1 if it would be.
    """
    from gyre_cli import planning
    from gyre_cli import submit as submission
    from gyre_cli.slurm import SlurmError

    if str(script).startswith("-"):  # no script was named, only options after `--`
        script, sbatch_options = Path("gyre.sbatch"), (str(script), *sbatch_options)
    plan = planning.make_plan(script, sbatch_options)
    try:
        code = submission.command(plan, dry_run=dry_run, as_json=as_json, gpu_memory_gib=gpu_memory_gib)
    except SlurmError as error:
        common.fail(str(error), common.NO)
    raise SystemExit(code)


@main.command("quickstart")
@click.option(
    "--run",
    "run_dir",
    default="runs/quickstart",
    show_default=True,
    metavar="DIR",
    help="Run directory; an unfinished run goes on.",
)
@click.option("--steps", type=click.IntRange(1), help="Optimizer steps (default: as examples/quickstart/gyre.toml).")
@click.option("--policy", type=click.Choice(["elastic", "colocate", "async"]), help="How cells are shared.")
@click.option("--seed", type=int, help="Order of tasks and of chance.")
@click.option("--heldout", type=click.IntRange(0), help="Held-out tasks measured before and after (0 = none).")
@click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE", help="Any configuration key, such as trajectories.jmax=1."
)
@click.option("--fresh", is_flag=True, help="Remove an earlier run of this name first.")
@click.option("--quiet", is_flag=True, help="No live display.")
@json_option
@guarded
def quickstart_command(run_dir: str, as_json: bool, **options: Any) -> None:
    """A whole elastic run on this machine: a small model, real daemons, a black-box agent, a pass rate that rises."""
    from gyre_cli import quickstart

    raise SystemExit(quickstart.run(run_dir, as_json=as_json, **options))


@main.command()
@click.option("--run", "run_dir", metavar="DIR", help="One run in detail (default: $GYRE_RUN, else list all runs).")
@json_option
@guarded
def status(run_dir: str | None, as_json: bool) -> None:
    """Your runs with state and time left; with --run, one run in detail."""
    if run_dir or os.environ.get("GYRE_RUN"):
        rows = common.view(run_dir, "cellctl", "status")[:1]
        common.print_json(rows) if as_json else common.print_tables(rows, hidden=("last_step", "now"))
        return
    from gyre_cli import listing

    found, complaint = listing.rows()
    if complaint:
        click.echo(f"the queue is not known: {complaint}", err=True)
    if as_json:
        common.print_json(found)
    elif found:
        common.print_table(listing.for_people(found))
    else:
        click.echo(
            "no runs yet; `gyre quickstart` makes one here, `gyre init` and `gyre submit` on a cluster", err=True
        )


@main.command()
@run_option
@guarded
def top(run_dir: str | None) -> None:
    """One run live on the terminal until interrupted: cells, roles, water level, scores."""
    from gyre_cli.display import Display

    with contextlib.suppress(KeyboardInterrupt), Display(common.run_root(run_dir)) as display:
        while True:
            display.update(common.view(run_dir, "cellctl", "status"))
            time.sleep(1.0)


@main.command()
@run_option
@json_option
@guarded
def report(run_dir: str | None, as_json: bool) -> None:
    """What a finished run amounted to (its summary.json)."""
    import orjson

    from gyre_base.rundir import RunDir
    from gyre_cli import quickstart

    path = RunDir.open(common.run_root(run_dir)).path("summary.json")
    if not path.exists():
        common.fail(f"{path} is not there: the run is not done; see `gyre status`", common.NO)
    summary = orjson.loads(path.read_bytes())
    common.print_json([summary]) if as_json else quickstart.print_summary(summary)


@main.command()
@click.option("--folder", type=click.Path(file_okay=False, path_type=Path), help="Where runs are to live (default: .).")
@click.option(
    "--config",
    "config_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Configuration whose engine and tasks are looked at (default: gyre.toml, if there is one).",
)
@click.option("--nodes", type=click.IntRange(0), default=0, help="Ask Slurm for so many nodes for a minute.")
@click.option("--partition", default="", help="Partition of these nodes; its settings are looked at too.")
@click.option("--account", default="", help="Account to charge.")
@click.option("--gpus", type=click.IntRange(0), default=0, help="GPUs per node to ask for and look at.")
@click.option("--job", default="", metavar="ID", help="Look at the nodes of this running job of yours.")
@json_option
@guarded
def doctor(folder: Path | None, config_file: Path | None, as_json: bool, **where: Any) -> None:
    """Check this machine, Slurm's settings and the nodes, and say what to do; exit 1 if something would not work.

    Inside an allocation its nodes are looked at; outside, those of --job, or --nodes new ones.
    """
    from gyre_cli import doctor as physician
    from gyre_cli import findings

    found = physician.examine((folder or Path()).resolve(), config_file, physician.Where(**where))
    findings.show(found, as_json=as_json)
    click.echo(findings.summary(found), err=True)
    raise SystemExit(common.NO if findings.failed(found) else 0)


@main.command()
@run_option
@guarded
def stop(run_dir: str | None) -> None:
    """Stop a run cleanly, on this machine or in its Slurm job, which is not requeued; `gyre up` (or the same quickstart
    command, or sbatch) goes on from its directory.
    """
    from gyre_base import messages as m
    from gyre_base.allocation import this_host
    from gyre_base.bus import NoAnswer
    from gyre_base.rundir import RunDir

    run = RunDir.open(common.run_root(run_dir))
    lock = run.path("lives", "supervisor.lock")
    holder = _holder(lock)
    if holder is None:
        from gyre_cli import remote

        code = remote.again_inside(str(run.root))  # locks of other nodes may not be felt here
        if code is None:
            common.fail(f"nothing runs for {run.root}", common.NO_ANSWER)
        raise SystemExit(code)
    try:
        common.ask(run_dir, "supervisor", m.OperatorOrder(verb="stop"))
    except NoAnswer:
        pid, _, host = holder.partition("@")
        if host != this_host() or not pid.isdigit():
            raise
        os.kill(int(pid), signal.SIGTERM)
    deadline = time.monotonic() + STOP_S
    while time.monotonic() < deadline:
        if _holder(lock) is None:
            click.echo("stopped")
            return
        time.sleep(0.1)
    words = f"{holder} is still saving and stopping its daemons after {STOP_S:g} s; look into {run.path('log')}"
    common.fail(words, common.NO)


def _holder(lock: Path) -> str | None:
    """pid@host of who holds the lock, or None if nobody does (the kernel frees it with the process)."""
    import fcntl

    if not lock.exists():
        return None
    with lock.open("r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return file.read() or "?"
    return None


@main.command("emulate")
@click.option("--profile", "name", required=True, metavar="NAME|FILE", help="As for `cellctl simulate`.")
@click.option("--arm", help="Of the profile (default: its first).")
@click.option("--policy", type=click.Choice(["elastic", "colocate", "async"]), help="The arm's cluster under this one.")
@click.option("--steps", type=click.IntRange(1), help="Measured optimizer steps (default: the profile's).")
@click.option("--seed", type=int, default=0, show_default=True, help="Workload: the simulator has the same.")
@click.option(
    "--seconds-per-hour", type=float, default=20.0, show_default=True, help="Scale; more for more executions."
)
@click.option("--run", "run_dir", default="runs/emulate", show_default=True, metavar="DIR", help="A new run directory.")
@json_option
@guarded
def emulate_command(run_dir: str, as_json: bool, seconds_per_hour: float, **options: Any) -> None:
    """Live a simulator profile with the real daemons in scaled time: engines and trainers only take time."""
    from gyre_cli import emulate, lived
    from gyre_cli.supervisor import RunFailed

    try:
        row = emulate.run(run_dir, seconds=seconds_per_hour, **options)
    except RunFailed as error:
        common.fail(str(error), error.code)
    except lived.Interrupted as error:
        common.fail(str(error), common.NO)
    common.print_json([row]) if as_json else common.print_tables([row])


main.add_command(tasks)
main.add_command(harness)
main.add_command(execute)
main.add_command(show)
main.add_command(rescore)

if __name__ == "__main__":
    main()
