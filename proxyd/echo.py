"""What harnesses are known to do to tool calls between hearing and repeating them. Pure.

Only asked for calls whose ids we issued: a call that comes back under our id and says the same is the model's own,
however it is spelled.
"""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from proxyd.conversation import ToolCall, loose_arguments

REPLACED_BY = "invalid"  # the name under which opencode repeats a call of an unknown tool or with broken arguments


def same_calls(echo: Sequence[ToolCall], said: Sequence[ToolCall]) -> bool:
    """Whether calls with the same ids say the same. A tool may have been renamed (an alias became its full name)."""
    return all(_same(back, sent) for back, sent in zip(echo, said, strict=True))


def _same(back: ToolCall, sent: ToolCall) -> bool:
    if loose_arguments(back.arguments) == loose_arguments(sent.arguments):
        return True
    return back.name == REPLACED_BY and _names(back.arguments, sent.name)


def _names(arguments: str, tool: str) -> bool:
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return False
    return isinstance(value, dict) and value.get("tool") == tool
