"""Completion text to content and tool calls. One function per format; `PARSERS` is the registry.

Ids are issued here, from the call's id: unique, and the same again after a restart. A call that isn't well formed
stays in the content as the model wrote it and is counted.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import orjson

from proxyd.conversation import Spoken, ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_SHAPE = re.compile(r'\s*\{\s*"name"\s*:\s*"(?:[^"\\]|\\.)*"\s*,\s*"arguments"\s*:\s*(.*)\}\s*', re.DOTALL)


@dataclass(frozen=True, slots=True)
class Parsed:
    """What a completion says. `ill_formed` counts calls that had to stay text."""

    spoken: Spoken
    ill_formed: int = 0


def issued_id(call: str, place: int) -> str:
    """The id of the place-th tool call of an answer. Letters and digits only: every harness returns it untouched."""
    return f"call_{call.replace('-', '')}{place:02d}"


def hermes(text: str, call: str) -> Parsed:
    """`<tool_call>` + JSON object with name and arguments + `</tool_call>`, any number of times, text around them."""
    if OPEN not in text:
        return Parsed(Spoken(text))
    content: list[str] = []
    calls: list[ToolCall] = []
    broken = 0
    at = 0
    while (start := text.find(OPEN, at)) >= 0:
        before = text[at:start]
        end = text.find(CLOSE, start)
        body = text[start + len(OPEN) : end] if end >= 0 else None
        call_made = _one(body, issued_id(call, len(calls))) if body is not None else None
        at = end + len(CLOSE) if end >= 0 else len(text)
        if call_made is None:
            broken += 1
            content += [before, text[start:at]]
        else:
            calls.append(call_made)
            content.append(before.removesuffix("\n"))
            if text[at : at + 1] == "\n":
                at += 1
    content.append(text[at:])
    return Parsed(Spoken("".join(content), tuple(calls)), broken)


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


PARSERS: dict[str, Callable[[str, str], Parsed]] = {"hermes": hermes}
