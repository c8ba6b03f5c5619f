"""Packing: the tree says what the rows say, each owned token once, in the context that the engine had."""

from __future__ import annotations

import dataclasses
from collections import Counter

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from trajbuild import Story, forest_of, random_execution

from gyre_base.microstep import MicroStep
from gyre_base.runfile import Span
from gyre_base.vocabulary import Outcome
from trajtools.choose import Rules, choose
from trajtools.pack import context_mismatches, flatten, micro_steps, owned_ranges, pack
from trajtools.weigh import Result, group_weights, weight_of, weight_sum

seeds = st.integers(0, 2**32)
rules = st.builds(
    Rules, jmax=st.sampled_from([1, 5, None]), rule=st.sampled_from(["greedy", "paper"]),
    stubs=st.sampled_from(["drop", "attach", "keep"]), unlabelled=st.booleans(),
)  # fmt: skip


def packed_execution(seed, rules=None, execution="e"):
    calls = random_execution(np.random.default_rng(seed), execution=execution)
    choice = choose(forest_of(*calls), rules or Rules())
    return calls, choice, pack(choice, group="g", advantage=0.5, dispatched_step=3)


def targets_of_tree(packed):
    """(context, target, logprob) of every owned token, by walking predecessors."""
    out = Counter()
    for i in np.flatnonzero(packed.owned).tolist():
        context, at = [], int(packed.predecessor[i])
        while at >= 0:
            context.append(int(packed.tokens[at]))
            at = int(packed.predecessor[at])
        out[tuple(context[::-1]), int(packed.tokens[i]), float(packed.logprob[i])] += 1
    return out


def targets_of_rows(rows):
    return Counter(
        (tuple(row.tokens[:i].tolist()), int(row.tokens[i]), float(row.logprob[i]))
        for row in rows
        for i in np.flatnonzero(row.owned).tolist()
    )


@given(seed=seeds, rules=rules)
@settings(max_examples=120, deadline=None)
def test_tree_and_rows_have_the_same_contexts_and_targets(seed, rules):
    _, choice, packed = packed_execution(seed, rules)
    packed.check()
    tree, rows = targets_of_tree(packed), targets_of_rows(flatten(packed))
    assert tree == rows
    assert sum(tree.values()) == packed.total_owned == choice.owned


@given(seed=seeds, rules=rules)
@settings(max_examples=80, deadline=None)
def test_each_owned_token_was_sampled_in_exactly_its_packed_context(seed, rules):
    calls, choice, packed = packed_execution(seed, rules)
    recorded = set()
    by_id = {call.call: call for call in calls}
    for name, start, end in choice.owned_ranges:
        call = by_id[name]
        for i in range(start, end):
            context = (*call.prompt_ids.tolist(), *call.completion_ids[:i].tolist())
            recorded.add((context, int(call.completion_ids[i]), float(call.logprobs[i])))
    tree = targets_of_tree(packed)
    assert set(tree) == recorded
    assert not tree or max(tree.values()) == 1
    assert context_mismatches(packed) == 0
    assert len({r[1] for r in owned_ranges(choice)}) == len(packed.calls)


@given(seed=seeds)
@settings(max_examples=60, deadline=None)
def test_a_shared_prefix_is_packed_once_and_the_best_trajectory_comes_first(seed):
    _, choice, packed = packed_execution(seed)
    rows = flatten(packed)
    prefixes = {tuple(row.tokens[: i + 1].tolist()) for row in rows for i in range(len(row.tokens))}
    assert len(packed) == len(prefixes)
    assert [len(row.tokens) for row in rows] == [t.end for t in choice.kept]
    if rows:
        assert rows[0].index.tolist() == list(range(len(rows[0].tokens)))
    parents = packed.segments[:, 2].tolist()
    assert all(parents.count(i) != 1 for i in range(len(parents)))  # unbranched runs are joined


@given(seed=seeds)
@settings(max_examples=40, deadline=None)
def test_the_wire_gives_back_what_was_packed(seed):
    packed = [packed_execution(seed + i, execution=f"e{i}")[2] for i in range(3)]
    layout, payload = MicroStep(tuple(packed)).to_wire()
    layout = msgspec.msgpack.decode(msgspec.msgpack.encode(layout))
    back = MicroStep.from_wire(layout, payload).executions
    for a, b in zip(packed, back, strict=True):
        for field in dataclasses.fields(a):
            x, y = getattr(a, field.name), getattr(b, field.name)
            same = np.array_equal(x, y, equal_nan=x.dtype.kind == "f") if isinstance(x, np.ndarray) else x == y
            assert same, field.name


def test_a_changed_token_before_a_completion_is_a_context_mismatch():
    story = Story()
    text = story.say([1, 2, 3], [4, 5])
    story.say([*text, 6], [7])
    packed = pack(choose(story.forest()))
    assert context_mismatches(packed) == 0
    tokens = packed.tokens.copy()
    tokens[5] = 60
    assert context_mismatches(dataclasses.replace(packed, tokens=tokens)) == 1
    tokens[1] = 20
    assert context_mismatches(dataclasses.replace(packed, tokens=tokens)) == 2


def test_a_packed_tree_by_hand():
    story = Story()
    text = story.say([1, 2], [3, 4])
    story.say([*text, 5], [6])
    story.say([1, 9], [8, 8], agent="s1")
    packed = pack(choose(story.forest()), group="g", advantage=-1.0, dispatched_step=7)
    assert packed.tokens.tolist() == [1, 2, 3, 4, 5, 6, 9, 8, 8]
    assert packed.position.tolist() == [0, 1, 2, 3, 4, 5, 1, 2, 3]
    assert packed.predecessor.tolist() == [-1, 0, 1, 2, 3, 4, 0, 6, 7]
    assert packed.owned.astype(int).tolist() == [0, 0, 1, 1, 0, 1, 0, 1, 1]
    assert packed.segments.tolist() == [[0, 1, -1], [1, 6, 0], [6, 9, 0]]
    assert [(p.trajectory, p.kind, p.segments, p.owned) for p in packed.paths] == [
        ("c1", "main", (0, 1), ((2, 4), (5, 6))),
        ("c2", "sub-agent", (0, 2), ((7, 9),)),
    ]
    assert [(c.call, c.start, c.end, c.prompt_length) for c in packed.calls] == [
        ("c0", 2, 4, 2), ("c1", 5, 6, 5), ("c2", 7, 9, 2),
    ]  # fmt: skip
    assert (packed.group, packed.advantage, packed.total_owned, packed.dispatched_step) == ("g", -1.0, 5, 7)


def test_version_spans_follow_their_tokens_into_the_packed_order():
    story = Story()
    text = story.say([1, 2], [3, 4, 5], spans=(Span("0.1", 0, 1), Span("0.2", 1, 3)))
    story.say([*text, 6], [7], spans=(Span("1.3", 0, 1),))
    packed = pack(choose(story.forest()))
    assert [(v.start, v.end, v.version) for v in packed.versions] == [(2, 3, "0.1"), (3, 5, "0.2"), (6, 7, "1.3")]


@given(seed=seeds, rules=rules)
@settings(max_examples=60, deadline=None)
def test_every_owned_token_has_the_version_that_sampled_it(seed, rules):
    calls, choice, packed = packed_execution(seed, rules)
    by_id = {call.call: call for call in calls}
    expected, found = Counter(), Counter()
    for name, start, end in choice.owned_ranges:
        for span in by_id[name].spans:
            expected[span.policy] += max(0, min(end, span.end) - max(start, span.start))
    owners = {c.call: c for c in packed.calls}
    assert set(owners) == {name for name, _, _ in choice.owned_ranges}
    for span in packed.versions:
        found[span.version] += int(packed.owned[span.start : span.end].sum())
    assert +found == +expected
    assert all(a.end <= b.start for a, b in zip(packed.versions, packed.versions[1:], strict=False))


def test_version_spans_of_a_completion_that_forks_inside():
    story = Story()
    story.say([1, 2], [3, 4, 5, 6], spans=(Span("0.1", 0, 3), Span("0.2", 3, 4)))
    story.say([1, 2, 3, 9, 9], [7], spans=(Span("0.3", 0, 1),))
    packed = pack(choose(story.forest(), Rules(stubs="attach")))
    assert packed.tokens.tolist() == [1, 2, 3, 9, 9, 7, 4, 5, 6]
    spans = [(v.start, v.end, v.version) for v in packed.versions]
    assert spans == [(2, 3, "0.1"), (5, 6, "0.3"), (6, 8, "0.1"), (8, 9, "0.2")]
    assert context_mismatches(packed) == 0


def test_micro_steps_keep_executions_whole_and_within_the_budget():
    packed = [packed_execution(seed)[2] for seed in range(12)]
    steps = micro_steps(packed, budget_tokens=60)
    assert sorted(id(p) for step in steps for p in step) == sorted(map(id, packed))
    assert all(sum(map(len, step)) <= 60 or len(step) == 1 for step in steps)
    assert micro_steps([], 10) == []


# ---- weights -------------------------------------------------------------------------------------------------------


@given(first=seeds, n=st.integers(1, 8))
@settings(max_examples=30, deadline=None)
def test_the_weights_of_a_batch_sum_to_one(first, n):
    packed = [packed_execution(first + i)[2] for i in range(n)]
    if any(p.total_owned for p in packed):
        assert abs(weight_sum(packed) - 1.0) < 1e-9
    assert all(weight_of(p) in (0.0, 1.0) for p in packed)


def result(name, outcome, score=None, duration=None):
    return Result(execution=name, outcome=outcome, score=score, duration_s=duration)


def test_advantages_use_population_deviation_over_the_outcomes_that_count():
    got = group_weights(
        [
            result("a", Outcome.SCORED, 1.0),
            result("b", Outcome.PARTIAL, 0.5),
            result("c", Outcome.NO_ARTIFACT),
            result("d", Outcome.EVALUATOR_FAILED, None, 12.0),
            result("e", Outcome.INFRA_FAILED),
            result("f", Outcome.CANCELLED, 1.0),
            result("g", Outcome.UNSCORED),
            result("h", Outcome.SCORED, None),
        ]
    )
    std = np.std([1.0, 0.5, 0.0])
    assert set(got.advantages) == {"a", "b", "c"}
    np.testing.assert_allclose(list(got.advantages.values()), [0.5 / (std + 1e-6), 0, -0.5 / (std + 1e-6)])
    assert got.counted == 3
    assert [r[:2] for r in got.removed] == [
        ("d", "evaluator_failed"), ("e", "infra_failed"), ("f", "cancelled"), ("g", "unscored"), ("h", "scored"),
    ]  # fmt: skip
    assert got.removed[0][2] == 12.0


def test_equal_scores_give_no_advantage_and_still_count():
    got = group_weights([result(str(i), Outcome.SCORED, 0.1) for i in range(7)])
    assert set(got.advantages.values()) == {0.0}
    assert (got.counted, got.std, got.enough) == (7, 0.0, True)


def test_a_group_with_too_few_values_is_not_enough():
    got = group_weights([result("a", Outcome.SCORED, 1.0), result("b", Outcome.INFRA_FAILED)])
    assert not got.enough
    assert got.advantages == {}
    assert group_weights([]).counted == 0
