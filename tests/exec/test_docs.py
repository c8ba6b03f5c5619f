"""docs/tasks.md: every block is what the code takes, every command line is one that there is. docs/harnesses.md: its
table of plays is that of the tests.
"""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path

import click

from gyre_base import config
from gyre_cli.gyre import main
from gyre_exec import harbor, tasks
from gyre_exec.harness import ADAPTERS
from gyre_exec.rulers import evaluator_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tasks.md").read_text()


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)


def test_every_json_block_is_a_task_or_an_evaluator() -> None:
    found = [json.loads(block) for block in blocks("json")]
    kinds = [
        tasks.from_dict(body, folder="", where="page").evaluator.kind
        if "id" in body
        else evaluator_of(body, "page").kind
        for body in found
    ]
    assert kinds == ["junit", "command", "junit", "rubric"]


def test_every_toml_block_is_what_it_says() -> None:
    task, ruler, cluster = (tomllib.loads(block) for block in blocks("toml"))
    assert list(harbor._problems(task)) == [] and harbor.get(task, "metadata.gyre.retries") == 2
    assert evaluator_of(ruler, "page").version == "2"
    assert config.from_tree(cluster).cluster.executors_max == 8


def test_every_key_that_is_named_is_there() -> None:
    known = set(config.keys())
    named = set(re.findall(r"`((?:tasks|cluster|scheduler)\.[a-z_]+)`", PAGE))
    assert named and named <= known, named - known


def test_every_command_parses() -> None:
    lines = [line.strip() for line in PAGE.splitlines() if line.startswith("    gyre ")]
    assert len(lines) == 10
    for line in lines:
        words = shlex.split(line, comments=True)[1:]
        command: click.Command = main
        while isinstance(command, click.Group):
            command = command.commands[words.pop(0)]
        command.make_parser(click.Context(command)).parse_args(words)  # raises for an option that there is not


PLAYS = ("a_whole_run", "agents_in_agents", "an_agent_in_the_background", "a_fork", "a_turn_that_overflows_the_context")


def test_the_table_of_what_harnesses_were_seen_to_do_is_that_of_their_plays() -> None:
    page = (ROOT / "docs" / "harnesses.md").read_text()
    rows = re.findall(r"^\| `([a-z-]+)` ((?:\| (?:yes|-) ){5})\|$", page, re.MULTILINE)
    said = {name: tuple(cell.strip() == "yes" for cell in cells.split("|")[1:]) for name, cells in rows}
    played = {}
    for name in said:
        source = (ROOT / "tests" / "harness" / f"test_{name.replace('-', '_')}.py").read_text()
        played[name] = tuple(f"async def test_{play}" in source for play in PLAYS)
    assert said == played and set(said) == set(ADAPTERS) - {"command"}
