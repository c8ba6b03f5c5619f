"""`gyre rescore`: kept states of a run measured by another ruler, beside the old scores and never over them.

Owns <run>/rescores/<name>@<version>.jsonl, one line per state; a second start goes on where the first ended, and tries
again what had failed. No rollout, no model of ours, no daemon is needed.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from gyre_base import config as configuration
from gyre_base.journal import mend_tail
from gyre_base.rundir import RunDir
from gyre_base.vocabulary import Outcome
from gyre_exec import child as children
from gyre_exec import states
from gyre_exec.agreement import Pair
from gyre_exec.daemon import places_of
from gyre_exec.evaluator import evaluate, version_of
from gyre_exec.fields import TaskError
from gyre_exec.rulers import Evaluator, evaluator_of
from gyre_exec.show import outcome_of
from gyre_exec.story import Story, stories
from gyre_exec.tasks import Task, load
from gyre_exec.workspace import kinds

RETRIES = 1
OLD = "task"  # the word for: each task's own evaluator as its file has it now
MEASURED = frozenset(  # what says something about the agent; a failure of ours is not measured into a score
    {Outcome.SCORED, Outcome.PARTIAL, Outcome.NO_ARTIFACT, Outcome.EVALUATOR_FAILED}
)
Ruler = Callable[[Task, bool], Evaluator]  # (task, whether time had run out)


@dataclass(frozen=True, kw_only=True)
class Job:
    """One kept state and who measures it."""

    execution: str
    story: Story
    old: Mapping[str, Any]
    task: Task
    ruler: Evaluator
    kept: states.Kept

    @property
    def version(self) -> str:
        return version_of(self.ruler, self.task.folder)

    @property
    def key(self) -> tuple[str, str, str]:
        return (self.execution, self.version, self.kept.reference)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What there is to do. `lost` were not kept; `refused` can't be measured so, with the reason."""

    jobs: tuple[Job, ...]
    lost: int
    refused: tuple[tuple[str, str], ...]


# ---- which ruler --------------------------------------------------------------------------------------------------


def ruler_from(source: str, run: RunDir) -> Ruler:
    """The ruler of each task: `task`, or a TOML or JSON file with one evaluator for all. Raises TaskError.

    A ruler without hidden tests of its own uses the task's; a rubric without an instruction is told the task's.
    """
    if source == OLD:
        return _current_rulers(run)
    path = Path(source)
    try:
        text = path.read_text(encoding="utf-8")
        body = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except (OSError, ValueError) as error:
        hint = f"name a .toml or .json file with an evaluator, or `{OLD}` for the tasks' own as they are now"
        raise TaskError(f"{source}: cannot be read as an evaluator ({error}); {hint}") from None
    where, folder = str(path), str(path.absolute().parent)
    evaluator_of(body, where)

    def ruler(task: Task, late: bool) -> Evaluator:
        del late
        given = {**body, "instruction": body.get("instruction") or task.instruction} if _is_rubric(body) else body
        made = evaluator_of(given, where)
        tests = made.tests if made.tests else task.evaluator.tests
        return replace(made, tests=tests, command=tuple(_anchored(made.command, folder)))

    return ruler


def _is_rubric(body: Any) -> bool:
    return isinstance(body, dict) and body.get("kind") == "rubric"


def _anchored(command: tuple[str, ...], folder: str) -> Iterator[str]:
    """Scripts beside the evaluator's file, wherever the task lies."""
    for word in command:
        beside = Path(folder, word)
        yield str(beside) if word.endswith((".py", ".sh")) and "{" not in word and beside.is_file() else word


def _current_rulers(run: RunDir) -> Ruler:
    settings = configuration.from_json(run.path("run.json").read_text()).tasks
    now: dict[str, Task] = {}
    for source in filter(None, (settings.train, settings.heldout)):
        now |= {task.id: task for task in load(Path(source))}

    def ruler(task: Task, late: bool) -> Evaluator:
        if task.id not in now:
            raise TaskError(f"no task {task.id} in the run's task files any more")
        found = now[task.id].ruler(time_up=late)
        if found is None:
            raise TaskError(f"task {task.id} says now that work which ran out of time can't be graded")
        return found

    return ruler


# ---- what there is ------------------------------------------------------------------------------------------------


def plan(run: RunDir, ruler: Ruler) -> Plan:
    """Every ended execution with a kept state."""
    jobs, refused, lost = {}, [], 0
    settings = configuration.from_json(run.path("run.json").read_text()).tasks
    for story in stories(run):
        name = story.execution
        old = outcome_of(run.path("executions", name), story)
        if old is None or Outcome(old["outcome"]) not in MEASURED:
            continue
        kept = states.find(run, name)
        if kept is None:
            lost += 1
            continue
        try:
            task = story.task(_folder_of(story, settings))
            chosen = ruler(task, old["outcome"] == Outcome.PARTIAL.value)
            jobs[name] = Job(execution=name, story=story, old=old, task=task, ruler=chosen, kept=kept)
        except TaskError as error:
            refused.append((name, str(error)))
    return Plan(jobs=tuple(jobs.values()), lost=lost, refused=tuple(refused))


def _folder_of(story: Story, settings: configuration.TaskConfig) -> str:
    source = settings.train if story.order.get("purpose") == "train" else settings.heldout or settings.train
    return str(Path(source).parent) if source else ""


# ---- measuring ----------------------------------------------------------------------------------------------------


class Rescorer:
    """Measures jobs, several at once, and writes each result as it comes."""

    def __init__(self, run: RunDir, workers: int) -> None:
        self._run, self._workers = run, asyncio.Semaphore(workers)
        settings = configuration.from_json(run.path("run.json").read_text()).tasks
        self._limit_s, self._kind, self._settings = settings.evaluation_limit_s, kinds()[settings.workspace], settings
        self._written: dict[Path, Any] = {}

    async def measure(self, jobs: tuple[Job, ...], on_done: Callable[[dict[str, Any]], None]) -> list[dict[str, Any]]:
        """A row per job: those of an earlier start, if they ended well, and new ones."""
        known = self._known({self.file_of(job) for job in jobs})
        children.become_subreaper()
        children.GUARD.start()
        try:
            with tempfile.TemporaryDirectory(prefix="gyre-rescore-") as place:
                work = [self._one(job, known, Path(place), on_done) for job in jobs]
                return list(await asyncio.gather(*work))
        finally:
            await children.kill_all(0.0)
            children.GUARD.stop()
            for file in self._written.values():
                file.close()

    def file_of(self, job: Job) -> Path:
        return self._run.path("rescores", f"{job.ruler.name}.jsonl")

    def _known(self, paths: set[Path]) -> dict[tuple[str, str, str], dict[str, Any]]:
        known = {}
        for path in filter(Path.exists, paths):
            mend_tail(path)
            for line in path.read_bytes().splitlines():
                row = orjson.loads(line)
                if Outcome(row["outcome"]).counts:
                    known[row["execution"], row["version"], row["state"]] = row
        return known

    async def _one(
        self,
        job: Job,
        known: Mapping[tuple[str, str, str], dict[str, Any]],
        place: Path,
        on_done: Callable[[dict[str, Any]], None],
    ) -> dict[str, Any]:
        row = known.get(job.key)
        if row is None:
            async with self._workers:
                row = await self._measure(job, place)
                self._write(self.file_of(job), row)
        on_done(row)
        return row

    async def _measure(self, job: Job, place: Path) -> dict[str, Any]:
        state, folder = place / job.execution / "state", place / job.execution / "scoring"
        scorer = self._kind(folder, places_of(self._settings))
        try:
            await asyncio.to_thread(job.kept.copy_to, state)
        except states.StateError as error:
            return self._row(job, Outcome.EVALUATOR_FAILED, None, {}, str(error))
        retries = RETRIES if job.ruler.retries is None else job.ruler.retries
        for attempt in range(retries + 1):
            done = await evaluate(job.execution, job.task, job.ruler, state, scorer, self._limit_s)
            if done.verdict != "failed" or attempt == retries:
                break
        if done.verdict == "scored":
            late = job.old["outcome"] == Outcome.PARTIAL.value
            return self._row(job, Outcome.PARTIAL if late else Outcome.SCORED, done.score, done.parts, "")
        if done.verdict == "no_artifact":
            return self._row(job, Outcome.NO_ARTIFACT, 0.0, {}, "")
        return self._row(job, Outcome.EVALUATOR_FAILED, None, {}, done.error)

    def _row(
        self, job: Job, outcome: Outcome, score: float | None, parts: Mapping[str, float], error: str
    ) -> dict[str, Any]:
        return {
            "execution": job.execution,
            "task": job.task.id,
            "group": job.story.order.get("group", ""),
            "evaluator": job.ruler.name,
            "version": job.version,
            "state": job.kept.reference,
            "outcome": outcome.value,
            "score": score,
            "parts": dict(parts),
            "error": error,
            "at": time.time(),
        }

    def _write(self, path: Path, row: dict[str, Any]) -> None:
        if path not in self._written:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            self._written[path] = open(path, "ab", buffering=0)  # noqa: SIM115 - closed when all is measured
        self._written[path].write(orjson.dumps(row) + b"\n")


# ---- comparing ----------------------------------------------------------------------------------------------------


def pairs(run: RunDir, jobs: tuple[Job, ...], rows: list[dict[str, Any]], tokens: Mapping[str, int]) -> Iterator[Pair]:
    """Old and new side by side. `tokens`: sampled tokens by execution, where the call log is there."""
    steps = steps_of(run)
    for job, row in zip(jobs, rows, strict=True):
        old = job.old
        yield Pair(
            execution=job.execution,
            group=row["group"],
            old_outcome=old["outcome"],
            new_outcome=row["outcome"],
            old=old.get("score"),
            new=row["score"],
            duration_s=old.get("wall_s"),
            tokens=tokens.get(job.execution),
            step=steps.get(row["group"]),
        )


def steps_of(run: RunDir) -> dict[str, int]:
    """The optimizer step at which each group was dispatched, as cellctl's journal says."""
    path = run.path("journal", "cellctl.jsonl")
    found: dict[str, int] = {}
    if not path.exists():
        return found
    with open(path, "rb") as journal:
        for line in journal:
            if b'"tag":"group.closed"' not in line or not line.endswith(b"\n"):
                continue
            for command in orjson.loads(line)["commands"]:
                if command["tag"] == "group.closed":
                    found[command["group"]] = int(command["dispatched_version"].partition(".")[2] or 0)
    return found
