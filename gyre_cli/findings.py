"""What a check found and what to do about it: one form for `gyre doctor` and `gyre submit`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum

from gyre_cli import common


class Level(StrEnum):
    """OK: nothing to do. NOTE: a fact worth knowing. WARN: works, but. FAIL: would not work."""

    OK = "ok"
    NOTE = "note"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """`do` is what the reader should do; empty where there is nothing."""

    check: str
    level: Level
    found: str
    do: str = ""


STYLE = {Level.OK: "green", Level.NOTE: "cyan", Level.WARN: "yellow", Level.FAIL: "bold red"}


def ok(check: str, found: str) -> Finding:
    return Finding(check, Level.OK, found)


def note(check: str, found: str, do: str = "") -> Finding:
    return Finding(check, Level.NOTE, found, do)


def warn(check: str, found: str, do: str) -> Finding:
    return Finding(check, Level.WARN, found, do)


def fail(check: str, found: str, do: str) -> Finding:
    return Finding(check, Level.FAIL, found, do)


def failed(findings: Iterable[Finding]) -> bool:
    return any(finding.level is Level.FAIL for finding in findings)


def show(findings: list[Finding], *, as_json: bool, title: str = "") -> None:
    """On stdout: one JSON object each, or a table, narrow enough for a terminal and plain when piped."""
    if as_json:
        common.print_json({**asdict(finding), "level": finding.level.value} for finding in findings)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 1), title=title or None, title_justify="left", pad_edge=False)
    for column in ("", "check", "found", "what to do"):
        table.add_column(column, overflow="fold", no_wrap=column in ("", "check"))
    for finding in findings:
        mark = Text(finding.level.value, style=STYLE[finding.level])
        table.add_row(mark, Text(finding.check), Text(finding.found), Text(finding.do))
    console = Console()
    Console(width=None if console.is_terminal else 160).print(table)


def summary(findings: list[Finding]) -> str:
    """`12 ok, 1 warn, 1 fail`."""
    counts = {level: sum(f.level is level for f in findings) for level in Level}
    return ", ".join(f"{count} {level.value}" for level, count in counts.items() if count)
