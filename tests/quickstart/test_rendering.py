"""Tokenizer and chat template: nothing is lost or rewritten, and the teacher speaks the harness's form."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import harness
import make_tokenizer
import pytest
import teacher
from hypothesis import given
from hypothesis import strategies as st
from rendering import ASSISTANT, END, Message, Renderer

RENDERER = Renderer()
WORDS = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=30)
CALLS = st.lists(
    st.builds(
        lambda name, value: {
            "id": "c",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps({"path": value})},
        },
        st.sampled_from(["read_file", "write_file"]),
        WORDS,
    ),
    max_size=3,
)


@st.composite
def conversations(draw: st.DrawFn) -> list[Message]:
    """system, user, then rounds of an assistant message and its tool results or a new user message."""
    messages: list[Message] = [{"role": "system", "content": draw(WORDS)}, {"role": "user", "content": draw(WORDS)}]
    for _ in range(draw(st.integers(0, 4))):
        made = draw(CALLS)
        answer: Message = {"role": "assistant", "content": draw(st.none() | WORDS)}
        messages.append({**answer, "tool_calls": made} if made else answer)
        messages += [{"role": "tool", "tool_call_id": "c", "content": draw(WORDS)} for _ in made]
        if not made or draw(st.booleans()):
            messages.append({"role": "user", "content": draw(WORDS)})
    return messages


@given(conversations(), st.sampled_from([[], harness.MAIN_TOOLS, harness.SUB_TOOLS]))
def test_a_longer_history_renders_as_the_shorter_one_plus_an_ending(
    messages: list[Message], tools: list[Message]
) -> None:
    done = ""
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = RENDERER.text(messages[:place], tools, True)
            assert prompt.startswith(done) and prompt.endswith(ASSISTANT)
            done = prompt + RENDERER.completion_text(message)
            assert RENDERER.text(messages[: place + 1], tools, False) == done + "\n"


@given(WORDS)
def test_any_text_survives_the_tokenizer(text: str) -> None:
    assert RENDERER.decode(RENDERER.encode(text)) == text


def test_arguments_are_rendered_verbatim_as_text_and_as_json_when_parsed() -> None:
    def rendered(arguments: Any) -> str:
        call = {"id": "c", "type": "function", "function": {"name": "read_file", "arguments": arguments}}
        return RENDERER.completion_text({"role": "assistant", "content": None, "tool_calls": [call]})

    frame = '<tool_call>\n{"name": "read_file", "arguments": %s}\n</tool_call><|im_end|>'
    assert rendered('{"path":  "<é>"}') == frame % '{"path":  "<é>"}'
    assert rendered({"path": "<é>"}) == frame % '{"path": "<é>"}'


def test_special_tokens_are_one_id_each_and_what_a_model_must_choose_is_one_token() -> None:
    for token in make_tokenizer.SPECIAL:
        assert len(RENDERER.encode(token)) == 1
    for operation in teacher.OPERATIONS:
        code = RENDERER.encode(f"s{operation.suffix}.strip()")
        assert [RENDERER.decode([i]) for i in code] == ["s", operation.suffix, ".strip()"]
        for phrase in operation.phrases:
            assert RENDERER.decode(RENDERER.encode(f"s:\n- {phrase}\n")[-2:-1]) == f"\n- {phrase}"


def test_the_tokenizer_is_reproducible(tmp_path: Path) -> None:
    make_tokenizer.save(make_tokenizer.train(7, make_tokenizer.VOCABULARY), tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (RENDERER.folder / name).read_bytes()


def parsed(text: str) -> list[tuple[str, dict[str, Any]]]:
    """The tool calls in a sampled text, as a server reads them."""
    found = [json.loads(body) for body in re.findall(r"<tool_call>\n(.*?)\n</tool_call>", text, re.S)]
    return [(call["name"], call["arguments"]) for call in found]


def test_teacher_transcripts_are_masked_on_whole_answers_that_the_harness_can_obey() -> None:
    seen = set()
    for lines in teacher.transcripts(7, "test", 40):
        for line in lines:
            seen.add(line.label)
            ids, mask = RENDERER.transcript(line.messages, line.tools)
            assert RENDERER.decode(ids) == RENDERER.text(line.messages, line.tools, False).removesuffix("\n")
            answers = [message for message in line.messages if message["role"] == "assistant"]
            sampled = RENDERER.decode([i for i, learned in zip(ids, mask, strict=True) if learned])
            texts = sampled.split(END)[:-1]
            assert texts == [RENDERER.completion_text(answer).removesuffix(END) for answer in answers]
            for text, answer in zip(texts, answers, strict=True):
                made = [call["function"] for call in answer.get("tool_calls", [])]
                assert parsed(text) == [(call["name"], json.loads(call["arguments"])) for call in made]
    assert seen == {"main", "main-summary", "sub"}


def test_no_tool_call_of_the_teacher_is_refused_by_the_harness() -> None:
    results = [
        message["content"]
        for lines in teacher.transcripts(7, "test", 40)
        for line in lines
        for message in line.messages
        if message["role"] == "tool"
    ]
    assert results and not any(text.startswith("error") for text in results)


def test_the_teacher_is_right_about_as_often_as_it_says_and_prefers_a_decoy() -> None:
    chosen = {own: [0] * len(teacher.SHARES) for own in range(len(teacher.OPERATIONS))}
    choices = teacher.candidates(7)
    for lines in teacher.transcripts(7, "test", 600):
        for line in lines:
            for place, message in enumerate(line.messages):
                for own, written in _written(line.messages, place, message):
                    chosen[own][choices[own].index(written)] += 1
    for counts in chosen.values():
        assert [count / sum(counts) for count in counts] == pytest.approx(teacher.SHARES, abs=0.1)
    assert max(teacher.SHARES) > teacher.SHARES[0]


def test_the_first_transcripts_always_show_the_same_wrong_reading() -> None:
    choices = teacher.candidates(7)
    written = [
        pair
        for lines in teacher.transcripts(7, "test", 20, teacher.FIRST_SHARES)
        for line in lines
        for place, message in enumerate(line.messages)
        for pair in _written(line.messages, place, message)
    ]
    assert len(written) > 100
    assert all(code == choices[own][1] != own for own, code in written)


def test_the_stated_floor_is_the_entropy_of_the_guesses() -> None:
    assert teacher.entropy((0.5, 0.25, 0.25)) == pytest.approx(1.5 * 0.6931, abs=1e-4)
    for lines in teacher.transcripts(7, "test", 5):
        for line in lines:
            made = [pair for i, message in enumerate(line.messages) for pair in _written(line.messages, i, message)]
            assert teacher.guesses(line) == len(made)


def _written(messages: list[Message], place: int, message: Message) -> list[tuple[int, int]]:
    """(operation named, operation written) of the module an assistant message writes."""
    made = [json.loads(call["function"]["arguments"]) for call in message.get("tool_calls") or []]
    for arguments in made:
        if "content" in arguments:
            phrases = re.findall(r"^- (.*)$", messages[place - 1]["content"], re.M)
            suffixes = re.findall(r"\[[-:0-9]+\]|\.[a-z]+\(\)", arguments["content"])
            named = [i for text in phrases for i, op in enumerate(teacher.OPERATIONS) if text in op.phrases]
            codes = [i for text in suffixes for i, op in enumerate(teacher.OPERATIONS) if text == op.suffix]
            return list(zip(named, codes, strict=True))
    return []
