"""The proof that a template may be rendered unit by unit, tried when a model is loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import orjson
from tokenizers import Tokenizer

from proxyd.conversation import Message, ToolCall
from proxyd.template import TemplateRefused

_TOOLS = orjson.dumps(
    [
        {
            "type": "function",
            "function": {"name": "f", "description": "é <b>", "parameters": {"type": "object", "properties": {}}},
        }
    ]
)
_CALL = Message("assistant", "", (ToolCall("c0", "f", '{"a": [1, "é\\n"]}'), ToolCall("c1", "f", "{}")))
_SAMPLES: dict[str, tuple[list[Message], bytes]] = {
    "system and users": (
        [Message("system", "s\n"), Message("user", " u "), Message("assistant", "a"), Message("user", "v")],
        b"",
    ),
    "no system": ([Message("user", "u"), Message("assistant", "a\n"), Message("user", "<b>é\u3000")], b""),
    "tools": (
        [
            Message("system", "s"),
            Message("user", "u"),
            _CALL,
            Message("tool", "1"),
            Message("tool", "2"),
            Message("assistant", "x"),
        ],
        _TOOLS,
    ),
    "tools without system": (
        [Message("user", "u"), Message("assistant", "t", _CALL.calls[:1]), Message("tool", "\nr\n")],
        _TOOLS,
    ),
    "tool result, then user": (
        [Message("user", "u"), _CALL, Message("tool", "1"), Message("user", "v"), Message("assistant", "w")],
        b"",
    ),
}
_THOUGHTS: dict[str, tuple[list[Message], bytes]] = {
    "thinking": (
        [
            Message("system", "s"),
            Message("user", "u"),
            Message("assistant", "a", reasoning="so"),
            Message("user", "v"),
            Message("assistant", "", _CALL.calls, reasoning="then\n\nthis"),
            Message("tool", "1"),
            Message("tool", "2"),
            Message("assistant", "w"),
            Message("user", "x"),
        ],
        _TOOLS,
    ),
}


class Model(Protocol):
    """The part of a chat model that is proved."""

    tokenizer: Tokenizer
    decode: Callable[[Sequence[int]], str]

    def render(self, messages: Sequence[Message], tools: bytes = b"") -> list[int]: ...

    def render_whole(self, messages: Sequence[Message], tools: bytes = b"") -> list[int]: ...


def prove(model: Model, *, thinks: bool) -> None:
    """Every prefix of the samples, rendered unit by unit, has the ids of its full text. Raises TemplateRefused."""
    for name, (messages, tools) in {**_SAMPLES, **(_THOUGHTS if thinks else {})}.items():
        for count in range(1, len(messages) + 1):
            if messages[0].role == "system" and count == 1:
                continue
            if count < len(messages) and messages[count].role == "tool":
                continue  # a run of tool results is one unit
            part = messages[:count]
            if model.render(part, tools) != model.render_whole(part, tools):
                raise TemplateRefused(
                    f"the chat template is not append-only: of a conversation of kind '{name}' message {count} "
                    f"({part[-1].role}) renders differently next to others than alone. Use a variant that renders each "
                    "message the same wherever it stands (keep thinking blocks of earlier turns, no counters)"
                )
            ids = model.render_whole(part, tools)
            if model.decode(ids) != model.tokenizer.decode(ids, skip_special_tokens=False):
                raise TemplateRefused("the tokenizer's decoder changes text (clean-up or prefix spaces): set them off")
