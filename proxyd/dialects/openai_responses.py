"""OpenAI Responses, streaming and not, stateless (`store: false`): the whole input comes with every request.

Every item that we issue bears the call's mark (its id, and reasoning items their `encrypted_content`), so an echo is
known without reading it. Tools of a namespace are shown to the model as `namespace.tool`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from proxyd.conversation import Conversation, Message, Reply, Request, ToolCall, mark_of
from proxyd.dialects import BadRequest, Failure, Written, load_json
from proxyd.dialects import openai_chat as chat

JSON, SSE = "application/json", "text/event-stream; charset=utf-8"
ROLES = {"developer": "system"}
_READ = {"input", "instructions", "tools", "stream", "model", "max_output_tokens"}
_ASSISTANT = {"reasoning", "function_call", "custom_tool_call"}
_RESULTS = {"function_call_output", "custom_tool_call_output"}
MARK = mark_of("")
OVERFLOW = "Your input exceeds the context window of this model. Please adjust your input and try again."


class OpenAIResponses:
    """POST /v1/responses."""

    field = "input"

    def read(self, body: bytes) -> Request:
        """Raises BadRequest."""
        try:
            given = load_json(body)
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"We could not parse the JSON body of your request: {error}") from None
        if not isinstance(given, dict):
            raise BadRequest("Invalid type for request body: expected an object.")
        items = given.get("input")
        if isinstance(items, str):
            items = [{"type": "message", "role": "user", "content": items}]
        if not isinstance(items, list) or not items:
            raise BadRequest("Missing required parameter: 'input'.")
        if given.get("previous_response_id"):
            raise BadRequest("Responses are not stored here: send the whole input instead of previous_response_id.")
        instructions = given.get("instructions")
        head = [Message("system", str(instructions))] if instructions else []
        limit = given.get("max_output_tokens")
        return Request(
            conversation=Conversation((*head, *_messages(items)), _tools(given.get("tools")), len(head)),
            max_tokens=limit if isinstance(limit, int) and not isinstance(limit, bool) and limit > 0 else None,
            stream=bool(given.get("stream")),
            include_usage=True,
            model=str(given.get("model") or ""),
            unknown=tuple(sorted(k for k in given if k not in _READ)),
        )

    def write(self, reply: Reply, request: Request) -> Written:
        if request.stream:
            return Written(200, SSE, _sse(_events(reply, request)))
        return Written(200, JSON, orjson.dumps(_response(reply, request)))

    def fail(self, failure: Failure, *, stream: bool = False) -> Written:
        """As Chat Completions words it, but for the one sentence and code that clients compact on.

        In a stream they read that code from a failed response, not from a status.
        """
        if failure.kind == "overflow" and stream:
            error: dict[str, Any] = {"code": "context_length_exceeded", "message": OVERFLOW}
            response = {"id": "resp_overflow", "object": "response", "status": "failed", "error": error, "output": []}
            return Written(200, SSE, _sse([{"type": "response.failed", "response": response}]))
        if failure.kind == "overflow":
            error = {
                "message": OVERFLOW,
                "type": "invalid_request_error",
                "param": "input",
                "code": "context_length_exceeded",
            }
            return Written(400, JSON, orjson.dumps({"error": error}))
        return chat.OpenAIChat().fail(failure)


# ---- reading --------------------------------------------------------------------------------------------------------


def _tools(tools: Any) -> bytes:
    """The tool list in the form that chat templates render."""
    if not isinstance(tools, list) or not tools:
        return b""
    functions = [{"type": "function", "function": f} for tool in tools for f in _functions(tool, "")]
    return orjson.dumps(functions)


def _functions(tool: Any, namespace: str) -> Iterator[dict[str, Any]]:
    if not isinstance(tool, dict):
        raise BadRequest("Invalid type for 'tools': expected objects.")
    if tool.get("type") == "namespace":
        for inner in tool.get("tools") or []:
            yield from _functions(inner, f"{tool.get('name')}.")
        return
    name = f"{namespace}{tool.get('name') or tool.get('type')}"
    function = {"name": name, "description": tool.get("description"), "parameters": tool.get("parameters")}
    if tool.get("type") == "custom":
        function["parameters"] = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    yield {k: v for k, v in function.items() if v is not None}


def _messages(items: list[Any]) -> Iterator[Message]:
    """Items in order; those of one answer (by their mark) become one assistant message."""
    answer: list[dict[str, Any]] = []
    for place, item in enumerate(items):
        if not isinstance(item, dict):
            raise BadRequest(f"Invalid type for 'input[{place}]': expected an object.")
        if _is_answer(item):
            if answer and _mark(item) != _mark(answer[0]):
                yield _answer(answer)
                answer = []
            answer.append(item)
            continue
        if answer:
            yield _answer(answer)
            answer = []
        yield _other(item, place)
    if answer:
        yield _answer(answer)


def _is_answer(item: dict[str, Any]) -> bool:
    return item.get("type") in _ASSISTANT or (
        item.get("type", "message") == "message" and item.get("role") == "assistant"
    )


def _mark(item: dict[str, Any]) -> str:
    """The mark in an item's secret or id; the same for all items of one answer. Empty if it is none of ours."""
    for issued in (item.get("encrypted_content"), item.get("id")):
        at = issued.find(MARK) if isinstance(issued, str) else -1
        if at >= 0:
            return str(issued)[at:]
    return ""


def _answer(items: list[dict[str, Any]]) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    for item in items:
        match item.get("type", "message"):
            case "reasoning":
                parts = item.get("content") or item.get("summary") or []
                thoughts += [str(p.get("text") or "") for p in parts if isinstance(p, dict)]
            case "message":
                texts.append(_text(item.get("content")))
            case _:
                calls.append(_call(item))
    mark = next((m for m in map(_mark, items) if m), "")
    return Message("assistant", "".join(texts), tuple(calls), reasoning="\n".join(thoughts), mark=mark)


def _call(item: dict[str, Any]) -> ToolCall:
    if not isinstance(item.get("name"), str):
        raise BadRequest("Invalid value for 'input': a function_call needs a name.")
    name = f"{item['namespace']}.{item['name']}" if item.get("namespace") else item["name"]
    if item["type"] == "custom_tool_call":
        return ToolCall(str(item.get("call_id") or ""), name, orjson.dumps({"input": item.get("input")}).decode())
    arguments = item.get("arguments")
    raw = arguments if isinstance(arguments, str) else orjson.dumps(arguments or {}).decode()
    return ToolCall(str(item.get("call_id") or ""), name, raw)


def _other(item: dict[str, Any], place: int) -> Message:
    kind = item.get("type", "message")
    if kind in _RESULTS:
        return Message("tool", _text(item.get("output")), call_id=str(item.get("call_id") or ""))
    if kind != "message":
        return Message("user", f"[{kind}]")
    role = ROLES.get(str(item.get("role")), item.get("role"))
    if role not in ("system", "user"):
        raise BadRequest(f"Invalid value for 'input[{place}].role': {item.get('role')!r}")
    content = item.get("content")
    last = _text(content[-1:]) if isinstance(content, list) and len(content) > 1 else ""
    return Message(role, _text(content), last_text=last)


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        return orjson.dumps(content).decode()
    return "\n".join(_part(part) for part in content)


def _part(part: Any) -> str:
    if isinstance(part, dict):
        for key in ("text", "refusal"):
            if isinstance(part.get(key), str):
                return str(part[key])
        return f"[{part.get('type', 'unknown part')}]"
    return str(part)


# ---- writing --------------------------------------------------------------------------------------------------------


def _items(reply: Reply) -> list[dict[str, Any]]:
    mark, out = reply.mark, []
    if reply.reasoning:
        summary = [{"type": "summary_text", "text": reply.reasoning}]
        out.append({"type": "reasoning", "id": f"rs_{mark}", "summary": summary, "encrypted_content": mark})
    if reply.text.strip() or not (reply.calls or reply.reasoning):
        content = [{"type": "output_text", "text": reply.text, "annotations": []}]
        out.append(
            {"type": "message", "id": f"msg_{mark}", "status": "completed", "role": "assistant", "content": content}
        )
    for place, call in enumerate(reply.calls):
        namespace, _, name = call.name.rpartition(".")
        item = {"type": "function_call", "id": f"fc_{place}_{mark}", "call_id": call.id, "name": name}
        item |= {"namespace": namespace} if namespace else {}
        out.append({**item, "arguments": call.arguments, "status": "completed"})
    return out


def _response(reply: Reply, request: Request) -> dict[str, Any]:
    """A client that set no limit is not told that ours was reached: it would discard the answer and ask again."""
    cut = reply.finish == "length" and request.max_tokens is not None
    return {
        "id": f"resp_{reply.call}",
        "object": "response",
        "created_at": reply.created,
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "error": None,
        "model": reply.model,
        "output": _items(reply),
        "usage": {
            "input_tokens": reply.prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": reply.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": reply.reasoning_tokens},
            "total_tokens": reply.prompt_tokens + reply.completion_tokens,
        },
    }


def _events(reply: Reply, request: Request) -> Iterator[dict[str, Any]]:
    whole = _response(reply, request)
    begun = {**whole, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    yield {"type": "response.created", "response": begun}
    for place, item in enumerate(whole["output"]):
        yield {"type": "response.output_item.added", "output_index": place, "item": _emptied(item)}
        yield from _filling(item, place)
        yield {"type": "response.output_item.done", "output_index": place, "item": item}
    ending = "response.incomplete" if whole["incomplete_details"] else "response.completed"
    yield {"type": ending, "response": whole}


def _emptied(item: dict[str, Any]) -> dict[str, Any]:
    match item["type"]:
        case "message":
            return {**item, "status": "in_progress", "content": []}
        case "reasoning":
            return {**item, "summary": [], "encrypted_content": None}
    return {**item, "status": "in_progress", "arguments": ""}


def _filling(item: dict[str, Any], place: int) -> Iterator[dict[str, Any]]:
    at = {"item_id": item["id"], "output_index": place}
    if item["type"] == "message":
        part = item["content"][0]
        yield {"type": "response.content_part.added", **at, "content_index": 0, "part": {**part, "text": ""}}
        yield {"type": "response.output_text.delta", **at, "content_index": 0, "delta": part["text"]}
        yield {"type": "response.output_text.done", **at, "content_index": 0, "text": part["text"]}
        yield {"type": "response.content_part.done", **at, "content_index": 0, "part": part}
    elif item["type"] == "function_call":
        yield {"type": "response.function_call_arguments.delta", **at, "delta": item["arguments"]}
        yield {"type": "response.function_call_arguments.done", **at, "arguments": item["arguments"]}
    else:
        text = item["summary"][0]["text"]
        empty = {"type": "summary_text", "text": ""}
        yield {"type": "response.reasoning_summary_part.added", **at, "summary_index": 0, "part": empty}
        yield {"type": "response.reasoning_summary_text.delta", **at, "summary_index": 0, "delta": text}
        yield {"type": "response.reasoning_summary_text.done", **at, "summary_index": 0, "text": text}


def _sse(events: Any) -> bytes:
    return b"".join(
        b"event: %b\ndata: %b\n\n" % (e["type"].encode(), orjson.dumps({**e, "sequence_number": n}))
        for n, e in enumerate(events)
    )
