"""What all commands share: finding the run, asking a daemon, printing rows, exit codes (DESIGN 12).

0 yes, done · 1 the answer is no · 2 bad usage · 3 the daemon does not answer · 4 refused in this state.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar
from urllib.parse import urlsplit

import click
import orjson

if TYPE_CHECKING:
    from gyre_base.rundir import RunDir

F = TypeVar("F", bound=Callable[..., Any])
NO, USAGE, NO_ANSWER, REFUSED = 1, 2, 3, 4
LATEST = Path("runs/latest")


def fail(message: str, code: int) -> NoReturn:
    """One line on stderr that says what to do, and the right exit code."""
    click.echo(f"error: {message}", err=True)
    sys.exit(code)


def examples(*lines: str) -> str:
    """The end of a program's help: what one types, and what the exit code says."""
    codes = "Exit codes: 0 yes or done, 1 the answer is no, 2 bad usage, 3 the daemon does not answer, 4 refused now."
    return "\b\nExamples:\n" + "".join(f"  {line}\n" for line in lines) + f"\n{codes}"


def run_option(function: F) -> F:
    """--run DIR, else $GYRE_RUN, else the newest run started from this directory."""
    return click.option(
        "--run", "run_dir", metavar="DIR", help="Run directory (default: $GYRE_RUN, else runs/latest)."
    )(function)


def json_option(function: F) -> F:
    return click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")(function)


def run_root(given: str | None) -> str:
    return given or os.environ.get("GYRE_RUN") or str(LATEST)


def guarded(function: F) -> F:
    """Turn the errors that a user can do something about into one line and an exit code."""

    @functools.wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        from gyre_base.bus import CannotListen, NoAnswer
        from gyre_base.config import ConfigError
        from gyre_base.journal import Damaged
        from gyre_base.rundir import RunDirError, RunLocked

        try:
            return function(*args, **kwargs)
        except (ConfigError, CannotListen, Damaged) as error:
            fail(str(error), USAGE)
        except RunLocked as error:
            fail(str(error), REFUSED)
        except RunDirError as error:
            fail(str(error), USAGE)
        except NoAnswer as error:
            from gyre_cli import remote

            code = remote.again_inside(run_root(kwargs.get("run_dir"))) if "run_dir" in kwargs else None
            if code is not None:
                sys.exit(code)
            from gyre_cli import listing

            left = listing.what_is_left(Path(run_root(kwargs["run_dir"]))) if "run_dir" in kwargs else ""
            fail(f"{error}; {left}" if left else str(error), NO_ANSWER)
        except OSError as error:
            if not is_about_given(error, kwargs.values()):
                raise  # a fault of the machine or of ours: its story is needed
            fail(f"cannot use {error.filename}: {error.strerror}", USAGE)

    return inner  # type: ignore[return-value]


def check_writable(out: Path | None) -> None:
    """Before long work, whose result would else be lost for want of a place. Fails with one line."""
    if out is not None and not out.absolute().parent.is_dir():
        fail(f"cannot write {out}: there is no folder {out.absolute().parent}", USAGE)
    if out is not None and (out.is_dir() or len(os.fsencode(out.name)) > 255):
        fail(f"cannot write {out}: " + ("it is a folder" if out.is_dir() else "the name is too long"), USAGE)


def is_about_given(error: OSError, given: Iterable[Any]) -> bool:
    """Whether the file that could not be used is one that the user named, or lies below one."""
    if not isinstance(error.filename, str):
        return False
    flat = [one for value in given for one in (value if isinstance(value, tuple) else (value,))]
    named = {Path(one) for one in flat if isinstance(one, str | Path)}
    path = Path(error.filename)
    return bool(named & {path, *path.parents})


def ask(run_dir: str | None, server: str, message: Any, timeout_s: float = 4.0) -> Any:
    """One question to one daemon of the run. Raises NoAnswer, RunDirError."""
    import asyncio

    from gyre_base.bus import Client
    from gyre_base.keys import load_keys
    from gyre_base.rundir import RunDir

    run = RunDir.open(run_root(run_dir))
    timeout_s = _patience(run, server, timeout_s)

    async def question() -> Any:
        client = Client(run, load_keys(run), server)
        try:
            return await client.ask(message, timeout_s=timeout_s)
        finally:
            client.close()

    return asyncio.run(question())


def _patience(run: RunDir, server: str, timeout_s: float) -> float:
    """Short where the port is not even open to us and a step inside the job can ask instead (remote.py)."""
    from gyre_cli import remote

    endpoint = run.endpoint(server)
    if endpoint is None or urlsplit(endpoint.address).hostname == "127.0.0.1" or not remote.may_help(run.root):
        return timeout_s
    return timeout_s if remote.reachable(endpoint.address) else min(timeout_s, remote.PROBE_S)


def view(
    run_dir: str | None, server: str, what: str, argument: str = "", timeout_s: float = 4.0
) -> list[dict[str, Any]]:
    """Rows of one view. Exits 2 for a view or argument that the daemon does not know."""
    from gyre_base import messages as m

    reply = ask(run_dir, server, m.StatusRequest(what=what, argument=argument), timeout_s)
    if isinstance(reply, m.Refused):
        fail(reply.why, REFUSED)
    rows = [dict(row) for row in reply.rows]
    if rows and "error" in rows[0]:
        fail(str(rows[0]["error"]), USAGE)
    return rows


def order(run_dir: str | None, server: str, verb: str, argument: str = "", **options: str) -> None:
    """A person's wish; prints what was done, exits 4 with the reason if refused."""
    from gyre_base import messages as m

    reply = ask(run_dir, server, m.OperatorOrder(verb=verb, argument=argument, options=options))
    if isinstance(reply, m.Refused):
        fail(reply.why, REFUSED)
    click.echo(reply.note)


def print_json(rows: Iterable[dict[str, Any]]) -> None:
    for row in rows:
        click.echo(orjson.dumps(row).decode())


def print_tables(rows: list[dict[str, Any]], hidden: tuple[str, ...] = ()) -> None:
    """Rows with the same first key make one table; a lone row is printed as `name value` lines. No colour when
    piped.
    """
    kinds: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        kinds.setdefault(next(iter(row)), []).append(row)
    for group in kinds.values():
        shown = [{k: v for k, v in row.items() if k not in hidden} for row in group]
        if len(shown) == 1 and len(shown[0]) > 6:
            print_facts(shown[0])
        else:
            print_table(shown)


def print_facts(row: dict[str, Any]) -> None:
    width = max(len(key) for key in row)
    for key, value in row.items():
        click.echo(f"{key:<{width}}  {plain(value)}")
    click.echo()


def print_table(rows: list[dict[str, Any]]) -> None:
    """Aligned columns under their names, also for a single row."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[plain(row.get(c, "")) for c in columns] for row in rows]
    widths = [max(len(c), *(len(line[i]) for line in cells)) for i, c in enumerate(columns)]
    click.echo("  ".join(c.ljust(w) for c, w in zip(columns, widths, strict=True)).rstrip())
    for line in cells:
        click.echo("  ".join(v.ljust(w) for v, w in zip(line, widths, strict=True)).rstrip())
    click.echo()


def plain(value: Any) -> str:
    """A value for a person."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return " ".join(f"{k}={plain(v)}" for k, v in value.items()) or "-"
    if isinstance(value, list | tuple):
        return ", ".join(plain(v) for v in value) or "-"
    return "-" if value in (None, "") else str(value)
