"""The lines of a file through one sliding buffer. Lines may be of any length; memory is the longest line and a block.

Owns where a line begins and ends. A line is copied out only if someone wants it whole: a reader that knows what a line
begins with looks at it in place and has the newline searched behind that.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

BLOCK_BYTES = 1 << 20  # stays in the cache
HEAD_BYTES = 4096  # of a line are in the buffer before it is looked at, if it is that long


class Window:
    """The present line is `buffer[start:end]` without its newline; `ended` says whether it had one."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.buffer = bytearray(BLOCK_BYTES)
        self.start = self.end = self.filled = 0
        self.ended = False
        self._next = 0

    def advance(self) -> bool:
        """To the start of the next line; False at the end of the file."""
        self.start = self._next
        return self.need(1) and (self.need(HEAD_BYTES) or True)

    def need(self, size: int) -> bool:
        """Have so many bytes from the start of the line in the buffer; False if the file ends before."""
        while self.filled - self.start < size:
            if not self._more():
                return False
        return True

    def finish(self, known: int = 0) -> None:
        """Find the end of the line, which is not within its first `known` bytes."""
        while (at := self.buffer.find(b"\n", self.start + known, self.filled)) < 0:
            known = self.filled - self.start
            if not self._more():
                break
        self.ended = at >= 0
        self.end = at if self.ended else self.filled
        self._next = self.end + self.ended

    def line(self) -> bytes:
        with memoryview(self.buffer) as view:
            return bytes(view[self.start : self.end])

    def _more(self) -> bool:
        """Read on; what lies before the line makes room first."""
        if self.filled == len(self.buffer):
            rest = self.filled - self.start
            grown = bytearray(len(self.buffer) * 2) if rest * 2 > len(self.buffer) else self.buffer
            with memoryview(self.buffer) as old, memoryview(grown) as new:
                new[:rest] = old[self.start : self.filled]
            self.buffer, self.start, self.filled = grown, 0, rest
        with memoryview(self.buffer) as view:
            size: int = self._file.readinto(view[self.filled :])  # type: ignore[attr-defined]
        self.filled += size
        return size > 0


def split_lines(file: BinaryIO) -> Iterator[tuple[bytes, bool]]:
    """(line without its newline, whether it had one)."""
    lines = Window(file)
    while lines.advance():
        lines.finish()
        yield lines.line(), lines.ended
