"""`sample`: training samples as JSON objects, flattened (one per trajectory) or tree-packed (one per execution).

Owns the outer form; which tokens is `choose`'s, their order `pack`'s, advantages `weigh`'s. Both forms are made of the
same selection. Executions whose outcome does not count get no advantage: null, never 0.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gyre_base.microstep import PackedExecution
from gyre_base.vocabulary import Outcome
from trajtools.choose import DEFAULT, Choice, Rules, choose
from trajtools.pack import flatten, pack
from trajtools.recording import Execution, Recording
from trajtools.weigh import Result, group_weights
from trajtools.words import counted

FORMS = ("flat", "tree")


@dataclass(frozen=True)
class Sampled:
    """What was made."""

    form: str
    rows: int
    executions: int
    without_targets: int
    withheld: dict[str, int]  # reason -> executions kept out as a whole
    tokens: int
    owned: int
    weight: float

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def lines(self) -> list[str]:
        return [
            f"{counted(self.rows, f'{self.form} sample')} of {counted(self.executions, 'execution')}: {self.tokens:,} "
            f"tokens, {self.owned:,} trained, weights sum to {self.weight:.9f}; "
            f"nothing to train in {counted(self.without_targets, 'other')}",
            *(f"  {n:,} of them because of: {why}" for why, n in self.withheld.items()),
        ]


class Samples:
    """Rows of a recording; `summary` when they have been taken."""

    def __init__(self, recording: Recording, form: str = "flat", rules: Rules = DEFAULT) -> None:
        self._recording, self._form, self._rules = recording, form, rules
        self._rows = self._executions = self._empty = self._tokens = self._owned = 0
        self._weight = 0.0
        self._withheld: Counter[str] = Counter()

    def rows(self) -> Iterator[dict[str, Any]]:
        advantages = _advantages(self._recording)
        for name in sorted(self._recording.executions):
            execution = self._recording.executions[name]
            if execution.level == "text":
                self._empty += 1
                continue
            withheld = execution.withheld(self._rules)
            self._withheld.update([withheld] if withheld else [])
            choice = choose(execution.forest, self._rules, withheld=withheld)
            if not choice.owned:
                self._empty += 1
                continue
            self._executions += 1
            packed = pack(choice, group=execution.group, advantage=advantages.get(name) or 0.0)
            packed.check()
            for row in _flat(packed) if self._form == "flat" else [_tree(packed, choice)]:
                self._count(row, packed)
                yield {**row, "advantage": advantages.get(name), **_outcome(execution)}

    def summary(self) -> Sampled:
        weight = self._weight / self._executions if self._executions else 0.0
        return Sampled(
            form=self._form,
            rows=self._rows,
            executions=self._executions,
            without_targets=self._empty,
            withheld=dict(self._withheld),
            tokens=self._tokens,
            owned=self._owned,
            weight=weight,
        )

    def _count(self, row: dict[str, Any], packed: PackedExecution) -> None:
        owned = int(np.count_nonzero(row["owned"]))
        self._rows += 1
        self._tokens += len(row["tokens"])
        self._owned += owned
        self._weight += owned / packed.total_owned


def _outcome(execution: Execution) -> dict[str, Any]:
    reward = execution.reward
    return {"outcome": reward.status if reward else "unscored", "score": reward.value if reward else None}


def _advantages(recording: Recording) -> dict[str, float]:
    """By execution, of those that count in a group that has enough."""
    groups: dict[str, list[Result]] = defaultdict(list)
    known = {o.value: o for o in Outcome}
    for execution in recording.executions.values():
        reward = execution.reward
        outcome = known.get(reward.status, Outcome.UNSCORED) if reward else Outcome.UNSCORED
        result = Result(execution=execution.id, outcome=outcome, score=reward.value if reward else None)
        groups[execution.group].append(result)
    out: dict[str, float] = {}
    for results in groups.values():
        out.update(group_weights(results).advantages)
    return out


def _flat(packed: PackedExecution) -> Iterator[dict[str, Any]]:
    for row in flatten(packed):
        spans = _spans(packed, row.index)
        yield {
            "execution": row.execution,
            "group": row.group,
            "trajectory": row.trajectory,
            "class": row.kind,
            "owned_by_execution": row.total_owned,
            "weight": 1.0 / row.total_owned,
            "versions": spans,
            "tokens": row.tokens,
            "owned": row.owned.astype(np.int8),
            "trainable": row.trainable.astype(np.int8),
            "logprobs": _logprobs(row.logprob),
        }


def _spans(packed: PackedExecution, index: NDArray[np.int32]) -> list[list[Any]]:
    """Version spans in places of a row."""
    out: list[list[Any]] = []
    for span in packed.versions:
        here = np.flatnonzero((index >= span.start) & (index < span.end))
        if len(here):
            out.append([int(here[0]), int(here[-1]) + 1, span.version])
    return out


def _tree(packed: PackedExecution, choice: Choice) -> dict[str, Any]:
    tin, tout = intervals(packed.segments)
    return {
        "execution": packed.execution,
        "group": packed.group,
        "owned_by_execution": packed.total_owned,
        "weight": 1.0 / packed.total_owned,
        "paths": [
            {
                "trajectory": p.trajectory,
                "class": p.kind,
                "segments": list(p.segments),
                "owned": [list(r) for r in p.owned],
            }
            for p in packed.paths
        ],
        "versions": [[v.start, v.end, v.version] for v in packed.versions],
        "dropped": dict(choice.dropped),
        "segments": packed.segments.tolist(),
        "tin": tin,
        "tout": tout,
        "tokens": packed.tokens,
        "position": packed.position,
        "predecessor": packed.predecessor,
        "owned": packed.owned.astype(np.int8),
        "trainable": packed.trainable.astype(np.int8),
        "logprobs": _logprobs(packed.logprob),
    }


def intervals(segments: NDArray[np.int32]) -> tuple[list[int], list[int]]:
    """(tin, tout) per segment, depth first: a is above b (or b itself) iff tin[a] <= tin[b] < tout[a]."""
    count = len(segments)
    tin, tout = list(range(count)), list(range(1, count + 1))
    for i in range(count - 1, -1, -1):
        parent = int(segments[i, 2])
        if parent >= 0:
            tout[parent] = max(tout[parent], tout[i])
    return tin, tout


def _logprobs(values: NDArray[np.float32]) -> list[float | None]:
    return [float(v) if np.isfinite(v) else None for v in values]
