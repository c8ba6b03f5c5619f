"""OpenAI Chat Completions, streaming and not, with tools.

Sampling fields are read past on purpose: what is trained is sampled as the run says (DESIGN 3.3).
"""

from __future__ import annotations

from typing import Any

import orjson

from proxyd.conversation import Conversation, Message, Reply, Request, ToolCall
from proxyd.dialects import BadRequest, Events, Failure, Told, Written, load_json

JSON, SSE = "application/json", "text/event-stream; charset=utf-8"
ROLES = {"developer": "system", "function": "tool"}
_READ = {"messages", "tools", "stream", "stream_options", "model", "max_tokens", "max_completion_tokens"}


class OpenAIChat:
    """POST /v1/chat/completions."""

    field = "messages"

    def read(self, body: bytes) -> Request:
        """Raises BadRequest."""
        given = _object(body)
        messages = given.get("messages")
        if not isinstance(messages, list) or not messages:
            raise BadRequest("you must provide a messages parameter")
        tools = given.get("tools") or given.get("functions")
        conversation = Conversation(
            tuple(_message(m, place) for place, m in enumerate(messages)),
            orjson.dumps(tools) if isinstance(tools, list) and tools else b"",
        )
        options = given.get("stream_options")
        return Request(
            conversation=conversation,
            max_tokens=_count(given.get("max_completion_tokens"), given.get("max_tokens")),
            stream=bool(given.get("stream")),
            include_usage=isinstance(options, dict) and bool(options.get("include_usage")),
            model=str(given.get("model") or ""),
            unknown=tuple(sorted(k for k in given if k not in _READ)),
        )

    def write(self, reply: Reply, request: Request) -> Written:
        if request.stream:
            return Written(200, SSE, self.stream(reply, request).end(reply))
        message: dict[str, Any] = {"role": "assistant", "content": reply.text or None, "refusal": None}
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        if reply.calls:
            message["tool_calls"] = [_call(c) for c in reply.calls]
        elif not reply.text:
            message["content"] = ""
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reply.finish}
        body = {**_head(reply, "chat.completion"), "choices": [choice], "usage": _usage(reply)}
        return Written(200, JSON, orjson.dumps(body))

    def stream(self, reply: Reply, request: Request) -> Events:
        return _Chunks(reply, request.include_usage)

    def fail(self, failure: Failure, *, stream: bool = False) -> Written:
        status, kind, code, message = _wording(failure)
        param = "messages" if failure.kind == "overflow" else None
        error = {"message": message, "type": kind, "param": param, "code": code}
        return Written(status, JSON, orjson.dumps({"error": error}))


def models(name: str, *, one: bool = False) -> Written:
    """GET /v1/models, or the entry of its one model."""
    entry = {"id": name, "object": "model", "created": 0, "owned_by": "gyre"}
    if one:
        return Written(200, JSON, orjson.dumps(entry))
    return Written(200, JSON, orjson.dumps({"object": "list", "data": [entry]}))


# ---- reading --------------------------------------------------------------------------------------------------------


def _object(body: bytes) -> dict[str, Any]:
    try:
        given = load_json(body)
    except (ValueError, RecursionError):
        raise BadRequest(
            "We could not parse the JSON body of your request. (HINT: This likely means you aren't using your HTTP "
            "library correctly. The OpenAI API expects a JSON payload, but what was sent was not valid JSON.)"
        ) from None
    if not isinstance(given, dict):
        raise BadRequest("Invalid type for request body: expected an object.")
    return given


def _count(*values: Any) -> int | None:
    return next((v for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 0), None)


def _message(given: Any, place: int) -> Message:
    if not isinstance(given, dict) or not isinstance(given.get("role"), str):
        raise BadRequest(f"Invalid value for 'messages[{place}]': expected an object with a role.")
    role = ROLES.get(given["role"], given["role"])
    if role not in ("system", "user", "assistant", "tool"):
        raise BadRequest(
            f"Invalid value: '{given['role']}'. Supported values are: 'system', 'assistant', 'user', 'function', "
            "'tool', and 'developer'."
        )
    text, last = _text(given.get("content"))
    if role != "assistant":
        return Message(role, text, call_id=str(given.get("tool_call_id") or ""), last_text=last)
    calls = given.get("tool_calls") or []
    if given.get("function_call"):
        calls = [{"id": "", "function": given["function_call"]}]
    if not isinstance(calls, list):
        raise BadRequest(f"Invalid type for 'messages[{place}].tool_calls': expected an array of objects.")
    thought = given.get("reasoning_content") or given.get("reasoning")
    return Message(
        "assistant",
        text,
        tuple(_tool_call(c, place) for c in calls),
        reasoning=thought if isinstance(thought, str) else "",
    )


def _text(content: Any) -> tuple[str, str]:
    """(all text, the last block) of a string or a list of parts. Parts that are no text leave their name."""
    if content is None:
        return "", ""
    if isinstance(content, str):
        return content, ""
    if not isinstance(content, list):
        return orjson.dumps(content).decode(), ""
    parts = [_part(p) for p in content]
    return "".join(parts), parts[-1] if len(parts) > 1 else ""


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict):
        for key in ("text", "refusal"):
            if isinstance(part.get(key), str):
                return str(part[key])
        return f"[{part.get('type', 'unknown part')}]"
    return str(part)


def _tool_call(given: Any, place: int) -> ToolCall:
    function = given.get("function") if isinstance(given, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequest(f"Invalid value for 'messages[{place}].tool_calls': expected a function with a name.")
    arguments = function.get("arguments")
    raw = arguments if isinstance(arguments, str) else orjson.dumps(arguments if arguments is not None else {}).decode()
    return ToolCall(str(given.get("id") or ""), function["name"], raw)


# ---- writing --------------------------------------------------------------------------------------------------------


def _head(reply: Reply, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{reply.call}", "object": kind, "created": reply.created, "model": reply.model}


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _usage(reply: Reply) -> dict[str, Any]:
    return {
        "prompt_tokens": reply.prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
        "completion_tokens_details": {"reasoning_tokens": reply.reasoning_tokens},
    }


class _Chunks:
    """`chat.completion.chunk` after chunk."""

    def __init__(self, reply: Reply, include_usage: bool) -> None:
        self._head = _head(reply, "chat.completion.chunk")
        self._begin = b'data: %b,"choices":[{"index":0,"delta":' % orjson.dumps(self._head)[:-1]
        self._include_usage = include_usage
        self._told = Told()
        self._begun = False

    def more(self, reasoning: str, text: str) -> bytes:
        deltas: list[dict[str, Any]] = [] if self._begun else [{"role": "assistant", "content": ""}]
        self._begun = True
        if reasoning:
            deltas.append({"reasoning_content": reasoning})
        if text:
            deltas.append({"content": text})
        self._told.add(reasoning, text)
        return b"".join(map(self._delta, deltas))

    def end(self, reply: Reply) -> bytes:
        out = [self.more(*self._told.rest(reply))]
        calls = enumerate(reply.calls)
        out += [self._delta({"tool_calls": [{"index": place, **_call(call)}]}) for place, call in calls]
        out.append(self._delta({}, reply.finish))
        if self._include_usage:
            out.append(_data({**self._head, "choices": [], "usage": _usage(reply)}))
        return b"".join(out) + b"data: [DONE]\n\n"

    def _delta(self, delta: dict[str, Any], finish: str | None = None) -> bytes:
        """All chunks of an answer begin alike: that part is written once."""
        usage = b',"usage":null' if self._include_usage else b""
        said = orjson.dumps(delta), orjson.dumps(finish)
        return b'%b%b,"finish_reason":%b}]%b}\n\n' % (self._begin, *said, usage)


def _data(chunk: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(chunk) + b"\n\n"


def _wording(failure: Failure) -> tuple[int, str, str | None, str]:
    match failure.kind:
        case "unauthorized":
            return 401, "invalid_request_error", "invalid_api_key", "Incorrect API key provided."
        case "overflow":
            return (
                400,
                "invalid_request_error",
                "context_length_exceeded",
                f"This model's maximum context length is {failure.limit} tokens. However, your messages resulted in "
                f"{failure.tokens} tokens. Please reduce the length of the messages.",
            )
        case "not_found":
            return (
                404,
                "invalid_request_error",
                "unknown_url",
                f"Unknown request URL: {failure.why}. Please check the URL.",
            )
        case "no_model":
            return 404, "invalid_request_error", "model_not_found", f"The model '{failure.why}' does not exist"
        case "forbidden":
            return 403, "invalid_request_error", "execution_closed", failure.why
        case "too_large":
            return 413, "invalid_request_error", None, failure.why
        case "bad_request":
            return 400, "invalid_request_error", None, failure.why
        case "unavailable":
            return 503, "server_error", "unavailable", failure.why
        case _:
            return 500, "server_error", None, failure.why or "The server had an error while processing your request."
