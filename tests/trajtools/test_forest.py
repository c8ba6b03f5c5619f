"""The forest: one shape and one provenance for any order, and the kinds of break by hand."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trajbuild import Story, forest_of, make_call, random_execution

from gyre_base.microstep import ids_digest
from gyre_base.runfile import CallWriter, RunReader, context_digest, encode
from trajtools.breaks import analyse
from trajtools.forest import ConflictingCall, paint

seeds = st.integers(0, 2**32)


@given(seed=seeds)
@settings(max_examples=60, deadline=None)
def test_any_order_of_the_calls_gives_one_digest(seed):
    rng = np.random.default_rng(seed)
    calls = random_execution(rng)
    digest = forest_of(*calls).digest()
    for _ in range(3):
        assert forest_of(*rng.permutation(np.array(calls, object))).digest() == digest


@given(seed=seeds)
@settings(max_examples=60, deadline=None)
def test_the_forest_gives_every_call_back_and_stores_each_prefix_once(seed):
    calls = random_execution(np.random.default_rng(seed))
    forest = forest_of(*calls)
    prefixes = set()
    for call in calls:
        whole = [*call.prompt_ids.tolist(), *call.completion_ids.tolist()]
        assert forest.tokens(forest[call.call]).tolist() == whole
        prefixes.update(tuple(whole[: i + 1]) for i in range(len(whole)))
    assert forest.unique_tokens() == len(prefixes)
    for segment in forest.segments():
        assert len(segment.children) != 1  # a boundary exists only at a branch
        for mark in segment.marks:
            assert segment.start < mark.end <= segment.end


@given(seed=seeds)
@settings(max_examples=40, deadline=None)
def test_full_lines_delta_lines_and_shuffled_lines_give_one_digest(seed):
    rng = np.random.default_rng(seed)
    calls = random_execution(rng)
    full = [encode(call) for call in rng.permutation(np.array(calls, object))]
    writer, delta = CallWriter(keyframe_calls=4), []
    forest = forest_of(*calls)
    links = analyse(forest).links
    for mark, call in sorted(((forest[c.call], c) for c in calls), key=lambda x: (x[1].t0, x[1].seq)):
        found = links.get(mark.id)
        delta.append(writer.call(call, base=found.mark.id, keep=found.shared) if found else writer.call(call))
    for lines in (full, delta):
        reader = RunReader(io.BytesIO(b"".join(lines)))
        assert forest_of(*(x.record for x in reader.records())).digest() == _cleaned(calls)
        assert not reader.report.bad


def _cleaned(calls):
    """The digest after one trip through the file: non-finite logprobs become NaN."""
    reader = RunReader(io.BytesIO(b"".join(map(encode, calls))))
    return forest_of(*(x.record for x in reader.records())).digest()


def test_a_linear_conversation_is_one_segment():
    story, text = Story(), [1, 2]
    for i in range(50):
        text = [*story.say(text, [i, 3]), 4]
    forest = story.forest()
    assert len(forest.segments()) == 1
    assert len(forest.segments()[0].marks) == 50
    assert forest.unique_tokens() == len(text) - 1


def test_the_same_call_twice_is_ignored_and_another_one_under_its_id_refused():
    forest = forest_of(make_call())
    assert not forest.insert(make_call())
    with pytest.raises(ConflictingCall):
        forest.insert(make_call(completion=(4, 6)))
    with pytest.raises(ConflictingCall):
        forest.insert(make_call(logprobs=(-1.0, -1.0)))
    assert len(forest) == 1


def test_a_call_seen_after_the_prompt_that_contains_it_still_sampled_its_tokens():
    first, second = make_call("a", [1, 2], [3, 4], t1=1.0), make_call("b", [1, 2, 3, 4, 5], [6], t1=2.0)
    forest = forest_of(second, first)
    [(_, painted)] = paint(forest.marks()).items()
    assert painted.owner.tolist() == [-1, -1, 0, 0, -1, 1]
    assert painted.logprob[2:4].tolist() == [-0.5, -1.0]


def test_a_token_sampled_twice_belongs_to_the_earliest_commit_that_can_train_it():
    early = make_call("z", [1], [2, 3, 4], logprobs=[np.nan, -1, -1], t1=1.0)
    late = make_call("a", [1], [2, 3, 5], logprobs=[-2, -2, -2], t1=2.0)
    forest = forest_of(late, early)
    painted = paint(forest.marks())
    shared = next(s for s in forest.segments() if len(s) == 3)
    assert painted[shared].owner.tolist() == [-1, 1, 0]


def test_the_context_digest_is_the_one_that_ranks_check():
    ids = np.array([5, 6, 7], np.int32)
    assert context_digest(ids) == ids_digest(ids)


# ---- breaks by hand ------------------------------------------------------------------------------------------------


def kinds(story):
    return [(b.kind, b.call, b.against) for b in analyse(story.forest()).breaks]


def test_an_exact_continuation_is_no_break():
    story = Story()
    text = story.say([1, 2, 3], [4, 5])
    story.say([*text, 6], [7])
    assert kinds(story) == []


@pytest.mark.parametrize(
    ("back", "kind"),
    [
        ([10, 11, 12, 13, 14], "tail-trim"),
        ([10, 11, 12, 13], "tail-trim"),
        ([10, 11, 12], "drift"),
        ([], "drift"),
    ],
)
def test_a_break_in_the_last_completion_is_a_trim_of_its_end_or_a_drift(back, kind):
    story = Story()
    story.say([1, 2, 3], [10, 11, 12, 13, 14, 15])
    story.say([1, 2, 3, *back, 77, 78], [9])
    assert kinds(story) == [(kind, "c1", "c0")]


def test_a_change_before_the_last_completion_is_a_deep_edit():
    story = Story()
    text = story.say([1, 2, 3], [4, 5])
    story.say([*text, 6, 7, 8], [9])
    story.say([*text, 6, 99, 8, 9, 9, 9], [10])
    [edit] = analyse(story.forest()).breaks
    assert (edit.kind, edit.depth, edit.lost) == ("deep-edit", 6, 3)
    assert edit.expected == (7, 8, 9)
    assert edit.got == (99, 8, 9, 9, 9)


def test_falling_back_to_the_first_prompt_with_less_text_is_a_compaction():
    story = Story()
    text = story.say([1, 2, 3], [4, 5])
    for _ in range(3):
        text = story.say([*text, 6, 6, 6], [7, 7])
    story.say([*text, 8], [50, 51], purpose="summary")
    story.say([1, 2, 50, 51], [9])
    assert kinds(story) == [("compaction", "c5", "c4")]


def test_the_first_call_of_an_agent_is_a_sub_agent_and_the_main_agent_goes_on_unbroken():
    story = Story()
    text = story.say([1, 2, 3], [4, 5])
    sub = story.say([1, 2, 30], [31], agent="s1")
    story.say([*sub, 32], [33], agent="s1")
    story.say([*text, 6], [7])
    assert kinds(story) == [("sub-agent", "c1", "c0")]


def test_without_agent_ids_a_conversation_that_is_taken_up_again_was_left_for_a_sub_agent():
    story = Story()
    text = story.say([1, 2, 3], [4, 5])
    text = story.say([*text, 6, 6, 6], [7])
    story.say([1, 2, 30], [31])
    story.say([*text, 8], [9])
    assert kinds(story) == [("sub-agent", "c2", "c1")]


def test_the_same_request_again_is_a_retry_and_the_answer_that_was_used_survives():
    story = Story()
    story.say([1, 2, 3], [4, 5])
    text = story.say([1, 2, 3], [4, 6])
    story.say([*text, 7], [8])
    analysis = analyse(story.forest())
    assert [(b.kind, b.call) for b in analysis.breaks] == [("retry", "c1")]
    assert analysis.superseded == {"c0"}


def test_a_first_answer_that_was_used_survives_its_retry():
    story = Story()
    text = story.say([1, 2, 3], [4, 5])
    story.say([1, 2, 3], [4, 6])
    story.say([*text, 7], [8])
    assert analyse(story.forest()).superseded == {"c1"}


def test_unused_answers_are_decided_by_delivery_then_by_the_last_and_not_at_all_when_they_overlap():
    delivered, last, undecided = Story(), Story(), Story()
    delivered.say([1, 2], [4], delivered=True)
    delivered.say([1, 2], [5], delivered=False)
    last.say([1, 2], [4])
    last.say([1, 2], [5])
    undecided.say([1, 2], [4], took=5.0)
    undecided.say([1, 2], [5], t0=1.0, took=5.0)
    assert analyse(delivered.forest()).superseded == {"c1"}
    assert analyse(last.forest()).superseded == {"c0"}
    assert analyse(undecided.forest()).superseded == {"c0", "c1"}


def test_parallel_sub_agents_with_the_same_prompt_are_not_retries():
    story = Story()
    story.say([1, 2, 3], [4, 5])
    story.say([9, 9], [4], agent="s1", t0=5.0)
    story.say([9, 9], [5], agent="s2", t0=5.0)
    analysis = analyse(story.forest())
    assert [b.kind for b in analysis.breaks] == ["parallel-siblings"]
    assert not analysis.superseded


def test_answers_of_one_agent_at_the_same_time_that_are_both_used_are_siblings():
    story = Story()
    a = story.say([1, 2], [4], took=5.0)
    b = story.say([1, 2], [5], t0=1.0, took=5.0)
    story.say([*a, 6], [7])
    story.say([*b, 6], [7])
    analysis = analyse(story.forest())
    assert [x.kind for x in analysis.breaks] == ["parallel-siblings"]
    assert not analysis.superseded


def test_a_call_beside_the_conversation_is_a_side_call_and_breaks_nothing():
    story = Story()
    text = story.say([1, 2, 3], [4, 5])
    story.say([1, 50], [51], purpose="aux")
    story.say([*text, 6], [7])
    assert kinds(story) == [("side", "c1", "c0")]


def test_a_history_that_a_sub_agent_took_over_is_still_the_main_agents_own():
    story = Story()
    text = story.say([1, 2], [3, 4])
    story.say([*text, 30], [31], agent="s1")
    story.say([*text, 6], [7])
    assert kinds(story) == []
    assert analyse(story.forest()).links["c2"].mark.id == "c0"


def test_of_equal_histories_an_agent_continues_its_own():
    story = Story()
    text = story.say([1, 2], [3, 4], agent="s1")
    story.say([1, 2], [3, 4], agent="s2")
    story.say([*text, 5], [6], agent="s1")
    links = analyse(story.forest()).links
    assert (links["c2"].mark.id, links["c2"].shared) == ("c0", 4)
