"""`--help` of every command says what it does and loads nothing heavy."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from tests.pages import named, options

PROGRAMS = ("gyre", "cellctl", "celld", "proxyd", "trajd", "trajtools")
HEAVY = {"torch", "zmq", "rich", "numpy", "megatron", "matplotlib", "aiohttp", "tokenizers", "asyncio"}
SHOW = """
import importlib, sys
main = importlib.import_module("gyre_cli." + sys.argv[1]).main
try:
    main([*sys.argv[2:], "--help"])
finally:
    print(*sorted(sys.modules), file=sys.stderr)
"""


def commands() -> Iterator[tuple[str, ...]]:
    for program in PROGRAMS:
        yield (program,)
        group = importlib.import_module(f"gyre_cli.{program}").main
        yield from ((program, name) for name in group.commands)


@pytest.mark.parametrize("words", list(commands()), ids=" ".join)
def test_every_command_says_what_it_does(words):
    program, *rest = words
    command = importlib.import_module(f"gyre_cli.{program}").main
    for name in rest:
        command = command.commands[name]
    assert isinstance(command, click.Command)
    assert command.help and len(command.help.splitlines()[0]) > 10


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_of_a_program_ends_with_examples_of_what_is_there_and_the_exit_codes(program):
    shown = CliRunner().invoke(importlib.import_module(f"gyre_cli.{program}").main, ["--help"]).output
    _, examples = shown.split("Examples:\n")
    lines, codes = examples.split("\n\n", 1)
    typed = [words for line in lines.splitlines() for words in typed_in(line)]
    assert len(typed) >= 2
    for words in typed:
        command, rest = named(words)
        given = {word for word in rest[: rest.index("--")] if word} if "--" in rest else set(rest)
        assert {word for word in given if word.startswith("--")} <= options(command), words
    assert all(f"{code} " in codes for code in range(5))


def typed_in(line: str) -> list[list[str]]:
    """Words of each of our commands in a line of the shell."""
    parts = [part.split() for part in re.split(r"\||&&", line)]
    return [words for words in parts if words and words[0] in PROGRAMS]


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_loads_nothing_heavy(program):
    main = importlib.import_module(f"gyre_cli.{program}").main
    for rest in ([], [next(iter(main.commands))]):
        line = [sys.executable, "-c", SHOW, program, *rest]
        shown = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
        assert shown.returncode == 0, shown.stderr
        assert shown.stdout.startswith("Usage: ")
        assert HEAVY & set(shown.stderr.split()) == set()


def test_every_command_of_the_design_is_there():
    there = {words for words in commands() if len(words) == 2}
    wanted = (
        "gyre init|up|quickstart|status|report|stop|exec;cellctl run|status|explain|flip|freeze|thaw|replay|events;"
    )
    wanted += "celld run|status;proxyd run|status|routes|sessions;trajd run|status|batches;"
    wanted += "trajtools dedup|stats|check|convert"
    for program, names in (part.split(" ") for part in wanted.split(";")):
        assert {(program, name) for name in names.split("|")} <= there
