"""The shapes that real harnesses send (measured on the programs), as a fake harness sends them.

Every claim is about exact ids: what continues, continues with the ids that were sampled; what differs is a branch.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxyd.chat import ChatModel
from tests.proxyd.talk import Said, Talk, tool

BASE = {"model": "gyre-policy", "max_tokens": 100, "stream": False}
MARKER = {"cache_control": {"type": "ephemeral"}}
READ = tool("Read", path="f1.md")


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def results(said: Said, *words: str) -> list[dict[str, Any]]:
    """Tool results for the calls of an answer, in order."""
    calls = [b for b in said.body["content"] if b["type"] == "tool_use"]
    return [
        {"type": "tool_result", "tool_use_id": c["id"], "content": w}
        for c, w in zip(calls, words or ["ok"], strict=True)
    ]


def heard(said: Said) -> dict[str, Any]:
    """The assistant turn as the harness repeats it."""
    return {"role": "assistant", "content": said.body["content"]}


def claude(messages: list[Any], **more: Any) -> dict[str, Any]:
    return {**BASE, "system": [text("You are a coding agent.")], "messages": messages, **more}


# ---- (a) the main line ----------------------------------------------------------------------------------------------


def test_a_long_main_line_with_flips_and_a_moving_marker_is_one_path(chat: ChatModel) -> None:
    talk, history, before = Talk(chat, "messages"), [{"role": "user", "content": "Write f1.py"}], None
    for turn in range(28):
        sent = json.loads(json.dumps(history))
        last = sent[-1]
        if isinstance(last["content"], str):
            last["content"] = [text(last["content"])]
        last["content"][-1] |= MARKER  # the marker sits on the last block only, which was a plain string before
        said = talk.say(claude(sent, system=[text("You are a coding agent.", **MARKER)]), f"turn {turn}\n{READ}")
        assert said.label == "main"
        if before is not None:
            assert said.continues(before)
        before = said
        history += [heard(said), user(*results(said, f"output {turn}"))]
    assert len({s.agent.id for s in talk.forest.calls.values()}) == 1


# ---- (b) compaction -------------------------------------------------------------------------------------------------


def test_a_summary_is_cut_inside_the_last_user_message_and_kept_turns_keep_their_ids(chat: ChatModel) -> None:
    talk = Talk(chat, "messages")
    first = user(text("<reminder>"), text("Write f1.py"))
    one = talk.say(claude([first]), READ)
    history = [first, heard(one), user(*results(one, "spec"), text("a reminder"))]
    two = talk.say(claude(history), READ)
    assert two.continues(one)
    order = text("Answer with text only: <summary> of the work so far")
    cut = [first, heard(one), user(*results(one, "spec"), text("a reminder"), order)]
    summary = talk.say(claude(cut), "<analysis>hm</analysis><summary>f1 is read</summary>")
    assert summary.continues(one), "the summary shares the main line up to the block where it was cut"
    after = [
        user(text("<reminder>"), text("This is continued. Summary: f1 is read")),
        heard(two),
        user(*results(two, "more")),
        {"role": "system", "content": "agents: none"},
    ]
    three = talk.say(claude(after), "Done.")
    assert three.plan.base is None and three.plan.spliced == 1, "the kept turn stands in a new prompt"
    kept = two.node.completion.ids.tolist()
    prompt = three.plan.prompt_ids().tolist()
    assert any(prompt[n : n + len(kept)] == kept for n in range(len(prompt))), "its ids are those that were sampled"
    assert talk.relabelled == {summary.node.call: "main-summary"} and three.plan.agent.id == "main"


def test_a_sub_agents_compaction_is_its_own(chat: ChatModel) -> None:
    talk, head = Talk(chat, "messages"), {"x-claude-code-agent-id": "a1b2"}
    talk.say(claude([user(text("task"))]), tool("Agent", prompt="look around"))
    child = [user(text("ctx"), text("look around"))]
    one = talk.say(claude(child, system="sub"), READ, head)
    two = talk.say(claude([*child, heard(one), user(*results(one), text("sum up"))], system="sub"), "half done", head)
    talk.say(claude([user(text("ctx"), text("continued: half done"))], system="sub"), "ok", head)
    assert talk.relabelled == {two.node.call: "sub-agent-summary"}


# ---- (c) agents -----------------------------------------------------------------------------------------------------


def test_parallel_agents_with_one_prompt_are_told_apart_by_their_ids(chat: ChatModel) -> None:
    talk = Talk(chat, "messages")
    main = talk.say(
        claude([user(text("task"))]), "\n".join([tool("Agent", prompt="look"), tool("Agent", prompt="look")])
    )
    first, second = (
        talk.say(claude([user(text("ctx"), text("look"))], system="sub"), READ, {"x-claude-code-agent-id": a})
        for a in ("a1", "a2")
    )
    parents = [c.id for c in main.node.spoken.calls]
    assert [s.plan.agent.parent for s in (first, second)] == parents
    assert [s.label for s in (first, second)] == ["sub-agent", "sub-agent"]
    for agent, said in (("a2", second), ("a1", first)):
        more = [user(text("ctx"), text("look")), heard(said), user(*results(said))]
        again = talk.say(claude(more, system="sub"), "found", {"x-claude-code-agent-id": agent})
        assert again.continues(said) and again.plan.agent == said.plan.agent
    back = [user(text("task")), heard(main), user(*results(main, "one", "two"))]
    assert talk.say(claude(back), "Done.").continues(main)


def test_an_agent_in_the_background_starts_after_its_call_was_answered(chat: ChatModel) -> None:
    talk = Talk(chat, "messages")
    main = talk.say(claude([user(text("task"))]), tool("Agent", prompt="look", run_in_background=True))
    back = [user(text("task")), heard(main), user(*results(main, "launched"))]
    talk.say(claude(back), "I wait.")
    child = talk.say(claude([user(text("look"))], system="sub"), "ok", {"x-claude-code-agent-id": "a9"})
    assert child.plan.agent.role == "sub-agent" and child.plan.agent.parent == main.node.spoken.calls[0].id


def test_a_nested_agent_names_the_one_above(chat: ChatModel) -> None:
    talk = Talk(chat, "messages")
    talk.say(claude([user(text("task"))]), tool("Agent", prompt="look"))
    outer = talk.say(claude([user(text("look"))], system="sub"), "hm", {"x-claude-code-agent-id": "a1"})
    headers = {"x-claude-code-agent-id": "a2", "x-claude-code-parent-agent-id": "a1"}
    inner = talk.say(claude([user(text("unheard of"))], system="sub"), "ok", headers)
    assert inner.plan.agent.role == "sub-agent" and inner.plan.agent.parent == outer.plan.agent.id


def test_a_fork_shares_its_parents_prefix_and_is_an_agent_of_its_own(chat: ChatModel) -> None:
    talk = Talk(chat, "messages")
    main = talk.say(claude([user(text("task"))]), tool("Agent", prompt="go on alone", subagent_type="fork"))
    shared = [user(text("task")), heard(main), user(*results(main, "forked"), text("go on alone"))]
    fork = talk.say(claude(shared), READ, {"x-claude-code-agent-id": "f1"})
    assert fork.continues(main) and fork.label == "sub-agent"
    assert fork.plan.agent.parent == main.node.spoken.calls[0].id
    more = talk.say(claude([*shared, heard(fork), user(*results(fork))]), "ok", {"x-claude-code-agent-id": "f1"})
    assert more.continues(fork) and more.plan.agent == fork.plan.agent
    back = talk.say(claude([user(text("task")), heard(main), user(*results(main, "done"))]), "ok")
    assert back.label == "main" and back.continues(main)


def test_request_classes_and_model_names_label_side_calls(chat: ChatModel) -> None:
    talk = Talk(chat, "messages")
    title = talk.say(claude([user(text("a title?"))], model="gyre-side"), "Title")
    main = talk.say(claude([user(text("task"))]), "ok")
    aux = talk.say(claude([user(text("x"))]), "y", {"x-claude-code-request-class": "auxiliary"})
    asked = [user(text("task")), heard(main), user(text("sum up"))]
    summary = talk.say(claude(asked), "all", {"x-claude-code-request-class": "compaction"})
    assert [s.label for s in (title, main, aux, summary)] == ["side", "main", "side", "main-summary"]
    after = talk.say(claude([user(text("task; so far: all"))]), "ok")
    assert after.label == "main" and not talk.relabelled, "the record says it already"


# ---- (f) what comes back differs from what was sent -----------------------------------------------------------------

CHANGED: dict[str, tuple[str, Any]] = {
    "key order": (tool("Edit", b="1", a="2"), {"a": "2", "b": "1"}),
    "numbers": (tool("T", n=5000.0, big=12345678901234567890), {"n": 5000, "big": 12345678901234567000}),
    "text to number": (tool("T", n="5000", f="false"), {"n": 5000, "f": False}),
    "stripped lines": (tool("Write", content="a  \nb\t\n"), {"content": "a\nb\n"}),
    "default added": (tool("Edit", old="x"), {"replace_all": False, "old": "x"}),
}


@pytest.mark.parametrize("how", CHANGED)
def test_lossy_echoes_of_arguments_are_the_same_turn(chat: ChatModel, how: str) -> None:
    answer, back = CHANGED[how]
    talk = Talk(chat, "messages")
    one = talk.say(claude([user(text("task"))]), answer)
    echo = json.loads(json.dumps(heard(one)))
    echo["content"][-1]["input"] = back
    assert talk.say(claude([user(text("task")), echo, user(*results(one))]), "ok").continues(one)


def test_renamed_tools_moved_and_dropped_texts_are_the_same_turn(chat: ChatModel) -> None:
    talk = Talk(chat, "messages")
    one = talk.say(claude([user(text("task"))]), tool("Task", prompt="p"))
    echo = json.loads(json.dumps(heard(one)))
    echo["content"][-1]["name"] = "Agent"
    two = talk.say(claude([user(text("task")), echo, user(*results(one))]), "look\n" + READ + "\nso")
    assert two.continues(one)
    call = [b for b in two.body["content"] if b["type"] == "tool_use"]
    words = [b for b in two.body["content"] if b["type"] == "text"]
    moved = {"role": "assistant", "content": [*call, *words]}
    three = talk.say(claude([user(text("task")), echo, user(*results(one)), moved, user(*results(two))]), "\n\n" + READ)
    assert three.continues(two)
    assert [b["type"] for b in three.body["content"]] == ["tool_use"], "a blank text before a call is not sent"


def test_thinking_comes_back_under_our_signature_or_not_at_all(thinker: ChatModel) -> None:
    talk = Talk(thinker, "messages")
    one = talk.say(claude([user(text("task"))]), "<think>\nso\n</think>\n\nHello")
    assert one.body["content"][0]["type"] == "thinking" and one.body["content"][0]["signature"]
    two = talk.say(claude([user(text("task")), heard(one), user(text("on"))]), "<think>\nso\n</think>\n\nHello")
    assert two.continues(one)
    bare = {"role": "assistant", "content": [text("Hello")]}
    assert talk.say(claude([user(text("task")), bare, user(text("again"))]), "ok").continues(one)
    quiet = talk.say(
        claude([user(text("other"))], thinking={"type": "adaptive", "display": "omitted"}), "<think>\nx\n</think>\n\ny"
    )
    assert quiet.body["content"][0]["thinking"] == "" and quiet.node.spoken.reasoning == "x"
    assert talk.say(claude([user(text("other")), heard(quiet), user(text("on"))]), "ok").continues(quiet)
    changed = json.loads(json.dumps(heard(one)))
    changed["content"][0]["thinking"] = "something else"
    assert talk.say(claude([user(text("task")), changed, user(text("v"))]), "ok").plan.base is None, "a real difference"


def test_siblings_that_differ_in_thinking_only_are_told_apart(thinker: ChatModel) -> None:
    talk = Talk(thinker, "messages")
    ones = [talk.say(claude([user(text("task"))]), f"<think>\n{t}\n</think>\n\nHello") for t in ("a", "b")]
    for one in ones:
        assert talk.say(claude([user(text("task")), heard(one), user(text("on"))]), "ok").continues(one)


# ---- (g) answers that harnesses drop --------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", ["", "<think>\nonly this\n</think>", "<tool_call>\n{broken\n</tool_call>"])
def test_a_dropped_answer_and_a_nudge_make_a_sibling(thinker: ChatModel, answer: str) -> None:
    talk = Talk(thinker, "messages")
    one = talk.say(claude([user(text("task"))]), READ)
    asked = [user(text("task")), heard(one), user(*results(one))]
    dropped = talk.say(claude(asked), answer)
    nudged = [*asked[:-1], user(*results(one), text("Please answer."))]
    after = talk.say(claude(nudged), "ok")
    assert dropped.continues(one) and after.continues(one) and after.plan.attempt.n == 0
    repeat = talk.say(claude(asked), "ok")
    assert repeat.plan.attempt.of == dropped.node.call and repeat.plan.attempt.n == 1


# ---- (h) qwen-code: two new roots after a compaction ----------------------------------------------------------------


def qwen(messages: list[Any]) -> dict[str, Any]:
    return {"model": "gyre-policy", "messages": [{"role": "system", "content": "qwen"}, *messages], "stream": False}


def chat_echo(said: Said) -> dict[str, Any]:
    message = said.body["choices"][0]["message"]
    return {k: v for k, v in message.items() if k in ("role", "content", "tool_calls", "reasoning_content")}


def test_both_roots_after_a_compaction_belong_to_the_main_agent(chat: ChatModel) -> None:
    talk = Talk(chat, "chat")
    task = {"role": "user", "content": "task"}
    one = talk.say(qwen([task]), READ)
    call = chat_echo(one)["tool_calls"][0]["id"]
    result = {"role": "tool", "tool_call_id": call, "content": "spec"}
    summary = talk.say(qwen([task, chat_echo(one), result, {"role": "user", "content": "sum up"}]), "spec is read")
    assert summary.continues(one)
    rewritten = {**chat_echo(one), "content": "Understood, I go on."}
    after = [{"role": "user", "content": "Summary: spec is read"}, rewritten, result]
    first = talk.say(qwen(after), READ)
    assert talk.relabelled == {summary.node.call: "main-summary"}
    assert first.plan.base is None and first.plan.spliced == 0, "a turn whose words were replaced is not ours any more"
    call2 = chat_echo(first)["tool_calls"][0]["id"]
    result2 = {"role": "tool", "tool_call_id": call2, "content": "more"}
    second = talk.say(qwen([{"role": "user", "content": "start-up reminder"}, *after, chat_echo(first), result2]), "ok")
    assert second.plan.base is None and second.plan.spliced == 1
    assert first.plan.agent.id == second.plan.agent.id == "main"


def test_trimmed_reasoning_and_compact_arguments_are_the_same_turn(thinker: ChatModel) -> None:
    talk = Talk(thinker, "chat")
    task = {"role": "user", "content": "task"}
    one = talk.say(qwen([task]), "<think>\n so \n</think>\n\n" + tool("T", a=1, b=5000.0))
    echo = chat_echo(one)
    assert echo["reasoning_content"] == " so "
    echo["reasoning_content"] = "so"
    echo["tool_calls"][0]["function"]["arguments"] = '{"a":1,"b":5000}'
    result = {"role": "tool", "tool_call_id": echo["tool_calls"][0]["id"], "content": "r"}
    assert talk.say(qwen([task, echo, result]), "ok").continues(one)


def test_a_call_repeated_as_invalid_is_the_same_turn(chat: ChatModel) -> None:
    talk = Talk(chat, "chat")
    task = {"role": "user", "content": "task"}
    one = talk.say(qwen([task]), tool("nonsense", a=1))
    echo = chat_echo(one)
    function = {"name": "invalid", "arguments": '{"tool":"nonsense","error":"no such tool"}'}
    echo["tool_calls"][0]["function"] = function
    result = {"role": "tool", "tool_call_id": echo["tool_calls"][0]["id"], "content": "r"}
    assert talk.say(qwen([task, echo, result]), "ok").continues(one)


def test_a_summary_that_comes_back_as_an_answer_is_known(chat: ChatModel) -> None:
    talk = Talk(chat, "chat")
    main = {"x-session-id": "s1"}
    tools = [{"type": "function", "function": {"name": "Read"}}]
    talk.say({**qwen([{"role": "user", "content": "task"}]), "tools": tools}, "ok", main)
    asked = talk.say(qwen([{"role": "user", "content": "Summarise: ..."}]), "what was done", main)
    after = [{"role": "user", "content": "What did we do?"}, {"role": "assistant", "content": "what was done"}]
    more = talk.say({**qwen([*after, {"role": "user", "content": "go on"}]), "tools": tools}, "ok", main)
    child = talk.say(
        qwen([{"role": "user", "content": "x"}]), "ok", {"x-session-id": "s2", "x-parent-session-id": "s1"}
    )
    assert asked.plan.agent.id == more.plan.agent.id == "main" and child.label == "sub-agent"


# ---- (i) codex ------------------------------------------------------------------------------------------------------


def codex(items: list[Any], **more: Any) -> dict[str, Any]:
    tools = [
        {"type": "function", "name": "exec_command", "parameters": {"type": "object"}, "strict": False},
        {"type": "namespace", "name": "multi_agent_v1", "tools": [{"type": "function", "name": "spawn"}]},
        {"type": "web_search"},
    ]
    body = {"model": "gyre-policy", "instructions": "codex", "input": items, "tools": tools, "store": False}
    return {**body, "include": ["reasoning.encrypted_content"], "prompt_cache_key": "t", **more}


def turn_of(kind: str = "turn", thread: str = "t0", **more: str) -> dict[str, str]:
    return {"x-codex-turn-metadata": json.dumps({"thread_id": thread, "request_kind": kind}), **more}


def asks(words: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": words}]}


def outputs(said: Said, words: str) -> list[Any]:
    calls = [i for i in said.body["output"] if i["type"] == "function_call"]
    return [{"type": "function_call_output", "call_id": c["call_id"], "output": words} for c in calls]


def test_items_come_back_with_our_ids_and_namespaced_tools_with_their_names(thinker: ChatModel) -> None:
    talk = Talk(thinker, "responses")
    answer = "<think>\nhm\n</think>\n\nI look.\n" + tool("multi_agent_v1.spawn", message="look")
    one = talk.say(codex([asks("task")]), answer, turn_of())
    kinds = [i["type"] for i in one.body["output"]]
    assert kinds == ["reasoning", "message", "function_call"]
    call = one.body["output"][2]
    assert (call["namespace"], call["name"]) == ("multi_agent_v1", "spawn") and one.body["output"][0][
        "encrypted_content"
    ]
    assert one.body["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    two = talk.say(codex([asks("task"), *one.body["output"], *outputs(one, "r")]), "ok", turn_of())
    assert two.continues(one)
    lost = [i for i in one.body["output"] if i["type"] != "reasoning"]
    three = talk.say(codex([asks("task"), *lost, *outputs(one, "s")]), "ok", turn_of())
    assert three.continues(one), "the mark is in every item"
    sub = turn_of(thread="t1", **{"x-openai-subagent": "collab_spawn", "x-codex-parent-thread-id": "t0"})
    child = talk.say(codex([asks("look")], instructions="sub"), "found", sub)
    assert child.label == "sub-agent" and child.plan.agent.parent == one.node.spoken.calls[0].id


def test_a_compaction_without_tools_is_an_honest_root_with_the_sampled_ids(chat: ChatModel) -> None:
    talk = Talk(chat, "responses")
    one = talk.say(codex([asks("task")]), tool("exec_command", cmd="ls"), turn_of())
    history = [asks("task"), *one.body["output"], *outputs(one, "a b"), asks("Summarise.")]
    compaction = talk.say(codex(history, tools=[]), "listed: a b", turn_of("compaction"))
    assert compaction.plan.base is None and compaction.plan.spliced == 1 and compaction.label == "main-summary"
    after = talk.say(codex([asks("task"), asks("So far: listed: a b")]), "ok", turn_of())
    assert after.label == "main" and not talk.relabelled


def test_two_answers_in_a_row_stay_two(chat: ChatModel) -> None:
    talk = Talk(chat, "responses")
    one = talk.say(codex([asks("task")]), "first", turn_of())
    two = talk.say(codex([asks("task"), *one.body["output"]]), "second", turn_of())
    three = talk.say(codex([asks("task"), *one.body["output"], *two.body["output"], asks("on")]), "ok", turn_of())
    assert two.continues(one) and three.continues(two)


# ---- (j) deferred tools ---------------------------------------------------------------------------------------------


def test_a_tool_list_that_grows_in_mid_run_changes_nothing_before(chat: ChatModel) -> None:
    talk = Talk(chat, "messages")
    search = {"name": "ToolSearch", "input_schema": {"type": "object"}}
    late = {"name": "WebFetch", "description": "fetches", "input_schema": {"type": "object"}}
    one = talk.say(
        claude([user(text("task"))], tools=[search, {**late, "defer_loading": True}]), tool("ToolSearch", q="w")
    )
    found = [{**results(one)[0], "content": [{"type": "tool_reference", "tool_name": "WebFetch"}]}]
    two = talk.say(claude([user(text("task")), heard(one), user(*found)], tools=[search, late]), "ok")
    assert two.continues(one)
    assert "fetches" in chat.decode(two.plan.tail.ids), "the schema stands where it was found"
    assert "fetches" not in chat.decode(one.plan.prompt_ids().tolist())


# ---- (m) unknown fields ---------------------------------------------------------------------------------------------


def test_unknown_fields_anywhere_change_nothing(chat: ChatModel) -> None:
    talk = Talk(chat, "messages")
    one = talk.say(claude([user(text("task"))], made_up=1), READ)
    odd = user(*[{**r, "odd": [1]} for r in results(one)]) | {"output_config": {"effort": "high"}}
    echo = heard(one) | {"odd": True}
    echo["content"] = [{**b, "caller": {"type": "direct"}} for b in echo["content"]]
    two = talk.say(claude([user(text("task", odd=2)), echo, odd], context_management={"edits": []}), "ok")
    assert two.continues(one)


def test_system_messages_stand_where_they_are(chat: ChatModel) -> None:
    talk = Talk(chat, "messages")
    notice = {"role": "system", "content": "agents: none"}
    one = talk.say(claude([user(text("task")), notice]), READ)
    late = {"role": "system", "content": "a background job ended"}
    two = talk.say(claude([user(text("task")), notice, heard(one), user(*results(one)), late]), "ok")
    assert two.continues(one)
