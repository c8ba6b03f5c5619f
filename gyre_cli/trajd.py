"""trajd: the trajectory daemon's commands."""

from __future__ import annotations

import click

from gyre_cli import common
from gyre_cli.common import guarded, json_option, run_option


@click.group()
def main() -> None:
    """The trajectory daemon: an index over the call log and the ledger of micro-steps."""


@main.command()
@run_option
@guarded
def run(run_dir: str | None) -> None:
    """Run the daemon for a run directory until TERM."""
    from gyre_base.daemon import run_main
    from trajtools.trajd.daemon import run_trajd

    root = common.run_root(run_dir)
    run_main(lambda: run_trajd(root))


@main.command()
@run_option
@json_option
@guarded
def status(run_dir: str | None, as_json: bool) -> None:
    """Groups, the open batch, micro-steps by state, totals."""
    rows = common.view(run_dir, "trajd", "status")
    common.print_json(rows) if as_json else common.print_tables(rows)


@main.command()
@run_option
@json_option
@guarded
def batches(run_dir: str | None, as_json: bool) -> None:
    """One row per applied batch."""
    rows = common.view(run_dir, "trajd", "batches")
    common.print_json(rows) if as_json else common.print_tables(rows)


if __name__ == "__main__":
    main()
