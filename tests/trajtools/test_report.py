"""Reports and conversion: the numbers are right, the damage is named, the slim file says the same."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import orjson
import pytest
from trajbuild import Story, make_call, random_execution

import trajtools
from gyre_base.runfile import CallWriter, ExecEnd, ExecStart, Intent, Note, Reward, RunHeader, encode
from trajtools.check import check
from trajtools.load import load
from trajtools.readers import UnknownFormat
from trajtools.report import dedup
from trajtools.stats import stats
from trajtools.writers.slim import write_slim

DATA = Path(__file__).parent / "data"


def story_of_three_turns(execution="e"):
    story = Story(execution)
    text = story.say([1, 2, 3], [10, 11, 12])
    text = story.say([*text[:-1], 99, 5], [20, 21])
    story.say([*text, 6], [30])
    return story


def log_of(*stories, outcome="scored"):
    lines = [encode(RunHeader(run="r", tokenizer={"vocab": 640}))]
    for story in stories:
        name = story.execution
        lines.append(encode(ExecStart(exec=name, group="g", started=0.0)))
        lines.extend(map(encode, story.calls))
        lines.append(encode(Reward(exec=name, status=outcome, value=0.5)))
        lines.append(encode(ExecEnd(exec=name, status="finished", calls=len(story.calls), ended=20.0)))
    return b"".join(lines)


def digests(source):
    return {name: e.forest.digest() for name, e in load(source).executions.items()}


def test_dedup_counts_what_repeats_what_breaks_and_what_is_trained():
    report = dedup(io.BytesIO(log_of(story_of_three_turns())))
    assert (report.executions, report.calls, report.leaves) == (1, 3, 2)
    assert report.tokens_raw == 6 + 9 + 11
    assert report.tokens_unique == 6 + 4 + 2
    assert (report.sampled, report.trainable, report.owned) == (6, 6, 5)
    assert report.dropped == {"stub": 1}
    [trim] = report.breaks
    assert (trim.kind, trim.count, trim.lost_tokens, trim.cause) == ("tail-trim", 1, 1, (12, 99, 1))
    assert "26 tokens recorded, 12 distinct" in report.lines()[0]
    orjson.dumps(report.as_json())


@pytest.mark.parametrize("seed", range(8))
def test_the_slim_file_holds_the_same_forest_whatever_the_order_and_says_it_in_equal_bytes(seed, tmp_path):
    rng = np.random.default_rng(seed)
    calls = [c for i in range(3) for c in random_execution(rng, execution=f"e{i}")]
    texts = []
    for name in ("a", "b"):
        lines = [encode(call) for call in rng.permutation(np.array(calls, object))]
        report = dedup(io.BytesIO(b"".join(lines)), tmp_path / name)
        texts.append((tmp_path / name).read_bytes())
        assert report.slim_bytes == len(texts[-1])
        assert digests(io.BytesIO(b"".join(lines))) == digests(tmp_path / name)
    assert texts[0] == texts[1]


def test_the_slim_file_keeps_everything_that_is_not_a_call(tmp_path):
    data = log_of(story_of_three_turns()) + encode(Note(text="n")) + encode(Intent(exec="e", call="lost"))
    before = load(io.BytesIO(data))
    write_slim(before, tmp_path / "slim")
    after = load(tmp_path / "slim")
    assert after.loose == before.loose
    assert sorted(map(repr, after.executions["e"].others)) == sorted(map(repr, before.executions["e"].others))


def test_a_folder_of_shards_is_one_log(tmp_path):
    story = story_of_three_turns()
    for i, call in enumerate(story.calls):
        (tmp_path / f"{i}.jsonl").write_bytes(encode(call))
    assert digests(tmp_path) == {"e": story.forest().digest()}
    (tmp_path / "9.jsonl").write_bytes(encode(story.calls[0]))  # the same call in two shards
    assert digests(tmp_path) == {"e": story.forest().digest()}


def test_stats_count_by_label_and_measure_reuse():
    report = stats(io.BytesIO(log_of(story_of_three_turns("a"), branching("b"))))
    assert (report.executions, report.groups, report.calls) == (2, 1, 5)
    main, sub = report.rows
    assert (main.name, main.calls, main.prompt_tokens, main.completion_tokens) == ("main", 4, 3 + 7 + 10 + 2, 8)
    assert main.reusable == 0 + 5 + 9 + 0
    assert (sub.name, sub.calls, sub.reusable) == ("sub-agent", 1, 1)
    assert (main.trainable, sub.trainable, report.trainable) == (8, 1, 9)
    assert report.longest_call == ("a", "c2")
    by_agent = stats(io.BytesIO(log_of(story_of_three_turns("a"), branching("b"))), by="agent")
    assert [(row.name, row.calls) for row in by_agent.rows] == [("main", 4), ("s", 1)]
    assert report.outcomes == {"scored": 2}
    assert report.mean_score == 0.5
    assert report.execution_s["max"] == 20.0
    orjson.dumps(report.as_json())
    assert "2 executions in 1 group" in report.lines()[0]


def branching(execution):
    story = Story(execution)
    story.say([1, 2], [3, 4])
    story.say([1, 9], [5], agent="s")
    return story


def test_reports_of_an_empty_log_are_empty():
    assert dedup(io.BytesIO(b"")).executions == 0
    assert stats(io.BytesIO(b"")).lines()
    assert check(io.BytesIO(b"")).ok


@pytest.mark.parametrize("seed", range(10))
def test_check_passes_what_is_sound(seed):
    story = Story()
    story.calls = random_execution(np.random.default_rng(seed))
    for call in story.calls:  # made-up logprobs above 0 are what one rule is about
        if call.logprobs is not None:
            call.logprobs[call.logprobs > 0] = np.nan
    report = check(io.BytesIO(log_of(story)), shuffles=3)
    assert report.ok, report.lines()
    assert report.counts["order"] == 0


def findings(data, **kw):
    return {(f.rule, f.execution, f.call) for f in check(io.BytesIO(data), **kw).findings}


def call_line(**change):
    line = orjson.loads(encode(make_call(label="main", t0=1.0, t1=2.0))) | change
    line.pop("h")
    return orjson.dumps(line) + b"\n"


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"logprobs": [0.2, -1]}, "logprob-range"),
        ({"t1": 0.5}, "times"),
        ({"label": "hero"}, "labels"),
        ({"context": "00"}, "context"),
        ({"policy": [["0.1", 0, 1]]}, "version-spans"),
        ({"policy": [["0.1", 0, 1], ["0.2", 0, 2]]}, "version-spans"),
        ({"prompt_ids": [640]}, "token-range"),
    ],
)
def test_check_names_the_call_that_breaks_a_rule(change, rule):
    data = encode(RunHeader(tokenizer={"vocab": 640})) + call_line(**change)
    also = {("packed", "e", "")} if rule == "context" else set()  # the packed context is not the recorded one either
    assert findings(data) == {(rule, "e", "c0"), *also}


def test_check_names_damaged_lines_conflicts_and_lost_calls():
    good = call_line()
    assert findings(good + b"junk\n") == {("readable", "", "")}
    assert findings(good + good[:-5]) == {("readable", "", "")}
    assert findings(good + call_line(logprobs=[-1.0], call="c1")) == {("logprob-length", "", "")}
    assert findings(good + call_line(completion_ids=[4, 6])) == {("unique-id", "e", "c0")}
    assert findings(good + encode(Intent(exec="e", call="c9"))) == {("complete", "e", "c9")}
    assert findings(good + encode(ExecEnd(exec="e", calls=2))) == {("complete", "e", "")}
    assert findings(good + encode(Reward(exec="e", status="zero"))) == {("labels", "e", "")}


def test_a_finding_carries_the_offset_of_its_line():
    good = call_line()
    [found] = check(io.BytesIO(good + call_line(call="c1", t1=0.5))).findings
    assert found.offset == len(good)


def test_damage_is_named_in_the_lines_of_a_report():
    _, second, third = (CallWriter().call(c) for c in story_of_three_turns().calls)
    report = dedup(io.BytesIO(second + b"junk\n" + b'{"k":"hologram"}\n' + second + third[:50]))
    text = "\n".join(report.lines())
    for part in ("torn last line", "left out of - at byte", "duplicate calls ignored: 1", "'hologram'"):
        assert part in text


# ---- conversion ----------------------------------------------------------------------------------------------------


def test_a_nemo_gym_rollout_keeps_its_ids_and_logprobs(tmp_path):
    converted = trajtools.convert(DATA / "nemogym_rollout.jsonl", tmp_path / "run.jsonl")
    assert (converted.format, converted.executions, converted.calls) == ("nemo-gym", 1, 1)
    rollout = json.loads((DATA / "nemogym_rollout.jsonl").read_text())
    item = rollout["response"]["output"][1]
    seen = []
    recording = load(tmp_path / "run.jsonl", on_call=seen.append)
    assert seen[0].prompt_ids.tolist() == item["prompt_token_ids"]
    assert seen[0].completion_ids.tolist() == item["generation_token_ids"]
    assert np.array_equal(seen[0].logprobs, np.array(item["generation_log_probs"], np.float32))
    [execution] = recording.executions.values()
    assert (execution.reward.status, execution.reward.value, execution.group) == ("scored", 0.0, "task0")
    assert check(tmp_path / "run.jsonl", shuffles=2).ok
    assert dedup(tmp_path / "run.jsonl").owned == len(item["generation_token_ids"])


def test_a_nemo_rl_log_is_read_as_far_as_its_ids_go(tmp_path):
    converted = trajtools.convert(DATA / "nemorl_multi_turn.json", tmp_path / "run.jsonl")
    assert (converted.format, converted.calls, converted.sampled) == ("nemo-rl", 1, 0)
    assert converted.left_out == {"turns without token ids": 3}
    assert dedup(tmp_path / "run.jsonl").tokens_unique == 3080
    assert check(tmp_path / "run.jsonl").ok


def test_a_nemo_rl_log_with_all_its_ids_becomes_one_linear_conversation(tmp_path):
    log = [
        {"role": "user", "token_ids": [1, 2, 3]},
        {"role": "assistant", "token_ids": [4, 5], "generation_logprobs": [-0.5, -0.25]},
        {"role": "environment", "token_ids": [6]},
        {"role": "assistant", "token_ids": [7], "generation_logprobs": [-0.125]},
    ]
    (tmp_path / "in.json").write_text(json.dumps([{"message_log": log, "total_reward": 1.0}]))
    trajtools.convert(tmp_path / "in.json", tmp_path / "run.jsonl")
    report = dedup(tmp_path / "run.jsonl")
    assert (report.calls, report.tokens_unique, report.owned, report.leaves, report.breaks) == (2, 7, 3, 1, ())


@pytest.mark.parametrize(
    ("change", "status", "value"),
    [
        ({"reward": 0.0}, "scored", 0.0),
        ({"reward": None}, "unscored", None),
        ({"reward": 1.0, "mask_sample": True}, "unscored", None),
        ({"reward": 0.0, "verify_error_kind": "timeout"}, "evaluator_failed", None),
    ],
)
def test_a_failed_or_masked_rollout_is_no_zero(change, status, value, tmp_path):
    rollout = {"responses_create_params": {}, "response": {"output": []}} | change
    (tmp_path / "in.jsonl").write_text(json.dumps(rollout))
    trajtools.convert(tmp_path / "in.jsonl", tmp_path / "run.jsonl")
    [execution] = load(tmp_path / "run.jsonl").executions.values()
    assert (execution.reward.status, execution.reward.value) == (status, value)


def test_converting_a_run_file_makes_it_slim_and_keeps_it_the_same(tmp_path):
    (tmp_path / "in").write_bytes(log_of(story_of_three_turns()))
    assert trajtools.convert(tmp_path / "in", tmp_path / "out").format == "gyre.run"
    assert digests(tmp_path / "in") == digests(tmp_path / "out")


@pytest.mark.parametrize("text", ["", "hello", "[]", '{"letters": []}', "3"])
def test_an_unknown_format_is_refused_with_what_was_seen(text, tmp_path):
    (tmp_path / "in").write_text(text)
    with pytest.raises(UnknownFormat, match="nemo-gym"):
        trajtools.convert(tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_later_note_that_relabels_a_call_is_obeyed(tmp_path):
    story = Story()
    text = story.say([1, 2, 3], [10, 11])
    story.say([*text, 8], [50, 51])
    story.say([1, 2, 50, 51], [15])
    note = {"call": "c1", "purpose": "summary", "label": "main-summary"}
    lines = [encode(Note(text="relabel", exec="e", extra=note)), *map(encode, story.calls)]  # before or after the call
    report = dedup(io.BytesIO(b"".join(lines)), tmp_path / "slim")
    assert report.owned_by_class == {"main": 1, "main-summary": 4}
    assert [b.kind for b in report.breaks] == ["compaction"]
    assert dedup(tmp_path / "slim").owned_by_class == report.owned_by_class
