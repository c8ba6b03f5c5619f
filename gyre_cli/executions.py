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
