"""A closed group becomes micro-steps that hold every owned token once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gyre_base import config as configuration
from gyre_base.config import Config
from gyre_base.messages import FinalExecution, GroupClosed
from gyre_base.microstep import MicroStep, PackedExecution
from gyre_base.vocabulary import Outcome
from tests.trajd.calls import Log
from trajtools.trajd.index import CallIndex
from trajtools.trajd.packing import PackedGroup, pack_group

SCORES = (0.0, 1.0, 0.5, 1.0)


def config(**trajectories: object) -> Config:
    return configuration.from_tree({"trajectories": trajectories, "trainer": {"micro_step_tokens": 120}})


def group(*outcomes: Outcome, scores: tuple[float, ...] = SCORES) -> GroupClosed:
    outcomes = outcomes or (Outcome.SCORED,) * len(scores)
    members = tuple(
        FinalExecution(execution=f"g-{i}", outcome=outcome, score=score if outcome.counts else None)
        for i, (outcome, score) in enumerate(zip(outcomes, scores, strict=True))
    )
    return GroupClosed(group="g", task="t", serial=3, dispatched_version="0.7", executions=members)


@pytest.fixture
def index(tmp_path: Path) -> CallIndex:
    log = Log(tmp_path)
    for i in range(len(SCORES)):
        log.execution(f"g-{i}", turns=2 + i, sub_agent=i == 3)
    made = CallIndex(tmp_path)
    made.scan()
    return made


def packs(index: CallIndex, closed: GroupClosed, options: Config) -> PackedGroup:
    return pack_group(closed, lambda name: index.load(name), index.extent, options)


def executions(made: PackedGroup) -> dict[str, PackedExecution]:
    steps = [MicroStep.from_wire(*payload) for payload in made.payloads.values()]
    assert sum(step.context_mismatches() for step in steps) == 0
    return {e.execution: e for step in steps for e in step.executions}


def test_an_execution_never_spans_micro_steps_and_each_owned_token_is_in_one(index: CallIndex):
    made = packs(index, group(), config())
    found = executions(made)
    assert sorted(found) == ["g-0", "g-1", "g-2", "g-3"] and len(made.payloads) > 1
    assert {e: int(p.owned.sum()) for e, p in found.items()} == {"g-0": 16, "g-1": 24, "g-2": 32, "g-3": 48}
    ranges = [r for step in made.packed.steps for r in step.owned]
    assert len(set(ranges)) == len(ranges) == 2 + 3 + 4 + 6
    assert sum(stop - start for _, _, start, stop in ranges) == made.packed.owned_tokens == 120
    assert sum(step.weight for step in made.packed.steps) == pytest.approx(made.packed.counted) == 4


def test_advantages_are_relative_to_the_executions_that_count(index: CallIndex):
    made = packs(index, group(Outcome.SCORED, Outcome.PARTIAL, Outcome.INFRA_FAILED, Outcome.SCORED), config())
    found = executions(made)
    assert {e: round(p.advantage, 3) for e, p in found.items()} == {"g-0": -1.414, "g-1": 0.707, "g-3": 0.707}
    assert all(p.dispatched_step == 7 and p.group == "g" for p in found.values())
    assert made.packed.summary["removed"] == {"infra_failed": 1}


def test_equal_scores_still_count(index: CallIndex):
    made = packs(index, group(scores=(1.0, 1.0, 1.0, 1.0)), config())
    assert made.packed.counted == 4 and all(p.advantage == 0.0 for p in executions(made).values())


def test_a_group_with_too_few_valid_executions_is_reported_not_packed(index: CallIndex):
    bad = (Outcome.INFRA_FAILED, Outcome.EVALUATOR_FAILED, Outcome.CANCELLED)
    made = packs(index, group(Outcome.SCORED, *bad), config())
    assert (made.packed.enough, made.packed.counted, made.packed.steps) == (False, 0, ())


def test_a_valid_execution_without_a_call_is_in_the_statistics_and_not_in_the_divisor(index: CallIndex):
    closed = group()
    silent = FinalExecution(execution="silent", outcome=Outcome.NO_ARTIFACT, score=None)
    made = packs(index, GroupClosed(**{**closed.__dict__, "executions": (*closed.executions, silent)}), config())
    assert made.packed.counted == 4 and made.packed.summary["mean_score"] == pytest.approx(2.5 / 5)


def test_a_group_without_any_owned_token_is_not_enough(index: CallIndex):
    closed = group()
    nobody = tuple(FinalExecution(execution=f"x{i}", outcome=Outcome.SCORED, score=float(i)) for i in range(3))
    assert not packs(index, GroupClosed(**{**closed.__dict__, "executions": nobody}), config()).packed.enough


@pytest.mark.parametrize("options", [config(), config(rule="draw", jmax=1), config(shuffle_advantages=True)])
def test_packing_again_gives_the_same_bytes(index: CallIndex, options: Config):
    first, second = (packs(index, group(), options) for _ in range(2))
    assert first.packed == second.packed and first.payloads == second.payloads


def test_the_control_arm_gives_the_same_advantages_to_other_executions(index: CallIndex):
    straight = executions(packs(index, group(), config()))
    shuffled = executions(packs(index, group(), config(shuffle_advantages=True)))
    before, after = ({e: p.advantage for e, p in found.items()} for found in (straight, shuffled))
    assert sorted(before.values()) == sorted(after.values()) and before != after


def test_jmax_bounds_the_trajectories_and_zero_means_no_bound(index: CallIndex):
    paths = {jmax: len(executions(packs(index, group(), config(jmax=jmax)))["g-3"].paths) for jmax in (1, 0)}
    assert paths == {1: 1, 0: 2}


def test_the_summary_says_what_was_recorded_stored_and_trained(index: CallIndex):
    summary = packs(index, group(), config()).packed.summary
    assert {
        k: summary[k] for k in ("calls", "tokens_sampled", "tokens_owned", "leaves_by_class", "owned_by_class")
    } == {
        "calls": 15,
        "tokens_sampled": 120,
        "tokens_owned": 120,
        "leaves_by_class": {"main": 4, "sub-agent": 1},
        "owned_by_class": {"main": 112, "sub-agent": 8},
    }
    assert summary["tokens_recorded"] > summary["tokens_stored"] == summary["tokens_packed"]
    assert summary["share_by_class"]["main"] == pytest.approx(112 / 120) and summary["breaks"] == {"sub-agent": 1}


def test_an_execution_whose_call_came_with_two_payloads_is_in_no_micro_step(tmp_path: Path):
    log = Log(tmp_path)
    for i in range(len(SCORES)):
        log.execution(f"g-{i}", turns=2 + i)
    Log(tmp_path, life=2).call("g-1", 1, np.arange(3, dtype=np.int32))  # c1 again, other tokens
    index = CallIndex(tmp_path)
    index.scan()
    made = packs(index, group(), config())
    assert sorted(executions(made)) == ["g-0", "g-2", "g-3"]
    summary = made.packed.summary
    assert summary["damage"] == {"conflicts": 1} and summary["dropped"]["conflict"] == 3 * 8
