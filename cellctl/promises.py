"""Commands that are said again until they are answered. Pure.

One per key; a newer command under a key takes the place of the older.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gyre_base.daemon import Send, WakeAt

RESEND_S = 5.0  # an unanswered command goes out again after this long


class Promises:
    """`say` gets what goes out. `due` is to be called after every event."""

    def __init__(self, say: Callable[[Any], None]) -> None:
        self._say = say
        self._pending: dict[str, tuple[Send, float]] = {}
        self._wake_at = 0.0
        self._resend_at = 0.0

    def __contains__(self, key: str) -> bool:
        return key in self._pending

    def keep(self, key: str, send: Send, now: float) -> None:
        """Say it, and again until `answered`."""
        self._pending[key] = (send, now)
        self._resend_at = min(self._resend_at, now + RESEND_S)
        self._say(send)

    def answered(self, key: str) -> None:
        self._pending.pop(key, None)

    def of(self, kind: str) -> dict[str, Send]:
        """What is open under keys that begin with `kind:`."""
        return {key: send for key, (send, _) in self._pending.items() if key.startswith(f"{kind}:")}

    def forget_all_but(self, kind: str) -> None:
        kept = self.of(kind)
        self._pending = {key: word for key, word in self._pending.items() if key in kept}

    def due(self, now: float, *, is_over: bool) -> None:
        """Repeat what is due and ask for the next alarm; with nothing open a run that is over needs none."""
        if now >= self._resend_at:
            self._repeat(now)
        if now >= self._wake_at and (self._pending or not is_over):
            self._wake_at = now + RESEND_S
            self._say(WakeAt(at=self._wake_at))

    def _repeat(self, now: float) -> None:
        for key, (send, at) in list(self._pending.items()):
            if now - at >= RESEND_S:
                self._say(send)
                self._pending[key] = (send, now)
        self._resend_at = min((at for _, at in self._pending.values()), default=now) + RESEND_S
