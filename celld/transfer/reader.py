"""Reads a remote slot into memory of our own, and believes only what the digests confirm.

Invariants: what `fetch` gave does not change while somebody holds it; a buffer that a failed read may still write into
is never read from again or given back; chunks that were confirmed are not fetched again. Memory is used again as soon
as nobody holds what was in it, because touching fresh memory takes longer than the network does.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import xxhash

from celld.transfer.engine import PROGRESS_S, Buffer, Engine, Operation, TransferFailed
from gyre_base.messages import RemoteSlot

TRIES = 3
ROOMS = 3  # buffers kept: what is held, what comes, and one of another size
LATE_S = 12 * PROGRESS_S  # after this long nothing is written any more
UNKNOWN = -1  # in place of a digest


@dataclass(eq=False)
class _Room:
    """One buffer. `digests`: of the chunks in it, UNKNOWN where none is confirmed."""

    buffer: Buffer
    digests: list[int] = field(default_factory=list)
    lent: weakref.ref[Buffer] | None = None

    @property
    def free(self) -> bool:
        return self.lent is None or self.lent() is None

    def has(self, slot: RemoteSlot, index: int) -> bool:
        return index < len(self.digests) and self.digests[index] == slot.digests[index]

    def lend(self, size: int) -> memoryview:
        view = self.buffer[:size]
        view.flags.writeable = False
        self.lent = weakref.ref(view)
        return view.data  # which holds the view


class Reader:
    """The reading side of one process. Not for use by two threads at once."""

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine, self._clock = engine, clock
        self._rooms: list[_Room] = []
        self._doubtful: list[tuple[float, Buffer]] = []
        self.fetched_bytes = 0
        self.reused_bytes = 0  # confirmed before: an earlier version's equal chunks, or a try that broke off

    def fetch(self, slot: RemoteSlot, tries: int = TRIES) -> memoryview:
        """The slot's bytes, read-only. Blocks; run it in a thread. Raises TransferFailed after `tries`."""
        self._doubtful = [(end, buffer) for end, buffer in self._doubtful if end > self._clock()]
        problem = ""
        for _ in range(tries):
            room = self._room(slot)
            missing = [i for i in range(len(slot.digests)) if not room.has(slot, i)]
            self.reused_bytes += slot.size - sum(_length(slot, i) for i in missing)
            operations = [_operation(slot, room.buffer, i) for i in missing]
            try:
                self._engine.read(slot.peer, room.buffer, operations, partial(_confirm, slot, room, missing))
            except TransferFailed as error:
                problem = str(error)
                if self._engine.late_writes:
                    self._abandon(room)
                self._engine.renew()
                continue
            self.fetched_bytes += sum(size for _, _, size in operations)
            if all(room.has(slot, i) for i in missing):
                return room.lend(slot.size)
            problem = f"what {slot.peer.partition('/')[0]} gave is not what it offered"
        raise TransferFailed(problem)

    def _room(self, slot: RemoteSlot) -> _Room:
        """A free room that is large enough, with all confirmed chunks of the slot that any room has."""
        fitting = [room for room in self._rooms if room.free and room.buffer.nbytes >= slot.size]
        most = max(fitting, key=lambda room: sum(room.has(slot, i) for i in range(len(slot.digests))), default=None)
        room = most or self._new_room(slot.size)
        room.digests = [d if room.has(slot, i) else UNKNOWN for i, d in enumerate(slot.digests)]
        for other in self._rooms:
            for index in range(len(slot.digests)):
                if other is not room and other.has(slot, index) and not room.has(slot, index):
                    at, length = index * slot.chunk_bytes, _length(slot, index)
                    room.buffer[at : at + length] = other.buffer[at : at + length]
                    room.digests[index] = slot.digests[index]
        return room

    def _new_room(self, size: int) -> _Room:
        if len(self._rooms) >= ROOMS:
            oldest = next((room for room in self._rooms if room.free), self._rooms[0])
            self._rooms.remove(oldest)
            self._engine.unregister(oldest.buffer)
        room = _Room(np.empty(max(size, 1), dtype=np.uint8))
        self._engine.register(room.buffer)
        self._rooms.append(room)
        return room

    def _abandon(self, room: _Room) -> None:
        """What it was sure of moves to a fresh room; the buffer is kept alive until no late write can come."""
        self._rooms.remove(room)
        self._engine.unregister(room.buffer)
        self._doubtful.append((self._clock() + LATE_S, room.buffer))
        if any(digest != UNKNOWN for digest in room.digests):
            fresh = self._new_room(room.buffer.nbytes)
            fresh.buffer[:] = room.buffer
            fresh.digests = list(room.digests)


def _confirm(slot: RemoteSlot, room: _Room, missing: list[int], nth: int) -> None:
    """The nth of the missing chunks has come: note it if it is what was offered."""
    index = missing[nth]
    at = index * slot.chunk_bytes
    found = xxhash.xxh3_64_intdigest(room.buffer[at : at + _length(slot, index)].data)
    if found == slot.digests[index]:
        room.digests[index] = found


def _operation(slot: RemoteSlot, buffer: Buffer, index: int) -> Operation:
    at = index * slot.chunk_bytes
    return int(buffer.ctypes.data) + at, slot.address + at, _length(slot, index)


def _length(slot: RemoteSlot, index: int) -> int:
    return min(slot.chunk_bytes, slot.size - index * slot.chunk_bytes)
