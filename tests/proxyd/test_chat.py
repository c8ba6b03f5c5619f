"""Rendering unit by unit equals rendering everything; text survives; tool calls are found or left alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxyd.chat import ChatModel, TemplateRefused, groups
from proxyd.conversation import Message, ToolCall
from proxyd.parsers import hermes, issued_id
from tests.proxyd.tokens import SPECIAL, TEMPLATE, write_tokenizer

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart" / "tokenizer"
text = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        ["", "\n", " a\n", "<|im_end|>", "<|im_start|>user\n", "</tool_call>", "é\u3000\U0001f40d", "f1.md"]
    ),
)
arguments = st.dictionaries(
    st.sampled_from(["path", "n", "x"]), st.one_of(text, st.integers(), st.booleans()), max_size=2
)
calls = st.builds(
    lambda name, given, number: ToolCall(f"c{number}", name, json.dumps(given)),
    st.sampled_from(["read_file", "f"]),
    arguments,
    st.integers(0, 99),
)
message = st.one_of(
    st.builds(lambda t: Message("user", t), text),
    st.builds(lambda t: Message("system", t), text),
    st.builds(lambda t: Message("tool", t), text),
    st.builds(lambda t, c: Message("assistant", t, tuple(c)), text, st.lists(calls, max_size=2)),
)
tools = st.sampled_from([b"", b'[{"type":"function","function":{"name":"f","description":"a <b> & \\u00e9"}}]'])


@given(first=st.booleans(), rest=st.lists(message, min_size=1, max_size=8), tools=tools, generate=st.booleans())
@settings(max_examples=150, deadline=None)
def test_rendering_unit_by_unit_equals_rendering_everything(
    chat: ChatModel, first: bool, rest: list[Message], tools: bytes, generate: bool
) -> None:
    messages = [Message("system", "s"), *rest] if first else rest
    assert chat.render(messages, tools, generate) == chat.render_whole(messages, tools, generate)


@pytest.mark.skipif(not QUICKSTART.exists(), reason="the quickstart's tokenizer is not there")
def test_the_quickstart_tokenizer_renders_unit_by_unit() -> None:
    model = ChatModel.load(QUICKSTART)
    messages = [
        Message("system", "You write"),
        Message("user", "Write f1"),
        Message("assistant", "", (ToolCall("a", "read_file", '{"path": "f1.md"}'),)),
        Message("tool", "- reverse\n"),
        Message("assistant", "Done."),
        Message("user", "thanks"),
    ]
    assert model.render(messages) == model.render_whole(messages)
    assert model.decode(model.encode("a\nb é")) == "a\nb é"


def test_a_template_that_rewrites_the_past_is_refused_and_says_what_to_change(tmp_path: Path) -> None:
    stripping = TEMPLATE.replace("message.content }}", "(message.content if loop.last else '...') }}", 1)
    assert stripping != TEMPLATE
    with pytest.raises(TemplateRefused, match=r"not append-only.*Use a variant"):
        ChatModel.load(write_tokenizer(tmp_path, stripping))


def test_a_counting_template_is_refused(tmp_path: Path) -> None:
    counting = "{{- '<|im_start|>' + messages|length|string }}" + TEMPLATE
    with pytest.raises(TemplateRefused, match="not append-only"):
        ChatModel.load(write_tokenizer(tmp_path, counting))


def test_a_missing_tokenizer_or_template_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        ChatModel.load(tmp_path)
    folder = write_tokenizer(tmp_path / "t")
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(TemplateRefused, match=r"chat_template"):
        ChatModel.load(folder)


@given(text=st.text(max_size=30))
@settings(max_examples=100, deadline=None)
def test_text_survives_ids(chat: ChatModel, text: str) -> None:
    assert chat.decode(chat.encode(text)) == text


def test_a_split_character_is_whole_again_and_a_cut_one_is_marked(chat: ChatModel) -> None:
    ids = chat.encode("\U0001f40d")
    assert len(ids) == 4
    assert chat.decode(ids) == "\U0001f40d"
    assert chat.decode(ids[:3]) == "\ufffd"


def test_the_end_token_is_part_of_the_ids_and_not_of_the_text(chat: ChatModel) -> None:
    ended = [*chat.encode("ok"), chat.end_id]
    assert chat.completion_text(ended) == "ok" == chat.completion_text(ended[:-1])
    assert chat.decode(chat.filler(ended).ids) == "\n"
    assert chat.decode(chat.filler(ended[:-1]).ids) == "<|im_end|>\n"


def test_tool_results_that_follow_each_other_are_one_unit() -> None:
    messages = [Message("user"), Message("tool", "1"), Message("tool", "2"), Message("user"), Message("tool", "3")]
    assert [len(g) for g in groups(messages)] == [1, 2, 1, 1]


# ---- tool calls -----------------------------------------------------------------------------------------------------


def call_text(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


def test_text_and_calls_are_told_apart() -> None:
    one = call_text('{"name": "f", "arguments": {"a": 1.0,  "b": "x"}}')
    parsed = hermes(f"I look.\n{one}\n{one}", "ab-12")
    assert parsed.spoken.text == "I look."
    assert [c.id for c in parsed.spoken.calls] == [issued_id("ab-12", 0), issued_id("ab-12", 1)]
    assert {c.arguments for c in parsed.spoken.calls} == {'{"a": 1.0,  "b": "x"}'}, "as the model wrote them"
    assert parsed.ill_formed == 0


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "f"',
        '{"name": 3, "arguments": {}}',
        '["f"]',
        '{"name": "f", "arguments": "x"}',
        "",
        '{"arguments": {}}',
    ],
)
def test_what_is_no_call_stays_text_and_is_counted(body: str) -> None:
    written = f"a\n{call_text(body)}\nb"
    parsed = hermes(written, "c")
    assert (parsed.spoken.text, parsed.spoken.calls, parsed.ill_formed) == (written, (), 1)


def test_a_call_that_was_cut_off_stays_text() -> None:
    parsed = hermes('x <tool_call>\n{"name": "f", "argu', "c")
    assert parsed.spoken.text.startswith("x <tool_call>") and parsed.ill_formed == 1


@given(pieces=st.lists(st.sampled_from(["<tool_call>", "</tool_call>", '{"name": "f", "arguments": {}}', "\n", "x"])))
def test_no_text_breaks_the_parser(pieces: list[str]) -> None:
    parsed = hermes("".join(pieces), "c")
    assert all(json.loads(c.arguments) == {} for c in parsed.spoken.calls)


def test_specials_in_the_tests_are_those_of_the_template() -> None:
    assert "<|im_end|>" in SPECIAL
