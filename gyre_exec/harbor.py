"""Reads Harbor task directories: instruction.md, task.toml, environment/, tests/test.sh.

Field names and defaults are Harbor's, the older spellings too; keys that are not known here are ignored, as Harbor
does. What gyre can't run (several steps, several containers, MCP servers, a verifier in an image of its own) is refused
with the line. `[metadata.gyre]` is where a task says what Harbor has no word for: `partial` and `retries`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gyre_base.tasklist import task_id
from gyre_exec.fields import TaskError
from gyre_exec.tasks import Needs, Task, from_dict

VERIFIER_S = 600.0  # Harbor's own default
WORKDIR = "/app"  # where Harbor's images work unless they say otherwise
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT])i?B?", re.IGNORECASE)
_MIB = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024 * 1024}
_HEADER = re.compile(r"\s*\[{1,2}\s*([^\]]+?)\s*\]{1,2}\s*(?:#.*)?")
_AT_LINE = re.compile(r"at line (\d+)")
COMPOSE = ("docker-compose.yaml", "docker-compose.yml")


def read(folder: Path) -> Task:
    """One task. Raises TaskError with every problem of this directory, one per line."""
    for name, why in (("instruction.md", "what the agent shall do"), ("task.toml", "its limits")):
        if not (folder / name).is_file():
            raise TaskError(f"{folder}: no {name} ({why})")
    file = folder / "task.toml"
    text = _text(file)
    try:
        settings = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        line = _AT_LINE.search(str(error))
        raise TaskError(f"{file}:{line.group(1) if line else 1}: not TOML: {error}") from None
    problems = [f"{file}:{line_of(text, key)}: {words}" for key, words in _problems(settings)]
    if not (folder / "tests" / "test.sh").is_file():
        problems.append(f"{folder}: no evaluator; a Harbor task keeps it in tests/test.sh")
    if any((folder / "environment" / name).is_file() for name in COMPOSE):
        problems.append(f"{folder}/environment: several containers (docker-compose) are not supported; use one image")
    if problems:
        raise TaskError("\n".join(problems))
    task = from_dict(_body(folder, settings), folder=str(folder.absolute()), where=str(folder))
    return replace(task, needs=needs_of(settings, folder))


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"{file}: cannot be read as UTF-8 text ({error})") from None


def _body(folder: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    ours = get(settings, "metadata.gyre") or {}
    return {
        "id": task_id(folder),
        "instruction": _text(folder / "instruction.md"),
        "workspace": {},
        "limit_s": get(settings, "agent.timeout_sec"),
        "partial": ours.get("partial", True),  # Harbor's verifier runs after an agent's timeout too
        "evaluator": {
            "kind": "harbor",
            "command": ["bash", "{tests}/test.sh"],
            "tests": _files(folder / "tests"),
            "timeout_s": get(settings, "verifier.timeout_sec") or VERIFIER_S,
            "env": get(settings, "verifier.env") or {},
            "name": "harbor",
            **({"retries": ours["retries"]} if "retries" in ours else {}),
        },
    }


def _files(folder: Path) -> dict[str, str]:
    found = sorted(p for p in folder.rglob("*") if p.is_file())
    return {p.relative_to(folder).as_posix(): p.read_bytes().decode("utf-8", "surrogateescape") for p in found}


def needs_of(settings: Mapping[str, Any], folder: Path) -> Needs:
    """What `[environment]` asks of the machine."""
    where = get(settings, "environment") or {}
    return Needs(
        image=where.get("docker_image") or "",
        dockerfile=(folder / "environment" / "Dockerfile").is_file(),
        workdir=where.get("workdir") or WORKDIR,
        cpus=where.get("cpus"),
        memory_mb=_mib(where.get("memory_mb", where.get("memory"))),
        storage_mb=_mib(where.get("storage_mb", where.get("storage"))),
        gpus=where.get("gpus") or 0,
        network=where.get("network_mode") == "public" or where.get("allow_internet") is True,
        env=where.get("env") or {},
    )


def _mib(value: Any) -> int | None:
    if isinstance(value, str):
        found = _SIZE.fullmatch(value.strip())
        return int(float(found.group(1)) * _MIB[found.group(2).upper()]) if found else None
    return int(value) if value is not None else None


# ---- what is wrong ------------------------------------------------------------------------------------------------


def _is_seconds(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e8


def _is_count(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e9


def _is_size(value: Any) -> bool:
    return _is_count(value) or (isinstance(value, str) and _SIZE.fullmatch(value.strip()) is not None)


def _is_texts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(v, str) for v in value.values())


CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "agent.timeout_sec": (_is_seconds, "a number of seconds above 0"),
    "verifier.timeout_sec": (_is_seconds, "a number of seconds above 0"),
    "verifier.env": (_is_texts, "a table of strings"),
    "environment.env": (_is_texts, "a table of strings"),
    "environment.docker_image": (lambda v: isinstance(v, str), "the name of an image"),
    "environment.workdir": (lambda v: isinstance(v, str) and v.startswith("/"), "an absolute path"),
    "environment.cpus": (_is_count, "a number"),
    "environment.gpus": (_is_count, "a number"),
    "environment.memory_mb": (_is_size, "a number of MiB"),
    "environment.memory": (_is_size, "a size such as 4G"),
    "environment.storage_mb": (_is_size, "a number of MiB"),
    "environment.storage": (_is_size, "a size such as 10G"),
    "metadata.gyre.partial": (lambda v: isinstance(v, bool), "true or false"),
    "metadata.gyre.retries": (lambda v: type(v) is int and 0 <= v <= 100, "a whole number from 0 to 100"),
}
UNSUPPORTED = {
    "steps": "a task of several steps is not supported; make one task of each",
    "environment.mcp_servers": "MCP servers are not supported; give the agent files or commands instead",
}


def _problems(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(dotted key, what is wrong with it)."""
    for section in ("agent", "verifier", "environment", "metadata", "metadata.gyre"):
        if not isinstance(get(settings, section), dict | None):
            yield section, f"`{section}` must be a table: write [{section}]"
    for key, (fits, wanted) in CHECKS.items():
        value = get(settings, key)
        if value is not None and not fits(value):
            yield key, f"`{key}` must be {wanted}, not {value!r}"
    for key, words in UNSUPPORTED.items():
        if get(settings, key):
            yield key, words
    if get(settings, "verifier.environment_mode") == "separate":
        yield "verifier.environment_mode", "a verifier in an image of its own is not supported; use `shared`"
    if get(settings, "environment.os") not in (None, "linux"):
        yield "environment.os", f"`environment.os` is {get(settings, 'environment.os')!r}; only linux is supported"


def get(tree: Any, dotted: str) -> Any:
    """The value at a dotted key, or None where there is none."""
    for part in dotted.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


def line_of(text: str, dotted: str) -> int:
    """The line that sets `dotted` in TOML text, else that of its table, else 1."""
    best, section = 1, ""
    parent, _, last = dotted.rpartition(".")
    for number, line in enumerate(text.split("\n"), start=1):
        header = _HEADER.fullmatch(line)
        if header:
            section = header.group(1).replace('"', "").replace(" ", "")
            if section == dotted:
                return number
            best = number if section == parent else best
        elif re.match(rf"\s*\"?{re.escape(last)}\"?\s*[.=]", line) and section == parent:
            return number
    return best
