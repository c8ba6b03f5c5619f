"""Values in task files: each check gives the value back or raises TaskError naming the place and what would do."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from gyre_base.ids import is_safe_name

MAX_FILE_BYTES = 16 << 20
MAX_FILES = 5_000


class TaskError(ValueError):
    """A task that can't be used: says where, why and what would do."""


def no_typing_errors(body: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    """Keys of the user's own are welcome; one that looks like a known one is most likely meant to be it."""
    for key in body:
        near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.8) if key not in known else []
        if near and near[0] not in body:
            raise TaskError(f"{where}: unknown key {key!r}, did you mean {near[0]!r}?")


def a_name(value: Any, where: str) -> str:
    if not isinstance(value, str | int) or not is_safe_name(str(value)):
        raise TaskError(f"{where}: an evaluator's name and version are letters, digits, `.`, `_`, `-`, not {value!r}")
    return str(value)


def count(value: Any, where: str, most: int) -> int | None:
    if value is None:
        return None
    if type(value) is not int or not 0 <= value <= most:
        raise TaskError(f"{where} must be a whole number from 0 to {most}, not {value!r}")
    return value


def strings(value: Any, where: str) -> list[str]:
    if not isinstance(value, list) or not all(map(is_argument, value)):
        raise TaskError(f"{where} must be a list of strings, not {value!r}")
    return value


def texts(value: Any, where: str) -> dict[str, str]:
    if not isinstance(value, dict) or not all(is_argument(v) and is_argument(k) for k, v in value.items()):
        raise TaskError(f"{where} must be an object of texts, not {value!r}")
    return dict(value)


def seconds(value: Any, where: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e8:
        raise TaskError(f"{where} must be a number of seconds above 0, not {value!r}")
    return float(value)


def files(body: Any, where: str) -> dict[str, str]:
    if not isinstance(body, dict):
        raise TaskError(f"{where} must be an object {{path: text}}, not {type(body).__name__}")
    if len(body) > MAX_FILES:
        raise TaskError(f"{where} has {len(body)} files; at most {MAX_FILES}")
    for path, text in body.items():
        if not isinstance(text, str):
            raise TaskError(f"{where}[{path!r}] must be text, not {type(text).__name__}")
        if len(text) > MAX_FILE_BYTES:
            raise TaskError(f"{where}[{path!r}] is larger than {MAX_FILE_BYTES >> 20} MiB")
        why = path_problem(path) if encodes(path) else "half a character in it"
        if not encodes(text):
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


def encodes(text: str) -> bool:
    """Whether it can become bytes: JSON may hold half a surrogate pair."""
    try:
        text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return True


def is_argument(value: Any) -> bool:
    return isinstance(value, str) and "\0" not in value and encodes(value)


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
