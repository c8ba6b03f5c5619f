"""What is in a call log, for people and programs: `dedup`, `stats`, `check`.

Reports are plain frozen data: `lines()` for a person (the summary first), `as_json()` for a program. Prints nothing.
Numbers are tokens and seconds unless the name says otherwise.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gyre_base.runblocks import Blocks
from gyre_base.runfile import ExecStart
from trajtools.breaks import KINDS, Analysis, Break, analyse
from trajtools.check import CheckReport, check
from trajtools.choose import CLASSES, DEFAULT, REASONS, Choice, Rules, choose
from trajtools.forest import Mark
from trajtools.load import Execution, OnBytes, Recording, SlimWriter, Source, Stream
from trajtools.words import Say, clipped, speaker

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
    mixed: int
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
            mixed=len(recording.mixed),
            unknown_kinds=dict(unknown),
        )

    @property
    def ok(self) -> bool:
        """Whether every whole line was a record; a torn last line is the trace of a crash, not damage."""
        return not (self.bad_lines or self.conflicts or self.mixed)

    def lines(self) -> list[str]:
        out = [f"  torn last line in {name} at byte {at}: {size} bytes, not read" for name, at, size in self.torn]
        counts = {
            "bad lines left out": self.bad_lines,
            "records recovered behind a torn one": self.recovered,
            "duplicate calls ignored": self.duplicates,
            "calls in conflict (same id, other tokens)": self.conflicts,
            "calls kept as context only": self.defects,
            "calls of another level than their execution, left out": self.mixed,
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
    texts: tuple[str, str] | None = None  # expected and got as text, where that can be known


@dataclass(frozen=True)
class TextSizes:
    """The part of a log that was recorded as text: blocks (message parts) and their bytes."""

    executions: int
    calls: int
    blocks_raw: int
    blocks_unique: int
    bytes_raw: int
    bytes_unique: int
    leaves: int
    breaks: tuple[BreakCount, ...]

    def lines(self) -> list[str]:
        total = sum(b.count for b in self.breaks)
        ratio = self.bytes_raw / max(self.bytes_unique, 1)
        return [
            f"{_n(self.executions, 'execution')}, {_n(self.calls, 'call')} at text level (no token ids were recorded): "
            f"{self.bytes_raw:,} bytes recorded, {self.bytes_unique:,} distinct ({ratio:.1f}x) "
            f"in {self.blocks_unique:,} blocks; {_n(self.leaves, 'leaf', 'leaves')}; {_n(total, 'break')}",
            *(_break_line(b, "block") for b in self.breaks),
            "  nothing of it can be trained: there are no logprobs",
        ]


@dataclass(frozen=True)
class DedupReport(_Report):
    """What repeats in a log. `trainable` = sampled with a logprob by a call that may train; `owned` = kept of those.

    Token counts are of the executions at token level; `text` is about the others.
    """

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
    format: str = "gyre.run"
    text: TextSizes | None = None
    slim_bytes: int | None = None

    def lines(self) -> list[str]:
        """For a person; the first line says it all."""
        out = self._tokens() if self.calls or self.text is None else []
        out += self.text.lines() if self.text is not None else []
        if self.slim_bytes is not None:
            ratio = self.source_bytes / max(self.slim_bytes, 1)
            out.append(f"  slim file: {self.slim_bytes:,} bytes of {self.source_bytes:,} ({ratio:.1f}x)")
        return out + self.damage.lines()

    def _tokens(self) -> list[str]:
        top = f", most lost by {self.breaks[0].kind}" if self.breaks else ""
        total = sum(b.count for b in self.breaks)
        first = (
            f"{_n(self.executions, 'execution')}, {_n(self.calls, 'call')}: {self.tokens_raw:,} tokens recorded, "
            f"{self.tokens_unique:,} distinct ({self.ratio:.1f}x); {self.sampled:,} sampled, {self.trainable:,} "
            f"trainable in {_n(self.leaves, 'leaf', 'leaves')}; {_n(total, 'break')}{top}"
        )
        out = [first, *(_break_line(b, "token") for b in self.breaks)]
        kept = ", ".join(f"{kind} {n:,}" for kind, n in self.owned_by_class.items()) or "none"
        out.append(f"  owned by the kept trajectories: {self.owned:,} ({kept})")
        if self.dropped:
            out.append("  sampled, not owned: " + ", ".join(f"{why} {n:,}" for why, n in self.dropped.items()))
        return out


def dedup(
    source: Source,
    out: str | Path | None = None,
    *,
    rules: Rules = DEFAULT,
    on_bytes: OnBytes | None = None,
    say: Say | None = None,
) -> DedupReport:
    """Store every prefix once; say what was shared, what broke, what would be trained. `out` gets the slim file.

    `say` turns token ids into text for the examples of breaks.
    """
    stream = Stream(source, on_bytes=on_bytes)
    tallies = {"token": _Tally(say), "text": _Tally(None)}
    writer: SlimWriter | None = None
    for execution in stream.executions():
        analysis = analyse(execution.forest)
        tallies[execution.level].add(execution, analysis, choose(execution.forest, rules, analysis))
        if out is not None:
            writer = writer or _opened(out, stream)
            writer.execution(execution, analysis)
    if out is not None:
        writer = writer or _opened(out, stream)
    tokens, text = tallies["token"], tallies["text"]
    return DedupReport(
        **tokens.fields(),
        damage=Damage.of(stream.recording),
        source_bytes=stream.recording.size,
        format=stream.recording.format,
        text=text.sizes() if text.executions else None,
        slim_bytes=writer.close() if writer is not None else None,
    )


def _opened(out: str | Path, stream: Stream) -> SlimWriter:
    writer = SlimWriter(out, stream.recording.blocks)
    writer.loose(stream.recording.loose)
    return writer


class _Tally:
    """Sums over executions of one level; keeps no forest."""

    def __init__(self, say: Say | None) -> None:
        self.executions = self.calls = self.raw = self.unique = self.sampled = self.owned = self.leaves = 0
        self.bytes_raw = self.bytes_unique = 0
        self.dropped: Counter[str] = Counter()
        self.by_class: Counter[str] = Counter()
        self.breaks: dict[str, _Breaks] = defaultdict(_Breaks)
        self._say = say

    def add(self, execution: Execution, analysis: Analysis, choice: Choice) -> None:
        forest = execution.forest
        self.executions += 1
        self.calls += len(forest)
        self.raw += forest.prompt_tokens + forest.sampled_tokens
        self.unique += forest.unique_tokens()
        self.sampled += forest.sampled_tokens
        self.leaves += forest.leaves()
        self.owned += choice.owned
        self.dropped.update(choice.dropped)
        self.by_class.update(choice.by_kind())
        for found in analysis.breaks:
            self.breaks[found.kind].add(execution, found)
        if execution.blocks is not None:
            segments = forest.segments()
            size = {s: execution.blocks.size(s.tokens) for s in segments}
            self.bytes_unique += sum(size.values())
            self.bytes_raw += sum(execution.blocks.size(forest.tokens(mark)) for mark in forest.marks())

    def counts(self) -> tuple[BreakCount, ...]:
        out = [self.breaks[kind].count(kind, self._say) for kind in KINDS if kind in self.breaks]
        return tuple(sorted(out, key=lambda b: (-b.lost_tokens, -b.count)))

    def fields(self) -> dict[str, Any]:
        dropped = {why: self.dropped[why] for why in REASONS if self.dropped[why]}
        return {
            "executions": self.executions,
            "calls": self.calls,
            "tokens_raw": self.raw,
            "tokens_unique": self.unique,
            "ratio": self.raw / self.unique if self.unique else 1.0,
            "sampled": self.sampled,
            "trainable": self.owned + self.dropped["stub"] + self.dropped["not-chosen"],
            "owned": self.owned,
            "owned_by_class": {kind: self.by_class[kind] for kind in CLASSES if self.by_class[kind]},
            "dropped": dropped,
            "leaves": self.leaves,
            "breaks": self.counts(),
        }

    def sizes(self) -> TextSizes:
        return TextSizes(
            executions=self.executions,
            calls=self.calls,
            blocks_raw=self.raw,
            blocks_unique=self.unique,
            bytes_raw=self.bytes_raw,
            bytes_unique=self.bytes_unique,
            leaves=self.leaves,
            breaks=self.counts(),
        )


class _Breaks:
    """The breaks of one kind: how often each changed token, with the first example of each."""

    def __init__(self) -> None:
        self.lost = self.times = 0
        self.causes: Counter[tuple[int | None, int | None]] = Counter()
        self.examples: dict[tuple[int | None, int | None], tuple[str, Break, Blocks | None]] = {}

    def add(self, execution: Execution, found: Break) -> None:
        cause = next(iter(found.expected), None), next(iter(found.got), None)
        self.times += 1
        self.lost += found.lost
        self.causes[cause] += 1
        self.examples.setdefault(cause, (execution.id, found, execution.blocks))

    def count(self, kind: str, say: Say | None) -> BreakCount:
        (expected, got), times = self.causes.most_common(1)[0]
        execution, example, blocks = self.examples[expected, got]
        if blocks is not None:
            say = speaker(blocks)
        texts = (say(example.expected), say(example.got)) if say is not None else None
        return BreakCount(kind, self.times, self.lost, (expected, got, times), execution, example, texts)


def _break_line(b: BreakCount, unit: str) -> str:
    expected, got, times = b.cause
    where = f"{b.execution} {b.example.call} at {unit} {b.example.depth}"
    if b.texts is not None:
        change = f"{clipped(b.texts[0])} became {clipped(b.texts[1])}" if got is not None else clipped(b.texts[0])
    else:
        change = f"id {expected} became {got}" if got is not None else f"id {expected} was sampled again"
    return f"  {b.kind:<17} {b.count:>5}  lost {b.lost_tokens:>9,} {unit}s; commonest: {change} ({times}x); see {where}"


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
    level: str = "token"  # "text": sizes are bytes of text
    reported_usage: dict[str, int] = dataclasses.field(default_factory=dict)  # the provider's own counts
    damage: Damage | None = None

    def lines(self) -> list[str]:
        """For a person; the first line says it all."""
        groups = f" in {_n(self.groups, 'group')}" if self.groups else ""
        unit = {"token": "tokens", "text": "bytes of text"}.get(self.level, "tokens or bytes")
        out = [
            f"{_n(self.executions, 'execution')}{groups}, {_n(self.calls, 'call')}, "
            f"{self.tokens_raw:,} {unit} recorded; a prefix cache could save {self.cache_hit:.0%} of the prompts; "
            f"longest call {self.longest:,} {unit} ({' '.join(self.longest_call)})",
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
        if self.reported_usage:
            out.append("  reported by the provider: " + ", ".join(f"{k} {n:,}" for k, n in self.reported_usage.items()))
        return out + (self.damage.lines() if self.damage is not None else [])


def stats(source: Source, *, on_bytes: OnBytes | None = None) -> StatsReport:
    """Count calls, tokens, reuse, durations and outcomes."""
    stream = Stream(source, on_bytes=on_bytes)
    rows: dict[str, list[_Row]] = defaultdict(list)
    ends: list[_End] = []
    for execution in stream.executions():
        links = analyse(execution.forest).links
        for mark in execution.forest.marks():
            shared = links[mark.id].shared if mark.id in links else 0
            rows[mark.call.label].append(_Row.of(mark, shared, execution))
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
        cache_hit=sum(row.shared for row in every) / prompts if prompts else 0.0,
        longest=longest.end if longest else 0,
        longest_call=(longest.execution, longest.call) if longest else ("", ""),
        labels=tuple(_label(label, rows[label]) for label in sorted(rows)),
        calls_per_execution=_quantiles([e.calls for e in ends]),
        execution_s=_quantiles([e.seconds for e in ends if e.seconds is not None]),
        outcomes=dict(Counter(e.outcome for e in ends).most_common()),
        mean_score=float(np.mean(scores)) if scores else None,
        groups=len({e.group for e in ends if e.group}),
        level=levels.pop() if len(levels) == 1 else "mixed",
        reported_usage=dict(usage),
        damage=Damage.of(stream.recording),
    )


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
    took_s: float
    usage: Mapping[str, int]

    @classmethod
    def of(cls, mark: Mark, shared: int, execution: Execution) -> _Row:
        prompt, end = mark.prompt_tokens, mark.end
        if execution.blocks is not None:
            tokens = execution.forest.tokens(mark)
            parts = (tokens[:shared], tokens[: mark.prompt_tokens], tokens)
            shared, prompt, end = (execution.blocks.size(part) for part in parts)
        call, usage = mark.call, mark.call.extra.get("usage")
        usage = usage if isinstance(usage, Mapping) else {}
        return cls(call.call, call.exec, call.agent.id, prompt, end - prompt, end, shared, call.t1 - call.t0, usage)


@dataclass(frozen=True, slots=True)
class _End:
    """What is kept of an execution."""

    calls: int
    unique: int
    seconds: float | None
    outcome: str
    value: float | None
    group: str
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
            level=execution.level,
        )


def _label(label: str, rows: Sequence[_Row]) -> LabelStats:
    return LabelStats(
        label=label,
        calls=len(rows),
        agents=len({(row.execution, row.agent) for row in rows}),
        prompt_tokens=sum(row.prompt for row in rows),
        completion_tokens=sum(row.sampled for row in rows),
        reusable=sum(row.shared for row in rows),
        longest=max(row.end for row in rows),
        call_s=_quantiles([row.took_s for row in rows]),
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


def _n(count: int, one: str, many: str | None = None) -> str:
    return f"{count:,} {one if count == 1 else many or one + 's'}"
