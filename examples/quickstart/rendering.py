"""Messages to text and token ids, with the quickstart's own chat template and tokenizer.

The same rule as at serving time: sampled ids are kept as they are, and only what follows them is rendered and encoded.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

Message = dict[str, Any]
FOLDER = Path(__file__).parent / "tokenizer"
END = "<|im_end|>"
ASSISTANT = "<|im_start|>assistant\n"


def _tojson(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)  # as transformers does: no HTML escapes, no sorting


@dataclass(frozen=True)
class Renderer:
    """A chat template and a tokenizer from one Hugging Face directory."""

    folder: Path = field(default=FOLDER)

    @cached_property
    def template(self) -> Any:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _tojson
        return environment.from_string((self.folder / "chat_template.jinja").read_text())

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(str(self.folder / "tokenizer.json"))

    @cached_property
    def end_id(self) -> int:
        return self.encode(END)[0]

    def text(self, messages: Sequence[Message], tools: Sequence[Message], add_generation_prompt: bool) -> str:
        return str(self.template.render(messages=messages, tools=tools, add_generation_prompt=add_generation_prompt))

    def encode(self, text: str) -> list[int]:
        return list(self._encoded(text))

    @lru_cache(maxsize=4096)  # noqa: B019 - renderers live as long as the process
    def _encoded(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    def completion_text(self, message: Message) -> str:
        """What a model must sample, up to and with <|im_end|>, for this assistant message."""
        rendered = self.text([message], [], False)
        return rendered.removeprefix(ASSISTANT).removesuffix("\n")

    def transcript(self, messages: Sequence[Message], tools: Sequence[Message]) -> tuple[list[int], list[int]]:
        """(ids, mask) of a line that ends in an assistant message; mask is 1 on what the model sampled."""
        ids: list[int] = []
        mask: list[int] = []
        text, at = self.text(messages, tools, False), 0
        for message in messages:
            if message["role"] != "assistant":
                continue
            completion = self.completion_text(message)
            start = text.index(ASSISTANT + completion, at) + len(ASSISTANT)
            context, sampled = self.encode(text[at:start]), self.encode(completion)
            ids += context + sampled
            mask += [0] * len(context) + [1] * len(sampled)
            at = start + len(completion)
        return ids, mask
