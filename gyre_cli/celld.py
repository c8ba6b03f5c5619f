"""celld: what runs in a cell."""

from __future__ import annotations

import os

import click

from gyre_cli import common
from gyre_cli.common import guarded, json_option, run_option


@click.group(
    epilog=common.examples(
        "celld status",
        "celld status c1 --json",
    )
)
def main() -> None:
    """A cell: its engine, its trainer ranks, and the agent that turns it from one to the other."""


@main.command()
@click.option("--cell", required=True, help="Name of the cell, such as c0 (the core).")
@run_option
@guarded
def run(cell: str, run_dir: str | None) -> None:
    """Run the agent of one cell until TERM; it starts the cell's engine and ranks."""
    from celld.agent.daemon import run_agent
    from gyre_base.allocation import own_gpus
    from gyre_base.daemon import run_main

    root = common.run_root(run_dir)
    if (gpus := own_gpus(os.environ)) is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus
    run_main(lambda: run_agent(root, cell))


@main.command()
@click.argument("cells", nargs=-1)
@run_option
@json_option
@guarded
def status(cells: tuple[str, ...], run_dir: str | None, as_json: bool) -> None:
    """Role, versions and children of each cell of the run (or of the CELLS named)."""
    from gyre_base import config
    from gyre_base.rundir import RunDir

    run = RunDir.open(common.run_root(run_dir))
    count = config.from_json(run.path("run.json").read_text()).cluster.cells
    known = tuple(f"c{i}" for i in range(count))
    for cell in cells:
        if cell not in known:
            common.fail(f"no cell is called {cell!r}: {', '.join(known)}", common.USAGE)
    rows = []
    for cell in cells or known:
        rows.extend(common.view(str(run.root), f"celld-{cell}", "status"))
    common.print_json(rows) if as_json else common.print_tables(rows)


if __name__ == "__main__":
    main()
