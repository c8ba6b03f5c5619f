"""Choosing: slots by class, stubs and retries take none, every sampled token has one fate."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trajbuild import Story, forest_of, random_execution

from trajtools.choose import CLASSES, Rules, choose

seeds = st.integers(0, 2**32)
rules = st.builds(
    Rules,
    jmax=st.sampled_from([1, 2, 5, None]),
    rule=st.sampled_from(["greedy", "paper"]),
    stubs=st.sampled_from(["drop", "attach", "keep"]),
    unlabelled=st.booleans(),
)


def kept(story, **kw):
    return [(t.id, t.kind) for t in choose(story.forest(), Rules(**kw)).kept]


@given(seed=seeds, rules=rules)
@settings(max_examples=150, deadline=None)
def test_every_sampled_token_is_owned_or_dropped_for_one_reason(seed, rules):
    calls = random_execution(np.random.default_rng(seed))
    choice = choose(forest_of(*calls), rules)
    assert choice.sampled == sum(len(c.completion_ids) for c in calls)
    assert choice.sampled == choice.owned + sum(choice.dropped.values())
    assert choice.owned == sum(t.new_tokens for t in choice.kept)


@given(seed=seeds, rules=rules)
@settings(max_examples=60, deadline=None)
def test_the_choice_does_not_depend_on_the_order_of_the_calls(seed, rules):
    rng = np.random.default_rng(seed)
    calls = random_execution(rng)
    once, again = (choose(forest_of(*x), rules) for x in (calls, rng.permutation(np.array(calls, object))))
    assert [(t.id, t.new_tokens) for t in once.kept] == [(t.id, t.new_tokens) for t in again.kept]
    assert once.owned_ranges == again.owned_ranges
    assert once.dropped == again.dropped


@given(seed=seeds, rules=rules)
@settings(max_examples=60, deadline=None)
def test_slots_are_bounded_and_classes_come_best_first(seed, rules):
    choice = choose(forest_of(*random_execution(np.random.default_rng(seed))), rules)
    slots = [CLASSES.index(t.kind) for t in choice.kept if not t.stub]
    assert rules.jmax is None or len(slots) <= rules.jmax
    assert slots == sorted(slots)
    assert all(t.new_tokens > 0 for t in choice.kept)


def branching_story():
    """main with a compaction and two sub-agents: four leaves, one of each class but one."""
    story = Story()
    text = story.say([1, 2, 3], [10, 11])
    sub = story.say([1, 20], [21, 22], agent="s1")
    story.say([*sub, 5], [23, 24, 25], agent="s1")
    story.say([1, 30], [31], agent="s2")
    text = story.say([*text, 6], [12, 13, 14])
    story.say([*text, 8], [50, 51], purpose="summary")
    story.say([1, 2, 50, 51], [15])
    return story


def test_classes_are_filled_in_order_and_shared_turns_are_owned_where_they_were_sampled():
    choice = choose(branching_story().forest())
    assert [(t.id, t.kind, t.new_tokens) for t in choice.kept] == [
        ("c6", "main", 1),
        ("c5", "main-summary", 7),
        ("c2", "sub-agent", 5),
        ("c3", "sub-agent", 1),
    ]
    assert choice.by_kind() == {"main": 1, "main-summary": 7, "sub-agent": 6}
    assert choice.dropped == {}


def test_a_small_jmax_takes_the_best_class_and_counts_the_rest():
    choice = choose(branching_story().forest(), Rules(jmax=2))
    assert [t.id for t in choice.kept] == ["c6", "c5"]
    assert choice.dropped == {"not-chosen": 6}
    assert [(t.id, t.new_tokens) for t in choice.passed_over] == [("c2", 5), ("c3", 1)]


def test_within_a_class_the_most_new_tokens_go_first():
    story = Story()
    text = story.say([1, 2, 3], [4] * 10)
    story.say([*text, 5, 5, 5], [6] * 3)
    story.say([*text, 5, 6, 5], [7] * 8)
    story.say([9, 9, 9, 9], [8] * 9)
    assert [t.new_tokens for t in choose(story.forest()).kept] == [18, 9, 3]


def drifting_story(turns=8):
    """Every third completion comes back with another second token; ends well."""
    story, text = Story(), [1, 2, 3]
    for i in range(turns):
        whole = story.say(text, [100 + i, 200 + i, 300 + i])
        text = [*text, 100 + i, 999, 300 + i, 7] if i % 3 == 0 else [*whole, 7]
    story.say(text, [42])
    return story


def test_stubs_of_drift_take_no_slot_and_their_tokens_are_counted():
    story = drifting_story()
    choice = choose(story.forest())
    assert [t.id for t in choice.kept] == ["c8"]
    assert [t.id for t in choice.stubs] == ["c0", "c3", "c6"]
    assert choice.dropped == {"stub": 6}
    assert choice.owned == 25 - 6


def test_attached_stubs_take_no_slot_and_lose_nothing_and_kept_ones_take_slots():
    attached = choose(drifting_story().forest(), Rules(stubs="attach", jmax=1))
    assert [(t.id, t.stub) for t in attached.kept] == [("c8", False), ("c0", True), ("c3", True), ("c6", True)]
    assert attached.owned == attached.sampled
    assert len(choose(drifting_story().forest(), Rules(stubs="keep", jmax=2)).kept) == 2


def test_a_trimmed_stop_token_is_a_stub():
    story = Story()
    story.say([1, 2], [3, 4, 99])
    story.say([1, 2, 3, 4, 5], [6, 99])
    choice = choose(story.forest())
    assert [t.id for t in choice.kept] == ["c1"]
    assert choice.dropped == {"stub": 1}


def test_a_lost_retry_takes_no_slot_and_its_tokens_are_counted():
    story = Story()
    story.say([1, 2, 3], [4, 5])
    text = story.say([1, 2, 3], [4, 6])
    story.say([*text, 7], [8])
    choice = choose(story.forest())
    assert [t.id for t in choice.kept] == ["c2"]
    assert choice.dropped == {"retry": 2}
    assert choice.owned_ranges == (("c1", 0, 2), ("c2", 0, 1))


def test_two_undecided_final_answers_leave_the_shared_prefix_trainable():
    story = Story()
    text = story.say([1, 2], [3, 4])
    story.say([*text, 5], [6], took=5.0, t0=10.0)
    story.say([*text, 5], [7], took=5.0, t0=11.0)
    choice = choose(story.forest())
    assert [t.id for t in choice.kept] == ["c0"]
    assert choice.dropped == {"retry": 2}


def test_an_undelivered_last_answer_is_left_out_but_an_undelivered_one_in_use_is_not():
    story = Story()
    text = story.say([1, 2], [3, 4], delivered=False)
    story.say([*text, 5], [6], delivered=False)
    choice = choose(story.forest())
    assert choice.owned_ranges == (("c0", 0, 2),)
    assert choice.dropped == {"undelivered": 1}


@pytest.mark.parametrize(
    ("label", "reason"), [("unlabelled", "unlabelled"), ("side", "side"), ("new-word", "unlabelled")]
)
def test_calls_that_are_not_the_conversation_are_left_out(label, reason):
    story = Story()
    text = story.say([1, 2], [3, 4])
    story.say([*text, 9], [8, 8], label=label)
    choice = choose(story.forest())
    assert [t.id for t in choice.kept] == ["c0"]
    assert choice.dropped == {reason: 2}


def test_unlabelled_calls_are_trained_on_request():
    story = Story()
    story.say([1, 2], [3, 4], label="unlabelled")
    assert kept(story) == []
    assert kept(story, unlabelled=True) == [("c0", "main")]


def test_a_token_without_a_finite_logprob_is_context():
    story = Story()
    text = story.say([1], [2, 3, 4, 5, 6], logprobs=[-1, np.nan, -9999, 0.5, -1])
    story.say([*text, 7], [8, 9], logprobs=None)
    choice = choose(story.forest())
    assert choice.owned_ranges == (("c0", 0, 1), ("c0", 4, 5))
    assert choice.dropped == {"untrainable": 5}


def test_without_a_prompt_a_token_has_no_context_and_is_no_target():
    story = Story()
    story.say([], [2, 3])
    assert kept(story) == []


def test_the_papers_draw_is_seeded_and_in_proportion_to_new_tokens():
    story = Story()
    story.say([1, 2], [3] * 90)
    story.say([2, 2], [4] * 10)
    forest = story.forest()
    firsts = [choose(forest, Rules(rule="paper", seed=s, jmax=1)).kept[0].id for s in range(400)]
    assert firsts == [choose(forest, Rules(rule="paper", seed=s, jmax=1)).kept[0].id for s in range(400)]
    assert 0.84 < firsts.count("c0") / 400 < 0.96


def test_turns_kept_after_a_compaction_are_context_there_and_owned_where_they_were_sampled():
    story = Story()
    text = story.say([1, 2, 3], [10, 11])
    text = story.say([*text, 6, 6], [12, 13])
    story.say([*text, 8], [50, 51], purpose="summary")
    story.say([1, 2, 3, 10, 11, 50, 51], [15])
    choice = choose(story.forest())
    assert [(t.id, t.new_tokens) for t in choice.kept] == [("c3", 3), ("c2", 4)]
    assert sorted(choice.owned_ranges) == [("c0", 0, 2), ("c1", 0, 2), ("c2", 0, 2), ("c3", 0, 1)]


def test_of_two_calls_that_end_in_the_same_place_the_earliest_names_the_leaf_and_owns_the_tokens():
    story = Story()
    story.say([1, 2], [3, 4], agent="s2")
    story.say([1, 2], [3, 4], agent="s1")
    choice = choose(story.forest())
    assert [t.id for t in choice.kept] == ["c0"]
    assert choice.dropped == {"duplicate": 2}
