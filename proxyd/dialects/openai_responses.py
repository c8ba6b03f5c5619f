"""OpenAI Responses, streaming and not, stateless (`store: false`): the whole input comes with every request.

Every item that we issue bears the call's mark (its id, and reasoning items their `encrypted_content`), so an echo is
known without reading it. Tools of a namespace are shown to the model as `namespace.tool`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from proxyd.conversation import Conversation, Message, Reply, Request, ToolCall, mark_of
from proxyd.dialects import BadRequest, Events, Failure, Told, Written, load_json
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
            return Written(200, SSE, self.stream(reply, request).end(reply))
        return Written(200, JSON, orjson.dumps(_response(reply, request)))

    def stream(self, reply: Reply, request: Request) -> Events:
        return _Items(reply, request)

    def fail(self, failure: Failure, *, stream: bool = False) -> Written:
        """As Chat Completions words it, but for the one sentence and code that clients compact on.

        In a stream they read that code from a failed response, not from a status.
        """
        if failure.kind == "overflow" and stream:
            error: dict[str, Any] = {"code": "context_length_exceeded", "message": OVERFLOW}
            response = {"id": "resp_overflow", "object": "response", "status": "failed", "error": error, "output": []}
            return Written(200, SSE, _event({"type": "response.failed", "response": response}, 0))
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
        out.append(_thought(mark, reply.reasoning))
    if _has_message(reply):
        out.append(_message(mark, reply.text))
    for place, call in enumerate(reply.calls):
        namespace, _, name = call.name.rpartition(".")
        item = {"type": "function_call", "id": f"fc_{place}_{mark}", "call_id": call.id, "name": name}
        item |= {"namespace": namespace} if namespace else {}
        out.append({**item, "arguments": call.arguments, "status": "completed"})
    return out


def _has_message(reply: Reply) -> bool:
    return bool(reply.text.strip() or not (reply.calls or reply.reasoning))


def _thought(mark: str, text: str) -> dict[str, Any]:
    summary = [{"type": "summary_text", "text": text}]
    return {"type": "reasoning", "id": f"rs_{mark}", "summary": summary, "encrypted_content": mark}


def _message(mark: str, text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "id": f"msg_{mark}", "status": "completed", "role": "assistant", "content": content}


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


class _Items:
    """`response.created`, item after item, `response.completed`; every event is numbered."""

    def __init__(self, reply: Reply, request: Request) -> None:
        self._reply, self._request = reply, request
        self._told = Told()
        self._texts = {"reasoning": "", "message": ""}
        self._kind = ""  # of the item that is open
        self._place = -1
        self._count = 0

    def more(self, reasoning: str, text: str) -> bytes:
        out = [] if self._count else [self._created()]
        if reasoning:
            out.append(self._fill("reasoning", reasoning))
        if text:
            out.append(self._fill("message", text))
        self._told.add(reasoning, text)
        return b"".join(out)

    def end(self, reply: Reply) -> bytes:
        reasoning, text = self._told.rest(reply)
        out = [self.more(reasoning, text if _has_message(reply) else "")]
        if _has_message(reply) and not reply.text:
            out.append(self._fill("message", ""))
        out.append(self._close())
        whole = _response(reply, self._request)
        out += [self._call(item) for item in whole["output"] if item["type"] == "function_call"]
        ending = "response.incomplete" if whole["incomplete_details"] else "response.completed"
        out.append(self._event({"type": ending, "response": whole}))
        return b"".join(out)

    def _created(self) -> bytes:
        begun = {**_response(self._reply, self._request), "status": "in_progress", "incomplete_details": None}
        return self._event({"type": "response.created", "response": {**begun, "output": [], "usage": None}})

    def _item(self) -> dict[str, Any]:
        make = _thought if self._kind == "reasoning" else _message
        return make(self._reply.mark, self._texts[self._kind])

    def _fill(self, kind: str, text: str) -> bytes:
        """Be in an item of this kind and add to it."""
        out = []
        if kind != self._kind:
            out = [self._close(), self._open(kind)]
        self._texts[kind] += text
        at = self._at(self._item())
        if kind == "reasoning":
            out.append(self._event({"type": "response.reasoning_summary_text.delta", **at, "delta": text}))
        else:
            out.append(self._event({"type": "response.output_text.delta", **at, "delta": text}))
        return b"".join(out)

    def _at(self, item: dict[str, Any]) -> dict[str, Any]:
        """Where an event belongs."""
        inner = {"reasoning": {"summary_index": 0}, "message": {"content_index": 0}}.get(item["type"], {})
        return {"item_id": item["id"], "output_index": self._place, **inner}

    def _open(self, kind: str) -> bytes:
        self._kind = kind
        self._place += 1
        item = self._item()
        added = self._event({"type": "response.output_item.added", "output_index": self._place, "item": _emptied(item)})
        if kind == "reasoning":
            part = {"type": "response.reasoning_summary_part.added", **self._at(item), "part": item["summary"][0]}
        else:
            part = {"type": "response.content_part.added", **self._at(item), "part": item["content"][0]}
        return added + self._event(part)

    def _close(self) -> bytes:
        if not self._kind:
            return b""
        item, text = self._item(), self._texts[self._kind]
        at, done = self._at(item), []
        if self._kind == "reasoning":
            done.append({"type": "response.reasoning_summary_text.done", **at, "text": text})
            done.append({"type": "response.reasoning_summary_part.done", **at, "part": item["summary"][0]})
        else:
            done.append({"type": "response.output_text.done", **at, "text": text})
            done.append({"type": "response.content_part.done", **at, "part": item["content"][0]})
        done.append({"type": "response.output_item.done", "output_index": self._place, "item": item})
        self._kind = ""
        return b"".join(map(self._event, done))

    def _call(self, item: dict[str, Any]) -> bytes:
        self._place += 1
        at = self._at(item)
        events = [
            {"type": "response.output_item.added", "output_index": self._place, "item": _emptied(item)},
            {"type": "response.function_call_arguments.delta", **at, "delta": item["arguments"]},
            {"type": "response.function_call_arguments.done", **at, "arguments": item["arguments"]},
            {"type": "response.output_item.done", "output_index": self._place, "item": item},
        ]
        return b"".join(map(self._event, events))

    def _event(self, event: dict[str, Any]) -> bytes:
        self._count += 1
        return _event(event, self._count - 1)


def _emptied(item: dict[str, Any]) -> dict[str, Any]:
    match item["type"]:
        case "message":
            return {**item, "status": "in_progress", "content": []}
        case "reasoning":
            return {**item, "summary": [], "encrypted_content": None}
    return {**item, "status": "in_progress", "arguments": ""}


def _event(event: dict[str, Any], number: int) -> bytes:
    data = orjson.dumps({**event, "sequence_number": number})
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), data)
