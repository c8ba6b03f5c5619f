"""Messages to token ids with the model's own chat template, one unit at a time.

A unit is what a template renders independently of its neighbours: the head (system and tools), one user, system or
assistant message, one run of tool results. Each begins at a special token, where tokenizers cut anyway, so the ids of
a conversation are the ids of its units one after another. `load` proves that on sample conversations (proof.py) and
refuses a template for which it is false. Units are cached, so a long history costs only its new part.
"""

from __future__ import annotations

import json
import logging
import struct
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
from jinja2 import TemplateError as JinjaError
from tokenizers import Tokenizer

from proxyd.conversation import Message, Spoken, ToolCall
from proxyd.detokenise import detokeniser
from proxyd.families import family_of
from proxyd.families.family import Family
from proxyd.parsers import Parsed, split_reasoning
from proxyd.proof import prove
from proxyd.template import TemplateRefused, compile_template

log = logging.getLogger(__name__)
CACHE_IDS = 300_000  # token ids held by the unit cache, for all executions; about 3 MB
_X = {"role": "user", "content": "x"}
_MARK = "qzqz"
Key = tuple[Any, ...]  # what a unit says; a tuple, so that no text can pass for another unit


@dataclass(slots=True)
class _Cache:
    """A unit -> its ids and their JSON text. Bounded by ids; the least recently used go first."""

    ids: OrderedDict[Key, Piece] = field(default_factory=OrderedDict)
    held: int = 0

    def get(self, key: Key) -> Piece | None:
        found = self.ids.get(key)
        if found is not None:
            self.ids.move_to_end(key)
        return found

    def put(self, key: Key, piece: Piece) -> None:
        self.ids[key] = piece
        self.held += len(piece.ids)
        while self.held > CACHE_IDS and len(self.ids) > 1:
            self.held -= len(self.ids.popitem(last=False)[1].ids)


@dataclass(frozen=True, slots=True)
class Piece:
    """Token ids and their JSON text without brackets ("1,2,3"), which is joined into the engine's request as it is."""

    ids: array[int]  # int32: four bytes per token, and about six for the text
    json: bytes

    @classmethod
    def of(cls, ids: Iterable[int]) -> Piece:
        kept = list(ids)
        made = array("i")
        made.frombytes(struct.pack(f"{len(kept)}i", *kept))  # several times faster than the array's own way
        return cls(made, orjson.dumps(kept)[1:-1])


class ChatModel:
    """A tokenizer and its template. Deterministic; holds no conversation."""

    def __init__(self, tokenizer: Tokenizer, template: str, eos: Iterable[str | int], family: Family) -> None:
        self.tokenizer = tokenizer
        self.family = family
        self._template = compile_template(template)
        self.decode, self.decodes_in_parts = detokeniser(tokenizer)
        self._units = _Cache()
        self._base = self._text([_X])
        self._x_unit = _after(self._base, self._text([_X, _X]), "a second user message")
        self.mid_system = self._knows_mid_system()
        header, tail = self._assistant_frame()
        self._tail = self.encode(tail)
        self.end_id = self._tail[0]
        self.filler_ended = Piece.of(self._tail[1:])  # what the template writes after an answer that ended by itself
        self.filler_cut = Piece.of(self._tail)  # ... and after one that was cut off
        self.opening = Piece.of(
            self.encode(_after(self._base, self._text([_X], generate=True), "the generation prompt"))
        )
        self.header = Piece.of(self.encode(header))
        start, end = family.think or ("", "")
        self.thinks = bool(start) and self.decode(self.opening.ids).rstrip().endswith(start)
        self._thought_end = tokenizer.token_to_id(end) if end else None
        eos_ids = {tokenizer.token_to_id(e) if isinstance(e, str) else e for e in eos}
        self.stop_ids = frozenset({self.end_id, *(i for i in eos_ids if i is not None)})
        prove(self, thinks=family.think is not None)

    @classmethod
    def load(cls, folder: str | Path, family: str = "auto") -> ChatModel:
        """From a Hugging Face directory. Raises TemplateRefused, FileNotFoundError, ValueError (unknown family)."""
        folder = Path(folder)
        tokenizer = Tokenizer.from_file(str(_must_exist(folder / "tokenizer.json")))
        described = _json_of(folder / "tokenizer_config.json")
        generation = _json_of(folder / "generation_config.json")
        template_file = folder / "chat_template.jinja"
        template = template_file.read_text() if template_file.exists() else described.get("chat_template")
        if not isinstance(template, str):
            raise TemplateRefused(
                f"{folder} has no chat_template.jinja and tokenizer_config.json names no chat_template"
            )
        eos = described.get("eos_token")
        eos = eos.get("content") if isinstance(eos, dict) else eos
        more = generation.get("eos_token_id", [])
        ends = [*([eos] if eos else []), *([more] if isinstance(more, int) else more)]
        return cls._of_family(folder, tokenizer, template, ends, family_of(template, family))

    @classmethod
    def _of_family(
        cls, folder: Path, tokenizer: Tokenizer, template: str, ends: list[str | int], family: Family
    ) -> ChatModel:
        """With the model's own template if that only appends, else with the family's variant of it."""
        try:
            return cls(tokenizer, template, ends, family)
        except JinjaError as error:
            raise TemplateRefused(f"the chat template of {folder} fails: {error}") from None
        except TemplateRefused as error:
            if family.variant is None:
                raise TemplateRefused(f"{folder}: {error}") from None
            log.info("%s: %s. The append-only template of family %s is used", folder, error, family.name)
            return cls(tokenizer, family.variant, ends, family)

    # ---- ids --------------------------------------------------------------------------------------------------------

    def encode(self, text: str) -> list[int]:
        """Ids of a piece of text, special tokens recognised, nothing added."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def completion_text(self, ids: Sequence[int]) -> str:
        """What the model said: the stop token at the end is not part of it."""
        return self.decode(ids[:-1] if ids and ids[-1] in self.stop_ids else ids)

    def parse(self, ids: Sequence[int], call: str, tools: bytes = b"") -> Parsed:
        """What an answer says, under ids issued from its call's. `tools`: JSON, for formats that need their schemas."""
        text, reasoning = self.completion_text(ids), ""
        if self.family.think is not None:
            reasoning, text = split_reasoning(text, self.family.think, opened=self.thinks)
        parsed = self.family.calls(text, call, tools)
        if not reasoning:
            return parsed
        spoken = Spoken(parsed.spoken.text, parsed.spoken.calls, reasoning)
        return Parsed(spoken, parsed.ill_formed, self._thought_tokens(ids))

    def _thought_tokens(self, ids: Sequence[int]) -> int:
        """Tokens up to the end of the thinking; all of them if it did not end, 0 if the end is no token of its own."""
        if self._thought_end is None:
            return 0
        return ids.index(self._thought_end) + 1 if self._thought_end in ids else len(ids)

    def filler(self, completion: Sequence[int]) -> Piece:
        """Template tokens between a recorded answer and what follows: they belong to the next prompt."""
        return self.filler_ended if completion and completion[-1] in self.stop_ids else self.filler_cut

    # ---- units ------------------------------------------------------------------------------------------------------

    def pieces(self, messages: Sequence[Message], tools: bytes = b"") -> list[Piece]:
        """A whole conversation from its head on, without the generation prompt."""
        first = messages[0] if messages and messages[0].role == "system" else None
        return [self._head(first, tools), *self.units(messages[1 if first else 0 :])]

    def units(self, messages: Sequence[Message]) -> list[Piece]:
        """Messages that stand anywhere after the head."""
        return [self._unit(group) for group in groups(messages)]

    def render(self, messages: Sequence[Message], tools: bytes = b"", add_generation_prompt: bool = True) -> list[int]:
        """Incremental rendering of everything; equal to encoding the full text."""
        out = [i for piece in self.pieces(messages, tools) for i in piece.ids]
        return out + list(self.opening.ids) if add_generation_prompt else out

    def render_whole(
        self, messages: Sequence[Message], tools: bytes = b"", add_generation_prompt: bool = True
    ) -> list[int]:
        """The slow way: the full text in one go. The oracle of tests and of the proof at load."""
        given = [self._dict(m) for m in messages]
        return self.encode(self._text(given, orjson.loads(tools) if tools else None, generate=add_generation_prompt))

    def _head(self, system: Message | None, tools: bytes) -> Piece:
        key = ("head", tools, system.text if system else None)
        found = self._units.get(key)
        if found is None:
            given = [self._dict(system, head=True)] if system else []
            text = self._text([*given, _X], orjson.loads(tools) if tools else None)
            if not text.endswith(self._x_unit):
                raise TemplateRefused("the template renders a first user message in another way than a later one")
            found = Piece.of(self.encode(text.removesuffix(self._x_unit)))
            self._units.put(key, found)
        return found

    def _unit(self, group: tuple[Message, ...]) -> Piece:
        first = group[0]
        if len(group) == 1 and not first.calls:
            key: Key = (first.role, first.text, first.reasoning)
        else:
            texts, calls = [m.text for m in group], [(c.name, c.arguments) for c in first.calls]
            key = (first.role, *texts, first.reasoning, *calls)
        found = self._units.get(key)
        if found is None:
            text = self._text([_X, *(self._dict(m) for m in group)])
            found = Piece.of(self.encode(_after(self._base, text, f"a {group[0].role} message")))
            self._units.put(key, found)
        return found

    # ---- template ---------------------------------------------------------------------------------------------------

    def _text(self, messages: list[dict[str, Any]], tools: Any = None, *, generate: bool = False) -> str:
        return str(self._template.render(messages=messages, tools=tools, add_generation_prompt=generate))

    def _dict(self, message: Message, *, head: bool = False) -> dict[str, Any]:
        role = message.role
        if role == "system" and not head:
            role = self.mid_system
        out: dict[str, Any] = {"role": role, "content": message.text}
        if message.reasoning:
            out["reasoning_content"] = message.reasoning
        if message.calls:
            out["tool_calls"] = [_call_dict(c) for c in message.calls]
        if message.role == "tool":
            out["tool_call_id"] = message.call_id
        return out

    def _knows_mid_system(self) -> str:
        """The role under which a system message after the first position is rendered."""
        self.mid_system = "system"
        try:
            text = self._text([_X, {"role": "system", "content": _MARK}])
        except JinjaError:
            return "user"
        return "system" if _MARK in text and text.startswith(self._base) else "user"

    def _assistant_frame(self) -> tuple[str, str]:
        text = self._text([_X, {"role": "assistant", "content": _MARK}])
        header, mark, tail = _after(self._base, text, "an assistant message").partition(_MARK)
        if not mark or not tail or not tail.startswith(str(self.tokenizer.id_to_token(self.encode(tail)[0]))):
            raise TemplateRefused(
                "the template must end an assistant message with a token of its own, such as <|im_end|>"
            )
        return header, tail


def groups(messages: Sequence[Message]) -> Iterator[tuple[Message, ...]]:
    """Units of a conversation: tool results that follow each other belong together."""
    run: list[Message] = []
    for message in messages:
        if message.role == "tool":
            run.append(message)
            continue
        if run:
            yield tuple(run)
            run = []
        yield (message,)
    if run:
        yield tuple(run)


def _call_dict(call: ToolCall) -> dict[str, Any]:
    """Arguments as an object where they are one: templates write objects, and texts as they stand."""
    arguments: Any = call.arguments
    try:
        value = json.loads(call.arguments)
        arguments = value if isinstance(value, dict) else call.arguments
    except (ValueError, RecursionError):
        pass
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _after(base: str, text: str, what: str) -> str:
    if not text.startswith(base):
        raise TemplateRefused(
            f"the chat template is not append-only: {what} changes what stands before it. Use a variant that renders "
            "every message the same wherever it stands (keep thinking blocks, no default that later messages change)"
        )
    return text[len(base) :]


def _must_exist(path: Path) -> Path:
    if not path.is_file():
        raise FileNotFoundError(
            f"no {path.name} in {path.parent}; model.tokenizer must name a Hugging Face tokenizer directory"
        )
    return path


def _json_of(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    body = json.loads(path.read_text())
    return body if isinstance(body, dict) else {}
