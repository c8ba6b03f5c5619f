"""Records in the frames of a `.gtr` file: one per frame, as a call log is written, or many in a compressed block.

Owns the bytes inside a frame (docs, "Run file", binary form). The objects are those of the JSON lines, with arrays in
place of lists. Resolves no delta: `RunReader` does.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, BinaryIO

import msgpack
import numpy as np

from gyre_base.runcodec import BadRecord, encode
from gyre_base.runframes import BLOCK, INDEX, MAGIC, RECORD, Frame, pack_frame
from gyre_base.runrecords import NO_IDS, Record

BLOCK_TOKENS = 1 << 18
_IDS = ("prompt_ids", "completion_ids")
_INT, _FLOAT = np.dtype("<i4"), np.dtype("<f4")
_FEW_TOKENS = 1 << 14
_LEVEL = 12


def framed(record: Record) -> bytes:
    """One record as one frame. A call comes out in full form; `CallWriter(form=record_frame)` makes the short one."""
    return encode(record, record_frame)


# ---- one record per frame -----------------------------------------------------------------------------------------


def record_frame(obj: Mapping[str, Any]) -> bytes:
    """The frame of one object: msgpack [object without arrays, sizes, [name, dtype, shape] of others], then the arrays.

    sizes = [prompt tail, completion, logprobs or -1]; what is empty at the end of the list is left out.
    """
    head = dict(obj)
    arrays: list[Any] = []
    sizes, about = _split(head, arrays)
    said = _own.packer.pack([head, sizes, about] if about else [head, sizes] if sizes else [head])
    if sum(sizes) < _FEW_TOKENS and not about:  # a copy costs less than looking at each of them
        return pack_frame(RECORD, len(said), b"".join((said, *arrays)))
    return pack_frame(RECORD, len(said), said, *arrays)


def _split(head: dict[str, Any], arrays: list[Any]) -> tuple[list[int], list[Any]]:
    """Take the arrays out of an object: (sizes, [name, dtype, shape] of the named ones)."""
    if head.get("k") != "call" or "completion_ids" not in head:
        return [], []
    logprobs, named = head.pop("logprobs", None), head.pop("arrays", {})
    prompt = np.ascontiguousarray(head.pop("prompt_ids", NO_IDS), _INT)
    completion = np.ascontiguousarray(head.pop("completion_ids"), _INT)
    arrays += (prompt, completion)
    sizes = [len(prompt), len(completion), -1]
    if logprobs is not None:
        arrays.append(np.ascontiguousarray(logprobs, _FLOAT))
        sizes[2] = len(logprobs)
    about = []
    for name, array in named.items():
        arrays.append(np.ascontiguousarray(array, array.dtype.newbyteorder("<")))
        about.append([name, arrays[-1].dtype.str, list(array.shape)])
    return sizes, about


def _plain(value: Any) -> Any:
    """What JSON lines take as well: numpy's numbers and foreign mappings."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} can't stand in a record")


class _Own(threading.local):
    """A packer of each thread: making one costs more than packing a short record."""

    def __init__(self) -> None:
        self.packer = msgpack.Packer(default=_plain)


_own = _Own()


def head_of(frame: Frame) -> dict[str, Any]:
    """The object of a record's frame without its arrays: who it is about is in it. Raises BadRecord."""
    return _head(frame)[0]


def _head(frame: Frame) -> tuple[dict[str, Any], list[int], list[Any]]:
    try:
        head, *more = msgpack.unpackb(memoryview(frame.stored)[: frame.size], strict_map_key=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise BadRecord(f"its head is no msgpack of ours: {error}") from None
    if not isinstance(head, dict) or not isinstance(head.get("k"), str):
        raise BadRecord("no kind: the key k is missing")
    return head, more[0] if more else [], more[1] if len(more) > 1 else []


def _record(frame: Frame) -> dict[str, Any]:
    obj, sizes, about = _head(frame)
    if sizes:
        try:
            prompt, completion, logprobs = sizes
            at = frame.size
            obj["prompt_ids"] = np.frombuffer(frame.stored, "<i4", prompt, at)
            at += 4 * prompt  # the others are copied: a short answer must not keep a long prompt in memory
            obj["completion_ids"] = np.frombuffer(frame.stored, "<i4", completion, at).copy()
            at += 4 * completion
            obj["logprobs"] = None if logprobs < 0 else np.frombuffer(frame.stored, "<f4", logprobs, at).copy()
            at += 4 * max(logprobs, 0)
            for name, form, shape in about:
                count = int(np.prod(shape, dtype=np.int64))
                data = memoryview(frame.stored)[at : at + count * np.dtype(form).itemsize]
                obj.setdefault("arrays", {})[name] = [form, shape, bytes(data)]
                at += len(data)
        except (ValueError, TypeError) as error:
            raise BadRecord(f"its arrays do not fit: {error}") from None
    return obj


def objects(frame: Frame) -> list[dict[str, Any]]:
    """Of a sound frame; none of an index or of a kind that a later version knows. Raises BadRecord."""
    if frame.kind == RECORD:
        return [_record(frame)]
    return list(_unpacked(frame)) if frame.kind == BLOCK else []


# ---- blocks -------------------------------------------------------------------------------------------------------


@dataclass
class BlockWriter:
    """Collects objects and writes a block when there are enough. `close` writes the rest and the index."""

    file: BinaryIO
    size: int = 0
    _heads: list[tuple[Any, ...]] = field(default_factory=list)  # (object without arrays, its sizes if it has any)
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
            if "arrays" in head:
                head["arrays"] = {n: [a.dtype.str, a.shape, a.tobytes()] for n, a in head["arrays"].items()}
            self._tokens += sum(lengths)
        self._heads.append((head, lengths) if lengths else (head,))
        if self._tokens >= BLOCK_TOKENS or len(self._heads) >= 4096:
            self._flush()

    def close(self) -> int:
        self._flush()
        self._frame(INDEX, msgpack.packb(self._offsets))
        return self.size

    def _flush(self) -> None:
        if not self._heads:
            return
        heads = msgpack.packb(self._heads, default=_plain)
        parts = [heads, _planes(self._ids, "<i4"), _planes(self._logprobs, "<f4")]
        self._offsets.append((self.size, len(self._heads)))
        self._frame(BLOCK, b"".join([struct.pack("<III", *map(len, parts)), *parts]))
        self._heads, self._ids, self._logprobs, self._tokens = [], [], [], 0

    def _frame(self, kind: int, payload: bytes) -> None:
        import zstandard

        stored = zstandard.ZstdCompressor(level=_LEVEL).compress(payload)
        self.size += self.file.write(pack_frame(kind, len(payload), stored))


def _unpacked(frame: Frame) -> Iterator[dict[str, Any]]:
    import zstandard

    try:
        payload = zstandard.ZstdDecompressor().decompress(frame.stored, max_output_size=frame.size)
        lengths = struct.unpack_from("<III", payload)
        edges = np.cumsum([12, *lengths]).tolist()
        heads, ids, logprobs = (payload[a:b] for a, b in pairwise(edges))
        all_ids, all_logprobs = _joined(ids, "<i4"), _joined(logprobs, "<f4")
        given = msgpack.unpackb(heads, strict_map_key=False)
    except (ValueError, TypeError, struct.error, RecursionError, zstandard.ZstdError) as error:
        raise BadRecord(f"it is no block of ours: {error}") from None
    at = at_logprob = 0
    for head, *sizes in given:
        if sizes:
            prompt, completion, n = sizes[0]
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
