"""What is in a call log, for people and programs: `dedup`, `stats`, `check`.

Reports are plain frozen data: `lines()` for a person (the summary first), `as_json()` for a program. Prints nothing.
Numbers are tokens and seconds unless the name says otherwise.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gyre_base.runfile import ExecStart
from trajtools.breaks import KINDS, Analysis, Break, analyse
from trajtools.check import CheckReport, check
from trajtools.choose import DEFAULT, Rules, choose
from trajtools.forest import Mark
from trajtools.load import Execution, Recording, Source, load, write_slim

__all__ = ["BreakCount", "CheckReport", "Damage", "DedupReport", "LabelStats", "StatsReport", "check", "dedup", "stats"]

QUANTILES = (0.5, 0.9, 0.99, 1.0)


class _Report:
    """Shared by the reports: as a JSON-able dict."""

    def as_json(self) -> dict[str, Any]:
        assert dataclasses.is_dataclass(self)
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Damage:
    """What the reader met besides good records."""

    bad_lines: int
    recovered: int
    torn: tuple[tuple[str, int, int], ...]  # file, offset, bytes
    duplicates: int
    conflicts: int
    defects: int
    unknown_kinds: dict[str, int]

    @classmethod
    def of(cls, recording: Recording) -> Damage:
        reports = recording.reports
        unknown: Counter[str] = Counter()
        for report in reports.values():
            unknown.update(report.unknown_kinds)
        return cls(
            bad_lines=sum(len(r.bad) for r in reports.values()),
            recovered=sum(r.recovered for r in reports.values()),
            torn=tuple((name, *r.torn) for name, r in reports.items() if r.torn),
            duplicates=sum(r.duplicates for r in reports.values()),
            conflicts=len(recording.conflicts),
            defects=sum(len(r.defects) for r in reports.values()),
            unknown_kinds=dict(unknown),
        )

    def lines(self) -> list[str]:
        out = [f"  torn last line in {name} at byte {at}: {size} bytes, not read" for name, at, size in self.torn]
        counts = {
            "bad lines left out": self.bad_lines,
            "records recovered behind a torn one": self.recovered,
            "duplicate calls ignored": self.duplicates,
            "calls in conflict (same id, other tokens)": self.conflicts,
            "calls kept as context only": self.defects,
            **{f"records of unknown kind {kind!r}": n for kind, n in self.unknown_kinds.items()},
        }
        return out + [f"  {n:,} {what}" for what, n in counts.items() if n]


@dataclass(frozen=True)
class BreakCount:
    """Breaks of one kind. `cause`: the commonest changed token (expected id, got id, times); `example` has it."""

    kind: str
    count: int
    lost_tokens: int
    cause: tuple[int | None, int | None, int]
    execution: str
    example: Break


@dataclass(frozen=True)
class DedupReport(_Report):
    """What repeats in a log. `trainable` = sampled with a logprob by a call that may train; `owned` = kept of those."""

    executions: int
    calls: int
    tokens_raw: int
    tokens_unique: int
    ratio: float
    sampled: int
    trainable: int
    owned: int
    owned_by_class: dict[str, int]
    dropped: dict[str, int]
    leaves: int
    breaks: tuple[BreakCount, ...]
    damage: Damage
    source_bytes: int
    slim_bytes: int | None = None

    def lines(self) -> list[str]:
        """For a person; the first line says it all."""
        top = f", most lost by {self.breaks[0].kind}" if self.breaks else ""
        total = sum(b.count for b in self.breaks)
        first = (
            f"{_n(self.executions, 'execution')}, {_n(self.calls, 'call')}: {self.tokens_raw:,} tokens recorded, "
            f"{self.tokens_unique:,} distinct ({self.ratio:.1f}x); {self.sampled:,} sampled, {self.trainable:,} "
            f"trainable in {_n(self.leaves, 'leaf', 'leaves')}; {_n(total, 'break')}{top}"
        )
        out = [first, *(_break_line(b) for b in self.breaks)]
        kept = ", ".join(f"{kind} {n:,}" for kind, n in self.owned_by_class.items()) or "none"
        out.append(f"  owned by the kept trajectories: {self.owned:,} ({kept})")
        if self.dropped:
            out.append("  sampled, not owned: " + ", ".join(f"{why} {n:,}" for why, n in self.dropped.items()))
        if self.slim_bytes is not None:
            ratio = self.source_bytes / max(self.slim_bytes, 1)
            out.append(f"  slim file: {self.slim_bytes:,} bytes of {self.source_bytes:,} ({ratio:.1f}x)")
        return out + self.damage.lines()


def dedup(
    source: Source,
    out: str | Path | None = None,
    *,
    rules: Rules = DEFAULT,
    on_bytes: Callable[[int], None] | None = None,
) -> DedupReport:
    """Store every prefix once; say what was shared, what broke, what would be trained. `out` gets the slim file."""
    recording = load(source, on_bytes=on_bytes)
    executions = recording.executions.values()
    analyses = {e.id: analyse(e.forest) for e in executions}
    choices = [choose(e.forest, rules, analyses[e.id]) for e in executions]
    dropped, by_class = _added(c.dropped for c in choices), _added(c.by_kind() for c in choices)
    owned = sum(c.owned for c in choices)
    raw = sum(e.forest.prompt_tokens + e.forest.sampled_tokens for e in executions)
    unique = sum(e.forest.unique_tokens() for e in executions)
    return DedupReport(
        executions=len(executions),
        calls=sum(len(e.forest) for e in executions),
        tokens_raw=raw,
        tokens_unique=unique,
        ratio=raw / unique if unique else 1.0,
        sampled=sum(e.forest.sampled_tokens for e in executions),
        trainable=owned + dropped.get("stub", 0) + dropped.get("not-chosen", 0),
        owned=owned,
        owned_by_class=by_class,
        dropped=dropped,
        leaves=sum(e.forest.leaves() for e in executions),
        breaks=_break_counts(analyses),
        damage=Damage.of(recording),
        source_bytes=recording.size,
        slim_bytes=write_slim(recording, out) if out is not None else None,
    )


def _break_counts(analyses: Mapping[str, Analysis]) -> tuple[BreakCount, ...]:
    by_kind: dict[str, list[tuple[str, Break]]] = defaultdict(list)
    for execution, analysis in analyses.items():
        for found in analysis.breaks:
            by_kind[found.kind].append((execution, found))
    out = [_count(kind, by_kind[kind]) for kind in KINDS if kind in by_kind]
    return tuple(sorted(out, key=lambda b: (-b.lost_tokens, -b.count)))


def _count(kind: str, found: Sequence[tuple[str, Break]]) -> BreakCount:
    firsts = Counter((next(iter(b.expected), None), next(iter(b.got), None)) for _, b in found)
    (expected, got), times = firsts.most_common(1)[0]
    execution, example = next(x for x in found if next(iter(x[1].expected), None) == expected)
    return BreakCount(kind, len(found), sum(b.lost for _, b in found), (expected, got, times), execution, example)


def _break_line(b: BreakCount) -> str:
    expected, got, times = b.cause
    where = f"{b.execution} {b.example.call} at token {b.example.depth}"
    return (
        f"  {b.kind:<17} {b.count:>5}  lost {b.lost_tokens:>9,} tokens; commonest: id {expected} became {got} "
        f"({times}x); see {where}"
    )


# ---- stats ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LabelStats:
    """Calls of one label. `reusable` = prompt tokens that an earlier call of the execution had already computed."""

    label: str
    calls: int
    agents: int
    prompt_tokens: int
    completion_tokens: int
    reusable: int
    longest: int
    call_s: dict[str, float]  # quantiles


@dataclass(frozen=True)
class StatsReport(_Report):
    """Tables of a log. `cache_hit` = reusable / prompt tokens, what a perfect prefix cache would save."""

    executions: int
    calls: int
    tokens_raw: int
    tokens_unique: int
    cache_hit: float
    longest: int
    longest_call: tuple[str, str]
    labels: tuple[LabelStats, ...]
    calls_per_execution: dict[str, float]
    execution_s: dict[str, float]
    outcomes: dict[str, int]
    mean_score: float | None
    groups: int

    def lines(self) -> list[str]:
        """For a person; the first line says it all."""
        out = [
            f"{_n(self.executions, 'execution')} in {_n(self.groups, 'group')}, {_n(self.calls, 'call')}, "
            f"{self.tokens_raw:,} tokens recorded; a prefix cache could save {self.cache_hit:.0%} of the prompts; "
            f"longest call {self.longest:,} tokens ({' '.join(self.longest_call)})",
            f"  {'label':<18} {'calls':>7} {'prompt':>13} {'reusable':>9} {'completion':>11} {'longest':>9} "
            f"{'p50 s':>7} {'p99 s':>7}",
        ]
        for s in self.labels:
            share = s.reusable / s.prompt_tokens if s.prompt_tokens else 0.0
            out.append(
                f"  {s.label:<18} {s.calls:>7,} {s.prompt_tokens:>13,} {share:>9.0%} {s.completion_tokens:>11,} "
                f"{s.longest:>9,} {s.call_s['p50']:>7.2f} {s.call_s['p99']:>7.2f}"
            )
        out.append(f"  calls per execution {_quantile_text(self.calls_per_execution)}")
        out.append(f"  execution seconds   {_quantile_text(self.execution_s)}")
        score = "" if self.mean_score is None else f"; mean score {self.mean_score:.3f}"
        out.append("  outcomes            " + ", ".join(f"{k} {n:,}" for k, n in self.outcomes.items()) + score)
        return out


def stats(source: Source, *, on_bytes: Callable[[int], None] | None = None) -> StatsReport:
    """Count calls, tokens, reuse, durations and outcomes."""
    recording = load(source, on_bytes=on_bytes)
    executions = list(recording.executions.values())
    rows: dict[str, list[tuple[Mark, int, str]]] = defaultdict(list)
    for execution in executions:
        links = analyse(execution.forest).links
        for mark in execution.forest.marks():
            shared = links[mark.id].shared if mark.id in links else 0
            rows[mark.call.label].append((mark, shared, execution.id))
    every = [row for group in rows.values() for row in group]
    longest = max(every, key=lambda row: row[0].end, default=None)
    prompts = sum(mark.prompt_tokens for mark, _, _ in every)
    scores = [r.value for e in executions if (r := e.reward) is not None and r.value is not None]
    return StatsReport(
        executions=len(executions),
        calls=len(every),
        tokens_raw=sum(mark.end for mark, _, _ in every),
        tokens_unique=sum(e.forest.unique_tokens() for e in executions),
        cache_hit=sum(shared for _, shared, _ in every) / prompts if prompts else 0.0,
        longest=longest[0].end if longest else 0,
        longest_call=(longest[2], longest[0].id) if longest else ("", ""),
        labels=tuple(_label(label, rows[label]) for label in sorted(rows)),
        calls_per_execution=_quantiles([len(e.forest) for e in executions]),
        execution_s=_quantiles([s for e in executions if (s := _seconds(e)) is not None]),
        outcomes=dict(Counter(e.reward.status if e.reward else "unscored" for e in executions).most_common()),
        mean_score=float(np.mean(scores)) if scores else None,
        groups=len({e.group for e in executions}),
    )


def _label(label: str, rows: Sequence[tuple[Mark, int, str]]) -> LabelStats:
    marks = [mark for mark, _, _ in rows]
    return LabelStats(
        label=label,
        calls=len(rows),
        agents=len({(name, mark.call.agent.id) for mark, _, name in rows}),
        prompt_tokens=sum(m.prompt_tokens for m in marks),
        completion_tokens=sum(m.sampled for m in marks),
        reusable=sum(shared for _, shared, _ in rows),
        longest=max(m.end for m in marks),
        call_s=_quantiles([m.call.t1 - m.call.t0 for m in marks]),
    )


def _seconds(execution: Execution) -> float | None:
    """From its start (or first call) to its end (or last call)."""
    marks = execution.forest.marks()
    times = [t for m in marks for t in (m.call.t0, m.call.t1)]
    starts = [r.started for r in execution.others if isinstance(r, ExecStart) and isinstance(r.started, (int, float))]
    ended = execution.end.ended if execution.end else None
    times += [*starts, *([ended] if isinstance(ended, (int, float)) else [])]
    return max(times) - min(times) if times else None


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    got = np.quantile(np.array(values, np.float64), QUANTILES).tolist() if len(values) else [0.0] * len(QUANTILES)
    return {f"p{round(q * 100)}" if q < 1 else "max": value for q, value in zip(QUANTILES, got, strict=True)}


def _quantile_text(quantiles: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:,.2f}" for name, value in quantiles.items())


def _added(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    out: Counter[str] = Counter()
    for one in counts:
        out.update(one)
    return dict(out)


def _n(count: int, one: str, many: str | None = None) -> str:
    return f"{count:,} {one if count == 1 else many or one + 's'}"
