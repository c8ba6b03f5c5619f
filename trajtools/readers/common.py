"""What the text-level readers share: message parts as blocks, and a conversation that grows call by call.

Owns the shape of a block: {role, kind, text} and, for tools, `name`. Text is copied; ids are never made up. What can't
be told (images, encrypted reasoning) becomes a block that says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import orjson

from gyre_base.runblocks import Blocks
from gyre_base.runfile import Agent, Call, Ids

Block = dict[str, Any]
_USAGE = {
    "input_tokens": "prompt_tokens",
    "prompt_tokens": "prompt_tokens",
    "output_tokens": "completion_tokens",
    "completion_tokens": "completion_tokens",
    "cache_read_input_tokens": "cached_tokens",
    "cached_input_tokens": "cached_tokens",
    "cached_tokens": "cached_tokens",
    "cache_creation_input_tokens": "cache_written_tokens",
}


def text_of(value: Any) -> str:
    """Any value as text: strings as they are, lists of parts joined, everything else as JSON."""
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if isinstance(value, list) and all(isinstance(v, dict) and isinstance(v.get("text"), str) for v in value):
        return "\n".join(v["text"] for v in value)
    return orjson.dumps(value, default=str).decode()


def block(role: str, kind: str, text: Any, name: Any = None) -> Block:
    made = {"role": role, "kind": kind, "text": text_of(text)}
    return {**made, "name": str(name)} if name else made


def message_blocks(message: Any, role: str | None = None) -> list[Block]:
    """The blocks of one chat message of any of the usual dialects (a string, parts, tool calls, tool results)."""
    if isinstance(message, str):
        return [block(role or "user", "text", message)]
    if not isinstance(message, Mapping):
        return [block(role or "user", "other", message)]
    role = str(message.get("role") or role or "user")
    out = []
    for key in ("reasoning_content", "reasoning", "thinking_content"):
        if isinstance(message.get(key), str) and message[key]:
            out.append(block(role, "reasoning", message[key]))
            break
    content = message.get("content")
    if role == "tool":
        out.append(block(role, "tool_result", content, message.get("name")))
    elif isinstance(content, list):
        out.extend(part_block(role, part) for part in content)
    elif content not in (None, ""):
        out.append(block(role, "text", content))
    for call in message.get("tool_calls") or ():
        out.append(_tool_call(role, call))
    if isinstance(message.get("function_call"), Mapping):
        out.append(_tool_call(role, message))
    return out


def _tool_call(role: str, call: Any) -> Block:
    if isinstance(call, str):  # some writers keep them as JSON inside JSON
        try:
            call = orjson.loads(call)
        except orjson.JSONDecodeError:
            return block(role, "tool_call", call)
    if not isinstance(call, Mapping):
        return block(role, "tool_call", call)
    function = call.get("function") or call.get("function_call") or call
    function = function if isinstance(function, Mapping) else {}
    return block(role, "tool_call", function.get("arguments", function.get("input")), function.get("name"))


def part_block(role: str, part: Any) -> Block:
    """One content part or response item."""
    if not isinstance(part, Mapping):
        return block(role, "text", part)
    kind = str(part.get("type", "text"))
    if kind in ("text", "input_text", "output_text", "refusal"):
        return block(role, "text", part.get("text", part.get("refusal", "")))
    if kind in ("thinking", "reasoning"):
        said = part.get("thinking") or part.get("text") or part.get("content") or part.get("summary")
        return block(role, "reasoning", said if said else "(not recorded in clear)")
    if kind in ("tool_use", "function_call", "custom_tool_call", "local_shell_call", "web_search_call"):
        given = part.get("input", part.get("arguments", part.get("action")))
        return block(role, "tool_call", given, part.get("name") or kind)
    if kind in ("tool_result", "function_call_output", "custom_tool_call_output"):
        return block("tool", "tool_result", part.get("content", part.get("output")))
    if "image" in kind or "audio" in kind or "document" in kind:
        return block(role, kind, "(not text)")
    return block(role, kind, {k: v for k, v in part.items() if k != "encrypted_content"})


def usage_of(given: Any) -> dict[str, int]:
    """The provider's own token counts under one set of names; {} if there are none."""
    if not isinstance(given, Mapping):
        return {}
    out = {ours: given[theirs] for theirs, ours in _USAGE.items() if isinstance(given.get(theirs), int)}
    details = given.get("prompt_tokens_details") or given.get("input_tokens_details")
    if isinstance(details, Mapping) and isinstance(details.get("cached_tokens"), int):
        out["cached_tokens"] = details["cached_tokens"]
    return out


def seconds(value: Any) -> float | None:
    """Epoch seconds of a number or an ISO time (without a zone: as UTC); None if it is neither."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, (int, float)):
        return float(value) / 1000 if value > 1e11 else float(value)
    try:
        time = datetime.fromisoformat(str(value).replace("Z", "+00:00"))
    except ValueError:
        return None
    return (time if time.tzinfo else datetime.fromisoformat(f"{time.isoformat()}+00:00")).timestamp()


def flat(value: Any) -> list[Any]:
    """A list of lists as one list."""
    return [y for x in value for y in (flat(x) if isinstance(x, list) else [x])]


@dataclass
class Talk:
    """One agent's conversation: `hear` adds context, `answer` makes a call of everything heard so far."""

    execution: str
    blocks: Blocks
    agent: Agent = field(default_factory=Agent)
    prefix: str = ""  # of call ids
    history: list[int] = field(default_factory=list)
    made: int = 0
    clock: float = 0.0

    def hear(self, blocks: Iterable[Block]) -> None:
        self.history.extend(self.blocks.numbers(blocks).tolist())

    def forget(self) -> None:
        """A new history: a compaction."""
        self.history.clear()

    def answer(self, completion: Sequence[Block], *, keep: bool = True, name: str | None = None, **about: Any) -> Call:
        """`keep`: the answer becomes history. Times default to a counter, since order is all that is known."""
        answer = self.blocks.numbers(completion)
        self.clock += 1.0
        t1 = about.pop("t1", None)
        t1 = self.clock if t1 is None else t1
        self.clock = max(self.clock, t1)
        t0 = about.pop("t0", None)
        extra = {k: v for k, v in about.pop("extra", {}).items() if v}
        label = about.pop("label", "main" if self.agent.role == "main" else "sub-agent")
        made = Call(
            exec=self.execution, call=name or f"{self.prefix}{self.made}", seq=about.pop("seq", self.made),
            t0=t1 if t0 is None else t0, t1=t1, agent=self.agent, label=label, level="text",
            prompt_ids=ids(self.history), completion_ids=answer, extra=extra, **about,
        )  # fmt: skip
        self.made += 1
        if keep:
            self.history.extend(answer.tolist())
        return made


def chat(talk: Talk, messages: Iterable[Any], about: Any = None) -> Iterator[Call]:
    """A plain list of messages: every assistant message is a call, all before it its prompt."""
    for message in messages:
        blocks = message_blocks(message)
        if isinstance(message, Mapping) and message.get("role") in ("assistant", "model", "ai"):
            more = about(message) if about else {}
            yield talk.answer(blocks, **more)
        else:
            talk.hear(blocks)


def ids(numbers: Sequence[int]) -> Ids:
    import numpy as np

    return np.array(numbers, np.int32)
