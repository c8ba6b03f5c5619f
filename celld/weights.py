"""Versioned weight snapshots: flat tensors under Hugging Face names, their digest, and how they are fetched.

Owns layout, digest, the bytes of safetensors files and the directory that an engine loads. Never trains, never imports
torch: the cell's agent uses it too. Invariant: a snapshot that leaves `Transport.pull` has the digest that its
publisher computed; a directory that `write_hf` or `write_directory` made is whole, whatever dies in between. Everything
is pulled: nobody writes into another cell.

numpy has no bf16: an array of it is uint16, its bits. Nothing else here is uint16.

`Transport` is the seam: `SlotTransport` reads from the core's slots (Mooncake or plain sockets), `BusTransport` is the
one over the bus, its fallback, and its oracle in tests.
"""

from __future__ import annotations

import json
import logging
import math
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from celld.transfer.bulk import Bulk
from celld.transfer.engine import TransferFailed
from celld.transfer.shelf import chunk_digests
from gyre_base.bus import Client
from gyre_base.keys import Keys
from gyre_base.messages import PullWeights, Refused, WeightsSnapshot
from gyre_base.rundir import RunDir

Array = npt.NDArray[Any]  # float32, or uint16 for bf16
Layout = tuple[tuple[str, str, tuple[int, ...]], ...]  # name, safetensors' word for the type, shape
KINDS = {"float32": "F32", "uint16": "BF16", "uint8": "U8"}  # numpy's name -> safetensors'
TYPES: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "BF16": np.dtype("<u2"), "U8": np.dtype("u1")}
SLOT = "weights"
log = logging.getLogger(__name__)
PULL_TRIES = 3  # a damaged answer is asked for again; three in a row are no accident


class WeightsError(RuntimeError):
    """No usable snapshot: refused, or damaged each time."""


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The weights of one policy version; immutable. `chunks` are the digests of the payload's chunks."""

    version: str
    layout: Layout
    digest: str
    payload: bytes  # or, out of a slot, a read-only view of memory that is not written while it lives
    chunks: tuple[int, ...]

    @classmethod
    def of(cls, version: str, tensors: Mapping[str, Array]) -> Snapshot:
        """A copy of `tensors`, in their order."""
        layout = layout_of(tensors)
        payload = b"".join(np.ascontiguousarray(tensors[name], TYPES[kind]).tobytes() for name, kind, _ in layout)
        chunks = chunk_digests(payload)
        return cls(version, layout, digest(version, layout, chunks), payload, chunks)

    @classmethod
    def received(cls, answer: WeightsSnapshot, chunks: tuple[int, ...] | None = None) -> Snapshot | None:
        """What came, or None if it is not what was published. `chunks`: digests that the payload was checked against
        as it came."""
        found = chunk_digests(answer.payload) if chunks is None else chunks
        if digest(answer.version, answer.layout, found) != answer.digest:
            return None
        if len(answer.payload) != sum(_bytes(kind, shape) for _, kind, shape in answer.layout):
            return None
        return cls(answer.version, answer.layout, answer.digest, answer.payload, found)

    def tensors(self) -> dict[str, Array]:
        """Read-only views by name."""
        views, at = {}, 0
        for name, kind, shape in self.layout:
            views[name] = _view(self.payload, kind, shape, at)
            at += _bytes(kind, shape)
        return views

    def write_hf(self, directory: str | Path, config: dict[str, Any]) -> Path:
        """A Hugging Face directory for an engine, whole or not there. One that is there already is left alone."""
        target = Path(directory)
        if not target.is_dir():
            try:
                write_directory(target, hf_files(self.tensors(), config))
            except OSError:
                if not target.is_dir():  # else another cell on the same file system was first with the same bytes
                    raise
        return target


class Transport(Protocol):
    """How a cell gets the core's weights."""

    name: str

    async def pull(self, have: str, timeout_s: float) -> Snapshot | None:
        """The newest snapshot, or None if `have` is it. Raises WeightsError or bus.NoAnswer."""

    def close(self) -> None:
        """Close its connections."""


def transport_to(run: RunDir, keys: Keys, source: str, bulk: Bulk | None) -> Transport:
    """How this process gets the weights of `source`."""
    plain = BusTransport(run, keys, source)
    return plain if bulk is None else SlotTransport(run, keys, source, bulk, plain)


class BusTransport:
    """Over the bus, in one message, encrypted. Every pull carries the digest and is checked."""

    name = "bus"

    def __init__(self, run: RunDir, keys: Keys, source: str) -> None:
        self._client = Client(run, keys, source)

    async def pull(self, have: str, timeout_s: float) -> Snapshot | None:
        for _ in range(PULL_TRIES):
            answer = await self._client.ask(PullWeights(have=have), timeout_s=timeout_s, again_every_s=timeout_s / 3)
            if isinstance(answer, Refused):
                raise WeightsError(f"{self._client.server} gives no weights: {answer.why}")
            if answer.version == have and not answer.payload:
                return None
            if snapshot := Snapshot.received(answer):
                return snapshot
        raise WeightsError(f"the weights of {self._client.server} arrived damaged {PULL_TRIES} times")

    def close(self) -> None:
        self._client.close()


class SlotTransport:
    """Reads from a slot of the core; chunks that did not change since the last pull are not read again."""

    def __init__(self, run: RunDir, keys: Keys, source: str, bulk: Bulk, plain: BusTransport) -> None:
        self._client, self._bulk, self._plain = Client(run, keys, source), bulk, plain
        self.name = bulk.name

    async def pull(self, have: str, timeout_s: float) -> Snapshot | None:
        question = PullWeights(have=have, by=self._bulk.kind)
        answer = await self._client.ask(question, timeout_s=timeout_s, again_every_s=timeout_s / 3)
        if isinstance(answer, Refused):
            raise WeightsError(f"{self._client.server} gives no weights: {answer.why}")
        if answer.version == have and answer.slot is None and not answer.payload:
            return None
        chunks = answer.slot.digests if answer.slot is not None else None  # none: its owner has another engine
        try:
            answer = await self._bulk.filled(answer, self._client)
        except TransferFailed as error:
            log.error("%s; these weights come over the bus", error)
            return await self._plain.pull(have, timeout_s)
        return Snapshot.received(answer, chunks) or await self._plain.pull(have, timeout_s)

    def close(self) -> None:
        self._client.close()
        self._plain.close()


class Published:
    """The snapshot that a core offers, on the bus and, with `bulk`, in a slot."""

    def __init__(self, bulk: Bulk | None = None) -> None:
        self._bulk = bulk
        self.snapshot: Snapshot | None = None

    def publish(self, snapshot: Snapshot) -> None:
        if self._bulk is not None:
            self._bulk.shelf.put(SLOT, snapshot.payload, snapshot.chunks)
        self.snapshot = snapshot

    def answer(self, question: PullWeights) -> WeightsSnapshot | Refused:
        held = self.snapshot
        if held is None:
            return Refused(why="no version is published yet")
        payload = b"" if question.have == held.version else held.payload
        answer = WeightsSnapshot(version=held.version, layout=held.layout, digest=held.digest, payload=payload)
        if self._bulk is None or question.by != self._bulk.kind or not payload:
            return answer
        return self._bulk.emptied(answer, SLOT)


def digest(version: str, layout: Layout, chunks: tuple[int, ...]) -> str:
    """xxh3-128 (hex) over version, layout and the chunks' digests: right bytes under another version's name are damage
    too."""
    return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode([version, layout, chunks]))


def layout_of(tensors: Mapping[str, Array]) -> Layout:
    return tuple((name, KINDS[str(a.dtype)], tuple(int(n) for n in a.shape)) for name, a in tensors.items())


def _bytes(kind: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * TYPES[kind].itemsize


def _view(payload: bytes | memoryview, kind: str, shape: tuple[int, ...], at: int) -> Array:
    return np.frombuffer(payload, TYPES[kind], math.prod(shape), at).reshape(shape)


# ---- files -----------------------------------------------------------------------------------------------------------


def hf_files(tensors: Mapping[str, Array], config: dict[str, Any]) -> dict[str, Iterable[bytes | memoryview]]:
    """config.json and model.safetensors, in pieces."""
    return {"config.json": [config_json(config, tensors)], "model.safetensors": safetensors_parts(tensors)}


def config_json(config: dict[str, Any], tensors: Mapping[str, Array]) -> bytes:
    """The model's config.json. Weights in bf16 are named in it: by that entry an engine chooses what it computes in."""
    if any(tensor.dtype == TYPES["BF16"] for tensor in tensors.values()):
        config = {**config, "torch_dtype": "bfloat16"}
        if "dtype" in config:  # what transformers 5 writes and reads first
            config["dtype"] = "bfloat16"
    return (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()


def safetensors_parts(arrays: Mapping[str, Array]) -> Iterator[bytes | memoryview]:
    """The safetensors file of `arrays`, piece by piece, so that no second copy of a model is made."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, kind, shape in layout_of(arrays):
        end = at + _bytes(kind, shape)
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for array in arrays.values():
        yield np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def safetensors_arrays(content: bytes) -> dict[str, Array]:
    """Inverse of `safetensors_parts`: read-only views of `content`. Raises ValueError or KeyError."""
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    return {
        name: _view(content, spec["dtype"], tuple(spec["shape"]), start + spec["data_offsets"][0])
        for name, spec in header.items()
        if name != "__metadata__"
    }


def write_directory(target: Path, files: Mapping[str, Iterable[bytes | memoryview]]) -> None:
    """All of `files` (in pieces) under `target`, durable, or no `target`. Raises OSError, also if it exists."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}")
    temporary.mkdir(parents=True)
    try:
        for name, content in files.items():
            with open(temporary / name, "wb") as file:
                file.writelines(content)
                file.flush()
                os.fsync(file.fileno())
        sync_directory(temporary)
        os.replace(temporary, target)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_directory(target.parent)


def sync_directory(directory: Path) -> None:
    """Its names are durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
