"""The binary form of a run file (`.gtr`): blocks of records with their arrays as byte planes, compressed with zstd.

Owns the bytes of docs, "Run file", binary form. The objects are those of the JSON lines; arrays are stored apart. A
torn tail is found by length and checksum, everything before it is good; the index at the end is a convenience that a
scan rebuilds. Resolves no delta: `RunReader.objects` does.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import msgpack
import numpy as np
import xxhash

from gyre_base.runcodec import RunFileError
from gyre_base.runrecords import NO_IDS

MAGIC = b"gyre.gtr/1\n"
_FRAME = struct.Struct("<IIIBxxx")  # stored bytes, bytes when unpacked, xxh32 of the stored bytes, kind
BLOCK, INDEX = 1, 2
BLOCK_TOKENS = 1 << 18
_IDS = ("prompt_ids", "completion_ids")
_LEVEL = 12


@dataclass
class FrameWriter:
    """Collects objects and writes a block when there are enough. `close` writes the rest and the index."""

    file: BinaryIO
    size: int = 0
    _heads: list[dict[str, Any]] = field(default_factory=list)
    _ids: list[Any] = field(default_factory=list)
    _logprobs: list[Any] = field(default_factory=list)
    _tokens: int = 0
    _offsets: list[tuple[int, int]] = field(default_factory=list)  # (offset, records)

    def __post_init__(self) -> None:
        self.size += self.file.write(MAGIC)

    def write(self, obj: dict[str, Any]) -> None:
        head, lengths = dict(obj), []
        for key in _IDS:
            if (array := head.pop(key, None)) is not None:
                self._ids.append(array)
                lengths.append(len(array))
        if lengths:
            logprobs = head.pop("logprobs", None)
            lengths.append(-1 if logprobs is None else len(logprobs))
            self._logprobs.append(np.zeros(0, np.float32) if logprobs is None else logprobs)
            head["#"] = lengths
            self._tokens += sum(lengths)
        self._heads.append(head)
        if self._tokens >= BLOCK_TOKENS or len(self._heads) >= 4096:
            self._flush()

    def close(self) -> int:
        self._flush()
        self._frame(INDEX, msgpack.packb(self._offsets))
        return self.size

    def _flush(self) -> None:
        if not self._heads:
            return
        parts = [msgpack.packb(self._heads), _planes(self._ids, "<i4"), _planes(self._logprobs, "<f4")]
        self._offsets.append((self.size, len(self._heads)))
        self._frame(BLOCK, b"".join([struct.pack("<III", *map(len, parts)), *parts]))
        self._heads, self._ids, self._logprobs, self._tokens = [], [], [], 0

    def _frame(self, kind: int, payload: bytes) -> None:
        import zstandard

        stored = zstandard.ZstdCompressor(level=_LEVEL).compress(payload)
        self.size += self.file.write(_FRAME.pack(len(stored), len(payload), xxhash.xxh32_intdigest(stored), kind))
        self.size += self.file.write(stored)


@dataclass
class FrameReader:
    """The objects of a binary file. `torn`: (offset, bytes) of what could not be used at the end."""

    source: Path | BinaryIO
    torn: tuple[int, int] | None = None
    size: int = 0

    def objects(self) -> Iterator[tuple[int, int, dict[str, Any]]]:
        """(offset and end of its block, object). Raises RunFileError for a file that is none of ours."""
        if isinstance(self.source, Path):
            with self.source.open("rb") as file:
                yield from self._read(file)
        else:
            yield from self._read(self.source)

    def _read(self, file: BinaryIO) -> Iterator[tuple[int, int, dict[str, Any]]]:
        if file.read(len(MAGIC)) != MAGIC:
            raise RunFileError("not a binary run file of this version")
        at = len(MAGIC)
        while head := file.read(_FRAME.size):
            stored, end = b"", at
            if len(head) == _FRAME.size:
                length, unpacked, check, kind = _FRAME.unpack(head)
                stored = file.read(length)
                end = at + _FRAME.size + len(stored)
                if len(stored) == length and xxhash.xxh32_intdigest(stored) == check:
                    if kind == BLOCK:
                        yield from ((at, end, obj) for obj in _unpacked(stored, unpacked))
                    at = self.size = end
                    continue
            rest = len(head) + len(stored) + len(file.read())
            self.torn = (at, rest)
            return


def _unpacked(stored: bytes, size: int) -> Iterator[dict[str, Any]]:
    import zstandard

    payload = zstandard.ZstdDecompressor().decompress(stored, max_output_size=size)
    lengths = struct.unpack_from("<III", payload)
    edges = np.cumsum([12, *lengths]).tolist()
    heads, ids, logprobs = (payload[a:b] for a, b in pairwise(edges))
    all_ids, all_logprobs = _joined(ids, "<i4"), _joined(logprobs, "<f4")
    at = at_logprob = 0
    for head in msgpack.unpackb(heads, strict_map_key=False):
        counts = head.pop("#", None)
        if counts is not None:
            prompt, completion, n = counts
            head["prompt_ids"] = all_ids[at : at + prompt] if prompt else NO_IDS
            head["completion_ids"] = all_ids[at + prompt : at + prompt + completion]
            head["logprobs"] = all_logprobs[at_logprob : at_logprob + n] if n >= 0 else None
            at, at_logprob = at + prompt + completion, at_logprob + max(n, 0)
        yield head


def _planes(arrays: Iterable[Any], form: str) -> bytes:
    """All first bytes, then all second bytes, and so on: like stands by like, which is what compresses."""
    joined = np.concatenate([np.zeros(0, form), *arrays]).astype(form)
    return joined.view(np.uint8).reshape(-1, 4).T.tobytes()


def _joined(planes: bytes, form: str) -> Any:
    return np.frombuffer(planes, np.uint8).reshape(4, -1).T.copy().view(form).reshape(-1)
