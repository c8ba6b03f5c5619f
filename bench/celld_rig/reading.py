"""Mooncake's engine with a watch on its reads: what of a pull is Mooncake's, and what is digests and copies."""

from __future__ import annotations

import time
from collections.abc import Sequence

from celld.transfer.engine import Buffer, TransferEngine


class TimedEngine(TransferEngine):
    """`read_s`: seconds of the last read."""

    read_s = 0.0

    def read(self, peer: str, buffer: Buffer, operations: Sequence[tuple[int, int, int]]) -> None:
        began = time.monotonic()
        super().read(peer, buffer, operations)
        self.read_s = time.monotonic() - began
