"""One execution on one page: what was asked, how it ended, what it was given for it, what it changed, what it printed.

Only gathers (gyre_cli draws). A part that was not kept is None with the reason beside it; nothing is made up.
"""

from __future__ import annotations

import difflib
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from gyre_base import config as configuration
from gyre_base.rundir import RunDir
from gyre_exec import keeping, progress, states
from gyre_exec.fields import TaskError
from gyre_exec.snapshot import LINK, Entry
from gyre_exec.story import Story, names, stories
from gyre_exec.tasks import Task

DIFF_LINES = 400  # of all files together
FILE_BYTES = 256 << 10  # a larger file is only named
TAIL_LINES = 20
TAIL_CHARS = 4_000


class NoSuchExecution(ValueError):
    """The run has none of this name; says which are near."""


@dataclass(frozen=True, kw_only=True)
class Changed:
    """One file of the workspace against the task's own. `lines` is a unified diff, empty for what is no text."""

    path: str
    what: str  # added, changed, removed
    lines: tuple[str, ...]
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Page:
    """All that is known."""

    execution: str
    executor: str
    order: Mapping[str, Any]
    instruction: str
    outcome: Mapping[str, Any] | None
    clocks: tuple[tuple[str, float | None, str], ...]  # (what, seconds, remark)
    changes: tuple[Changed, ...] | None
    state: str  # where the workspace is kept, or why it is not
    left_out_lines: int
    progress: tuple[Mapping[str, Any], ...]  # scores while it ran, if the run measured them
    stdout: str
    stderr: str
    others: tuple[str, ...]  # further attempts of the same member of the group


def gather(run: RunDir, execution: str) -> Page:
    """Raises NoSuchExecution."""
    name = resolve(run, execution)
    story = next(iter(stories(run, name)), None)
    folder = run.path("executions", name)
    outcome = outcome_of(folder, story)
    if story is None and outcome is None:
        raise NoSuchExecution(f"nothing is recorded of {name}: neither a journal nor {folder} tells of it")
    task = _task_of(story)
    changes, left_out, state = _changes(run, name, task)
    return Page(
        execution=name,
        executor=story.executor if story else "",
        order=story.order if story else {},
        instruction=task.instruction if task else "",
        outcome=outcome,
        clocks=tuple(clocks(run, story, task, outcome)),
        changes=changes,
        state=state,
        left_out_lines=left_out,
        progress=tuple(progress.read(folder)),
        stdout=ending(keeping.read(folder, "stdout")),
        stderr=ending(keeping.read(folder, "stderr")),
        others=tuple(n for n in names(run) if n != name and member_of(n) == member_of(name)),
    )


def _task_of(story: Story | None) -> Task | None:
    """As it was ordered; None if that can't be read any more (a task directory that is gone)."""
    try:
        return story.task("") if story else None
    except TaskError:
        return None


def member_of(execution: str) -> str:
    """g00032-07.1 is the second attempt of g00032-07."""
    return execution.rpartition(".")[0] or execution


def resolve(run: RunDir, execution: str) -> str:
    """The full name; a member of a group without an attempt means its last one."""
    known = names(run)
    if execution in known:
        return execution
    attempts = [name for name in known if member_of(name) == execution]
    if attempts:
        return max(attempts, key=lambda n: int(n.rpartition(".")[2]) if n.rpartition(".")[2].isdigit() else 0)
    if any(True for _ in stories(run, execution)):
        return execution
    near = difflib.get_close_matches(execution, known, n=3, cutoff=0.6) or known[:3]
    hint = f"; near: {', '.join(near)}" if near else "; nothing has run there yet"
    raise NoSuchExecution(f"no execution {execution!r} in {run.root}{hint}")


def outcome_of(folder: Path, story: Story | None) -> dict[str, Any] | None:
    """From the folder, else from the journal: both are the executor's own word."""
    try:
        return dict(orjson.loads((folder / "outcome.json").read_bytes()))
    except (OSError, ValueError):
        return story.finished if story else None


def clocks(
    run: RunDir, story: Story | None, task: Task | None, outcome: Mapping[str, Any] | None
) -> Iterator[tuple[str, float | None, str]]:
    """Limits beside what was used of them."""
    settings = configuration.from_json(run.path("run.json").read_text()).tasks
    done, order = outcome or {}, story.order if story else {}
    waited_s = done.get("waited_s")
    yield "harness limit", order.get("limit_s"), ""
    yield "ran", done.get("wall_s"), "from its start to its end, waits included"
    yield "of it waited for us", waited_s, "credited: the limit moved by as much"
    if story is not None:
        yield from _phases(story)
    limit_s = task.evaluator.timeout_s if task else None
    yield "evaluation limit", limit_s or settings.evaluation_limit_s, ""
    yield "overall limit", settings.overall_limit_s, "from its start, waits included"


def _phases(story: Story) -> Iterator[tuple[str, float | None, str]]:
    at = {tag: story.at(tag) for tag in ("execution.order", "exec.prepared", "exec.started", "exec.ended")}

    def between(first: str, second: str) -> float | None:
        a, b = at[first], at[second]
        return b - a if a is not None and b is not None else None

    yield "queued and prepared", between("execution.order", "exec.prepared"), ""
    yield "until the harness ran", between("exec.prepared", "exec.started"), ""
    scored = [(t, event) for t, event in story.moments if event["tag"] == "exec.evaluated"]
    ended = at["exec.ended"]
    if scored and ended is not None:
        yield "scored after", scored[-1][0] - ended, f"{len(scored)} tries" if len(scored) > 1 else ""


def ending(data: bytes) -> str:
    """The last lines as text."""
    text = data[-4 * TAIL_CHARS :].decode("utf-8", "replace").rstrip()
    return "\n".join(text.splitlines()[-TAIL_LINES:])[-TAIL_CHARS:]


# ---- workspace ----------------------------------------------------------------------------------------------------


def _changes(run: RunDir, name: str, task: Task | None) -> tuple[tuple[Changed, ...] | None, int, str]:
    kept = states.find(run, name)
    if kept is None:
        why = "not kept: set tasks.snapshots or tasks.keep_workspaces before the run"
        return None, 0, why
    try:
        changes = kept.changes()
        if changes is not None:
            found = [_changed(c.path, _side(kept, c.old), _side(kept, c.new)) for c in changes]
        else:
            found = _compared(kept, task)
    except states.StateError as error:
        return None, 0, str(error)
    budget, shown, left_out = DIFF_LINES, [], 0
    for change in found:
        lines = change.lines[:budget]
        budget -= len(lines)
        left_out += len(change.lines) - len(lines)
        shown.append(Changed(path=change.path, what=change.what, lines=lines, note=change.note))
    return tuple(shown), left_out, kept.reference


@dataclass(frozen=True)
class Side:
    """A file before or after: its content as far as it is shown (None: too large), or where a link leads."""

    data: bytes | None
    size: int
    link: str = ""


def _side(kept: states.Kept, entry: Entry | None) -> Side | None:
    if entry is None:
        return None
    data, size = kept.content(entry, FILE_BYTES)
    if entry.mode == LINK:
        return Side(None, size, (data or b"").decode("utf-8", "replace"))
    return Side(data, size)


def _compared(kept: states.Kept, task: Task | None) -> list[Changed]:
    """Without a start in the store: against the task's own files."""
    with tempfile.TemporaryDirectory(prefix="gyre-show-") as place:
        target = Path(place) / "state"
        kept.copy_to(target)
        return list(differences(task.workspace if task else {}, target))


def differences(before: Mapping[str, str], root: Path) -> Iterator[Changed]:
    """The task's own files against what is there now, by path."""
    now = {p.relative_to(root).as_posix(): p for p in root.rglob("*") if p.is_symlink() or p.is_file()}
    for path in sorted({*before, *now}):
        text = before.get(path)
        data = text.encode("utf-8", "surrogateescape") if text is not None else None
        old = Side(data, len(data)) if data is not None else None
        new = _there(now[path]) if path in now else None
        if old != new:
            yield _changed(path, old, new)


def _there(path: Path) -> Side:
    if path.is_symlink():
        return Side(None, 0, str(path.readlink()))
    size = path.stat().st_size
    return Side(path.read_bytes() if size <= FILE_BYTES else None, size)


def _changed(path: str, old: Side | None, new: Side | None) -> Changed:
    what = "added" if old is None else "removed" if new is None else "changed"
    if new is not None and new.link:
        return Changed(path=path, what=what, lines=(), note=f"a link to {new.link}")
    texts = [side.data if side is not None else b"" for side in (old, new)]
    if any(data is None or b"\0" in data for data in texts):
        size = (new or old or Side(b"", 0)).size
        return Changed(path=path, what=what, lines=(), note=f"{size:,} bytes, not shown")
    before, after = ((data or b"").decode("utf-8", "replace") for data in texts)
    return Changed(path=path, what=what, lines=tuple(_diff(path, before, after)))


def _diff(path: str, old: str, new: str) -> Iterator[str]:
    lines = difflib.unified_diff(old.splitlines(), new.splitlines(), f"a/{path}", f"b/{path}", lineterm="", n=2)
    yield from list(lines)[2:]  # the two head lines say the path again
