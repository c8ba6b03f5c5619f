"""Other tools' records: real files at the level they were recorded at, and every form written reads back the same."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import numpy as np
import orjson
import pytest
from trajbuild import Story, forest_of, random_execution

import trajtools
from gyre_base.runfile import Reward, encode, read_run
from gyre_base.runframes import Frames
from trajtools.breaks import analyse
from trajtools.conversion import CannotWrite
from trajtools.conversion import convert as convert_to
from trajtools.inspect import diff, show_call
from trajtools.load import load
from trajtools.stats import stats

DATA = Path(__file__).parent / "data"
REAL = {  # file: (format, level, executions, calls, sampled)
    "claude_session.jsonl": ("claude-code", "text", 1, 5, 5),
    "codex_rollout.jsonl": ("codex", "text", 1, 3, 5),
    "mini_github_issue.traj.json": ("mini-swe-agent", "text", 1, 10, 10),
    "sweagent_pydicom.traj": ("swe-agent", "text", 1, 12, 12),
    "openhands_eval.jsonl": ("openhands", "text", 1, 4, 8),
    "atif_router.json": ("atif", "text", 1, 3, 3),
    "litellm_standard_payload.json": ("chat-log", "text", 1, 1, 1),
    "nemorl_multi_turn.json": ("nemo-rl", "token", None, None, None),
    "nemogym_rollout.jsonl": ("nemo-gym", "token", None, None, None),
}


def written(tmp_path, *objects, name="in.jsonl"):
    path = tmp_path / name
    path.write_bytes(b"".join(orjson.dumps(o) + b"\n" for o in objects))
    return path


def texts(execution, call):
    """(new prompt, answer) of a text-level call as written."""
    mark = execution.forest[call]
    blocks = execution.blocks.many(execution.forest.tokens(mark))
    return [b["text"] for b in blocks[: mark.prompt_tokens]], [b["text"] for b in blocks[mark.prompt_tokens :]]


@pytest.mark.parametrize("name", REAL)
def test_a_real_file_is_read_at_its_level_and_every_form_says_the_same(name, tmp_path):
    form, level, executions, calls, sampled = REAL[name]
    made = convert_to(DATA / name, tmp_path / "run.jsonl")
    assert (made.format, made.level) == (form, level)
    if calls is not None:
        assert (made.executions, made.calls, made.sampled) == (executions, calls, sampled)
    convert_to(DATA / name, tmp_path / "run.gtr")
    assert diff(DATA / name, tmp_path / "run.jsonl").ok
    assert diff(tmp_path / "run.jsonl", tmp_path / "run.gtr").ok
    assert b"prompt_ids" not in (tmp_path / "run.jsonl").read_bytes() or level == "token"


@pytest.mark.parametrize("name", REAL)
def test_atif_exports_of_real_files_pass_the_public_validator(name, tmp_path):
    atif = pytest.importorskip("atif")
    convert_to(DATA / name, tmp_path / "out", "atif")
    for path in (tmp_path / "out").iterdir():
        document = orjson.loads(path.read_bytes())
        atif.Trajectory.model_validate(document)
        assert document["schema_version"] == "ATIF-v1.7"


@pytest.mark.parametrize("seed", range(12))
def test_atif_exports_of_branching_executions_are_valid_and_tell_no_target_twice(seed, tmp_path):
    atif = pytest.importorskip("atif")
    calls = random_execution(np.random.default_rng(seed), calls=25)
    (tmp_path / "in.jsonl").write_bytes(b"".join(map(encode, calls)))
    convert_to(tmp_path / "in.jsonl", tmp_path / "out", "atif", prompt_ids=True)
    told = []
    for path in (tmp_path / "out").iterdir():
        document = orjson.loads(path.read_bytes())
        atif.Trajectory.model_validate(document)
        for part in [document, *(document.get("subagent_trajectories") or [])]:
            own = [s for s in part["steps"] if s["source"] == "agent" and not s.get("is_copied_context")]
            told += [s["extra"]["gyre"]["call"] for s in own]
    assert told
    assert len(told) == len(set(told))


def test_an_atif_export_with_prompt_ids_comes_back_with_the_same_tokens(tmp_path):
    story = Story()
    text = story.say([1, 2, 3], [4, 5])
    story.say([*text, 6, 7], [8, 9])
    (tmp_path / "in.jsonl").write_bytes(b"".join(map(encode, story.calls)))
    convert_to(tmp_path / "in.jsonl", tmp_path / "out.json", "atif", prompt_ids=True)
    back = load(tmp_path / "out.json").executions["e"].forest
    for call in story.calls:
        assert back.tokens(back[call.call]).tolist() == [*call.prompt_ids.tolist(), *call.completion_ids.tolist()]
        assert np.array_equal(back[call.call].logprobs, call.logprobs)


def test_a_claude_message_that_comes_in_several_lines_is_one_call_and_a_rewind_is_a_branch(tmp_path):
    def line(kind, uuid, parent, content, message=None, **more):
        said = {"role": kind, "content": content, **({"id": message} if message else {})}
        return {"type": kind, "uuid": uuid, "parentUuid": parent, "sessionId": "s", "message": said, **more}

    use = [{"type": "tool_use", "id": "t1", "name": "Read", "input": {"p": 1}}]
    rows = [
        line("user", "u1", None, "hello"),
        line("assistant", "a1", "u1", [{"type": "text", "text": "let me"}], "m1"),
        line("assistant", "a2", "a1", use, "m1"),
        line("user", "u2", "a2", [{"type": "tool_result", "tool_use_id": "t1", "content": "ok"}]),
        line("assistant", "a3", "u2", [{"type": "text", "text": "done"}], "m2"),
        line("user", "u3", "a1", "no, otherwise"),
        line("assistant", "a4", "u3", [{"type": "text", "text": "fine"}], "m3"),
        "a stray string", 7,
    ]  # fmt: skip
    sub = [
        line("user", "x1", None, "look", isSidechain=True),
        line("assistant", "x2", "x1", [{"type": "text", "text": "found"}], "m9", isSidechain=True),
    ]
    path = written(tmp_path, *rows, name="s.jsonl")
    (tmp_path / "s" / "subagents").mkdir(parents=True)
    written(tmp_path / "s" / "subagents", *sub, name="agent-77.jsonl")
    execution = load(path).executions["s"]
    assert sorted(m.id for m in execution.forest.marks()) == ["m1", "m2", "m3", "m9"]
    assert texts(execution, "m1") == (["hello"], ["let me", '{"p":1}'])
    assert texts(execution, "m2") == (["hello", "let me", '{"p":1}', "ok"], ["done"])
    assert texts(execution, "m3")[0] == ["hello", "let me", "no, otherwise"]
    assert execution.forest["m9"].call.agent.id == "77"
    assert [b.kind for b in analyse(execution.forest).breaks] == ["deep-edit"]
    [note] = [r for r in execution.others if getattr(r, "text", "") == "lines left out"]
    assert note.extra["left_out"] == {"lines that are no object": 2}


def test_a_codex_compaction_begins_a_new_history(tmp_path):
    def item(role, text):
        payload = {"type": "message", "role": role, "content": [{"type": "text", "text": text}]}
        return {"timestamp": "2026-01-01T00:00:00Z", "type": "response_item", "payload": payload}

    compacted = {"type": "compacted", "payload": {"message": "so far: x"}}
    path = written(
        tmp_path, item("user", "a"), item("assistant", "b"), compacted, item("user", "c"), item("assistant", "d")
    )
    [execution] = load(path).executions.values()
    assert texts(execution, "call-0") == (["a"], ["b"])
    assert texts(execution, "call-1") == (["so far: x", "c"], ["d"])


def test_chat_logs_keep_traces_apart_assemble_streams_and_leave_failures_out(tmp_path):
    def entry(trace, messages, response, **more):
        return {"id": f"{trace}{len(messages)}", "trace_id": trace, "messages": messages, "response": response, **more}

    user = {"role": "user", "content": "hi"}
    answer = {"choices": [{"message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}]}
    chunks = [
        {"choices": [{"delta": {"content": "ye"}}]},
        {
            "choices": [
                {"delta": {"content": "s", "tool_calls": [{"index": 0, "function": {"name": "f", "arguments": "{"}}]}}
            ]
        },
        {
            "choices": [
                {"delta": {"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]}, "finish_reason": "stop"}
            ]
        },
    ]
    path = written(
        tmp_path,
        entry("t", [user], answer, startTime="2026-01-01T00:00:00", endTime="2026-01-01T00:00:02"),
        entry("t", [user, {"role": "assistant", "content": "yes"}, user], chunks),
        entry("u", [user], answer),
        entry("u", [user, user], None, status="failure", error_information={"error_code": "500"}),
    )
    recording = load(path)
    assert recording.format == "chat-log"
    assert {name: len(e.forest) for name, e in recording.executions.items()} == {"t": 2, "u": 1}
    assert texts(recording.executions["t"], "t3")[1] == ["yes", "{}"]
    first = recording.executions["t"].forest["t1"].call
    assert first.t1 - first.t0 == 2.0
    assert analyse(recording.executions["t"].forest).links["t3"].shared == 2


@pytest.mark.parametrize("nested", [True, False])
def test_openhands_events_and_pairs_give_the_same_calls(nested, tmp_path):
    events = [
        {"id": 0, "source": "user", "action": "message", "args": {"content": "fix it"}},
        {"id": 2, "source": "agent", "action": "run", "args": {"command": "ls", "thought": "look"}},
        {"id": 3, "source": "environment", "observation": "run", "content": "a.py", "cause": 2},
        {"id": 7, "source": "agent", "action": "finish", "args": {"thought": "done"}},
    ]
    if nested:
        row = {"instance_id": "i", "history": [[events[0]], events[1:3], [events[3]]]}
        path = written(tmp_path, {**row, "test_result": {"report": {"resolved": True}}})
    else:
        path = tmp_path / "i-0.json"
        path.write_bytes(orjson.dumps(events))
    [execution] = load(path).executions.values()
    assert texts(execution, "action-1") == (["fix it", "look", '{"command":"ls"}', "a.py"], ["done", "{}"])
    assert (execution.reward.status, execution.reward.value) == (("scored", 1.0) if nested else ("unscored", None))


def test_a_swe_agent_file_with_queries_has_one_call_per_step(tmp_path):
    steps = [
        {"query": [{"role": "user", "content": str(j)} for j in range(i + 1)], "response": f"r{i}"} for i in range(3)
    ]
    (tmp_path / "x.traj").write_bytes(orjson.dumps({"trajectory": steps, "history": [], "info": {"exit_status": "ok"}}))
    [execution] = load(tmp_path / "x.traj").executions.values()
    assert texts(execution, "step-2") == (["0", "1", "2"], ["r2"])
    assert execution.end.status == "ok"


def test_mini_in_its_newer_shape(tmp_path):
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a"},
    ]
    whole = {"info": {"exit_status": "Submitted"}, "messages": messages, "trajectory_format": "mini-swe-agent-1.1"}
    (tmp_path / "m.traj.json").write_bytes(orjson.dumps(whole))
    recording = load(tmp_path / "m.traj.json")
    assert recording.format == "mini-swe-agent"
    assert recording.executions["m"].end.status == "Submitted"


def test_verifiers_results_say_the_prompt_again_and_keep_tool_calls_as_text(tmp_path):
    asked = {"content": "q", "role": "user"}
    tool = '{"id": "t1", "function": {"arguments": "{\\"code\\":\\"1+1\\"}", "name": "repl"}, "type": "function"}'
    said = [
        {**asked, "tool_calls": None},
        {"content": "", "role": "assistant", "tool_calls": [tool]},
        {"content": "2", "role": "tool", "tool_calls": None},
        {"content": "It is 2.", "role": "assistant", "tool_calls": None},
    ]
    more = {"task": "default", "error": None, "generation_ms": 1500.0, "scoring_ms": 500.0, "total_ms": 2000.0}
    row = {"example_id": 4, "prompt": [asked], "completion": said, "reward": 0.5, **more, "answer": "2", "turns": 2.0}
    chain = {"error": "ModelError", "error_chain_repr": "ModelError()", "error_chain_str": "ModelError -> timeout"}
    failed = {"example_id": 4, "prompt": [asked], "completion": [], "reward": 0.0, "error": chain}
    older = {"id": 7, "prompt": [asked], "completion": [{"content": "a", "role": "assistant"}], "reward": 1}
    recording = load(written(tmp_path, row, failed, older))
    first, second, third = (recording.executions[f"example{n}"] for n in ("4-0", "4-1", "7-0"))
    assert first.level == "text" and first.group == second.group != third.group
    assert texts(first, "example4-0-0") == (["q"], ['{"code":"1+1"}'])
    assert texts(first, "example4-0-1") == (["q", '{"code":"1+1"}', "2"], ["It is 2."])
    assert (first.reward.status, first.reward.value, first.end.ended) == ("scored", 0.5, 2.0)
    assert (second.reward.status, second.reward.error) == ("infra_failed", "ModelError: ModelError -> timeout")
    assert not len(second.forest) and third.reward.value == 1.0


def test_verifiers_trajectories_with_tokens_keep_their_masks(tmp_path):
    tokens = {"prompt_ids": [1, 2], "completion_ids": [3, 4], "completion_mask": [1, 0]}
    step = {"prompt": [], "completion": [], "tokens": {**tokens, "completion_logprobs": [-0.5, -1.0]}}
    row = {"example_id": 5, "prompt": "q", "completion": "a", "trajectory": [step], "reward": None}
    execution = load(written(tmp_path, row)).executions["example5-0"]
    [mark] = execution.forest.marks()
    assert execution.level == "token" and mark.trainable().tolist() == [True, False]
    assert execution.reward.status == "unscored"  # null is never 0


def a_trace(number, nodes, **more):
    task = {"type": "Math", "data": {"id": 3}, "key": "task-a", "hash": "00ff"}
    agent = {"name": "agent", "trainable": True, "config": {}}
    fixed = {"version": 1, "id": f"t{number}", "task": task, "agent": agent, "calls": [], "rewards": {}, "ok": True}
    return {**fixed, "nodes": nodes, "metrics": {"turns": 2.0}, "errors": [], "stop_condition": "agent_done", **more}


def a_node(parent, role, text, token_ids=(), mask=(), logprobs=(), **more):
    sampled = role == "assistant"
    node = {"parent": parent, "message": {"role": role, "content": text}, "sampled": sampled, "semantic_parents": []}
    return {**node, "token_ids": [*token_ids], "mask": [*mask], "logprobs": [*logprobs], **more}


def test_a_verifiers_trace_is_a_graph_with_one_logprob_per_sampled_token(tmp_path):
    nodes = [
        a_node(None, "user", "q", [1, 2], [False, False]),
        a_node(0, "assistant", "a", [9, 5, 6], [False, True, True], [-0.5, -0.25]),
        a_node(0, "assistant", "b", [9, 7], [False, True], [-1.0]),
        a_node(1, "user", "sum up", [4], [False]),
        a_node(
            3, "assistant", "s", [9, 8], [0, 1], [-2.0], semantic_parents=[{"node": 1, "type": "compaction_attempt"}]
        ),
    ]
    time = {"start": 1.7e9, "end": 1.7e9 + 3}
    calls = [
        {"node": 1, "finish_reason": "tool_calls", "time": time, "usage": {"input_tokens": 3, "completion_tokens": 2}},
        {"node": None, "error": {"type": "Overloaded", "message": "busy"}},
    ]
    rewards = {"tests": {"score": 0.5, "weight": 2.0}, "style": {"score": 1.0, "weight": 0.5}}
    timing = {"start": 1.7e9, "agent": {"start": 1.7e9, "end": 1.7e9 + 60}}
    first = a_trace(1, nodes, calls=calls, rewards=rewards, timing=timing)
    opponent = {"name": "judge", "trainable": False}
    second = a_trace(2, nodes[:2], rewards={"tests": None}, agent=opponent)
    third = a_trace(3, nodes[:2], ok=False, errors=[{"type": "SandboxError", "message": "gone"}])
    recording = load(written(tmp_path, first, second, third))
    one, two, three = (recording.executions[f"exampletask-a-{n}"] for n in range(3))
    assert one.group == two.group == three.group
    marks = sorted(one.forest.marks(), key=lambda m: m.call.seq)
    assert [one.forest.tokens(m).tolist() for m in marks] == [[1, 2, 9, 5, 6], [1, 2, 9, 7], [1, 2, 9, 5, 6, 4, 9, 8]]
    assert [m.logprobs.tolist() for m in marks] == [[-0.5, -0.25], [-1.0], [-2.0]]
    assert [m.prompt_tokens for m in marks] == [3, 4 - 1, 7]
    assert marks[0].call.finish == "tool_calls" and marks[0].call.t1 - marks[0].call.t0 == 3.0
    assert marks[0].call.extra["usage"] == {"prompt_tokens": 3, "completion_tokens": 2}
    assert (marks[2].call.purpose, marks[2].call.label) == ("summary", "main-summary")
    assert (one.reward.status, one.reward.value, one.reward.parts["style"]) == ("scored", 1.5, 1.0)
    assert one.end.ended - 1.7e9 == 60.0
    assert [r.extra["left_out"] for r in one.others if getattr(r, "extra", {}).get("left_out")] == [
        {"model calls that failed": 1}
    ]
    assert two.reward.status == "unscored" and {m.call.label for m in two.forest.marks()} == {"side"}
    assert (three.reward.status, three.reward.error) == ("infra_failed", "SandboxError: gone")


def test_a_verifiers_trace_without_ids_is_text(tmp_path):
    nodes = [
        a_node(None, "user", "q"),
        a_node(0, "assistant", "a"),
        a_node(1, "user", "more"),
        a_node(2, "assistant", "b"),
    ]
    execution = load(written(tmp_path, a_trace(1, nodes))).executions["exampletask-a-0"]
    assert execution.level == "text" and texts(execution, "exampletask-a-0-3") == (["q", "a", "more"], ["b"])
    assert execution.reward.status == "unscored"  # no reward at all is none


def test_times_that_are_only_an_order_are_no_durations(tmp_path):
    report = stats(DATA / "sweagent_pydicom.traj")
    assert (
        report.execution_s == {}
        and not report.tasks
        and "execution seconds   not recorded" in "\n".join(report.lines())
    )
    assert stats(DATA / "claude_session.jsonl").execution_s["max"] > 0


def test_atif_copied_steps_are_context_and_files_beside_it_are_followed(tmp_path):
    def step(number, source, text, **more):
        return {"step_id": number, "source": source, "message": text, **more}

    later = {"schema_version": "ATIF-v1.8", "session_id": "s", "agent": {"name": "a", "version": "1"}}
    later["steps"] = [step(1, "user", "q"), step(2, "agent", "a1", is_copied_context=True), step(3, "agent", "a2")]
    (tmp_path / "next.json").write_bytes(orjson.dumps(later))
    first = {"schema_version": "ATIF-v1.2", "session_id": "s", "agent": {"name": "a", "version": "1"}}
    first["steps"] = [
        step(1, "user", "q"),
        step(2, "agent", "a1", llm_call_count=3),
        step(3, "agent", "x", llm_call_count=0),
    ]
    first["subagent_trajectories"] = [
        {
            "schema_version": "ATIF-v1.7",
            "trajectory_id": "sub",
            "agent": {"name": "b", "version": "1"},
            "steps": [step(1, "agent", "b1")],
        }
    ]
    first["continued_trajectory_ref"] = "next.json"
    path = tmp_path / "first.json"
    path.write_bytes(orjson.dumps(first))
    execution = load(path).executions["s"]
    assert [(m.call.agent.id, texts(execution, m.id)) for m in execution.forest.marks()] == [
        ("main", (["q"], ["a1"])),
        ("sub", ([], ["b1"])),
        ("main", (["q", "a1"], ["a2"])),
    ]


def test_a_binary_file_is_found_torn_wherever_it_is_cut_and_what_is_before_is_good(tmp_path):
    calls = random_execution(np.random.default_rng(1), calls=12)
    (tmp_path / "in.jsonl").write_bytes(b"".join(map(encode, calls)))
    convert_to(tmp_path / "in.jsonl", tmp_path / "a.gtr")
    data = (tmp_path / "a.gtr").read_bytes()
    ends = [frame.end for frame in Frames(io.BytesIO(data))]
    whole, _ = read_run(io.BytesIO(data))
    for cut in range(11, len(data), 7):
        got, report = read_run(io.BytesIO(data[:cut]))
        assert len(got) == (len(whole) if cut >= ends[0] else 0)
        assert (report.torn is None) == (cut in ends or cut == 11)
    flipped = bytearray(data)
    flipped[60] ^= 4
    got, report = read_run(io.BytesIO(bytes(flipped)))
    assert not got and [(b.offset, b.end) for b in report.bad] == [(11, ends[0])]


def rows_of(path):
    """The calls of a table with their whole prompts, as a reader of the file would put them together."""
    from pyarrow import feather, parquet

    table = parquet.read_table(path) if path.suffix == ".parquet" else feather.read_table(path)
    whole, out = {}, {}
    for row in table.to_pylist():
        head = whole[row["execution"], row["base"]][: row["keep"]] if row["base"] is not None else []
        prompt = [*head, *row["prompt_ids"]]
        whole[row["execution"], row["call"]] = [*prompt, *row["completion_ids"]]
        out[row["execution"], row["call"]] = (
            prompt,
            row["completion_ids"],
            row["logprobs"],
            row["label"],
            row["score"],
        )
    return out


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_a_table_holds_every_call_with_its_ids_and_logprobs(suffix, tmp_path):
    calls = [c for i in range(3) for c in random_execution(np.random.default_rng(i), calls=30, execution=f"e{i}")]
    lines = [*map(encode, calls), encode(Reward(exec="e1", status="scored", value=0.5))]
    (tmp_path / "in.jsonl").write_bytes(b"".join(lines))
    convert_to(tmp_path / "in.jsonl", tmp_path / f"out{suffix}")
    rows = rows_of(tmp_path / f"out{suffix}")
    assert len(rows) == len(calls)
    for call in calls:
        prompt, completion, logprobs, label, score = rows[call.exec, call.call]
        assert (prompt, completion) == (call.prompt_ids.tolist(), call.completion_ids.tolist())
        assert (logprobs is None) == (call.logprobs is None)
        if logprobs is not None:
            finite = np.where(np.isfinite(call.logprobs), call.logprobs, np.nan).astype(np.float32)
            assert np.array_equal(np.array(logprobs, np.float32), finite, equal_nan=True)
        assert (label, score) == (call.label, 0.5 if call.exec == "e1" else None)


def test_without_pyarrow_a_table_is_refused_with_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(CannotWrite, match=r"pip install 'gyre-rl\[arrow\]'"):
        convert_to(DATA / "nemogym_rollout.jsonl", tmp_path / "x.parquet")


def test_a_table_needs_ids_and_says_so(tmp_path):
    with pytest.raises(CannotWrite, match="has none"):
        convert_to(DATA / "codex_rollout.jsonl", tmp_path / "x.parquet")


def test_text_level_lines_are_read_by_readers_that_know_only_tokens_as_calls_without_targets(tmp_path):
    convert_to(DATA / "codex_rollout.jsonl", tmp_path / "run.jsonl")
    rows = [orjson.loads(line) for line in (tmp_path / "run.jsonl").read_bytes().splitlines()]
    calls = [row for row in rows if row["k"] == "call"]
    assert all(row["level"] == "text" and "logprobs" not in row and "sampling" not in row for row in calls)
    assert [len(row["prompt"]) for row in calls] == [2, 1, 1]  # only what is new


def test_show_tells_text_of_blocks_and_ids_of_tokens(tmp_path):
    shown = show_call(load(DATA / "codex_rollout.jsonl"), None, "call-1")
    assert "cat README.md" in shown.completion and shown.completion_ids is None
    forest = forest_of(*random_execution(np.random.default_rng(0)))
    (tmp_path / "in.jsonl").write_bytes(b"".join(map(encode, random_execution(np.random.default_rng(0)))))
    name = forest.marks()[0].id
    assert (
        show_call(load(tmp_path / "in.jsonl"), None, name).completion_ids
        == forest.tokens(forest[name])[forest[name].prompt_tokens :].tolist()
    )


def test_convert_is_also_a_function_of_the_package(tmp_path):
    assert trajtools.convert(DATA / "codex_rollout.jsonl", tmp_path / "o.jsonl").calls == 3
