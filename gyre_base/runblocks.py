"""Text-level calls: where a record has no token ids, its history is a row of blocks (a message part, a tool call).

Owns the numbers that stand for blocks in memory, so that one forest serves tokens and blocks. They are never written
and never token ids: a file holds the blocks themselves. Equal blocks have equal numbers whatever the order of reading
(bar two different blocks that meet in 31 bits of xxh3).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import orjson
import xxhash
from numpy.typing import NDArray

from gyre_base.runrecords import Ids

_BITS = 0x7FFFFFFF


class Blocks:
    """The distinct blocks of a reader: number <-> block."""

    def __init__(self) -> None:
        self._text: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._text)

    def __getitem__(self, number: int) -> dict[str, Any]:
        block: dict[str, Any] = orjson.loads(self._text[int(number)])
        return block

    def number(self, block: Mapping[str, Any]) -> int:
        """The number of a block, a new one if it was never seen."""
        text = orjson.dumps(block, option=orjson.OPT_SORT_KEYS)
        number = xxhash.xxh3_64_intdigest(text) & _BITS
        while self._text.setdefault(number, text) != text:
            number = (number + 1) & _BITS
        return number

    def numbers(self, blocks: Iterable[Mapping[str, Any]]) -> Ids:
        """int32[n]."""
        return np.array([self.number(block) for block in blocks], np.int32)

    def many(self, numbers: Ids) -> list[dict[str, Any]]:
        return [self[n] for n in numbers.tolist()]

    def size(self, numbers: Ids) -> int:
        """Bytes of text of these blocks, each counted as often as it stands there."""
        return sum(len(self._text[n]) for n in numbers.tolist())

    def hashed(self, numbers: Ids) -> NDArray[np.int32]:
        """int32[2n]: the xxh3-64 of each block as two words; what a chain hash runs over."""
        return np.array([xxhash.xxh3_64_intdigest(self._text[n]) for n in numbers.tolist()], "<u8").view("<i4")
