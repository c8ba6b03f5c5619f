"""Tasks: what an agent is asked, what lies in its workspace, and how the result is measured.

Read from a JSONL of `{id, instruction, workspace, evaluator}` or from Harbor task directories, into the same frozen
Task. Owns validation: an error names the file, the line and what to do. Starts nothing, writes nothing.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gyre_base.ids import is_safe_name

PLACEHOLDERS = ("python", "task_file_dir", "workspace", "tests", "out", "instruction", "transcript")
_PLACEHOLDER = re.compile(r"(?<!\$)\{([A-Za-z_]+)\}")
MAX_FILE_BYTES = 16 << 20
MAX_FILES = 5_000


class TaskError(ValueError):
    """A task that can't be used: says where, why and what would do."""


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """A command that writes a score file; `tests` are files that the agent never sees."""

    command: tuple[str, ...]
    tests: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float | None = None  # None: the run's evaluation_limit_s
    name: str = "command"


@dataclass(frozen=True, kw_only=True)
class Task:
    """`folder` is where the task file lies; relative files in commands are looked for there, then one folder up."""

    id: str
    instruction: str
    workspace: Mapping[str, str]
    evaluator: Evaluator
    folder: str = ""
    limit_s: float | None = None
    container: bool = False  # needs an image: `plain` refuses it


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
    if "\0" in instruction or not _encodes(instruction):
        raise TaskError(f"{where}: `instruction` holds a NUL or half a character, which no command line can carry")
    return Task(
        id=identity,
        instruction=instruction,
        workspace=_files(body.get("workspace", {}), f"{where}: workspace"),
        evaluator=_evaluator(body.get("evaluator"), where),
        folder=folder,
        limit_s=_seconds(body.get("limit_s"), f"{where}: limit_s"),
    )


def _evaluator(body: Any, where: str) -> Evaluator:
    if body is None:
        raise TaskError(
            f"{where}: no `evaluator`; add "
            '{"command": ["{python}", "{task_file_dir}/evaluate.py"], "tests": {path: text}}'
        )
    if not isinstance(body, dict):
        raise TaskError(f"{where}: `evaluator` must be an object with `command`, not {type(body).__name__}")
    command = body.get("command")
    if not isinstance(command, list) or not command or not all(map(_is_argument, command)):
        raise TaskError(f"{where}: `evaluator.command` must be a list of strings, not {command!r}")
    for word in unknown_placeholders(command):
        raise TaskError(f"{where}: unknown placeholder {{{word}}} in the evaluator; known: {', '.join(PLACEHOLDERS)}")
    script = next((Path(c).name for c in command if c.endswith((".py", ".sh"))), Path(command[0]).name)
    return Evaluator(
        command=tuple(command),
        tests=_files(body.get("tests", {}), f"{where}: evaluator.tests"),
        timeout_s=_seconds(body.get("timeout_s"), f"{where}: evaluator.timeout_s"),
        name=str(body.get("name", script)),
    )


def _seconds(value: Any, where: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e8:
        raise TaskError(f"{where} must be a number of seconds above 0, not {value!r}")
    return float(value)


def _files(body: Any, where: str) -> dict[str, str]:
    if not isinstance(body, dict):
        raise TaskError(f"{where} must be an object {{path: text}}, not {type(body).__name__}")
    if len(body) > MAX_FILES:
        raise TaskError(f"{where} has {len(body)} files; at most {MAX_FILES}")
    for path, text in body.items():
        if not isinstance(text, str):
            raise TaskError(f"{where}[{path!r}] must be text, not {type(text).__name__}")
        if len(text) > MAX_FILE_BYTES:
            raise TaskError(f"{where}[{path!r}] is larger than {MAX_FILE_BYTES >> 20} MiB")
        why = path_problem(path) if _encodes(path) else "half a character in it"
        if not _encodes(text):
            raise TaskError(f"{where}[{path!r}] holds half a character (a lone surrogate); write whole ones")
        if why:
            raise TaskError(f"{where}[{path!r}]: {why}; use a relative path below the directory, such as src/main.py")
    for path in body:
        above = path
        while "/" in above:
            above = above.rpartition("/")[0]
            if above in body:
                raise TaskError(f"{where}[{path!r}]: {above!r} is a file and a directory at once; rename one")
    return dict(body)


def _encodes(text: str) -> bool:
    """Whether it can become bytes: JSON may hold half a surrogate pair."""
    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return True


def _is_argument(value: Any) -> bool:
    return isinstance(value, str) and "\0" not in value and _encodes(value)


def path_problem(path: str) -> str | None:
    """Why this path may not become a file below a directory of ours, or None."""
    parts = path.split("/")
    if not path or "\0" in path or path.endswith("/"):
        return "not the name of a file"
    if path.startswith("/"):
        return "an absolute path"
    if ".." in parts:
        return "it leads out of the directory"
    if "." in parts or "" in parts:
        return "not in its plain form"
    if len(path) > 1024 or any(len(part.encode("utf-8", "surrogatepass")) > 255 for part in parts):
        return "a name that is too long"
    return None


# ---- commands -----------------------------------------------------------------------------------------------------


def unknown_placeholders(command: Iterable[str]) -> Iterator[str]:
    """Words in braces that `fill` would not replace: most likely typing errors."""
    for argument in command:
        for word in _PLACEHOLDER.findall(argument):
            if word not in PLACEHOLDERS:
                yield word


def fill(command: Iterable[str], values: Mapping[str, str], *, bases: Iterable[str] = ()) -> list[str]:
    """Placeholders replaced; `python` is this interpreter; a relative file of a base becomes absolute."""
    places = [Path(base) for base in bases if base]
    out = [_PLACEHOLDER.sub(lambda found: values.get(found.group(1), found.group(0)), c) for c in command]
    if out and out[0] in ("python", "python3"):
        out[0] = sys.executable
    return [_anchored(argument, places) for argument in out]


def _anchored(argument: str, places: list[Path]) -> str:
    if (
        not argument
        or argument.startswith(("-", "/"))
        or "\n" in argument
        or len(argument) > 255
        or "." not in argument
    ):
        return argument
    return next((str(place / argument) for place in places if (place / argument).is_file()), argument)


def bases(folder: str) -> tuple[str, ...]:
    """Where relative files of a task's commands are looked for."""
    return (folder, str(Path(folder).parent)) if folder else ()


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
    problems: list[str] = []
    for path in paths:
        for found in _scan(path):
            if isinstance(found, TaskError):
                problems.append(str(found))
            else:
                problems.extend(_missing_scripts(found, path))
    return problems


def _missing_scripts(task: Task, path: Path) -> Iterator[str]:
    if task.container:
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
    if (path / "task.toml").is_file() or (path / "instruction.md").is_file():
        folders = [path]
    else:
        folders = sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))
    if not folders:
        yield TaskError(f"{path}: no task directory (instruction.md, task.toml, tests/) in it")
    for folder in folders:
        try:
            yield _harbor(folder)
        except TaskError as error:
            yield error
        except (OSError, UnicodeDecodeError) as error:
            yield TaskError(f"{folder}: cannot be read ({error})")


def _harbor(folder: Path) -> Task:
    """A Harbor task directory. Its environment is an image, which `plain` workspaces can't give it."""
    for name, why in (("instruction.md", "what the agent shall do"), ("task.toml", "its limits")):
        if not (folder / name).is_file():
            raise TaskError(f"{folder}: no {name} ({why})")
    try:
        settings = tomllib.loads((folder / "task.toml").read_text())
    except tomllib.TOMLDecodeError as error:
        raise TaskError(f"{folder}/task.toml: not TOML: {error}") from None
    if not (folder / "tests" / "test.sh").is_file():
        raise TaskError(f"{folder}: no evaluator; a Harbor task keeps it in tests/test.sh")
    body = {
        "id": re.sub(r"[^A-Za-z0-9._-]", "_", folder.name),
        "instruction": (folder / "instruction.md").read_text(),
        "workspace": {},
        "limit_s": _dig(settings, "agent", "timeout_sec"),
        "evaluator": {
            "command": ["bash", "{tests}/test.sh"],
            "tests": _texts(folder / "tests"),
            "timeout_s": _dig(settings, "verifier", "timeout_sec"),
            "name": "harbor",
        },
    }
    task = from_dict(body, folder=str(folder.absolute()), where=str(folder))
    return Task(**{**task.__dict__, "container": (folder / "environment").is_dir()})


def _dig(tree: Mapping[str, Any], section: str, key: str) -> Any:
    part = tree.get(section, {})
    return part.get(key) if isinstance(part, dict) else None


def _texts(folder: Path) -> dict[str, str]:
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {p.relative_to(folder).as_posix(): p.read_text(encoding="utf-8", errors="surrogateescape") for p in files}
