"""`show`, `choose`, `diff`: one execution or call in words, what is kept and why, two recordings against each other.

Reports as in `report`: frozen data with `lines()` and `as_json()`. Prints nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from trajtools.breaks import analyse
from trajtools.choose import CLASSES, DEFAULT, Rules, choose
from trajtools.forest import Forest, Mark
from trajtools.load import OnBytes, Source, Stream, load
from trajtools.recording import Execution, Recording
from trajtools.words import Say, named, plain_ids, short, sizes, speaker


class NotThere(ValueError):
    """No execution or call of that name; the text says which there are."""


def only(recording: Recording, name: str | None) -> Execution:
    """The execution of a name, or the only one. Raises NotThere."""
    names = sorted(recording.executions)
    if name is None and len(names) == 1:
        return recording.executions[names[0]]
    if name is None or name not in recording.executions:
        some = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
        raise NotThere(f"name one execution of: {some}" if name is None else f"no execution {name}; there are: {some}")
    return recording.executions[name]


# ---- show ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CallRow:
    """A call among others. `new` = prompt tokens that no earlier call had."""

    call: str
    agent: str
    label: str
    prompt: int
    new: int
    sampled: int
    continues: str
    broke: str
    t0: float
    seconds: float
    finish: str
    reported: dict[str, int]


@dataclass(frozen=True)
class Shown:
    """An execution: facts and its calls by start."""

    execution: str
    level: str
    facts: dict[str, Any]
    calls: tuple[CallRow, ...]

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def lines(self) -> list[str]:
        unit = "tokens" if self.level == "token" else "blocks"
        facts = "  ".join(f"{k} {v}" for k, v in self.facts.items() if v not in (None, "", [], {}))
        width = max([len(short(r.call)) for r in self.calls] + [4])
        agents = max([len(short(r.agent)) for r in self.calls] + [5])
        out = [
            f"{self.execution}  {len(self.calls):,} calls  sizes in {unit}  {facts}",
            f"  {'call':<{width}}  {'agent':<{agents}}  {'label':<17} {'prompt':>9} {'new':>8} "
            f"{'sampled':>8} {'s':>7}  "
            f"{'finish':<10} break",
        ]
        for r in self.calls:
            out.append(
                f"  {short(r.call):<{width}}  {short(r.agent):<{agents}}  {r.label:<17} {r.prompt:>9,} {r.new:>8,} "
                f"{r.sampled:>8,} "
                f"{f'{r.seconds:.1f}' if r.seconds > 0 else '-':>7}  {r.finish:<10} {r.broke}".rstrip()
            )
        return out


def show(recording: Recording, name: str | None = None) -> Shown:
    execution = only(recording, name)
    analysis = analyse(execution.forest)
    breaks = {b.call: b for b in analysis.breaks}
    rows = []
    for mark in sorted(execution.forest.marks(), key=lambda m: (m.call.t0, m.call.seq, m.id)):
        link, found = analysis.links.get(mark.id), breaks.get(mark.id)
        usage = mark.call.extra.get("usage")
        rows.append(
            CallRow(
                call=mark.id,
                agent=mark.call.agent.id,
                label=mark.call.label,
                prompt=mark.prompt_tokens,
                new=mark.prompt_tokens - (link.shared if link else 0),
                sampled=mark.sampled,
                continues=link.mark.id if link else "",
                broke=f"{found.kind} at {found.depth:,} (against {short(found.against)})" if found else "",
                t0=mark.call.t0,
                seconds=mark.call.t1 - mark.call.t0,
                finish=str(mark.call.finish or ""),
                reported=usage if isinstance(usage, dict) else {},
            )
        )
    reward, end = execution.reward, execution.end
    facts = {
        "group": execution.group,
        "outcome": reward.status if reward else "unscored",
        "score": reward.value if reward else None,
        "error": reward.error if reward else None,
        "status": end.status if end else None,
        "incomplete": execution.told_missing(),
        "quarantined": f"{', '.join(execution.conflicts)} came twice" if execution.conflicts else "",
    }
    return Shown(execution.id, execution.level, facts, tuple(rows))


@dataclass(frozen=True)
class ShownCall:
    """One call: its head, what is new in its prompt, its answer; as text where that is known, else ids."""

    head: dict[str, Any]
    shared: int
    new: str
    completion: str
    logprobs: list[float | None] | None
    prompt_ids: list[int] | None
    completion_ids: list[int] | None

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def lines(self) -> list[str]:
        said = {key: _plain(value) for key, value in self.head.items()}
        out = [f"{key:<12} {text}" for key, text in said.items() if text]
        out += [f"--- prompt (after {self.shared:,} shared)", self.new, "--- completion", self.completion]
        if self.logprobs is not None:
            numbers = [x for x in self.logprobs if x is not None]
            mean = sum(numbers) / len(numbers) if numbers else 0.0
            out.append(f"--- logprobs: {len(self.logprobs):,}, {len(numbers):,} finite, mean {mean:.4f}")
        return out


def _plain(value: Any) -> str:
    """A value of a call's head as words: no braces, nothing that was not recorded."""
    if isinstance(value, dict):
        return ", ".join(f"{k} {_plain(v)}" for k, v in value.items() if v is not None)
    if isinstance(value, (list, tuple)):
        return "; ".join(map(_plain, value))
    return "" if value is None else str(value)


def show_call(recording: Recording, name: str | None, call: str, say: Say | None = None) -> ShownCall:
    execution = only(recording, name)
    forest = execution.forest
    found = named(call, (m.id for m in forest.marks()))
    if len(found) != 1:
        some = ", ".join(found[:8] or (m.id for m in forest.marks()[:8]))
        why = f"several calls begin with {call}" if found else f"no call {call}"
        raise NotThere(f"{why} in {execution.id}; there are {len(forest):,}: {some}, …")
    mark = forest[found[0]]
    link = analyse(forest).links.get(mark.id)
    shared = link.shared if link else 0
    tokens = forest.tokens(mark)
    new, completion = tokens[shared : mark.prompt_tokens].tolist(), tokens[mark.prompt_tokens :].tolist()
    if execution.blocks is not None:
        say = speaker(execution.blocks)
    text = execution.blocks is not None
    about = {
        k: v
        for k, v in dataclasses.asdict(mark.call).items()
        if not k.endswith("_ids") and k not in ("logprobs", "extra")
    }
    if text:
        about = {k: v for k, v in about.items() if k not in ("sampling", "spans", "context")}
    about |= {"prompt": mark.prompt_tokens, "sampled": mark.sampled, "continues": link.mark.id if link else None}
    logprobs = None
    if mark.logprobs is not None:
        logprobs = [float(x) if np.isfinite(x) else None for x in mark.logprobs]
    return ShownCall(
        head={**about, **dict(mark.call.extra)},
        shared=shared,
        new=say(new) if say else plain_ids(new),
        completion=say(completion) if say else plain_ids(completion),
        logprobs=logprobs,
        prompt_ids=None if text else tokens[: mark.prompt_tokens].tolist(),
        completion_ids=None if text else completion,
    )


# ---- choose --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chosen:
    """What the rules keep of one execution, in the order of priority, and why the rest is not."""

    execution: str
    kept: tuple[dict[str, Any], ...]
    passed_over: tuple[dict[str, Any], ...]
    stubs: tuple[dict[str, Any], ...]
    sampled: int
    owned: int
    dropped: dict[str, int]
    flattened: int
    packed: int

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def lines(self) -> list[str]:
        share = self.owned / self.sampled if self.sampled else 0.0
        out = [
            f"{self.execution}: {len(self.kept)} kept, {self.owned:,} of {self.sampled:,} sampled tokens trained "
            f"({share:.0%}); {self.flattened:,} tokens as rows, {self.packed:,} tree-packed"
        ]
        groups = (("kept", self.kept), ("passed over", self.passed_over), ("stub", self.stubs))
        for what, rows in groups:
            out += [
                f"  {what:<12} {r['kind']:<18} ends in {short(r['leaf']):<14} {r['tokens']:>9,} tokens, "
                f"{r['new']:>8,} new  {r['why']}"
                for r in rows
            ]
        if self.dropped:
            out.append("  sampled, not trained: " + ", ".join(f"{why} {n:,}" for why, n in self.dropped.items()))
        return out


def chosen(execution: Execution, rules: Rules = DEFAULT) -> Chosen:
    """The choice for one execution, explained."""
    if execution.level == "text":
        sampled = execution.forest.sampled_tokens
        return Chosen(execution.id, (), (), (), sampled, 0, {"text level (no ids, no logprobs)": sampled}, 0, 0)
    choice = choose(execution.forest, rules, withheld=execution.withheld(rules))
    full = f"slots are full (Jmax {rules.jmax})"
    slots = iter(range(1, len(choice.kept) + 1))
    kept = [
        _row(t, f"attached to slot path, costs {t.new_tokens:,}" if t.stub else _why(next(slots), t.kind))
        for t in choice.kept
    ]
    passed = [_row(t, full if t.new_tokens else "adds nothing new") for t in choice.passed_over]
    attached = {t.id for t in choice.kept if t.stub}
    stubs = [_row(t, "its turn came back changed: no slot") for t in choice.stubs if t.id not in attached]
    segments = {
        s: min(s.end, max(t.end for t in choice.kept if s in t.path)) - s.start for t in choice.kept for s in t.path
    }
    return Chosen(
        execution=execution.id,
        kept=tuple(kept),
        passed_over=tuple(passed),
        stubs=tuple(stubs),
        sampled=choice.sampled,
        owned=choice.owned,
        dropped=dict(choice.dropped),
        flattened=sum(t.end for t in choice.kept),
        packed=sum(segments.values()),
    )


def _why(slot: int, kind: str) -> str:
    order = CLASSES.index(kind) + 1
    return f"slot {slot}: class {order} of {len(CLASSES)}, most new tokens in it"


def _row(trajectory: Any, why: str) -> dict[str, Any]:
    return {
        "leaf": trajectory.id,
        "kind": trajectory.kind,
        "tokens": trajectory.end,
        "new": trajectory.new_tokens,
        "why": why,
    }


def choices(source: Source, rules: Rules = DEFAULT, *, on_bytes: OnBytes | None = None) -> Iterator[Chosen]:
    for execution in Stream(source, on_bytes=on_bytes).executions():
        yield chosen(execution, rules)


# ---- diff ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """One thing that two recordings do not have in common."""

    what: str  # only-left, only-right, tokens, logprobs, reward, about
    execution: str
    call: str
    text: str


@dataclass(frozen=True)
class Diff:
    """All differences; equal executions have one digest whatever their form."""

    executions: int
    calls: int
    same: int
    differences: tuple[Difference, ...]

    @property
    def ok(self) -> bool:
        return not self.differences

    def as_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "equal": self.ok}

    def lines(self, shown: int = 40) -> list[str]:
        if self.ok:
            return [f"equal: {sizes(self.executions, self.calls)}, one forest each"]
        plural = "s" if len(self.differences) > 1 else ""
        out = [f"{len(self.differences):,} difference{plural}; {self.same:,} of {self.calls:,} calls are the same"]
        out += [f"  {d.what:<10} {d.execution} {d.call}: {d.text}" for d in self.differences[:shown]]
        return out + ([f"  … {len(self.differences) - shown:,} more"] if len(self.differences) > shown else [])


def diff(left: Source, right: Source) -> Diff:
    """Two recordings, in whatever form each is, call by call."""
    a, b = load(left), load(right)
    out: list[Difference] = []
    calls = same = 0
    for name in sorted({*a.executions, *b.executions}):
        if name not in a.executions or name not in b.executions:
            side, other = ("only-left", a) if name in a.executions else ("only-right", b)
            out.append(Difference(side, name, "", f"{len(other.executions[name].forest):,} calls"))
            calls += len(other.executions[name].forest)
            continue
        found, equal, total = _of_execution(a.executions[name], b.executions[name])
        out += found
        same, calls = same + equal, calls + total
    return Diff(len({*a.executions, *b.executions}), calls, same, tuple(out))


def _of_execution(a: Execution, b: Execution) -> tuple[list[Difference], int, int]:
    out: list[Difference] = []
    ids = sorted({m.id for m in a.forest.marks()} | {m.id for m in b.forest.marks()})
    for call in ids:
        if call not in a.forest or call not in b.forest:
            out.append(Difference("only-left" if call in a.forest else "only-right", a.id, call, "a call"))
        elif (found := _of_call(a, b, a.forest, b.forest, a.forest[call], b.forest[call])) is not None:
            out.append(found)
    alike = len(ids) - len(out)
    left, right = a.reward, b.reward
    if (left.status, left.value) != (right.status, right.value) if left and right else left is not right:
        text = f"{_score(left)} against {_score(right)}"
        out.append(Difference("reward", a.id, "", text))
    return out, alike, len(ids)


def _score(reward: Any) -> str:
    return "nothing" if reward is None else f"{reward.status} {reward.value}"


def _of_call(a: Execution, b: Execution, left: Forest, right: Forest, x: Mark, y: Mark) -> Difference | None:
    if a.level != b.level:
        return Difference("about", a.id, x.id, f"{a.level} level against {b.level} level")
    one, two = left.tokens(x), right.tokens(y)
    if x.prompt_tokens != y.prompt_tokens or len(one) != len(two) or not np.array_equal(one, two):
        n = min(len(one), len(two))
        differs = np.flatnonzero(one[:n] != two[:n])
        at = int(differs[0]) if len(differs) else n
        sizes = f"{x.prompt_tokens:,}+{x.sampled:,} against {y.prompt_tokens:,}+{y.sampled:,}"
        return Difference("tokens", a.id, x.id, f"first at {at:,} ({sizes})")
    if (x.logprobs is None) != (y.logprobs is None):
        return Difference("logprobs", a.id, x.id, "one side has none")
    if x.logprobs is not None and y.logprobs is not None and x.logprobs.tobytes() != y.logprobs.tobytes():
        return Difference("logprobs", a.id, x.id, "other numbers")
    for name in ("label", "purpose", "finish", "agent", "spans"):
        if getattr(x.call, name) != getattr(y.call, name):
            return Difference("about", a.id, x.id, f"{name}: {getattr(x.call, name)} against {getattr(y.call, name)}")
    return None
