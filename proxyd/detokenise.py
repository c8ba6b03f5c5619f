"""Token ids to text by an own table: bytes are joined before they are decoded, so a split UTF-8 character survives.

Byte-level BPE vocabularies (Qwen, Llama 3, GPT) use the table; anything else falls back to the tokenizer's own decoder.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import Tokenizer


def detokeniser(tokenizer: Tokenizer) -> tuple[Callable[[Sequence[int]], str], bool]:
    """The function from ids to text, special tokens included; broken bytes become U+FFFD.

    And whether the texts of two lists that meet between two characters are together the text of both.
    """
    described = json.loads(tokenizer.to_str())
    if not _is_byte_level(described.get("decoder") or {}):
        return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False)), False
    table = _byte_table(tokenizer, {int(t["id"]) for t in described.get("added_tokens", [])})

    bytes_of = table.__getitem__

    def decode(ids: Sequence[int]) -> str:
        try:
            said = b"".join(map(bytes_of, ids))
        except KeyError:  # the embedding has rows that the vocabulary does not name
            said = b"".join([table.get(i, b"") for i in ids])
        return said.decode("utf-8", "replace")

    return decode, True


def _is_byte_level(decoder: dict[str, Any]) -> bool:
    if decoder.get("type") == "Sequence":
        return all(_is_byte_level(part) for part in decoder.get("decoders", []))
    return decoder.get("type") == "ByteLevel"


def _byte_table(tokenizer: Tokenizer, added: set[int]) -> dict[int, bytes]:
    back = {char: byte for byte, char in _byte_to_char().items()}
    table: dict[int, bytes] = {}
    for token, number in tokenizer.get_vocab(with_added_tokens=True).items():
        known = number not in added and all(char in back for char in token)
        table[number] = bytes(back[char] for char in token) if known else token.encode("utf-8", "surrogatepass")
    return table


def _byte_to_char() -> dict[int, str]:
    """The printable stand-in of each byte in a byte-level vocabulary."""
    kept = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {byte: chr(byte) for byte in kept}
    spare = 0x100
    for byte in range(256):
        if byte not in table:
            table[byte] = chr(spare)
            spare += 1
    return table
