"""The evaluator as a process: shares of passed tests, and agents' code that misbehaves."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.quickstart.conftest import QUICKSTART

TESTS = """
def test_one():
    from m1 import f
    assert f("ab") == "ba"

def test_two():
    from m1 import f
    assert f("abc") == "cba"

def test_other():
    from m2 import g
    assert g("a") == "A"
"""
REVERSE = "def f(s):\n    return s[::-1]\n"
UPPER = "def g(s):\n    return s.upper()\n"


def evaluate(place: Path, modules: dict[str, str], tests: str | None = TESTS) -> tuple[int, dict[str, Any] | None, str]:
    """(exit code, result or None, stderr) for a workspace with these modules."""
    for folder in ("workspace", "tests"):
        (place / folder).mkdir()
    for name, text in modules.items():
        (place / "workspace" / name).write_text(text)
    if tests is not None:
        (place / "tests" / "test_m.py").write_text(tests)
    out = place / "score.json"
    options = ["--workspace", str(place / "workspace"), "--tests", str(place / "tests"), "--out", str(out)]
    command = [sys.executable, "-I", "-S", str(QUICKSTART / "evaluate.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return done.returncode, json.loads(out.read_text()) if out.exists() else None, done.stderr


def result(one: bool, two: bool, other: bool) -> dict[str, Any]:
    parts = {"test_m.test_one": one, "test_m.test_two": two, "test_m.test_other": other}
    return {"score": sum(parts.values()) / 3, "parts": parts}


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        ({"m1.py": REVERSE, "m2.py": UPPER}, result(True, True, True)),
        ({"m1.py": REVERSE}, result(True, True, False)),  # a missing module fails its own tests only
        ({"m1.py": "def f(s):\n    return 'ba'\n", "m2.py": UPPER}, result(True, False, True)),
        ({"m1.py": "def f(s:\n", "m2.py": UPPER}, result(False, False, True)),
        ({"m1.py": "raise SystemExit(0)\n", "m2.py": UPPER}, result(False, False, True)),
        ({"m1.py": "import sys\nsys.path.clear()\n" + REVERSE, "m2.py": UPPER}, result(True, True, True)),
        ({"m1.py": "import os\nos._exit(0)\n", "m2.py": UPPER}, result(False, False, False)),
        ({"m1.py": "\x00"}, result(False, False, False)),
        ({"notes.py": ""}, result(False, False, False)),
    ],
)
def test_the_score_is_the_share_of_tests_that_pass(
    tmp_path: Path, modules: dict[str, str], expected: dict[str, Any]
) -> None:
    assert evaluate(tmp_path, modules) == (0, expected, "")


def test_an_endless_loop_fails_its_tests_and_not_the_evaluator(tmp_path: Path) -> None:
    loop = "def f(s):\n    while True:\n        try:\n            while True: pass\n        except Exception: pass\n"
    started = time.monotonic()
    assert evaluate(tmp_path, {"m1.py": loop, "m2.py": UPPER}) == (0, result(False, False, True), "")
    assert time.monotonic() - started < 10


def test_nothing_to_score_is_not_a_score_of_zero(tmp_path: Path) -> None:
    assert evaluate(tmp_path, {"m1.md": "f"}) == (0, {"no_artifact": True, "parts": {}}, "")


@pytest.mark.parametrize("tests", [None, "def test_x(:\n", "x = 1\n"])
def test_unusable_tests_are_an_error_and_leave_no_result(tmp_path: Path, tests: str | None) -> None:
    status, written, problem = evaluate(tmp_path, {"m1.py": REVERSE}, tests)
    assert (status, written) == (1, None)
    assert problem.startswith("evaluate: ")


def test_wrong_options_are_bad_usage() -> None:
    command = [sys.executable, "-I", "-S", str(QUICKSTART / "evaluate.py"), "--workspace", "x"]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 2
