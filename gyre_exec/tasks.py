"""Tasks: what an agent is asked, what lies in its workspace, and how the result is measured.

Read from a JSONL of `{id, instruction, workspace, evaluator}` or from Harbor task directories (harbor.py), into the
same frozen Task. Owns validation: an error names the file, the line and what to do. Starts nothing, writes nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gyre_base import tasklist
from gyre_base.ids import is_safe_name
from gyre_exec.fields import TaskError, encodes, files, no_typing_errors, seconds, texts
from gyre_exec.rulers import Evaluator, bases, evaluator_of, fill

KEYS = ("id", "instruction", "workspace", "evaluator", "limit_s", "partial", "needs")


@dataclass(frozen=True, kw_only=True)
class Needs:
    """What a task asks of its workspace; None: it does not say."""

    image: str = ""  # a container image, as docker writes it
    dockerfile: bool = False  # environment/Dockerfile: the image is to be built from it
    workdir: str = ""  # where the agent works, inside
    cpus: float | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    gpus: float = 0
    network: bool = False  # more than the relay
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Task:
    """`folder` is where the task file lies; relative files in commands are looked for there, then one folder up."""

    id: str
    instruction: str
    workspace: Mapping[str, str]
    evaluator: Evaluator
    partial: Evaluator | None = None  # how work that ran out of time is graded; None: it can't be
    folder: str = ""
    limit_s: float | None = None
    needs: Needs = field(default_factory=Needs)

    @property
    def container(self) -> bool:
        """Whether it needs an image, which a `plain` workspace can't give it."""
        return bool(self.needs.image) or self.needs.dockerfile

    def ruler(self, *, time_up: bool) -> Evaluator | None:
        return self.partial if time_up else self.evaluator


# ---- one task -----------------------------------------------------------------------------------------------------


def from_dict(body: Any, *, folder: str, where: str) -> Task:
    """A checked Task. Raises TaskError beginning with `where`."""
    if not isinstance(body, dict):
        raise TaskError(f"{where}: not an object {{id, instruction, workspace, evaluator}} but {type(body).__name__}")
    identity = body.get("id")
    if not isinstance(identity, str) or not is_safe_name(identity):
        raise TaskError(f"{where}: `id` must be letters, digits, `.`, `_` or `-` (at most 128), not {identity!r}")
    where = f"{where} (task {identity})"
    instruction = body.get("instruction")
    if not isinstance(instruction, str) or not instruction.strip():
        raise TaskError(f"{where}: `instruction` is missing; write what the agent shall do")
    if "\0" in instruction or not encodes(instruction):
        raise TaskError(f"{where}: `instruction` holds a NUL or half a character, which no command line can carry")
    no_typing_errors(body, KEYS, where)
    evaluator = evaluator_of(body.get("evaluator"), where)
    return Task(
        id=identity,
        instruction=instruction,
        workspace=files(body.get("workspace", {}), f"{where}: workspace"),
        evaluator=evaluator,
        partial=_partial(body.get("partial", True), evaluator, where),
        folder=folder,
        limit_s=seconds(body.get("limit_s"), f"{where}: limit_s"),
        needs=_needs(body.get("needs", {}), where),
    )


def _partial(body: Any, evaluator: Evaluator, where: str) -> Evaluator | None:
    """true: what is left after a timeout is measured by the same evaluator; false: it can't be measured."""
    if isinstance(body, bool):
        return evaluator if body else None
    if not isinstance(body, dict):
        raise TaskError(f"{where}: `partial` must be true, false or an evaluator, not {body!r}")
    return evaluator_of(body, f"{where}: partial")


NEEDS: dict[str, tuple[type | tuple[type, ...], str]] = {
    "image": (str, "the name of an image"),
    "workdir": (str, "a path"),
    "cpus": ((int, float), "a number"),
    "memory_mb": (int, "a whole number of MiB"),
    "storage_mb": (int, "a whole number of MiB"),
    "network": (bool, "true or false"),
    "env": (dict, "an object of texts"),
}


def _needs(body: Any, where: str) -> Needs:
    if not isinstance(body, dict):
        raise TaskError(f"{where}: `needs` must be an object, not {type(body).__name__}")
    for key, value in body.items():
        if key not in NEEDS:
            raise TaskError(f"{where}: unknown key needs.{key}; known: {', '.join(NEEDS)}")
        kind, wanted = NEEDS[key]
        number = kind is not bool and isinstance(value, bool)
        if number or not isinstance(value, kind) or (isinstance(value, int | float) and value < 0):
            raise TaskError(f"{where}: needs.{key} must be {wanted}, not {value!r}")
    return Needs(**{**body, "env": texts(body.get("env", {}), f"{where}: needs.env")})


def from_order(body: Any, *, folder: str, where: str) -> Task:
    """As an execution order says it: the task itself, or where its directory is. Raises TaskError."""
    if isinstance(body, dict) and "task_dir" in body:
        from gyre_exec import harbor

        return harbor.read(Path(str(body["task_dir"])))
    return from_dict(body, folder=folder, where=where)


# ---- files --------------------------------------------------------------------------------------------------------


def load(path: Path) -> list[Task]:
    """All tasks of a JSONL file, a Harbor task directory, or a directory of those. Raises TaskError at a bad one."""
    tasks: list[Task] = []
    for found in _scan(path):
        if isinstance(found, TaskError):
            raise found
        tasks.append(found)
    return tasks


def check(paths: Iterable[Path]) -> list[str]:
    """Every problem, one line each; an empty list means that all tasks can run."""
    return [line for found in survey(paths) if isinstance(found, TaskError) for line in str(found).splitlines()]


def survey(paths: Iterable[Path]) -> Iterator[Task | TaskError]:
    """All tasks, and in their places what is wrong; an id that occurs twice is a mistake too."""
    seen: dict[str, Path] = {}
    for path in paths:
        for found in _scan(path):
            yield found
            if isinstance(found, TaskError):
                continue
            if seen.setdefault(found.id, path) is not path:
                yield TaskError(f"{path}: the id {found.id} is also in {seen[found.id]}; rename one")
            yield from map(TaskError, _missing_scripts(found, path))


def _missing_scripts(task: Task, path: Path) -> Iterator[str]:
    if task.evaluator.kind == "harbor":
        return
    values = {"python": sys.executable, "task_file_dir": task.folder}
    for argument in fill(task.evaluator.command, values, bases=bases(task.folder)):
        if argument.endswith((".py", ".sh")) and "{" not in argument and not Path(argument).is_file():
            yield f"{path} (task {task.id}): the evaluator's {argument} does not exist; put it beside the task file"


def _scan(path: Path) -> Iterator[Task | TaskError]:
    if path.is_dir():
        yield from _scan_directory(path)
    else:
        yield from _scan_jsonl(path)


def _scan_jsonl(path: Path) -> Iterator[Task | TaskError]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        yield TaskError(f"{path}: cannot be read as UTF-8 text ({error}); a task file is JSONL, one task per line")
        return
    seen: dict[str, int] = {}
    folder = str(path.absolute().parent)
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            task = from_dict(json.loads(line), folder=folder, where=f"{path}:{number}")
            if task.id in seen:
                raise TaskError(f"{path}:{number}: id {task.id} is already used in line {seen[task.id]}; rename one")
        except TaskError as error:
            yield error
            continue
        except (ValueError, RecursionError) as error:
            yield TaskError(f"{path}:{number}: not JSON ({error}); write one object per line")
            continue
        seen[task.id] = number
        yield task
    if not seen and all(not line.strip() for line in lines):
        yield TaskError(f"{path}: no task in it; write one object {{id, instruction, workspace, evaluator}} per line")


def _scan_directory(path: Path) -> Iterator[Task | TaskError]:
    from gyre_exec import harbor

    folders = tasklist.folders(path)
    if not folders:
        yield TaskError(f"{path}: no task directory (instruction.md, task.toml, tests/) in it")
    for folder in folders:
        try:
            yield harbor.read(folder)
        except TaskError as error:
            yield error
        except OSError as error:
            yield TaskError(f"{folder}: cannot be read ({error})")
