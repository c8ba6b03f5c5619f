"""`dedup`: what repeats in a call log, what breaks prefix reuse, what would be trained, and the slim form.

Reports are plain frozen data: `lines()` for a person (the summary first), `as_json()` for a program. Prints nothing.
Numbers are tokens and seconds unless the name says otherwise.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gyre_base.runblocks import Blocks
from trajtools.breaks import KINDS, Analysis, Break, analyse
from trajtools.choose import CLASSES, DEFAULT, REASONS, Choice, Rules, choose
from trajtools.damage import Damage, Gaps, gap_lines
from trajtools.load import OnBytes, Source, Stream
from trajtools.recording import Execution
from trajtools.words import Say, clipped, counted, short, sizes, speaker
from trajtools.writers.slim import SlimWriter


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
            f"{sizes(self.executions, self.calls)} at text level (no token ids were recorded): "
            f"{self.bytes_raw:,} bytes recorded, {self.bytes_unique:,} distinct ({ratio:.1f}x) "
            f"in {self.blocks_unique:,} blocks; {counted(self.leaves, 'leaf', 'leaves')}; {counted(total, 'break')}",
            *(_break_line(b, "block") for b in self.breaks),
            "  nothing of it can be trained: there are no logprobs",
        ]


@dataclass(frozen=True)
class DedupReport:
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
    quarantined: int  # executions of which nothing trains: a call came twice with another payload
    incomplete: int  # executions that miss calls; they train unless --incomplete mask
    missing: tuple[tuple[str, str], ...]  # (execution, what is missing) of the first few
    damage: Damage
    source_bytes: int
    format: str = "gyre.run"
    text: TextSizes | None = None
    slim_bytes: int | None = None
    side: str | None = None  # the file with what was left out, beside the slim one

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def lines(self) -> list[str]:
        """For a person; the first line says it all."""
        out = self._tokens() if self.calls or self.text is None else []
        out += self.text.lines() if self.text is not None else []
        if self.slim_bytes is not None:
            ratio = self.source_bytes / max(self.slim_bytes, 1)
            out.append(f"  slim file: {self.slim_bytes:,} bytes of {self.source_bytes:,} ({ratio:.1f}x)")
        out += gap_lines(self.quarantined, self.incomplete, self.missing) + self.damage.lines()
        return out + ([f"  what was left out is in {self.side}"] if self.side is not None else [])

    def _tokens(self) -> list[str]:
        top = f", most lost by {self.breaks[0].kind}" if self.breaks else ""
        total = sum(b.count for b in self.breaks)
        first = (
            f"{sizes(self.executions, self.calls)}: {self.tokens_raw:,} tokens recorded, "
            f"{self.tokens_unique:,} distinct ({self.ratio:.1f}x); {self.sampled:,} sampled, {self.trainable:,} "
            f"trainable in {counted(self.leaves, 'leaf', 'leaves')}; {counted(total, 'break')}{top}"
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
    side = Path(out).with_name(Path(out).name + ".taken.jsonl") if out is not None else None
    stream = Stream(source, on_bytes=on_bytes, side=side)
    tallies = {"token": _Tally(say), "text": _Tally(None)}
    writer: SlimWriter | None = None
    gaps = Gaps()
    for execution in stream.executions():
        gaps.add(execution)
        analysis = analyse(execution.forest)
        choice = choose(execution.forest, rules, analysis, withheld=execution.withheld(rules))
        tallies[execution.level].add(execution, analysis, choice)
        if out is not None:
            writer = writer or _opened(out, stream)
            writer.execution(execution, analysis)
    if out is not None:
        writer = writer or _opened(out, stream)
    tokens, text = tallies["token"], tallies["text"]
    return DedupReport(
        **tokens.fields(),
        **gaps.fields(),
        damage=Damage.of(stream.recording),
        source_bytes=stream.recording.size,
        format=stream.recording.format,
        text=text.sizes() if text.executions else None,
        slim_bytes=writer.close() if writer is not None else None,
        side=str(side) if stream.wrote_side else None,
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
    where = f"{b.execution} {short(b.example.call)} at {unit} {b.example.depth}"
    if b.texts is not None:
        change = f"{clipped(b.texts[0])} became {clipped(b.texts[1])}" if got is not None else clipped(b.texts[0])
    else:
        change = f"id {expected} became {got}" if got is not None else f"id {expected} was sampled again"
    return f"  {b.kind:<17} {b.count:>5}  lost {b.lost_tokens:>9,} {unit}s; commonest: {change} ({times}x); see {where}"
