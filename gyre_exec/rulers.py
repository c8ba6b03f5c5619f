"""Evaluators as tasks write them: a command, a test runner, a rubric judged by a model, a Harbor verifier.

Owns what an evaluator may say, and how its command becomes an argv. Runs nothing (evaluator.py does).
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gyre_exec.fields import TaskError, a_name, count, files, is_argument, seconds, strings, texts

PLACEHOLDERS = ("python", "task_file_dir", "workspace", "tests", "out", "instruction", "transcript")
_PLACEHOLDER = re.compile(r"(?<!\$)\{([A-Za-z_]+)\}")
KINDS = ("command", "junit", "pytest", "rubric", "harbor")
JUDGE = str(Path(__file__).with_name("rubric.py"))
# -I: neither the current directory nor PYTHONPATH, so a pytest.py of the agent's is not the one that runs
PYTEST = (
    *("{python}", "-I", "-m", "pytest", "{tests}", "--junitxml={out}", "--rootdir={tests}", "-q"),
    *("-o", "pythonpath='{workspace}'", "--continue-on-collection-errors", "-p", "no:cacheprovider"),
)


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """A command and how its result is read; `tests` are files that the agent never sees.

    kind: `command` writes {"score": x, "parts": {}} to {out}; `junit` writes JUnit XML there, the score is the share
    of tests that pass; `rubric` is a command of ours that asks a model; `harbor` writes /logs/verifier/reward.txt.
    """

    command: tuple[str, ...]
    kind: str = "command"
    tests: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float | None = None  # None: the run's evaluation_limit_s
    retries: int | None = None  # further tries after a crash or rubbish; None: the executor's
    name: str = "command"
    version: str = ""  # the author's word; a hash of everything that measures is always added
    env: Mapping[str, str] = field(default_factory=dict)  # "${NAME}" is taken from the executor's environment
    expected: int | None = None  # junit: how many tests there are, so that one that does not even load counts


def evaluator_of(body: Any, where: str) -> Evaluator:
    """A checked Evaluator. Raises TaskError beginning with `where`."""
    if body is None:
        raise TaskError(
            f"{where}: no `evaluator`; add "
            '{"command": ["{python}", "{task_file_dir}/evaluate.py"], "tests": {path: text}}'
        )
    if not isinstance(body, dict):
        raise TaskError(f"{where}: `evaluator` must be an object with `command`, not {type(body).__name__}")
    kind = body.get("kind", "command")
    if kind not in KINDS:
        raise TaskError(f"{where}: evaluator.kind must be one of {', '.join(KINDS)}, not {kind!r}")
    tests = files(body.get("tests", {}), f"{where}: evaluator.tests")
    name = body.get("name")
    if kind == "rubric":
        command: Any = ["{python}", "-I", JUDGE]
        tests = {**tests, "rubric.json": _rubric(body, where)}
    elif kind == "pytest":
        command = [*PYTEST, *strings(body.get("args", []), f"{where}: evaluator.args")]
    else:
        command = _command(body.get("command"), where)
    script = next((Path(c).name for c in command if c.endswith((".py", ".sh"))), Path(command[0]).name)
    return Evaluator(
        command=tuple(command),
        kind="junit" if kind == "pytest" else kind,
        tests=tests,
        timeout_s=seconds(body.get("timeout_s"), f"{where}: evaluator.timeout_s"),
        retries=count(body.get("retries"), f"{where}: evaluator.retries", 100),
        name=a_name(name, where) if name is not None else kind if kind in ("rubric", "pytest") else script,
        version=a_name(body["version"], where) if "version" in body else "",
        env=texts(body.get("env", {}), f"{where}: evaluator.env") | _key_of(body, kind),
        expected=count(body.get("expected"), f"{where}: evaluator.expected", 1_000_000),
    )


def _command(command: Any, where: str) -> list[str]:
    if not isinstance(command, list) or not command or not all(map(is_argument, command)):
        raise TaskError(f"{where}: `evaluator.command` must be a list of strings, not {command!r}")
    for word in unknown_placeholders(command):
        raise TaskError(f"{where}: unknown placeholder {{{word}}} in the evaluator; known: {', '.join(PLACEHOLDERS)}")
    return command


def _is_patterns(value: Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(p, str) and p and not p.startswith("/") and ".." not in p.split("/") for p in value)


RUBRIC_KEYS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("base_url", lambda v: isinstance(v, str) and v.startswith(("http://", "https://")), "an http or https address"),
    ("api_key_env", lambda v: isinstance(v, str) and v.isidentifier(), "the name of a variable"),
    ("files", _is_patterns, "a list of patterns below the workspace, such as src/**/*.py"),
    ("max_chars", lambda v: type(v) is int and v > 0, "a whole number above 0"),
    ("samples", lambda v: type(v) is int and 1 <= v <= 100, "a whole number from 1 to 100"),
)


def _rubric(body: Mapping[str, Any], where: str) -> str:
    """What the judge reads: criteria, model, endpoint. The endpoint may be left to the environment."""
    criteria = body.get("criteria")
    if not isinstance(criteria, list) or not criteria:
        raise TaskError(f'{where}: a rubric needs `criteria`: [{{"name": "tests", "text": "has tests", "weight": 1}}]')
    for place, item in enumerate(criteria, start=1):
        fits = isinstance(item, dict) and all(isinstance(item.get(k), str) and item[k] for k in ("name", "text"))
        weight = item.get("weight", 1) if fits else 0
        if not fits or isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < 1e6:
            raise TaskError(f"{where}: evaluator.criteria[{place}] must have a name, a text and a weight above 0")
    if len({item["name"] for item in criteria}) < len(criteria):
        raise TaskError(f"{where}: two of evaluator.criteria have the same name")
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise TaskError(f"{where}: a rubric needs `model`: which one judges is a part of the ruler")
    spec = {"criteria": criteria, "model": model, "instruction": body.get("instruction", "")}
    for key, is_right, wanted in RUBRIC_KEYS:
        if key in body:
            if not is_right(body[key]):
                raise TaskError(f"{where}: evaluator.{key} must be {wanted}, not {body[key]!r}")
            spec[key] = body[key]
    return json.dumps(spec, sort_keys=True)


def _key_of(body: Mapping[str, Any], kind: str) -> dict[str, str]:
    """The judge's environment: where the model is and the key for it, by name; neither is in a task file."""
    if kind != "rubric":
        return {}
    key = body.get("api_key_env", "OPENAI_API_KEY")
    return {"OPENAI_BASE_URL": "${OPENAI_BASE_URL:-}", "OPENAI_API_KEY": f"${{{key}:-}}"}


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
