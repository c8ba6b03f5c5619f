"""Completion text to reasoning, content and tool calls. One function per format; families (`families/`) choose.

Ids are issued here, from the call's id: unique, and the same again after a restart. A call that isn't well formed
stays in the content as the model wrote it and is counted.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import orjson

from proxyd.conversation import Spoken, ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_SHAPE = re.compile(r'\s*\{\s*"name"\s*:\s*"(?:[^"\\]|\\.)*"\s*,\s*"arguments"\s*:\s*(.*)\}\s*', re.DOTALL)


@dataclass(slots=True)
class Parsed:
    """What a completion says. `ill_formed` counts calls that stayed text, `reasoning_tokens` the ids of thinking."""

    spoken: Spoken
    ill_formed: int = 0
    reasoning_tokens: int = 0


def issued_id(call: str, place: int) -> str:
    """The id of the place-th tool call of an answer. Letters and digits only: every harness returns it untouched."""
    return f"call_{call.replace('-', '')}{place:02d}"


class Parser(Protocol):
    """Text, the call's id and its tools (JSON) to what was said."""

    def __call__(self, text: str, call: str, tools: bytes = b"") -> Parsed: ...


def split_reasoning(text: str, tags: tuple[str, str], *, opened: bool) -> tuple[str, str]:
    """(reasoning, the rest). `opened`: the prompt has already opened the tag. Cut off within it: all is reasoning."""
    start, end = tags
    body = text.lstrip()
    if not opened:
        if not body.startswith(start):
            return "", text
        body = body[len(start) :]
    elif body.startswith(start):
        body = body[len(start) :]
    reasoning, _, rest = body.partition(end)
    return reasoning.strip("\n"), rest.lstrip("\n")


def split_calls(text: str, one: Callable[[str, int], ToolCall | None]) -> Parsed:
    """Text with calls in tags, any number of times; `one` reads what stands between two tags, None if it is no call."""
    if OPEN not in text:
        return Parsed(Spoken(text))
    content: list[str] = []
    calls: list[ToolCall] = []
    broken = 0
    at = 0
    while (start := text.find(OPEN, at)) >= 0:
        before = text[at:start]
        end = text.find(CLOSE, start)
        made = one(text[start + len(OPEN) : end], len(calls)) if end >= 0 else None
        at = end + len(CLOSE) if end >= 0 else len(text)
        if made is None:
            broken += 1
            content += [before, text[start:at]]
        else:
            calls.append(made)
            content.append(before.removesuffix("\n"))
            if text[at : at + 1] == "\n":
                at += 1
    content.append(text[at:])
    return Parsed(Spoken("".join(content), tuple(calls)), broken)


def hermes(text: str, call: str, tools: bytes = b"") -> Parsed:
    """`<tool_call>` + JSON object with name and arguments + `</tool_call>`, any number of times, text around them."""
    return split_calls(text, lambda body, place: _one(body, issued_id(call, place)))


def _one(body: str, number: str) -> ToolCall | None:
    """The call in one pair of tags, its arguments as the model wrote them; None if it is no call."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    arguments = value.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    return ToolCall(number, value["name"], _raw_arguments(body, arguments))


def _raw_arguments(body: str, arguments: dict[str, object]) -> str:
    shape = _SHAPE.fullmatch(body)
    if shape is not None:
        try:
            if orjson.loads(shape.group(1)) == arguments:
                return shape.group(1).strip()
        except orjson.JSONDecodeError:
            pass
    return orjson.dumps(arguments).decode()
