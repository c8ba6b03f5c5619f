"""proxyd: the request router's commands."""

from __future__ import annotations

import click

from gyre_cli import common
from gyre_cli.common import guarded, json_option, run_option


@click.group()
def main() -> None:
    """The request router: harness dialects in, exact token ids recorded, calls moved between engines."""


@main.command()
@run_option
@guarded
def run(run_dir: str | None) -> None:
    """Run the daemon for a run directory until TERM."""
    from gyre_base.daemon import run_main
    from proxyd.daemon import run_proxyd

    root = common.run_root(run_dir)
    run_main(lambda: run_proxyd(root))


@main.command()
@run_option
@json_option
@guarded
def status(run_dir: str | None, as_json: bool) -> None:
    """One row of counters: calls, tokens, held calls, moved calls."""
    rows = common.view(run_dir, "proxyd", "status")
    common.print_json(rows) if as_json else common.print_tables(rows)


@main.command()
@run_option
@json_option
@guarded
def routes(run_dir: str | None, as_json: bool) -> None:
    """Engines, what is in flight on each, and which executions stick to it."""
    rows = common.view(run_dir, "proxyd", "routes")
    common.print_json(rows) if as_json else common.print_tables(rows)


@main.command()
@run_option
@json_option
@guarded
def sessions(run_dir: str | None, as_json: bool) -> None:
    """Executions known to the router, with their calls and tokens."""
    rows = common.view(run_dir, "proxyd", "sessions")
    common.print_json(rows) if as_json else common.print_tables(rows)


@main.command()
@click.argument("execution", default="")
@click.option("-n", "count", default=20, show_default=True, help="How many of the newest finished calls.")
@click.option("--follow", "-f", is_flag=True, help="Go on with new ones until interrupted.")
@run_option
@json_option
@guarded
def tail(execution: str, count: int, follow: bool, run_dir: str | None, as_json: bool) -> None:
    """The newest finished calls, of all executions or of EXECUTION: numbers only, no text."""
    import time

    seen: set[tuple[str, str]] = set()
    rows = common.view(run_dir, "proxyd", "tail", execution)[-count:] if count > 0 else []
    while True:
        new = [row for row in rows if (row["execution"], row["call"]) not in seen]
        seen = {(row["execution"], row["call"]) for row in rows}
        if new:
            common.print_json(new) if as_json else common.print_tables(new)
        if not follow:
            return
        time.sleep(1.0)
        rows = common.view(run_dir, "proxyd", "tail", execution)


@main.command()
@click.argument("cell")
@run_option
@guarded
def drain(cell: str, run_dir: str | None) -> None:
    """Route nothing to a cell's engine any more and move what runs there, until `proxyd undrain`."""
    common.order(run_dir, "proxyd", "drain", cell)


@main.command()
@click.argument("cell")
@run_option
@guarded
def undrain(cell: str, run_dir: str | None) -> None:
    """Route to a drained cell again."""
    common.order(run_dir, "proxyd", "undrain", cell)


if __name__ == "__main__":
    main()
