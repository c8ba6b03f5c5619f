"""gyre show, gyre rescore: executions of a run, one by one and measured anew."""

from __future__ import annotations

from pathlib import Path

import click

from gyre_cli import common
from gyre_cli.common import guarded, json_option, run_option


@click.command("show")
@click.argument("execution")
@run_option
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Write one page that needs nothing else.")
@json_option
@guarded
def show(execution: str, run_dir: str | None, html: Path | None, as_json: bool) -> None:
    """EXECUTION on one page: task, outcome, score parts, clocks, tree of calls, what it changed, what it printed."""
    from gyre_base.rundir import RunDir
    from gyre_cli import show as pages
    from gyre_exec.show import NoSuchExecution, gather

    run = RunDir.open(common.run_root(run_dir))
    try:
        page = gather(run, execution)
    except NoSuchExecution as error:
        common.fail(str(error), common.USAGE)
    told = pages.history_of(run, page)
    if html is not None:
        pages.write(page, told, html)
        click.echo(f"wrote {html}", err=True)
    elif as_json:
        common.print_json([pages.as_json(page, told)])
    else:
        pages.show(page, told)


@click.command("rescore")
@click.argument("run_dir", metavar="RUN", type=click.Path(file_okay=False))
@click.option(
    "--evaluator",
    required=True,
    metavar="FILE|task",
    help="A .toml or .json file with an evaluator, or `task`: each task's own as its file has it now.",
)
@click.option("--workers", type=click.IntRange(1), help="Evaluators at once (default: one per core).")
@click.option("--limit", type=click.IntRange(1), help="Only the first so many states.")
@json_option
@guarded
def rescore(run_dir: str, evaluator: str, workers: int | None, limit: int | None, as_json: bool) -> None:
    """Measure the kept states of RUN by another ruler: agreement, bias by length, drift over the steps.

    Results go to RUN/rescores/, beside the old scores. A second start goes on. Exit 1 if a state could not be measured.
    """
    from gyre_cli import rescoring

    raise SystemExit(rescoring.run(run_dir, evaluator, workers, limit, as_json))
