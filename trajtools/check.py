"""The invariants of a call log, one by one, with the call and the byte offset where one fails.

Owns the list. A rule that holds is reported too: "checked" is not "not looked at". Repairs nothing.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from gyre_base.microstep import PackError
from gyre_base.runfile import LABELS, LOGPROB_MAX, Call, context_digest
from gyre_base.vocabulary import Outcome
from trajtools.breaks import analyse
from trajtools.choose import DEFAULT, Rules, choose
from trajtools.forest import Forest
from trajtools.load import OnBytes, Source, load
from trajtools.pack import context_mismatches, pack
from trajtools.recording import Execution, Recording, whole_call
from trajtools.weigh import weight_of
from trajtools.words import sizes

SHOWN = 20  # findings per rule that a report carries; all are counted
RULES = {
    "readable": "every line or frame is a record",
    "unique-id": "one payload per call id",
    "logprob-length": "as many logprobs as completion tokens, or none",
    "logprob-range": "finite logprobs are at most 0 (+1e-4)",
    "token-range": "ids below the vocabulary size",
    "version-spans": "version spans tile the completion",
    "times": "a call ends after it starts",
    "labels": "labels and outcomes are known words",
    "context": "the prompt is the one the engine got",
    "complete": "no call is missing",
    "conservation": "sampled = owned + dropped",
    "packed": "packed contexts are the recorded ones, each owned token once",
    "weights": "the weights of an execution sum to 1",
    "order": "any order of the calls gives the same forest",
}


@dataclass(frozen=True)
class Finding:
    """One place where a rule does not hold. `offset` is the byte offset of the record, -1 where there is none."""

    rule: str
    execution: str
    call: str
    offset: int
    text: str


@dataclass(frozen=True)
class CheckReport:
    """Every rule looked at with the number of its findings; the first few of each."""

    executions: int
    calls: int
    counts: dict[str, int]
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        return not any(self.counts.values())

    def as_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "ok": self.ok}

    def lines(self) -> list[str]:
        """For a person; the first line is the verdict."""
        wrong = sum(self.counts.values())
        verdict = "all rules hold" if self.ok else f"{wrong:,} finding{'s' if wrong > 1 else ''}"
        out = [f"{sizes(self.executions, self.calls)}, {len(self.counts)} rules: {verdict}"]
        out += [f"  {'ok  ' if not n else f'{n:>4}'} {rule:<15} {RULES[rule]}" for rule, n in self.counts.items()]
        for f in self.findings:
            where = " ".join(x for x in (f.execution, f.call, f"at byte {f.offset}" if f.offset >= 0 else "") if x)
            out.append(f"  {f.rule}: {where}: {f.text}")
        return out


def check(
    source: Source, *, shuffles: int = 0, rules: Rules = DEFAULT, seed: int = 0, on_bytes: OnBytes | None = None
) -> CheckReport:
    """Look at every rule; `order` only if `shuffles` > 0 (each one builds every forest again)."""
    early: list[Finding] = []
    recording = load(source, on_call=lambda call: early.extend(_of_call(call)), on_bytes=on_bytes)
    found = [*_of_lines(recording), *(_located(f, recording) for f in early)]
    for execution in recording.executions.values():
        found.extend(_of_execution(execution, recording, rules))
    if shuffles:
        found.extend(_of_order(recording, shuffles, seed))
    by_rule: dict[str, list[Finding]] = defaultdict(list)
    for finding in found:
        by_rule[finding.rule].append(finding)
    looked_at = [rule for rule in RULES if rule != "order" or shuffles]
    return CheckReport(
        executions=len(recording.executions),
        calls=sum(len(e.forest) for e in recording.executions.values()),
        counts={rule: len(by_rule[rule]) for rule in looked_at},
        findings=tuple(f for rule in looked_at for f in by_rule[rule][:SHOWN]),
    )


def _located(finding: Finding, recording: Recording) -> Finding:
    offset = recording.executions[finding.execution].offsets.get(finding.call, -1)
    return dataclasses.replace(finding, offset=offset)


def _of_lines(recording: Recording) -> Iterator[Finding]:
    for report in recording.reports.values():
        yield from (Finding("readable", "", "", bad.offset, bad.reason) for bad in report.bad)
        yield from (Finding("logprob-length", "", "", bad.offset, bad.reason) for bad in report.defects)
        if report.torn:
            yield Finding(
                "readable", "", "", report.torn[0], f"the last {report.unit} is torn ({report.torn[1]} bytes)"
            )
    for execution, call, offset in recording.conflicts:
        yield Finding("unique-id", execution, call, offset, "came twice with different tokens or logprobs")


def _of_call(call: Call) -> Iterator[Finding]:
    def finding(rule: str, text: str) -> Finding:
        return Finding(rule, call.exec, call.call, -1, text)

    if call.logprobs is not None and len(call.logprobs) and np.nanmax(call.logprobs, initial=-np.inf) > LOGPROB_MAX:
        yield finding("logprob-range", f"a logprob of {float(np.nanmax(call.logprobs)):.4g}")
    if call.t1 < call.t0:
        yield finding("times", f"ends {call.t0 - call.t1:.3f} s before it starts")
    if call.label not in LABELS:
        yield finding("labels", f"label {call.label!r} is none of {', '.join(LABELS)}")
    if call.context is not None and call.context != context_digest(call.prompt_ids):
        yield finding("context", "the recorded digest of the prompt is another one")
    edges = [0, *(edge for span in call.spans for edge in (span.start, span.end)), len(call.completion_ids)]
    if call.spans and (edges[::2] != edges[1::2] or edges != sorted(edges)):
        yield finding("version-spans", f"{[(s.start, s.end) for s in call.spans]} of {len(call.completion_ids)} tokens")


def _of_execution(execution: Execution, recording: Recording, rules: Rules) -> Iterator[Finding]:
    yield from _of_bounds(execution, recording.vocab)
    yield from _of_completeness(execution)
    choice = choose(execution.forest, rules, withheld=execution.withheld(rules))
    total = choice.owned + sum(choice.dropped.values())
    if total != choice.sampled:
        text = f"{choice.sampled} sampled, {choice.owned} owned, dropped {dict(choice.dropped)}"
        yield Finding("conservation", execution.id, "", -1, text)
    packed = pack(choice)
    try:
        packed.check()
    except PackError as error:
        yield Finding("packed", execution.id, "", -1, str(error))
    if wrong := context_mismatches(packed):
        yield Finding("packed", execution.id, "", -1, f"{wrong} completions stand in another context than recorded")
    if choice.owned and abs(weight_of(packed) - 1.0) > 1e-9:
        yield Finding("weights", execution.id, "", -1, f"{weight_of(packed)!r}")


def _of_bounds(execution: Execution, vocab: int | None) -> Iterator[Finding]:
    for segment in execution.forest.segments() if vocab else ():
        if len(segment) and int(segment.tokens.max()) >= (vocab or 0):
            call = segment.marks[0].id if segment.marks else ""
            text = f"id {int(segment.tokens.max())} with a vocabulary of {vocab}"
            yield Finding("token-range", execution.id, call, execution.offsets.get(call, -1), text)


def _of_completeness(execution: Execution) -> Iterator[Finding]:
    reward = execution.reward
    if reward is not None and reward.status not in {outcome.value for outcome in Outcome}:
        yield Finding("labels", execution.id, "", -1, f"outcome {reward.status!r} is not a known one")
    for call, text in execution.missing():
        yield Finding("complete", execution.id, call, -1, text)


def _of_order(recording: Recording, shuffles: int, seed: int) -> Iterator[Finding]:
    rng = np.random.default_rng(seed)
    for execution in recording.executions.values():
        forest = execution.forest
        marks = forest.marks()
        digest, links = forest.digest(), {k: (v.mark.id, v.shared) for k, v in analyse(forest).links.items()}
        for _ in range(shuffles):
            again = Forest(execution.id)
            for i in rng.permutation(len(marks)).tolist():
                again.insert(whole_call(forest, marks[i]))
            if again.digest() != digest or {k: (v.mark.id, v.shared) for k, v in analyse(again).links.items()} != links:
                yield Finding("order", execution.id, "", -1, f"another order gives {again.digest()}, not {digest}")
