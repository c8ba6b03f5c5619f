"""What the commands over recordings share: sources and outputs, progress, tokenizers, the rules of choosing."""

from __future__ import annotations

import functools
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

from gyre_cli import common

F = TypeVar("F", bound=Callable[..., Any])
PROGRESS_FROM_BYTES = 20_000_000  # a bar for less would only flicker
source_argument = click.argument("source", type=click.Path(path_type=Path), default="-")
out_file = click.Path(dir_okay=False, path_type=Path)


def readable(function: F) -> F:
    """One line for a file that can't be read, or a wish that can't be met."""

    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except BrokenPipeError:
            sys.stderr.close()  # a reader that had enough is no error
            raise SystemExit(0) from None
        except OSError as error:
            named = error.filename or kwargs.get("source") or "the input"  # a failing read names no file
            common.fail(f"cannot use {named}: {error.strerror}", common.USAGE)
        except ValueError as error:
            if type(error).__module__.split(".")[0] not in ("gyre_base", "trajtools"):
                raise  # a bug of ours
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
    from trajtools.beside import files_of

    files = files_of(source)
    if not files:
        common.fail(f"no run files in {source}: neither there nor in its calls/ is a *.jsonl or *.gtr", common.USAGE)
    size = sum(p.stat().st_size for p in files)
    if size < PROGRESS_FROM_BYTES or not sys.stderr.isatty():
        yield source, None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(source.name, total=size)
        yield source, lambda done: bar.update(task, completed=done)


def show_report(report: Any, as_json: bool) -> None:
    if as_json:
        common.print_json([report.as_json()])
    else:
        click.echo("\n".join(report.lines()))


@contextmanager
def spooled(source: Path) -> Iterator[Path]:
    """A source that is read more than once, as a file: standard input (-) is kept beside the other temporary files."""
    if str(source) != "-":
        if not source.is_file():
            common.fail(f"no such file: {source}", common.USAGE)
        yield source
        return
    with tempfile.TemporaryDirectory() as folder:
        kept = Path(folder) / "standard-input.jsonl"
        with kept.open("wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
        yield kept


def different(source: Path, *outputs: Path | None) -> None:
    """Inputs are never changed."""
    if any(out is not None and out.exists() and source.exists() and out.samefile(source) for out in outputs):
        common.fail(f"{source} is the input, and inputs are never changed: name another output", common.USAGE)


def tokenizer_option(function: F) -> F:
    return click.option(
        "--tokenizer",
        type=click.Path(path_type=Path),
        metavar="DIR",
        help="Show tokens as text: a folder with tokenizer.json, or that file.",
    )(function)


def speaker(tokenizer: Path | None) -> Any:
    """Ids to text, or None."""
    if tokenizer is None:
        return None
    file = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
    if not file.is_file():
        common.fail(f"no tokenizer.json at {tokenizer}", common.USAGE)
    from tokenizers import Tokenizer

    try:
        made = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        common.fail(f"cannot read {file}: {error}", common.USAGE)
    return lambda ids: made.decode(list(ids), skip_special_tokens=False)


def rules_options(function: F) -> F:
    """How to choose; the defaults are those of training."""
    options = (
        click.option("--jmax", type=click.IntRange(0), default=5, show_default=True, help="Slots; 0: no bound."),
        click.option("--rule", type=click.Choice(["greedy", "paper"]), default="greedy", show_default=True),
        click.option("--stubs", type=click.Choice(["drop", "attach", "keep"]), default="drop", show_default=True),
        click.option("--seed", type=int, default=0, show_default=True, help="Of the paper's draw."),
        click.option("--unlabelled", is_flag=True, help="Train calls that nothing classified."),
        click.option(
            "--incomplete",
            type=click.Choice(["keep", "mask"]),
            default="keep",
            show_default=True,
            help="Executions that miss calls: what is there is on-policy still; mask trains none of it.",
        ),
    )
    for option in reversed(options):
        function = option(function)
    return function


def rules(jmax: int, **options: Any) -> Any:
    from trajtools.choose import Rules

    return Rules(jmax=jmax or None, **options)
