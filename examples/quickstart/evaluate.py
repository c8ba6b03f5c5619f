# ruff: noqa: PTH100, PTH118, PTH208
"""Score a workspace with hidden tests. Standard library only; runs apart from the agent, after it has ended.

Every `test_*.py` below --tests holds functions named `test_*`; the score is the share of them that pass. A test that
raises, hangs past its alarm, or can't import the agent's module has failed. The agent's code runs in this process: use
it for trusted toy models, or inside a sandbox.

    python -I -S evaluate.py --workspace DIR --tests DIR --out score.json

Output: {"score": 0.75, "parts": {"test_m1.test_f_1": true, ...}}, or {"no_artifact": true, "parts": {}} when the
workspace holds no module at all. Exit codes: 0 a result was written, 1 the tests themselves are unusable, 2 bad usage.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Test = Callable[[], object]

try:
    import _signal as signal  # `signal` itself brings enum along, which would be half of this process's start
except ImportError:
    import signal

TEST_SECONDS = 0.5
TOTAL_SECONDS = 5.0


class OutOfTime(BaseException):
    """Not an Exception: the agent's code must not be able to swallow it by accident."""


def on_alarm(signum: int, frame: object) -> None:
    raise OutOfTime


def limited(function: Test, seconds: float) -> bool:
    """Whether `function()` returns within `seconds` without raising. Repeats the alarm in case one is swallowed."""
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        function()
        return True
    except BaseException:
        return False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def load_tests(folder: str) -> dict[str, Test]:
    """{"file.function": callable} of all hidden tests; an unreadable test file is our fault and an error."""
    found: dict[str, Test] = {}
    for name in sorted(os.listdir(folder)):
        if name.startswith("test_") and name.endswith(".py"):
            with open(os.path.join(folder, name), encoding="utf-8") as file:
                code = compile(file.read(), name, "exec")
            space: dict[str, Any] = {"__name__": name[:-3]}
            exec(code, space)
            tests = [key for key, value in space.items() if key.startswith("test_") and callable(value)]
            found.update({name[:-3] + "." + key: space[key] for key in tests})
    if not found:
        raise ValueError("no tests in " + folder)
    return found


def has_artifact(workspace: str) -> bool:
    return any(name.endswith(".py") for name in os.listdir(workspace))


def run(tests: dict[str, Test], workspace: str, total_seconds: float = TOTAL_SECONDS) -> dict[str, bool]:
    """Outcome of each test; when the total time is up, the rest have failed."""
    from time import monotonic

    search = [workspace, *sys.path]
    sys.dont_write_bytecode = True
    deadline = monotonic() + total_seconds
    parts = {}
    for name, test in tests.items():
        left = deadline - monotonic()
        sys.path = list(search)  # the agent's code of an earlier test may have changed it
        parts[name] = left > 0 and limited(test, min(TEST_SECONDS, left))
    return parts


def write(out: str, text: str) -> None:
    with open(out + ".tmp", "w", encoding="utf-8") as file:
        file.write(text + "\n")
    os.replace(out + ".tmp", out)


def quote(text: str) -> str:
    """A JSON string; names of tests are identifiers, but a file name may be anything."""
    safe = [c if (c.isalnum() and c.isascii()) or c in "._-" else f"\\u{ord(c):04x}" for c in text]
    return '"' + "".join(safe) + '"'


def to_json(parts: dict[str, bool], artifact: bool) -> str:
    """The result as JSON text, written by hand because importing json would double this process's start."""
    body = ", ".join(quote(name) + ": " + ("true" if passed else "false") for name, passed in parts.items())
    if not artifact:
        return '{"no_artifact": true, "parts": {}}'
    return f'{{"score": {sum(parts.values()) / len(parts)!r}, "parts": {{{body}}}}}'


def options(arguments: list[str]) -> dict[str, str] | None:
    """--name VALUE pairs; None when something is missing or unknown."""
    given = dict(zip(arguments[::2], arguments[1::2], strict=False))
    return given if len(arguments) == 6 and set(given) == {"--workspace", "--tests", "--out"} else None


def main() -> int:
    given = options(sys.argv[1:])
    if given is None:
        print("usage: evaluate.py --workspace DIR --tests DIR --out FILE", file=sys.stderr)
        return 2
    signal.signal(signal.SIGALRM, on_alarm)
    workspace, out = os.path.abspath(given["--workspace"]), os.path.abspath(given["--out"])
    try:
        tests = load_tests(given["--tests"])
        artifact = has_artifact(workspace)
    except Exception as error:
        print("evaluate: " + type(error).__name__ + ": " + str(error), file=sys.stderr)
        return 1
    write(out, to_json(dict.fromkeys(tests, False), artifact))  # stands if the agent's code ends this process
    if artifact:
        write(out, to_json(run(tests, workspace), artifact))
    return 0


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # the agent's code may have left threads or exit hooks behind
