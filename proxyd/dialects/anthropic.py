"""Anthropic Messages, streaming and not: tools, thinking under our signatures, system messages where they stand.

Deferred tools stay out of the prompt's head; the schema of one stands where a result refers to it, so that a tool list
which grows in mid-run changes nothing before. A block of an unknown type leaves its name as text.
"""

from __future__ import annotations

import json
import re
from typing import Any

import orjson

from proxyd.conversation import Conversation, Message, Reply, Request, ToolCall
from proxyd.dialects import BadRequest, Events, Failure, Told, Written, load_json

JSON, SSE = "application/json", "text/event-stream; charset=utf-8"
STOP = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_READ = {"messages", "system", "tools", "stream", "model", "max_tokens", "thinking"}
_SILENT = {"thinking", "redacted_thinking"}
_REFERENCE = re.compile(rb'"tool_name"\s*:\s*"((?:[^"\\]|\\.)*)"')


class AnthropicMessages:
    """POST /v1/messages."""

    field = "messages"

    def read(self, body: bytes) -> Request:
        """Raises BadRequest."""
        try:
            given = load_json(body)
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"The request body is not valid JSON: {error}") from None
        if not isinstance(given, dict):
            raise BadRequest("The request body must be an object")
        messages = given.get("messages")
        if not isinstance(messages, list) or not messages:
            raise BadRequest("messages: at least one message is required")
        out = [Message("system", _plain(given["system"]))] if given.get("system") else []
        head = len(out)
        tools, schemas = _tools(given.get("tools"), body)
        for place, message in enumerate(messages):
            out += _messages(message, place, schemas)
        limit = given.get("max_tokens")
        return Request(
            conversation=Conversation(tuple(out), tools, head),
            max_tokens=limit if isinstance(limit, int) and not isinstance(limit, bool) and limit > 0 else None,
            stream=bool(given.get("stream")),
            include_usage=True,
            model=str(given.get("model") or ""),
            shows_reasoning=_shows(given.get("thinking")),
            unknown=tuple(sorted(k for k in given if k not in _READ)),
        )

    def write(self, reply: Reply, request: Request) -> Written:
        if request.stream:
            return Written(200, SSE, self.stream(reply, request).end(reply))
        content = _content(reply, shown=request.shows_reasoning)
        body = {**_head(reply), "content": content, "stop_reason": STOP[reply.finish], "usage": _usage(reply)}
        return Written(200, JSON, orjson.dumps(body))

    def stream(self, reply: Reply, request: Request) -> Events:
        return _Blocks(reply, shown=request.shows_reasoning)

    def fail(self, failure: Failure, *, stream: bool = False) -> Written:
        status, kind, message = _wording(failure)
        return Written(status, JSON, orjson.dumps({"type": "error", "error": {"type": kind, "message": message}}))


# ---- reading --------------------------------------------------------------------------------------------------------


def _shows(thinking: Any) -> bool:
    """`display: omitted` asks for the signature alone."""
    return not (isinstance(thinking, dict) and thinking.get("display") == "omitted")


def _tools(tools: Any, body: bytes) -> tuple[bytes, dict[str, str]]:
    """(the tool list in the form that chat templates render, the schemas of tools that are loaded by reference)."""
    if not isinstance(tools, list) or not tools:
        return b"", {}
    named = _referenced(body)
    out: list[dict[str, Any]] = []
    later: dict[str, str] = {}
    for tool in tools:
        if not isinstance(tool, dict):
            raise BadRequest("tools: expected objects")
        function = {"name": tool.get("name"), "description": tool.get("description")}
        if "input_schema" in tool:
            function["parameters"] = tool["input_schema"]
        function = {k: v for k, v in function.items() if v is not None}
        if tool.get("defer_loading") or tool.get("name") in named:
            later[str(tool.get("name"))] = orjson.dumps(function).decode()
        else:
            out.append({"type": "function", "function": function})
    return orjson.dumps(out) if out else b"", later


def _referenced(body: bytes) -> set[str]:
    """Names of tools to which results refer. The search is over raw text: nearly no request has any."""
    if b"tool_reference" not in body:
        return set()
    return {name.decode("utf-8", "replace") for name in _REFERENCE.findall(body)}


def _plain(content: Any, schemas: dict[str, str] | None = None) -> str:
    """Text of a string or of blocks; cache markers and the string/array form make no difference."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return "" if content is None else json.dumps(content)
    return "\n".join(t for t in (_block_text(b, schemas or {}) for b in content) if t is not None)


def _block_text(block: Any, schemas: dict[str, str]) -> str | None:
    if isinstance(block, str):
        return block
    if not isinstance(block, dict):
        return str(block)
    if block.get("type") in _SILENT:
        return None
    if block.get("type") == "tool_reference":
        name = str(block.get("tool_name") or "")
        return f"<function>{schemas.get(name, name)}</function>"
    if isinstance(block.get("text"), str):
        return str(block["text"])
    return f"[{block.get('type', 'unknown block')}]"


def _messages(given: Any, place: int, schemas: dict[str, str]) -> list[Message]:
    """One message of the dialect: an assistant turn, or results and user text in their order."""
    if not isinstance(given, dict) or given.get("role") not in ("user", "assistant", "system"):
        raise BadRequest(f"messages.{place}.role: Input should be 'user', 'assistant' or 'system'")
    role, content = given["role"], given.get("content")
    blocks = content if isinstance(content, list) else [{"type": "text", "text": _plain(content)}]
    if role == "assistant":
        return [_assistant(blocks, place)]
    out: list[Message] = []
    texts: list[Any] = []
    for block in blocks:
        if isinstance(block, dict) and block.get("type") == "tool_result":
            out += _texts(role, texts)
            texts = []
            result = _plain(block.get("content"), schemas)
            out.append(Message("tool", result, call_id=str(block.get("tool_use_id") or "")))
        else:
            texts.append(block)
    return [*out, *_texts(role, texts)]


def _texts(role: str, blocks: list[Any]) -> list[Message]:
    if not blocks:
        return []
    last = _block_text(blocks[-1], {}) if len(blocks) > 1 else None
    return [Message(role, _plain(blocks), last_text=last or "")]


def _assistant(blocks: list[Any], place: int) -> Message:
    calls: list[ToolCall] = []
    texts: list[Any] = []
    thoughts: list[str] = []
    mark = ""
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_use":
            if not isinstance(block.get("name"), str):
                raise BadRequest(f"messages.{place}.content: a tool_use needs a name")
            arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
            calls.append(ToolCall(str(block.get("id") or ""), block["name"], arguments))
        elif kind in _SILENT:
            mark = mark or str(block.get("signature") or block.get("data") or "")
            thoughts.append(str(block.get("thinking") or ""))
        else:
            texts.append(block)
    return Message("assistant", _plain(texts), tuple(calls), reasoning="\n".join(thoughts), mark=mark)


# ---- writing --------------------------------------------------------------------------------------------------------


def _head(reply: Reply) -> dict[str, Any]:
    return {
        "id": f"msg_{reply.call.replace('-', '')}",
        "type": "message",
        "role": "assistant",
        "model": reply.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def _usage(reply: Reply) -> dict[str, int]:
    return {
        "input_tokens": reply.prompt_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
        "output_tokens": reply.completion_tokens,
    }


def _content(reply: Reply, *, shown: bool) -> list[dict[str, Any]]:
    """Thinking, text, calls. A blank text before a call is left out: clients drop it, or are refused with it."""
    out: list[dict[str, Any]] = []
    if reply.reasoning:
        out.append({"type": "thinking", "thinking": reply.reasoning if shown else "", "signature": reply.mark})
    if _has_text(reply):
        out.append({"type": "text", "text": reply.text})
    for call in reply.calls:
        out.append({"type": "tool_use", "id": call.id, "name": call.name, "input": orjson.loads(call.arguments)})
    return out


def _has_text(reply: Reply) -> bool:
    return bool(reply.text.strip() or (reply.text and not reply.calls))


class _Blocks:
    """`message_start`, block after block, `message_stop`."""

    def __init__(self, reply: Reply, *, shown: bool) -> None:
        self._shown, self._mark = shown, reply.mark
        self._start = {**_head(reply), "usage": {**_usage(reply), "output_tokens": 1}}
        self._told = Told()
        self._begun = False
        self._kind = ""  # of the block that is open
        self._place = -1

    def more(self, reasoning: str, text: str) -> bytes:
        out = [] if self._begun else [_event({"type": "message_start", "message": self._start})]
        self._begun = True
        if reasoning:
            out.append(self._within({"type": "thinking", "thinking": "", "signature": ""}))
            if self._shown:
                out.append(self._delta({"type": "thinking_delta", "thinking": reasoning}))
        if text:
            out.append(self._within({"type": "text", "text": ""}))
            out.append(self._delta({"type": "text_delta", "text": text}))
        self._told.add(reasoning, text)
        return b"".join(out)

    def end(self, reply: Reply) -> bytes:
        reasoning, text = self._told.rest(reply)
        out = [self.more(reasoning, text if _has_text(reply) else "")]
        for call in reply.calls:
            out.append(self._close())
            out.append(self._within({"type": "tool_use", "id": call.id, "name": call.name, "input": {}}))
            whole = orjson.dumps(orjson.loads(call.arguments)).decode()
            out.append(self._delta({"type": "input_json_delta", "partial_json": whole}))
        out.append(self._close())
        ending = {"stop_reason": STOP[reply.finish], "stop_sequence": None}
        out.append(_event({"type": "message_delta", "delta": ending, "usage": _usage(reply)}))
        out.append(_event({"type": "message_stop"}))
        return b"".join(out)

    def _within(self, opening: dict[str, Any]) -> bytes:
        """Be in a block of this kind."""
        if opening["type"] == self._kind:
            return b""
        closed = self._close()
        self._kind = opening["type"]
        self._place += 1
        return closed + _event({"type": "content_block_start", "index": self._place, "content_block": opening})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event({"type": "content_block_delta", "index": self._place, "delta": delta})

    def _close(self) -> bytes:
        if not self._kind:
            return b""
        signed = self._kind == "thinking"
        self._kind = ""
        signature = self._delta({"type": "signature_delta", "signature": self._mark}) if signed else b""
        return signature + _event({"type": "content_block_stop", "index": self._place})


def _event(event: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), orjson.dumps(event))


def _wording(failure: Failure) -> tuple[int, str, str]:
    match failure.kind:
        case "unauthorized":
            return 401, "authentication_error", "invalid x-api-key"
        case "overflow":
            message = f"prompt is too long: {failure.tokens} tokens > {failure.limit} maximum"
            return 400, "invalid_request_error", message
        case "not_found" | "no_model":
            return 404, "not_found_error", failure.why
        case "forbidden":
            return 403, "permission_error", failure.why
        case "too_large":
            return 413, "request_too_large", failure.why
        case "bad_request":
            return 400, "invalid_request_error", failure.why
        case "unavailable":
            return 503, "api_error", failure.why
        case _:
            return 500, "api_error", failure.why or "Internal server error"
