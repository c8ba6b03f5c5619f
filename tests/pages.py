"""The commands of a documentation page, to be run as a reader runs them: top to bottom, in one shell.

A fenced block `sh` is run; every command in it must succeed, unless its line ends in `# exits N`. A comment
`<!-- test: COMMAND -->` is run and not shown: what a reader does by waiting. `<!-- interactive -->` before a block:
each of its lines goes on until interrupted.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import click

HIDDEN = re.compile(r"<!-- test: (.*) -->")
EXITS = re.compile(r"(.*?)\s*# exits (\d+)")
INTERRUPTED = "timeout -s INT {seconds} {line} || [ $? = 124 ] || [ $? = 1 ] || [ $? = 130 ]"
LIVE_S = 4


@dataclass(frozen=True)
class Block:
    """Commands that stand together; `line` is where they stand in the page."""

    page: str
    line: int
    commands: tuple[str, ...]
    interactive: bool = False


def blocks(path: Path) -> list[Block]:
    """Every block that is run, in order. Raises AssertionError for a fence that is not closed."""
    out: list[Block] = []
    body: list[str] | None = None
    begin, interactive = 0, False
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if body is not None:
            if line.startswith("```"):
                out.append(Block(path.name, begin, tuple(body), interactive))
                body, interactive = None, False
            else:
                body.append(line)
        elif line == "```sh":
            body, begin = [], number
        elif hidden := HIDDEN.fullmatch(line):
            out.append(Block(path.name, number, (hidden[1],)))
        elif line == "<!-- interactive -->":
            interactive = True
    assert body is None, f"{path.name}:{begin} is not closed"
    return out


def shell_lines(block: Block) -> list[str]:
    """What bash is given for a block: its place, then its commands."""
    out = [f"echo '@@ {block.page}:{block.line}'"]
    for line in block.commands:
        if expected := EXITS.fullmatch(line):
            out.append(f"code=0; {expected[1]} || code=$?; [ $code = {expected[2]} ]")
        elif block.interactive:
            out.append(INTERRUPTED.format(seconds=LIVE_S, line=line))
        else:
            out.append(line)
    return out


def run(path: Path, cwd: Path, env: dict[str, str], timeout_s: float = 400.0) -> str:
    """All of a page in one bash; its output. Raises AssertionError with the place and the last words."""
    script = "\n".join(["set -euo pipefail", *(line for block in blocks(path) for line in shell_lines(block))])
    shell = subprocess.Popen(
        ["bash", "-c", script],
        cwd=cwd,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = shell.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(shell.pid, 9)
        said, _ = shell.communicate()
        raise AssertionError(f"{place(said)} does not end:\n{said[-4000:]}") from None
    assert shell.returncode == 0, f"{place(said)} fails with {shell.returncode}:\n{said[-4000:]}"
    return said


def place(said: str) -> str:
    """The last block that began."""
    begun = re.findall(r"^@@ (.*)$", said, re.M)
    return begun[-1] if begun else "the beginning"


def options(command: click.Command) -> set[str]:
    return {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}


def named(words: list[str]) -> tuple[click.Command, list[str]]:
    """The command that the words begin with, also one within a group, and the rest. Raises KeyError."""
    command: click.Command = importlib.import_module(f"gyre_cli.{words[0]}").main
    rest = words[1:]
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        command = command.commands[rest.pop(0)]
    return command, rest
