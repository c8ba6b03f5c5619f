"""The canonical conversation: what every dialect is read into and every answer is written from.

Pure values. Owns the digests by which two conversations are compared; decides nothing.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

import orjson
import xxhash

_LENGTH = struct.Struct("<Q").pack


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call as it stands in a conversation. `arguments` is the raw JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One block group of a conversation. `role`: system, user, assistant or tool; `call_id` is a tool result's call."""

    role: str
    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    last_text: str = ""  # the last text block, where a dialect has several in one message
    reasoning: str = ""
    mark: str = ""  # what we issued beside tool-call ids: a signature, an item's encrypted content


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages in order. `tools` is the JSON text of the tool list, b"" for none.

    `head` says how many of the messages come from fields beside the message list (a dialect's own system field).
    """

    messages: tuple[Message, ...]
    tools: bytes = b""
    head: int = 0


@dataclass(frozen=True, slots=True)
class Hints:
    """What headers and model names say of a call; structure says more and is asked first (labels)."""

    agent: str = ""  # the agent's id; empty: none was given
    parent: str = ""  # the agent above, where it is named
    role: str = ""  # main, sub-agent; empty: not said
    purpose: str = ""  # turn, summary, side; empty: not said
    tool: str = ""  # harness and version, for the pattern table


NO_HINTS = Hints()


@dataclass(slots=True)
class Request:
    """What a dialect made of a body. `unknown` names fields that were kept aside, never refused."""

    conversation: Conversation
    max_tokens: int | None = None
    stream: bool = False
    include_usage: bool = False
    model: str = ""
    shows_reasoning: bool = True  # whether the client is to be given the text of the thinking
    unknown: tuple[str, ...] = ()


_NO_HISTORY = Conversation(())


def without_history(request: Request) -> Request:
    """What an answer's wording needs of a request. (Several times faster than `dataclasses.replace`.)"""
    r = request
    return Request(_NO_HISTORY, r.max_tokens, r.stream, r.include_usage, r.model, r.shows_reasoning, r.unknown)


@dataclass(slots=True)
class Reply:
    """A finished answer, before a dialect words it. `finish`: stop, length or tool_calls."""

    call: str
    created: int
    model: str
    text: str
    calls: tuple[ToolCall, ...]
    finish: str
    prompt_tokens: int
    completion_tokens: int
    reasoning: str = ""
    reasoning_tokens: int = 0

    @property
    def mark(self) -> str:
        return mark_of(self.call)


@dataclass(frozen=True, slots=True)
class Spoken:
    """What an answer said: the part of a reply that a later request echoes."""

    text: str
    calls: tuple[ToolCall, ...] = field(default=())
    reasoning: str = ""


def mark_of(call: str) -> str:
    """Issued beside an answer, returned untouched by harnesses: a signature of thinking, a Responses item's secret."""
    return f"gyre-{call}"


def digest(*parts: bytes) -> bytes:
    """16 bytes over the parts and their borders. Stable between processes: it is written to the call log."""
    if len(parts) == 2:  # most are
        one, two = parts
        return xxhash.xxh3_128_digest(_LENGTH(len(one)) + one + _LENGTH(len(two)) + two)
    framed: list[bytes] = []
    for part in parts:
        framed += (_LENGTH(len(part)), part)
    return xxhash.xxh3_128_digest(b"".join(framed))


def text_bytes(text: str) -> bytes:
    """UTF-8 that survives lone surrogates, which JSON bodies may hold."""
    return text.encode("utf-8", "surrogatepass")


def exact_arguments(raw: str) -> bytes:
    """Equal for equal JSON values, whatever the key order and spacing; the raw text if it is not JSON."""
    try:
        return orjson.dumps(orjson.loads(raw), option=orjson.OPT_SORT_KEYS)
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        return text_bytes(raw)


def loose_arguments(raw: str) -> bytes:
    """Equal for what harnesses are known to do to arguments on replay (reference/harness.md 1.6).

    Numbers as floats, texts that are numbers or booleans as those, blanks at line ends dropped, keys that are false,
    null or empty dropped. Only used for a call whose id we issued.
    """
    try:
        return orjson.dumps(_loose(orjson.loads(raw or "{}")), option=orjson.OPT_SORT_KEYS)
    except (orjson.JSONDecodeError, orjson.JSONEncodeError, RecursionError):
        return text_bytes(raw)


def _loose(value: Any) -> Any:
    if isinstance(value, dict):
        made = {key: _loose(item) for key, item in value.items()}
        return {key: item for key, item in made.items() if not (item is False or item is None or item == "")}
    if isinstance(value, list):
        return [_loose(item) for item in value]
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int | float):
        return float(value)
    return _loose_text(value)


def _loose_text(text: str) -> Any:
    stripped = text.strip()
    if stripped[:1] in ("[", "{"):
        try:
            return _loose(orjson.loads(stripped))
        except orjson.JSONDecodeError:
            pass
    if stripped in ("true", "false"):
        return stripped == "true"
    if stripped[:1] in "-0123456789" and 0 < len(stripped) < 40:
        try:
            return float(stripped)
        except ValueError:
            pass
    return "\n".join(line.rstrip() for line in text.split("\n")).strip()


def exact_key(spoken: Spoken | Message, *, reasoning: bool = True) -> bytes:
    """An assistant turn by its content; ids are left out, because a harness may issue its own.

    Reasoning counts where there is any; many harnesses trim it, and some never send it back (`reasoning=False`).
    """
    thought = spoken.reasoning.strip() if reasoning else ""
    parts = [b"assistant", text_bytes(spoken.text)]
    if thought:
        parts += [b"thought", text_bytes(thought)]
    for call in spoken.calls:
        parts += [text_bytes(call.name), exact_arguments(call.arguments)]
    return digest(*parts)


def same_reasoning(message: Message, spoken: Spoken) -> bool:
    """Whether an echo's reasoning is what was said, or was left out."""
    return not message.reasoning.strip() or message.reasoning.strip() == spoken.reasoning.strip()


def loose_key(spoken: Spoken | Message) -> bytes:
    """An assistant turn with the lossy parts of an echo taken out, reasoning among them."""
    parts = [b"loose", text_bytes(spoken.text.strip())]
    for call in spoken.calls:
        parts += [text_bytes(call.name), loose_arguments(call.arguments)]
    return digest(*parts)


def message_key(message: Message) -> bytes:
    """A message that is not an assistant's: role and text. Only what the template renders counts."""
    return digest(message.role.encode(), text_bytes(message.text))
