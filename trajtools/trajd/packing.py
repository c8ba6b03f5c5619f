"""A closed group as micro-steps: forests, choice, advantages, packed sequences, and what is worth reporting. Pure.

The same calls and the same configuration give the same micro-steps, bytes included: a restart packs again instead of
storing a second copy. Executions whose outcome does not count are not read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from gyre_base.config import Config
from gyre_base.ids import PolicyVersion
from gyre_base.messages import GroupClosed
from gyre_base.microstep import MicroStep, PackedExecution
from trajtools.breaks import Analysis, analyse
from trajtools.choose import Choice, Rules, choose
from trajtools.forest import Forest
from trajtools.pack import micro_steps, owned_ranges, pack
from trajtools.trajd.events import OwnedRange, Packed, PackedStep
from trajtools.trajd.index import Extent, Loaded, damage
from trajtools.weigh import GroupWeights, Result, group_weights, weight_of


@dataclass(frozen=True, eq=False)
class PackedGroup:
    """What the ledger is told, and the wire form of each micro-step by id."""

    packed: Packed
    payloads: Mapping[str, tuple[dict[str, Any], bytes]]


@dataclass(frozen=True, eq=False)
class _Member:
    """One execution that counts."""

    forest: Forest
    analysis: Analysis
    choice: Choice
    damage: Counter[str]


def pack_group(closed: GroupClosed, load: Callable[[str], Loaded], extent: Extent, config: Config) -> PackedGroup:
    """Everything between the call log and the ledger. `extent` is how far `load` reads; it is recorded."""
    options = config.trajectories
    results = [Result(execution=e.execution, outcome=e.outcome, score=e.score) for e in closed.executions]
    weights = group_weights(results, eps=options.eps, n_min=options.min_valid)
    advantages = dict(weights.advantages)
    if options.shuffle_advantages:
        advantages = _shuffled(advantages, f"{config.scheduler.seed}:{closed.group}")
    rules = rules_of(config)
    members = [_member(name, load(name), rules) for name in advantages]
    step = PolicyVersion.parse(closed.dispatched_version).step
    packed = [
        pack(m.choice, group=closed.group, advantage=advantages[m.forest.execution], dispatched_step=step)
        for m in members
        if m.choice.owned
    ]
    for execution in packed:
        execution.check()
    enough = weights.enough and bool(packed)
    bins = micro_steps(packed, config.trainer.micro_step_tokens) if enough else []
    owned = {m.forest.execution: owned_ranges(m.choice) for m in members}
    steps = {f"{closed.group}.{i}": executions for i, executions in enumerate(bins)}
    return PackedGroup(
        Packed(
            group=closed.group,
            enough=enough,
            counted=len(packed) if enough else 0,
            owned_tokens=sum(e.total_owned for e in packed) if enough else 0,
            steps=tuple(_step(name, executions, owned) for name, executions in steps.items()),
            extent=tuple(sorted(extent.items())),
            summary=_summary(closed, weights, members, packed),
        ),
        {name: MicroStep(tuple(executions)).to_wire() for name, executions in steps.items()},
    )


def rules_of(config: Config) -> Rules:
    """How to choose, from the configuration's words."""
    options = config.trajectories
    return Rules(
        jmax=options.jmax or None,
        rule="greedy" if options.rule == "greedy" else "paper",
        seed=config.scheduler.seed,
    )


def _member(execution: str, loaded: Loaded, rules: Rules) -> _Member:
    forest = Forest(execution)
    for call in loaded.calls:
        forest.insert(call)
    analysis = analyse(forest)
    withheld = "conflict" if loaded.report.conflicts else None
    return _Member(forest, analysis, choose(forest, rules, analysis, withheld=withheld), damage(loaded.report))


def _shuffled(advantages: dict[str, float], seed: str) -> dict[str, float]:
    """The control arm: the same values, given to the wrong executions of the group."""
    rng = np.random.default_rng(xxhash.xxh3_64_intdigest(f"shuffle:{seed}".encode()))
    values = list(advantages.values())
    return dict(zip(advantages, (values[i] for i in rng.permutation(len(values))), strict=True))


def _step(name: str, executions: list[PackedExecution], owned: Mapping[str, tuple[OwnedRange, ...]]) -> PackedStep:
    return PackedStep(
        id=name,
        tokens=sum(map(len, executions)),
        weight=sum(map(weight_of, executions)),
        owned=tuple(owned_range for e in executions for owned_range in owned[e.execution]),
    )


def _summary(
    closed: GroupClosed, weights: GroupWeights, members: list[_Member], packed: list[PackedExecution]
) -> dict[str, Any]:
    forests, choices = [m.forest for m in members], [m.choice for m in members]
    recorded = sum(f.prompt_tokens + f.sampled_tokens for f in forests)
    leaves = Counter(t.kind for c in choices for t in (*c.kept, *c.passed_over))
    trained = _added(c.by_kind() for c in choices)
    total = sum(trained.values())
    return {
        "task": closed.task,
        "dispatched_version": closed.dispatched_version,
        "executions": len(closed.executions),
        "removed": dict(Counter(outcome for _, outcome, _ in weights.removed)),
        "mean_score": weights.mean,
        "std_score": weights.std,
        "calls": sum(map(len, forests)),
        "tokens_recorded": recorded,
        "tokens_stored": sum(f.unique_tokens() for f in forests),
        "tokens_sampled": sum(f.sampled_tokens for f in forests),
        "tokens_owned": sum(c.owned for c in choices),
        "tokens_packed": sum(map(len, packed)),
        "dropped": dict(_added(c.dropped for c in choices)),
        "leaves_by_class": dict(leaves),
        "owned_by_class": dict(trained),
        "share_by_class": {kind: n / total for kind, n in trained.items()} if total else {},
        "passed_over": sum(len(c.passed_over) for c in choices),
        "breaks": dict(Counter(b.kind for m in members for b in m.analysis.breaks)),
        "damage": dict(_added(m.damage for m in members)),
    }


def _added(counts: Iterable[Mapping[str, int]]) -> Counter[str]:
    out: Counter[str] = Counter()
    for one in counts:
        out.update(one)
    return out
