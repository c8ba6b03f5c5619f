"""gyre tasks: what is in task files and directories, and whether all of it can run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gyre_cli import common
from gyre_cli.common import guarded, json_option

SHOWN_CHARS = 60
paths_argument = click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path))


@click.group("tasks")
def tasks() -> None:
    """Task files (JSONL) and Harbor task directories: check them, list them."""


@tasks.command()
@paths_argument
@click.option("--partial", is_flag=True, help="Also require that work which ran out of time can be graded.")
@json_option
@guarded
def check(paths: tuple[Path, ...], partial: bool, as_json: bool) -> None:
    """Every task of PATHS: a JSONL, a Harbor task directory, or a directory of those. Exit 1 with each problem, by
    file and line.
    """
    from gyre_exec.fields import TaskError
    from gyre_exec.tasks import Task, survey

    found = list(survey(here(paths)))
    good = [task for task in found if isinstance(task, Task)]
    problems = [line for error in found if isinstance(error, TaskError) for line in str(error).splitlines()]
    if partial:
        why = "says that partial work can't be graded (`partial` is false)"
        problems += [f"{task.folder} (task {task.id}): {why}" for task in good if task.partial is None]
    if as_json:
        common.print_json([{"tasks": len(good), "problems": problems}])
    else:
        for problem in problems:
            click.echo(problem)
        click.echo(f"{len(good)} tasks, {len(problems)} problems", err=bool(problems))
    raise SystemExit(common.NO if problems else 0)


@tasks.command("list")
@paths_argument
@json_option
@guarded
def list_tasks(paths: tuple[Path, ...], as_json: bool) -> None:
    """One line per task: its limits, how it is measured, what it needs. Bad ones go to stderr; then exit 1."""
    from gyre_exec.tasks import Task, survey

    bad = 0
    rows: list[dict[str, Any]] = []
    for found in survey(here(paths)):
        if isinstance(found, Task):
            rows.append(row_of(found))
        else:
            bad += 1
            click.echo(str(found), err=True)
    if as_json:
        common.print_json(rows)
    elif rows:
        common.print_table([short(row) for row in rows])
    raise SystemExit(common.NO if bad else 0)


def here(paths: tuple[Path, ...]) -> list[Path]:
    missing = [str(path) for path in paths if not path.exists()]
    if missing:
        common.fail(f"no such file or directory: {', '.join(missing)}", common.USAGE)
    return list(paths)


def row_of(task: Any) -> dict[str, Any]:
    from gyre_exec.evaluator import version_of

    partial = "no" if task.partial is None else "yes" if task.partial == task.evaluator else task.partial.name
    return {
        "task": task.id,
        "limit_s": task.limit_s,
        "evaluator": task.evaluator.name,
        "kind": task.evaluator.kind,
        "version": version_of(task.evaluator, task.folder),
        "evaluation_s": task.evaluator.timeout_s,
        "partial": partial,
        "files": len(task.workspace),
        "hidden": len(task.evaluator.tests),
        "image": task.needs.image or ("Dockerfile" if task.needs.dockerfile else ""),
        "network": task.needs.network,
        "instruction": task.instruction,
    }


def short(row: dict[str, Any]) -> dict[str, Any]:
    """One line of a terminal."""
    words = " ".join(row["instruction"].split())
    shown = words if len(words) <= SHOWN_CHARS else words[: SHOWN_CHARS - 1] + "…"
    plain = {k: v for k, v in row.items() if k not in ("version", "instruction")}
    return {**plain, "network": "yes" if row["network"] else "no", "instruction": shown}
