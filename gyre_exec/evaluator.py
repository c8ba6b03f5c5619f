"""Measures what an execution left: an evaluator as its own process, over a copy of the workspace, its result read with
suspicion.

A crash, rubbish or a hang is a failure of the evaluator and never a zero. The agent's own workspace is not touched:
what an evaluator does to its copy (executions/<id>/scoring, which exists only while it runs) can't change what the next
one sees. Hidden tests enter only there. `--workspace {workspace} --tests {tests} --out {out}` is added to a command
that names none of them.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from gyre_exec import child as children
from gyre_exec.events import Evaluated
from gyre_exec.harness import PATH
from gyre_exec.restless import remove_tree
from gyre_exec.rulers import Evaluator, bases, fill
from gyre_exec.score import BadScore, Reading, read_junit, read_reward, read_score
from gyre_exec.states import StateError, copy_state
from gyre_exec.tasks import Task
from gyre_exec.workspace import MARK, CommandLine, Plain, Workspace, WorkspaceError, write_files

MAX_PRINTED_BYTES = 64 << 10
TOLERANT = frozenset({"junit", "harbor"})  # failing tests end these with a code of their own; the report decides
_FROM_OUTSIDE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")


@dataclass(frozen=True)
class Places:
    """Where one evaluation happens: on this machine, and as its process sees it behind the walls of `scorer`.

    `scorer` is a workspace of the run's kind whose folder is the evaluation's own; its root becomes the copy.
    """

    scorer: Workspace

    @property
    def folder(self) -> Path:
        return self.scorer.folder

    @property
    def tests(self) -> Path:
        return self.folder / "tests"

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    def words(self, *, walled: bool) -> dict[str, str]:
        """What placeholders become. Behind walls the places have Harbor's names."""
        if not walled:
            return {"workspace": str(self.scorer.root), "tests": str(self.tests), "out": str(self.logs / "score")}
        return {"workspace": str(self.scorer.inside), "tests": "/tests", "out": "/logs/score"}


@functools.lru_cache(maxsize=4096)
def _digest_of_file(path: str, mtime_ns: int, size: int) -> bytes:
    return hashlib.sha256(Path(path).read_bytes()).digest()


def version_of(ruler: Evaluator, folder: str) -> str:
    """The author's version and a hash of all that measures: kind, command, scripts that it names, hidden tests."""
    digest = hashlib.sha256(f"{ruler.kind}\0{ruler.expected}\0".encode())
    for argument in fill(ruler.command, {"task_file_dir": folder}, bases=bases(folder)):
        try:
            found = os.stat(argument) if argument.startswith("/") and argument != sys.executable else None
        except OSError:
            found = None
        if found is not None:
            digest.update(_digest_of_file(argument, found.st_mtime_ns, found.st_size))
        else:
            digest.update(argument.encode("utf-8", "surrogateescape") + b"\0")
    for path, text in sorted(ruler.tests.items()):
        digest.update(f"{path}\0{len(text)}\0{text}".encode("utf-8", "surrogateescape"))
    mark = digest.hexdigest()[:16]
    return f"{ruler.version}+{mark}" if ruler.version else mark


def command_of(ruler: Evaluator, folder: str, places: Mapping[str, str]) -> list[str]:
    """The full argv."""
    argv = fill(ruler.command, {**places, "python": sys.executable, "task_file_dir": folder}, bases=bases(folder))
    if not any(f"{{{name}}}" in part for part in ruler.command for name in ("workspace", "tests", "out")):
        argv += ["--workspace", places["workspace"], "--tests", places["tests"], "--out", places["out"]]
    return argv


def environment_of(ruler: Evaluator, task: Task, home: str) -> dict[str, str]:
    """Little; `${NAME}` and `${NAME:-default}` in the ruler's own words are taken from the executor's environment."""

    def outside(found: re.Match[str]) -> str:
        return os.environ.get(found.group(1), found.group(2) or "")

    fixed = {"PATH": PATH, "HOME": home, "TMPDIR": home, "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}
    own = {key: _FROM_OUTSIDE.sub(outside, text) for key, text in {**task.needs.env, **ruler.env}.items()}
    return {**fixed, **own}


async def evaluate(
    execution: str, task: Task, ruler: Evaluator, state: Path, scorer: Workspace, limit_s: float
) -> Evaluated:
    """One run of `ruler` over a copy of `state`, behind the walls of `scorer`. Never raises for what it does."""
    places = Places(scorer)
    blank = Evaluated(
        execution=execution,
        verdict="failed",
        evaluator=ruler.name,
        version=version_of(ruler, task.folder),
        retry_budget=-1 if ruler.retries is None else ruler.retries,
    )
    try:
        await asyncio.to_thread(_prepare, task, ruler, state, places)
        line = start_of(ruler, task, places)
        cwd = scorer.root if ruler.kind == "junit" else scorer.folder
        verdict, error = await _run(line, cwd, scorer.folder, ruler.timeout_s or limit_s, ruler.kind in TOLERANT)
        if verdict != "ended":
            return replace(blank, verdict=verdict, error=error)
        try:
            reading = _read(ruler, places)
        except BadScore as problem:
            return replace(blank, error=f"the evaluator {problem}" + (f" ({error})" if error else ""))
    except (OSError, WorkspaceError, StateError) as problem:
        return replace(blank, error=f"the evaluator could not be started: {problem}")
    finally:
        remove_tree(places.folder)
    if reading.score is None:
        return replace(blank, verdict="no_artifact")
    return replace(blank, verdict="scored", score=reading.score, parts=reading.parts)


def _prepare(task: Task, ruler: Evaluator, state: Path, places: Places) -> None:
    remove_tree(places.folder)
    places.scorer.accept(task)
    places.tests.mkdir(parents=True, mode=0o700)
    (places.scorer.harness / "tmp").mkdir(parents=True, mode=0o700)
    (places.logs / "verifier").mkdir(parents=True)
    write_files(places.tests, ruler.tests)
    copy_state(state, places.scorer.root)


def start_of(ruler: Evaluator, task: Task, places: Places) -> CommandLine:
    """What is started. A rubric's judge runs nothing of the agent's and needs the network: it has no walls."""
    walled = ruler.kind != "rubric" and not isinstance(places.scorer, Plain)
    if ruler.kind == "harbor" and not walled:
        raise WorkspaceError("a Harbor verifier writes to /logs and needs walls: tasks.workspace = bwrap or apptainer")
    argv = command_of(ruler, task.folder, places.words(walled=walled))
    if not walled:
        return CommandLine(argv=argv, env=environment_of(ruler, task, str(places.folder)))
    binds = {str(places.tests): "/tests", str(places.logs): "/logs"}
    return places.scorer.command(argv, environment_of(ruler, task, "/tmp"), binds=binds, reach=False)


def _read(ruler: Evaluator, places: Places) -> Reading:
    match ruler.kind:
        case "junit":
            return read_junit(places.logs / "score", ruler.expected)
        case "harbor":
            return read_reward(places.logs / "verifier")
    return read_score(places.logs / "score")


async def _run(line: CommandLine, cwd: Path, folder: Path, timeout_s: float, tolerant: bool) -> tuple[str, str]:
    """("ended" | "failed" | "hung", what it said if it did not end well)."""
    out, err = children.Sink(None, MAX_PRINTED_BYTES), children.Sink(None, MAX_PRINTED_BYTES)
    env = {**line.env, MARK: str(folder)} if line.walled else line.env
    child = children.spawn(line.argv, cwd=cwd, env=env, stdout=out, stderr=err, marker=str(folder), walled=line.walled)
    hung = False

    def time_up() -> None:
        nonlocal hung
        hung = True
        child.kill()

    timer = asyncio.get_running_loop().call_later(timeout_s, time_up)
    try:
        code = await asyncio.shield(child.exited)
    except asyncio.CancelledError:
        child.kill()
        raise
    finally:
        timer.cancel()
    if hung:
        return "hung", f"the evaluator did not end within {timeout_s:g} s and was killed"
    if code == 0:
        return "ended", ""
    words = f"the evaluator ended with exit code {code}: {err.tail() or out.tail()}"
    return ("ended" if tolerant and code > 0 else "failed"), words
