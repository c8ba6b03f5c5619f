"""Reads a remote slot into memory of our own, and believes only what the digests confirm.

Invariant: a buffer that a failed read was meant for is never read from or given back while a late write may still come;
chunks that were confirmed are copied out of it and not fetched again.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import xxhash

from celld.transfer.engine import PROGRESS_S, Buffer, TransferEngine, TransferFailed
from gyre_base.messages import RemoteSlot

TRIES = 3
LATE_S = 12 * PROGRESS_S  # after this long nothing is written any more


class Reader:
    """The reading side of one process. Not for use by two threads at once."""

    def __init__(self, engine: TransferEngine, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine, self._clock = engine, clock
        self._held: Buffer | None = None
        self._digests: tuple[int, ...] = ()  # of the chunks in _held; 0 = not confirmed
        self._doubtful: list[tuple[float, Buffer]] = []
        self.fetched_bytes = 0
        self.reused_bytes = 0  # confirmed before: an earlier version's equal chunks, or a try that broke off

    def fetch(self, slot: RemoteSlot) -> bytes:
        """The slot's bytes. Blocks; run it in a thread. Raises TransferFailed after some tries."""
        self._forget_old()
        problem = ""
        for _ in range(TRIES):
            buffer = self._buffer(slot.size)
            missing = [i for i, digest in enumerate(slot.digests) if self._known(i) != digest]
            self.reused_bytes += slot.size - sum(_length(slot, i) for i in missing)
            try:
                self._engine.read(slot.peer, buffer, [self._operation(slot, buffer, i) for i in missing])
            except TransferFailed as error:
                problem = str(error)
                self._confirm(slot, buffer, missing)
                self._abandon(buffer)
                self._engine.renew()
                continue
            self.fetched_bytes += sum(_length(slot, i) for i in missing)
            if self._confirm(slot, buffer, missing):
                return buffer[: slot.size].tobytes()
            problem = f"what {slot.peer} gave is not what it offered"
        raise TransferFailed(problem)

    def _buffer(self, size: int) -> Buffer:
        if self._held is None or len(self._held) != size:
            if self._held is not None:
                self._engine.unregister(self._held)
            self._held, self._digests = np.empty(max(size, 1), dtype=np.uint8), ()
            self._engine.register(self._held)
        return self._held

    def _known(self, index: int) -> int | None:
        return self._digests[index] if index < len(self._digests) else None

    @staticmethod
    def _operation(slot: RemoteSlot, buffer: Buffer, index: int) -> tuple[int, int, int]:
        at = index * slot.chunk_bytes
        return int(buffer.ctypes.data) + at, slot.address + at, _length(slot, index)

    def _confirm(self, slot: RemoteSlot, buffer: Buffer, missing: list[int]) -> bool:
        """Note which of the chunks are what was offered; whether all are."""
        known = list(self._digests) + [0] * (len(slot.digests) - len(self._digests))
        whole = True
        for index in missing:
            at = index * slot.chunk_bytes
            found = xxhash.xxh3_64_intdigest(buffer[at : at + _length(slot, index)].data)
            right = found == slot.digests[index]
            known[index] = found if right else 0
            whole = whole and right
        self._digests = tuple(known)
        return whole

    def _abandon(self, buffer: Buffer) -> None:
        """Confirmed chunks move to a fresh buffer; the old one is kept alive until no late write can come."""
        self._engine.unregister(buffer)
        self._doubtful.append((self._clock() + LATE_S, buffer))
        self._held = buffer.copy()
        self._engine.register(self._held)

    def _forget_old(self) -> None:
        now = self._clock()
        self._doubtful = [(end, buffer) for end, buffer in self._doubtful if end > now]


def _length(slot: RemoteSlot, index: int) -> int:
    return min(slot.chunk_bytes, slot.size - index * slot.chunk_bytes)
