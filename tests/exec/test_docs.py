"""docs/tasks.md: every block is what the code takes, every command line is one that there is."""

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
from gyre_exec.rulers import evaluator_of

PAGE = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text()


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
