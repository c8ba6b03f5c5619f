"""`gyre harness`: which coding agents gyre knows by name, and their pinned programs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from gyre_cli import common

if TYPE_CHECKING:
    from gyre_exec.harnesses.programs import Program

KNOWN = ("claude_code", "codex", "qwen_code", "opencode", "mini_swe_agent")


@click.group()
def harness() -> None:
    """Coding agents that gyre starts by name (tasks.harness = ["claude-code"]); any other is a command."""


@harness.command("list")
@common.json_option
def list_known(as_json: bool) -> None:
    """What can be installed, which version, and whether it is here."""
    rows = [
        {
            "harness": program.harness,
            "version": program.version,
            "from": f"{program.registry}: {program.package}",
            "installed": program.found(),
            "folder": str(program.folder()),
        }
        for program in _programs().values()
    ]
    common.print_json(rows) if as_json else common.print_tables(rows)


@harness.command()
@click.argument("names", nargs=-1, required=True)
def install(names: tuple[str, ...]) -> None:
    """Fetch the pinned version of each of NAMES into a folder of its own ($GYRE_HARNESS_HOME, else the cache)."""
    from gyre_exec.harnesses.programs import HarnessMissing

    known = _programs()
    if unknown := [name for name in names if name not in known]:
        common.fail(f"no harness is called {unknown[0]!r}; there are: {', '.join(known)}", common.USAGE)
    for name in names:
        try:
            click.echo(str(known[name].install()))
        except HarnessMissing as error:
            common.fail(str(error), common.NO)


def _programs() -> dict[str, Program]:
    import importlib

    programs = [importlib.import_module(f"gyre_exec.harnesses.{name}").PROGRAM for name in KNOWN]
    return {program.harness: program for program in programs}
