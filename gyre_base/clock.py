"""Time as a thing that is passed in. Cores never read a clock; shells stamp an event once, on arrival."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds since the epoch that never go backwards within one process."""

    def now(self) -> float: ...


class WallClock:
    """Wall time at start plus the monotonic clock since: comparable between daemons, immune to steps."""

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def now(self) -> float:
        return self._offset + time.monotonic()
