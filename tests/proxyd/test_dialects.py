"""Bodies as harnesses send them become one conversation; answers and errors have each dialect's own shape."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxyd.conversation import Message, Reply, Request, ToolCall, exact_key, loose_arguments
from proxyd.dialects import BadRequest, Failure
from proxyd.dialects.anthropic import AnthropicMessages
from proxyd.dialects.openai_chat import OpenAIChat, models

CALL = ToolCall("call_1", "f", '{"a": 1}')


def reply(text: str = "hi", calls: tuple[ToolCall, ...] = (), finish: str = "stop") -> Reply:
    return Reply("k-1", 7, "m", text, calls, finish, prompt_tokens=11, completion_tokens=3)


def read(body: Any) -> Request:
    return OpenAIChat().read(json.dumps(body).encode())


def asks(stream: bool, usage: bool = True) -> Request:
    options = {"include_usage": usage}
    return read({"messages": [{"role": "user", "content": "x"}], "stream": stream, "stream_options": options})


# ---- OpenAI Chat Completions ----------------------------------------------------------------------------------------


def test_every_message_form_is_read() -> None:
    request = read(
        {
            "model": "m",
            "messages": [
                {"role": "developer", "content": "s"},
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
                    "name": "n",
                },
                {"role": "assistant", "content": None, "tool_calls": [openai_call(CALL)], "reasoning_content": "r"},
                {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "out"}]},
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]},
            ],
            "max_completion_tokens": 5,
            "max_tokens": 9,
            "temperature": 0.3,
            "made_up": {"x": 1},
        }
    )
    assert request.conversation.messages == (
        Message("system", "s"),
        Message("user", "ab", last_text="b"),
        Message("assistant", "", (CALL,), reasoning="r"),
        Message("tool", "out", call_id="call_1"),
        Message("user", "[image_url]"),
    )
    assert request.max_tokens == 5 and request.unknown == ("made_up", "temperature")


def openai_call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"nonsense",
        b"[1]",
        b'{"messages": []}',
        b'{"messages": ["x"]}',
        b'{"messages": [{"role": "sage"}]}',
        b'{"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]}',
        b'{"messages": [{"role": "assistant", "tool_calls": 7}]}',
        b"\xff\xfe",
        b"[" * 100_000,
    ],
)
@pytest.mark.parametrize("dialect", [OpenAIChat(), AnthropicMessages()])
def test_what_is_no_request_is_refused_in_words(dialect: Any, body: bytes) -> None:
    if dialect.__class__ is AnthropicMessages and b"tool_calls" in body:
        return
    with pytest.raises(BadRequest) as caught:
        dialect.read(body)
    assert str(caught.value)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
fields = st.sampled_from(
    ["role", "content", "tool_calls", "tool_call_id", "type", "text", "id", "name", "input", "function"]
)
bodies = st.fixed_dictionaries(
    {
        "messages": st.lists(
            st.dictionaries(fields, json_values | st.sampled_from(["user", "assistant", "tool"]), max_size=4)
        )
    }
)


@given(body=bodies)
def test_no_json_breaks_a_dialect(body: Any) -> None:
    for dialect in (OpenAIChat(), AnthropicMessages()):
        try:
            dialect.read(json.dumps(body).encode())
        except BadRequest:
            pass


def test_lone_surrogates_are_no_reason_to_refuse() -> None:
    body = b'{"messages": [{"role": "user", "content": "a\\ud800b"}]}'
    assert OpenAIChat().read(body).conversation.messages[0].text == "a?b"


@pytest.mark.parametrize(
    "given",
    [reply(), reply("", (CALL,), "tool_calls"), reply("so", (CALL, CALL), "tool_calls"), reply("", (), "length")],
)
def test_a_stream_says_what_the_plain_answer_says(given: Reply) -> None:
    plain = json.loads(OpenAIChat().write(given, asks(False)).body)
    streamed = OpenAIChat().write(given, asks(True))
    assert streamed.content_type.startswith("text/event-stream")
    text, calls, finish, usage = "", [], None, None
    events = streamed.body.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    for event in events[:-2]:
        chunk = json.loads(event.removeprefix("data: "))
        usage = chunk["usage"] or usage
        for choice in chunk["choices"]:
            text += choice["delta"].get("content") or ""
            calls += choice["delta"].get("tool_calls", [])
            finish = choice["finish_reason"] or finish
    choice = plain["choices"][0]
    assert text == (choice["message"]["content"] or "")
    assert [{k: v for k, v in c.items() if k != "index"} for c in calls] == choice["message"].get("tool_calls", [])
    assert (finish, usage) == (choice["finish_reason"], plain["usage"])
    details = {"reasoning_tokens": given.reasoning_tokens}
    assert plain["usage"] == {
        "prompt_tokens": 11,
        "completion_tokens": 3,
        "total_tokens": 14,
        "completion_tokens_details": details,
    }
    assert "usage" not in OpenAIChat().write(given, asks(True, usage=False)).body.decode()


def test_errors_have_the_shape_and_words_that_harnesses_know() -> None:
    over = OpenAIChat().fail(Failure("overflow", limit=100, tokens=120))
    assert over.status == 400
    assert json.loads(over.body)["error"] == {
        "message": "This model's maximum context length is 100 tokens. However, your messages resulted in 120 tokens. "
        "Please reduce the length of the messages.",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "context_length_exceeded",
    }
    statuses = {"unauthorized": 401, "not_found": 404, "bad_request": 400, "forbidden": 403, "unavailable": 503}
    for kind, status in statuses.items():
        for dialect in (OpenAIChat(), AnthropicMessages()):
            assert dialect.fail(Failure(kind, why="w")).status == status
    other = json.loads(AnthropicMessages().fail(Failure("overflow", limit=100, tokens=120)).body)
    assert other["error"]["message"] == "prompt is too long: 120 tokens > 100 maximum"
    assert json.loads(models("m").body)["data"][0]["id"] == "m"


# ---- Anthropic Messages ---------------------------------------------------------------------------------------------


def test_blocks_become_the_same_conversation() -> None:
    tool = {"name": "f", "description": "d", "input_schema": {"type": "object"}, "cache_control": {}}
    body = {
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "tools": [tool],
        "messages": [
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "call_1", "name": "f", "input": {"a": 1}}]},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "call_1", "content": "r"},
                    {"type": "text", "text": "and"},
                ],
            },
        ],
        "thinking": {"type": "adaptive"},
    }
    request = AnthropicMessages().read(json.dumps(body).encode())
    assert request.conversation.messages == (
        Message("system", "s"),
        Message("user", "u"),
        Message("assistant", "", (CALL,)),
        Message("tool", "r", call_id="call_1"),
        Message("user", "and"),
    )
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}}
    assert json.loads(request.conversation.tools) == [{"type": "function", "function": function}]


def test_its_stream_says_what_its_plain_answer_says() -> None:
    dialect = AnthropicMessages()
    ask = json.dumps({"messages": [{"role": "user", "content": "x"}], "stream": True}).encode()
    given = reply("so", (CALL,), "tool_calls")
    plain = json.loads(dialect.write(given, asks(False)).body)
    events = dialect.write(given, dialect.read(ask)).body.decode().strip().split("\n\n")
    blocks: dict[int, Any] = {}
    for event in events:
        name, data = event.split("\n")
        body = json.loads(data.removeprefix("data: "))
        assert name == f"event: {body['type']}"
        if body["type"] == "content_block_start":
            blocks[body["index"]] = body["content_block"]
        if body["type"] == "content_block_delta":
            delta = body["delta"]
            if delta["type"] == "text_delta":
                blocks[body["index"]]["text"] += delta["text"]
            else:
                blocks[body["index"]]["input"] = json.loads(delta["partial_json"])
    assert [blocks[n] for n in sorted(blocks)] == plain["content"]
    assert events[-1].startswith("event: message_stop") and plain["stop_reason"] == "tool_use"
    assert plain["usage"]["input_tokens"] == 11


# ---- comparing ------------------------------------------------------------------------------------------------------


def test_arguments_are_compared_as_values() -> None:
    one = Message("assistant", "t", (ToolCall("x", "f", '{"a": 1, "b": [2]}'),))
    assert exact_key(one) == exact_key(Message("assistant", "t", (ToolCall("y", "f", '{"b":[2],"a":1}'),)))
    assert exact_key(one) != exact_key(Message("assistant", "t", (ToolCall("x", "f", '{"a": 1, "b": [3]}'),)))
    assert exact_key(one) != exact_key(Message("assistant", "t ", one.calls))


@pytest.mark.parametrize(
    ("sent", "back"),
    [
        ('{"n": 5000.0}', '{"n": 5000}'),
        ('{"n": "5000"}', '{"n": 5000}'),
        ('{"f": "false"}', '{"f": false}'),
        ('{"a": 1}', '{"replace_all": false, "a": 1}'),
        ('{"t": "x  \\ny"}', '{"t": "x\\ny"}'),
        ("{}", ""),
        ('{"a": 0}', '{"a": 0.0}'),
    ],
)
def test_what_harnesses_do_to_arguments_is_forgiven(sent: str, back: str) -> None:
    assert loose_arguments(sent) == loose_arguments(back)


def test_a_zero_is_not_nothing() -> None:
    assert loose_arguments('{"a": 0}') != loose_arguments("{}")
