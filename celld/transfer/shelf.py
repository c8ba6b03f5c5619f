"""Bytes that others may read: each blob in a registered slot, pinned while someone reads it.

Invariant: a slot's bytes do not change while it is the newest of its name or a lease on it lives. A reader that takes
longer than a lease may see them change; its digests tell.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import xxhash

from celld.transfer.engine import OPERATION_BYTES, Buffer, Engine
from gyre_base.messages import RemoteSlot

LEASE_S = 600.0


@dataclass
class _Slot:
    buffer: Buffer
    name: str = ""
    size: int = 0
    digests: tuple[int, ...] = ()
    leases: dict[int, float] = field(default_factory=dict)  # number -> end


class Shelf:
    """The slots of one process."""

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine, self._clock = engine, clock
        self._slots: list[_Slot] = []
        self._newest: dict[str, _Slot] = {}
        self._numbers = itertools.count(1)

    def put(self, name: str, payload: bytes | memoryview, digests: tuple[int, ...] | None = None) -> None:
        """A copy of `payload` as the newest of `name`; the one before goes once nobody reads it. `digests`: of its
        chunks, where the caller knows them."""
        slot = self._free(len(payload))
        slot.name, slot.size = name, len(payload)
        slot.buffer[: slot.size] = np.frombuffer(payload, dtype=np.uint8)
        slot.digests = chunk_digests(payload) if digests is None else digests
        self._newest[name] = slot

    def offer(self, name: str) -> RemoteSlot:
        """Where the newest of `name` is, under a lease that `done` or time ends."""
        slot, number = self._newest[name], next(self._numbers)
        slot.leases[number] = self._clock() + LEASE_S
        return RemoteSlot(
            peer=self._engine.peer,
            address=int(slot.buffer.ctypes.data),
            size=slot.size,
            chunk_bytes=OPERATION_BYTES,
            digests=slot.digests,
            lease=number,
        )

    def done(self, lease: int) -> None:
        """Its reader has what it wanted."""
        for slot in self._slots:
            slot.leases.pop(lease, None)

    def drop(self, name: str) -> None:
        """The newest of `name` and its memory go now; who still reads it finds out by the digests."""
        slot = self._newest.pop(name)
        self._engine.unregister(slot.buffer)
        self._slots = [other for other in self._slots if other is not slot]

    def _free(self, size: int) -> _Slot:
        """A slot that is large enough, not the newest of anything, and read by nobody; else a new one."""
        now = self._clock()
        for slot in self._slots:
            slot.leases = {number: end for number, end in slot.leases.items() if end > now}
            used = any(slot is newest for newest in self._newest.values())
            if len(slot.buffer) >= size and not used and not slot.leases:
                return slot
        made = _Slot(np.empty(max(size, 1), dtype=np.uint8))
        self._engine.register(made.buffer, shared=True)
        self._slots.append(made)
        return made


def chunk_digests(payload: bytes | memoryview) -> tuple[int, ...]:
    """xxh3-64 of each chunk of OPERATION_BYTES."""
    view = memoryview(payload)
    return tuple(
        xxhash.xxh3_64_intdigest(view[at : at + OPERATION_BYTES]) for at in range(0, len(view), OPERATION_BYTES)
    )
