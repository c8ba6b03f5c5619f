"""What evaluators leave, read with suspicion: score files, JUnit XML, Harbor's reward files. Pure but for reading.

A valid reading is a finite number with its parts, or "nothing to score". Everything else raises BadScore, whose text
goes on after the words "the evaluator".
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

MAX_SCORE_BYTES = 1 << 20
MAX_XML_BYTES = 16 << 20
MAX_PARTS = 10_000


class BadScore(ValueError):
    """The result is not what the contract says."""


@dataclass(frozen=True)
class Reading:
    """A valid result. `score` is None for `no_artifact`."""

    score: float | None
    parts: dict[str, float]


def read_score(path: Path) -> Reading:
    """{"score": finite number, "parts": {name: finite number or bool}} or {"no_artifact": true}. Raises BadScore."""
    body = _json(_bytes(path, MAX_SCORE_BYTES))
    if body.get("no_artifact") is True:
        return Reading(None, {})
    return Reading(_number(body.get("score"), "score"), _parts(body.get("parts", {})))


def read_reward(folder: Path) -> Reading:
    """Harbor: reward.txt holds one number, reward.json named ones. The text wins, the JSON gives the parts."""
    text, table = folder / "reward.txt", folder / "reward.json"
    parts = _parts(_json(_bytes(table, MAX_SCORE_BYTES)), skip_words=True) if table.exists() else {}
    if text.exists() or not parts:
        written = _bytes(text, 4096).decode("utf-8", "replace").strip()
        try:
            return Reading(_number(float(written), "reward.txt"), parts)
        except ValueError as error:
            if isinstance(error, BadScore):
                raise
            raise BadScore(f"wrote reward.txt = {written[:80]!r}, not a number") from None
    if "reward" in parts:
        return Reading(parts["reward"], {k: v for k, v in parts.items() if k != "reward"})
    if len(parts) == 1:
        return Reading(next(iter(parts.values())), parts)
    raise BadScore(f"wrote a reward.json without `reward`: {', '.join(sorted(parts))[:200]}")


def read_junit(path: Path, expected: int | None = None) -> Reading:
    """The share of test cases that pass; one that is skipped has not passed. Raises BadScore if none ran.

    With `expected` at least so many are counted: a test file that does not load can't make the sum smaller.
    """
    data = _bytes(path, MAX_XML_BYTES)
    if b"<!DOCTYPE" in data or b"<!ENTITY" in data:  # entities that grow without bound
        raise BadScore("wrote XML with a document type, which JUnit reports do not have")
    try:
        cases = list(ElementTree.fromstring(data).iter("testcase"))
    except ElementTree.ParseError as error:
        raise BadScore(f"wrote a test report that is not XML ({error})") from None
    if not cases:
        raise BadScore("ran no test")
    parts: dict[str, float] = {}
    for place, case in enumerate(cases):
        name = f"{case.get('classname', '')}.{case.get('name', '')}".strip(".") or f"test {place}"
        passed = not any(case.find(bad) is not None for bad in ("failure", "error", "skipped"))
        parts[name] = min(parts.get(name, 1.0), float(passed))  # a failing teardown is a second case of that name
    total = max(len(parts), expected or 0)
    passed_cases = sum(parts.values())
    return Reading(passed_cases / total, dict(list(parts.items())[:MAX_PARTS]))


def _bytes(path: Path, limit: int) -> bytes:
    try:
        with open(path, "rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise BadScore(f"wrote no {path.name} ({error.strerror})") from None
    if len(data) > limit:
        raise BadScore(f"wrote a {path.name} of more than {limit >> 10} KiB")
    return data


def _json(data: bytes) -> dict[str, Any]:
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BadScore(f"wrote a score file that is not JSON ({error})") from None
    if not isinstance(body, dict):
        raise BadScore(f"wrote a {type(body).__name__} where an object was expected")
    return body


def _parts(body: Any, *, skip_words: bool = False) -> dict[str, float]:
    """Numbers by name. Harbor's table may hold a reason or a table beside them: `skip_words` leaves those out."""
    if not isinstance(body, dict) or len(body) > MAX_PARTS:
        raise BadScore("wrote `parts` that are not an object of numbers")
    return {
        name: float(value) if isinstance(value, bool) else _number(value, f"parts[{name!r}]")
        for name, value in body.items()
        if not (skip_words and not isinstance(value, int | float))
    }


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadScore(f"wrote {name} = {str(value)[:80]!r}, not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise BadScore(f"wrote {name} = {number}, not a finite number")
    return number
