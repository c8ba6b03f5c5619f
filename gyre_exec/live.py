"""What proxyd has given out of an answer before its end, and the tokens that this was made of.

A piece is a chunk that begins with a line of such tokens, sealed by proxyd and never shown to a harness; what comes
without is the end, which is held until it is complete. Whoever asks for the call again sends the lines along, so that
a new life of proxyd goes on where the old one was. Pure.
"""

from __future__ import annotations

import dataclasses

from gyre_exec import http1

SO_FAR = b"x-gyre-so-far"
LINE, WAITED = b": gyre-so-far ", b": gyre-waited "


class Live:
    """Of one call, whoever waits for it."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self._lines: list[bytes] = []

    def take(self, chunk: bytes) -> bytes | None:
        """The events of a piece, which may be shown now; None for the end."""
        if not chunk.startswith(LINE):
            return None
        line, _, events = chunk.removeprefix(LINE).partition(b"\n\n")
        self._lines.append(line)
        self.pieces.append(events)
        return events

    def so_far(self) -> bytes:
        """For proxyd, when it is asked again."""
        return b"\n".join(self._lines)


def without_wait(answer: http1.Message, waited_s: float) -> tuple[http1.Message, float]:
    """An answer as the harness may see it, and what its call was held by the infrastructure, which a live end says."""
    if not answer.body.startswith(WAITED):
        return answer, waited_s
    said, _, body = answer.body.removeprefix(WAITED).partition(b"\n\n")
    return dataclasses.replace(answer, body=body), float(said)
