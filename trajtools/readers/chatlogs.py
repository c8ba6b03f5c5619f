"""Logs of chat endpoints: OpenAI requests and responses, LiteLLM's standard payload, plain lists of messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gyre_base.runblocks import Blocks
from gyre_base.runfile import Call, ExecEnd, ExecStart, Note, Record
from trajtools.readers.common import Talk, chat, message_blocks, seconds, usage_of


def is_chat_log(first: Any) -> bool:
    if not isinstance(first, Mapping):
        return False
    request = first.get("request") if isinstance(first.get("request"), Mapping) else first
    assert isinstance(request, Mapping)
    return isinstance(request.get("messages"), list) or ("messages" in request and "response" in first)


def chat_log_records(objects: Sequence[Any], name: str, blocks: Blocks) -> Iterator[Record]:
    """One entry per request. Entries of one trace or session are one execution; without either, all of them are."""
    talks: dict[str, Talk] = {}
    left_out: Counter[str] = Counter()
    for number, entry in enumerate(objects):
        if not is_chat_log(entry):
            left_out["entries that are no request"] += 1
            continue
        execution = _trace(entry) or Path(name).stem
        if execution not in talks:
            talks[execution] = Talk(execution, blocks, prefix=f"{execution}-")
            yield ExecStart(exec=execution, task=execution)
        calls = list(_entry(entry, talks[execution], number))
        if not calls:
            left_out["requests without an answer"] += 1
        yield from calls
    for execution, talk in talks.items():
        yield ExecEnd(exec=execution, status="recorded", calls=talk.made)
    if left_out:
        yield Note(text="entries left out", extra={"left_out": dict(left_out)})


def _trace(entry: Mapping[str, Any]) -> str | None:
    metadata = entry.get("metadata") if isinstance(entry.get("metadata"), Mapping) else {}
    assert isinstance(metadata, Mapping)
    for key in ("session_id", "litellm_session_id", "trace_id", "litellm_trace_id"):
        if found := entry.get(key) or metadata.get(key):
            return str(found)
    return None


def _entry(entry: Mapping[str, Any], talk: Talk, number: int) -> Iterator[Call]:
    request = entry["request"] if isinstance(entry.get("request"), Mapping) else entry
    messages = request["messages"] if isinstance(request["messages"], list) else [request["messages"]]
    response = entry.get("response", entry if "choices" in entry else None)
    talk.forget()
    if response is None:  # a conversation without its requests: each assistant message was a call
        yield from chat(talk, messages)
        return
    answer, about = _answer(response)
    if answer is None or entry.get("status") == "failure":
        return
    for message in messages:
        talk.hear(message_blocks(message))
    about = {**about, "model": about.get("model") or entry.get("model")}
    finish = about.pop("finish", None)
    yield talk.answer(
        message_blocks(answer, "assistant"), keep=False, name=str(entry.get("id") or f"{talk.prefix}{number}"),
        t0=seconds(entry.get("startTime")), t1=seconds(entry.get("endTime")), finish=finish, extra=about,
    )  # fmt: skip


def _answer(response: Any) -> tuple[Any, dict[str, Any]]:
    """(the message, about it) of a whole response, of the pieces of a streamed one, or of a bare text."""
    if isinstance(response, str):
        return response or None, {}
    if isinstance(response, list):
        return _assembled([r for r in response if isinstance(r, Mapping)])
    if not isinstance(response, Mapping):
        return None, {}
    about: dict[str, Any] = {"usage": usage_of(response.get("usage")), "model": response.get("model")}
    choices = response.get("choices")
    if isinstance(choices, list) and choices and isinstance(choices[0], Mapping):
        about["finish"] = choices[0].get("finish_reason")
        return choices[0].get("message", choices[0].get("text")), about
    if response.get("role") == "assistant" or "content" in response:
        about["finish"] = response.get("stop_reason")
        return {"role": "assistant", "content": response.get("content")}, about
    return None, {}


def _assembled(chunks: Sequence[Mapping[str, Any]]) -> tuple[Any, dict[str, Any]]:
    """The message of a stream."""
    said: dict[str, str] = {"content": "", "reasoning_content": ""}
    tools: dict[int, dict[str, str]] = {}
    about: dict[str, Any] = {}
    for chunk in chunks:
        about |= {"usage": usage_of(chunk.get("usage"))} if chunk.get("usage") else {}
        about["model"] = chunk.get("model") or about.get("model")
        for choice in chunk.get("choices") or ():
            about["finish"] = choice.get("finish_reason") or about.get("finish")
            delta = choice.get("delta") or {}
            for key in said:
                said[key] += delta.get(key) or ""
            for call in delta.get("tool_calls") or ():
                tool = tools.setdefault(call.get("index", 0), {"name": "", "arguments": ""})
                function = call.get("function") or {}
                tool["name"] += function.get("name") or ""
                tool["arguments"] += function.get("arguments") or ""
    calls = [{"function": tool} for _, tool in sorted(tools.items())]
    return {"role": "assistant", **said, "tool_calls": calls}, about
