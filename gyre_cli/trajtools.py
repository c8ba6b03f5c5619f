"""trajtools: what is in a recorded run, what repeats, what breaks prefix reuse, what would be trained. Needs no cluster."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

from gyre_cli import common
from gyre_cli.common import json_option

F = TypeVar("F", bound=Callable[..., Any])
PROGRESS_FROM_BYTES = 20_000_000  # a bar for less would only flicker
source_argument = click.argument("source", type=click.Path(path_type=Path), default="-")


@click.group()
def main() -> None:
    """Recorded runs of agents: say what is in them, check them, slim them.

    SOURCE is a run file (gyre.run/1), a run's calls/ folder, or - for standard input.
    """


def readable(function: F) -> F:
    """One line for a file that can't be read."""

    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        from gyre_base.runfile import RunFileError
        from trajtools.readers import UnknownFormat

        try:
            return function(*args, **kwargs)
        except OSError as error:
            common.fail(f"cannot read {error.filename}: {error.strerror}", common.USAGE)
        except (RunFileError, UnknownFormat) as error:
            common.fail(str(error), common.USAGE)

    return inner  # type: ignore[return-value]


@contextmanager
def opened(source: Path) -> Iterator[Any]:
    """The source as the library takes it, and a progress callback: a bar on stderr for big files on a terminal."""
    if str(source) == "-":
        yield sys.stdin.buffer, None
        return
    if not source.exists():
        common.fail(f"no such file or folder: {source}", common.USAGE)
    size = sum(p.stat().st_size for p in (source.glob("*.jsonl") if source.is_dir() else [source]))
    if size < PROGRESS_FROM_BYTES or not sys.stderr.isatty():
        yield source, None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(source.name, total=size)
        yield source, lambda done: bar.update(task, completed=done)


def show(report: Any, as_json: bool) -> None:
    if as_json:
        common.print_json([report.as_json()])
    else:
        click.echo("\n".join(report.lines()))


@main.command()
@source_argument
@click.option("-o", "--out", type=click.Path(dir_okay=False, path_type=Path), help="Write the slim form here.")
@json_option
@readable
def dedup(source: Path, out: Path | None, as_json: bool) -> None:
    """What repeats, by class of break, and what is stored once."""
    from trajtools.report import dedup as run

    with opened(source) as (stream, on_bytes):
        show(run(stream, out, on_bytes=on_bytes), as_json)


@main.command()
@source_argument
@json_option
@readable
def stats(source: Path, as_json: bool) -> None:
    """Calls, tokens, reuse of prefixes, durations and outcomes, by agent."""
    from trajtools.report import stats as run

    with opened(source) as (stream, on_bytes):
        show(run(stream, on_bytes=on_bytes), as_json)


@main.command()
@source_argument
@click.option("--shuffles", type=click.IntRange(0), default=0, help="Build every forest again in this many random orders.")
@json_option
@readable
def check(source: Path, shuffles: int, as_json: bool) -> None:
    """Every invariant of a run file; exit 1 with the call and the offset if one does not hold."""
    from trajtools.check import check as run

    with opened(source) as (stream, _):
        report = run(stream, shuffles=shuffles)
    show(report, as_json)
    raise SystemExit(0 if report.ok else common.NO)


@main.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.option("-o", "--out", required=True, type=click.Path(dir_okay=False, path_type=Path), help="Run file to write.")
@json_option
@readable
def convert(source: Path, out: Path, as_json: bool) -> None:
    """Another tool's token-level record (NeMo-Gym rollouts, NeMo-RL message logs) as a run file."""
    from trajtools import convert as run

    if not source.exists():
        common.fail(f"no such file: {source}", common.USAGE)
    show(run(source, out), as_json)


if __name__ == "__main__":
    main()
