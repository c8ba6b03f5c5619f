"""proxyd: the request router's commands. They ask every shard; one that is away hides nothing of the others."""

from __future__ import annotations

import sys
from typing import Any

import click

from gyre_cli import common
from gyre_cli.common import guarded, json_option, run_option

Rows = list[dict[str, Any]]


@click.group(
    epilog=common.examples(
        "proxyd routes",
        "proxyd sessions --json",
        "proxyd tail -f",
    )
)
def main() -> None:
    """The request router: harness dialects in, exact token ids recorded, calls moved between engines."""


@main.command()
@click.option("--shard", default=0, show_default=True, help="Which of proxyd.shards; the first is 0.")
@run_option
@guarded
def run(shard: int, run_dir: str | None) -> None:
    """Run one shard of a run directory until TERM."""
    from gyre_base.daemon import run_main
    from proxyd.daemon import run_proxyd

    root = common.run_root(run_dir)
    run_main(lambda: run_proxyd(root, shard))


@main.command()
@run_option
@json_option
@guarded
def status(run_dir: str | None, as_json: bool) -> None:
    """One row of counters for each shard: calls, tokens, held calls, moved calls."""
    _show("status", run_dir, as_json)


@main.command()
@run_option
@json_option
@guarded
def routes(run_dir: str | None, as_json: bool) -> None:
    """Engines as each shard sees them: what it has in flight there, and how many of its executions stick to it."""
    _show("routes", run_dir, as_json)


@main.command()
@run_option
@json_option
@guarded
def sessions(run_dir: str | None, as_json: bool) -> None:
    """Executions known to the router, with their shard, calls and tokens."""
    _show("sessions", run_dir, as_json)


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
    found, silent = _ask("tail", run_dir, execution)
    rows = found[-count:] if count > 0 else []
    while True:
        new = [row for row in rows if (row["execution"], row["call"]) not in seen]
        seen = {(row["execution"], row["call"]) for row in rows}
        if new:
            common.print_json(new) if as_json else common.print_tables(new)
        if not follow:
            return _end(silent)
        time.sleep(1.0)
        rows, silent = _ask("tail", run_dir, execution)


@main.command()
@click.argument("cell")
@run_option
@guarded
def drain(cell: str, run_dir: str | None) -> None:
    """Route nothing to a cell's engine any more and move what runs there, until `proxyd undrain`."""
    _order("drain", cell, run_dir)


@main.command()
@click.argument("cell")
@run_option
@guarded
def undrain(cell: str, run_dir: str | None) -> None:
    """Route to a drained cell again."""
    _order("undrain", cell, run_dir)


# ---- every shard ----------------------------------------------------------------------------------------------------


def _names(run_dir: str | None, execution: str = "") -> list[str]:
    """The shards of a run, or the one of an execution. Raises RunDirError."""
    from gyre_base import config
    from gyre_base.rundir import RunDir
    from gyre_base.shards import proxyd_name, proxyd_names, shard_of

    run = RunDir.open(common.run_root(run_dir))
    shards = config.from_json(run.path("run.json").read_text()).proxyd.shards
    return [proxyd_name(shard_of(execution, shards))] if execution else proxyd_names(shards)


def _ask(what: str, run_dir: str | None, execution: str = "") -> tuple[Rows, list[str]]:
    """Rows of those that answer (finished calls in the order of their ends), and why the others do not.

    Raises NoAnswer if none answers.
    """
    from gyre_base.bus import NoAnswer

    rows: Rows = []
    silent: list[str] = []
    names = _names(run_dir, execution)
    for name in names:
        try:
            rows += common.view(run_dir, name, what, execution)
        except NoAnswer as error:
            silent.append(str(error))
    if len(silent) == len(names):
        raise NoAnswer("; ".join(silent))
    return (sorted(rows, key=lambda row: float(row["at"])) if what == "tail" else rows), silent


def _show(what: str, run_dir: str | None, as_json: bool) -> None:
    rows, silent = _ask(what, run_dir)
    common.print_json(rows) if as_json else common.print_tables(rows)
    _end(silent)


def _end(silent: list[str]) -> None:
    """Exits 3 if a shard did not answer."""
    for why in silent:
        click.echo(f"error: {why}", err=True)
    if silent:
        sys.exit(common.NO_ANSWER)


def _order(verb: str, cell: str, run_dir: str | None) -> None:
    """Given to every shard; one that is away is told nothing, and the exit code says so."""
    from gyre_base import messages as m
    from gyre_base.bus import NoAnswer

    silent: list[str] = []
    names = _names(run_dir)
    for name in names:
        try:
            reply = common.ask(run_dir, name, m.OperatorOrder(verb=verb, argument=cell))
        except NoAnswer as error:
            silent.append(str(error))
            continue
        if isinstance(reply, m.Refused):
            common.fail(reply.why, common.REFUSED)
        click.echo(f"{name}: {reply.note}")
    if len(silent) == len(names):
        raise NoAnswer("; ".join(silent))
    _end(silent)


if __name__ == "__main__":
    main()
