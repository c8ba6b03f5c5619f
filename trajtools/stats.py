"""`stats`: tables of a call log: calls, tokens, what a prefix cache would save, durations, outcomes.

Reports as in `report`. The durations by task are what `cellctl simulate --durations` and `cellctl plan` read.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from gyre_base.runfile import ExecStart
from trajtools.breaks import analyse
from trajtools.choose import DEFAULT, Choice, choose
from trajtools.damage import Damage, Gaps, gap_lines
from trajtools.forest import Mark
from trajtools.load import OnBytes, Source, Stream
from trajtools.recording import Execution
from trajtools.words import counted, short

QUANTILES = (0.5, 0.9, 0.99, 1.0)


@dataclass(frozen=True)
class StatsRow:
    """Calls of one label or agent. `reusable` = prompt tokens that an earlier call of the execution had computed.

    `trainable` = tokens that could be targets: sampled with a logprob by a call that may train, each counted once.
    """

    name: str
    calls: int
    agents: int
    prompt_tokens: int
    completion_tokens: int
    reusable: int
    trainable: int
    longest: int
    call_s: dict[str, float]  # quantiles; empty if nobody recorded when calls began and ended


@dataclass(frozen=True)
class TaskDurations:
    """How long each execution of a task took, in seconds, in the order of their names."""

    task: str
    executions: int
    duration_s: tuple[float, ...]


@dataclass(frozen=True)
class StatsReport:
    """Tables of a log. `cache_hit` = reusable / prompt tokens, what a perfect prefix cache would save."""

    executions: int
    calls: int
    tokens_raw: int
    tokens_unique: int
    trainable: int
    cache_hit: float
    longest: int
    longest_call: tuple[str, str]
    by: str  # label | agent
    rows: tuple[StatsRow, ...]
    calls_per_execution: dict[str, float]
    execution_s: dict[str, float]
    outcomes: dict[str, int]
    mean_score: float | None
    groups: int
    level: str = "token"  # "text": sizes are bytes of text
    reported_usage: dict[str, int] = dataclasses.field(default_factory=dict)  # the provider's own counts
    quarantined: int = 0
    incomplete: int = 0
    missing: tuple[tuple[str, str], ...] = ()
    damage: Damage | None = None
    tasks: tuple[TaskDurations, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The table without the tasks, which are objects of their own: see `objects`."""
        return {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self) if f.name != "tasks"}

    def objects(self) -> Iterator[dict[str, Any]]:
        """The table, then the durations by task."""
        yield self.as_json()
        yield from map(dataclasses.asdict, self.tasks)

    def lines(self) -> list[str]:
        """For a person; the first line says it all."""
        groups = f" in {counted(self.groups, 'group')}" if self.groups else ""
        unit = {"token": "tokens", "text": "bytes of text"}.get(self.level, "tokens or bytes")
        out = [
            f"{counted(self.executions, 'execution')}{groups}, {counted(self.calls, 'call')}, "
            f"{self.tokens_raw:,} {unit} recorded, {self.tokens_unique:,} distinct, {self.trainable:,} tokens "
            f"trainable; a prefix cache could save {self.cache_hit:.0%} of the prompts; longest call {self.longest:,} "
            f"{unit} ({self.longest_call[0]} {short(self.longest_call[1])})",
            f"  {self.by:<18} {'calls':>7} {'prompt':>13} {'reusable':>9} {'completion':>11} {'trainable':>10} "
            f"{'longest':>9} {'p50 s':>7} {'p99 s':>7}",
        ]
        for row in self.rows:
            share = row.reusable / row.prompt_tokens if row.prompt_tokens else 0.0
            took = " ".join(f"{row.call_s[q]:>7.2f}" if row.call_s else f"{'-':>7}" for q in ("p50", "p99"))
            out.append(
                f"  {short(row.name):<18} {row.calls:>7,} {row.prompt_tokens:>13,} {share:>9.0%} "
                f"{row.completion_tokens:>11,} {row.trainable:>10,} {row.longest:>9,} {took}"
            )
        out.append(f"  calls per execution {_quantile_text(self.calls_per_execution)}")
        out.append(f"  execution seconds   {_quantile_text(self.execution_s)}")
        score = "" if self.mean_score is None else f"; mean score {self.mean_score:.3f}"
        out.append("  outcomes            " + ", ".join(f"{k} {n:,}" for k, n in self.outcomes.items()) + score)
        if self.reported_usage:
            out.append("  reported by the provider: " + ", ".join(f"{k} {n:,}" for k, n in self.reported_usage.items()))
        out += gap_lines(self.quarantined, self.incomplete, self.missing)
        return out + (self.damage.lines() if self.damage is not None else [])


def stats(source: Source, *, by: Literal["label", "agent"] = "label", on_bytes: OnBytes | None = None) -> StatsReport:
    """Count calls, tokens, reuse, durations and outcomes; a row per label or per agent."""
    stream = Stream(source, on_bytes=on_bytes)
    rows: dict[str, list[_Row]] = defaultdict(list)
    ends: list[_End] = []
    gaps = Gaps()
    for execution in stream.executions():
        gaps.add(execution)
        analysis = analyse(execution.forest)
        trainable = _trainable(choose(execution.forest, DEFAULT, analysis, withheld=execution.withheld()))
        for mark in execution.forest.marks():
            found = analysis.links.get(mark.id)
            row = _Row.of(mark, found.shared if found is not None else 0, trainable[mark.order], execution)
            rows[mark.call.label if by == "label" else mark.call.agent.id].append(row)
        ends.append(_End.of(execution))
    every = [row for group in rows.values() for row in group]
    longest = max(every, key=lambda row: row.end, default=None)
    prompts = sum(row.prompt for row in every)
    scores = [e.value for e in ends if e.value is not None]
    levels = {e.level for e in ends} or {"token"}
    usage: Counter[str] = Counter()
    for row in every:
        usage.update(row.usage)
    return StatsReport(
        executions=len(ends),
        calls=len(every),
        tokens_raw=sum(row.end for row in every),
        tokens_unique=sum(e.unique for e in ends),
        trainable=int(sum(row.trainable for row in every)),
        cache_hit=sum(row.shared for row in every) / prompts if prompts else 0.0,
        longest=longest.end if longest else 0,
        longest_call=(longest.execution, longest.call) if longest else ("", ""),
        by=by,
        rows=tuple(_row(name, rows[name]) for name in sorted(rows)),
        calls_per_execution=_quantiles([e.calls for e in ends]),
        execution_s=_quantiles([e.seconds for e in ends if e.seconds is not None]),
        outcomes=dict(Counter(e.outcome for e in ends).most_common()),
        mean_score=float(np.mean(scores)) if scores else None,
        groups=len({e.group for e in ends if e.group}),
        level=levels.pop() if len(levels) == 1 else "mixed",
        reported_usage=dict(usage),
        **gaps.fields(),
        damage=Damage.of(stream.recording),
        tasks=tuple(_tasks(ends)),
    )


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return [_plain(v) for v in value] if isinstance(value, tuple) else value


def _tasks(ends: Sequence[_End]) -> Iterator[TaskDurations]:
    by_task: dict[str, list[float]] = defaultdict(list)
    for end in ends:
        if end.seconds is not None:
            by_task[end.task or end.group].append(end.seconds)
    yield from (TaskDurations(task, len(took), tuple(took)) for task, took in sorted(by_task.items()))


@dataclass(frozen=True, slots=True)
class _Row:
    """One call, without its tokens. Sizes are tokens, or bytes of text."""

    call: str
    execution: str
    agent: str
    prompt: int
    sampled: int
    end: int
    shared: int
    trainable: int
    took_s: float
    usage: Mapping[str, int]

    @classmethod
    def of(cls, mark: Mark, shared: int, trainable: int, execution: Execution) -> _Row:
        prompt, end = mark.prompt_tokens, mark.end
        if execution.blocks is not None:
            tokens = execution.forest.tokens(mark)
            parts = (tokens[:shared], tokens[: mark.prompt_tokens], tokens)
            shared, prompt, end = (execution.blocks.size(part) for part in parts)
        call, usage = mark.call, mark.call.extra.get("usage")
        usage = usage if isinstance(usage, Mapping) else {}
        took_s = call.t1 - call.t0
        return cls(call.call, call.exec, call.agent.id, prompt, end - prompt, end, shared, trainable, took_s, usage)


@dataclass(frozen=True, slots=True)
class _End:
    """What is kept of an execution."""

    calls: int
    unique: int
    seconds: float | None
    outcome: str
    value: float | None
    group: str
    task: str
    level: str

    @classmethod
    def of(cls, execution: Execution) -> _End:
        forest, reward = execution.forest, execution.reward
        unique = forest.unique_tokens()
        if execution.blocks is not None:
            unique = sum(execution.blocks.size(segment.tokens) for segment in forest.segments())
        return cls(
            calls=len(forest),
            unique=unique,
            seconds=_seconds(execution),
            outcome=reward.status if reward else "unscored",
            value=reward.value if reward else None,
            group=execution.group,
            task=execution.task,
            level=execution.level,
        )


def _trainable(choice: Choice) -> NDArray[np.int64]:
    """int64[calls]: tokens that each call, by commit, could train."""
    out = np.zeros(len(choice.marks), np.int64)
    for paint in choice.painted.values():
        out += np.bincount(paint.owner[paint.trainable], minlength=len(out))
    return out


def _row(name: str, rows: Sequence[_Row]) -> StatsRow:
    return StatsRow(
        name=name,
        calls=len(rows),
        agents=len({(row.execution, row.agent) for row in rows}),
        prompt_tokens=sum(row.prompt for row in rows),
        completion_tokens=sum(row.sampled for row in rows),
        reusable=sum(row.shared for row in rows),
        trainable=int(sum(row.trainable for row in rows)),
        longest=max(row.end for row in rows),
        call_s=_quantiles([row.took_s for row in rows if row.took_s > 0]),
    )


def _seconds(execution: Execution) -> float | None:
    """As its executor measured it, else from its start (or first call) to its end (or last call); None if not known."""
    measured = execution.end.extra.get("wall_s") if execution.end else None
    if isinstance(measured, (int, float)):
        return float(measured)
    times = [t for m in execution.forest.marks() for t in (m.call.t0, m.call.t1)] if execution.timed else []
    starts = [r.started for r in execution.others if isinstance(r, ExecStart) and isinstance(r.started, (int, float))]
    ended = execution.end.ended if execution.end else None
    times += [*starts, *([ended] if isinstance(ended, (int, float)) else [])]
    return (max(times) - min(times) if times else 0.0) or None


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    if not len(values):
        return {}
    got = np.quantile(np.array(values, np.float64), QUANTILES).tolist()
    return {f"p{round(q * 100)}" if q < 1 else "max": value for q, value in zip(QUANTILES, got, strict=True)}


def _quantile_text(quantiles: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:,.2f}" for name, value in quantiles.items()) or "not recorded"
