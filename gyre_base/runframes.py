"""The binary container of a run file (`.gtr`): a magic, then frames with a checksum each. The content is `runpacked`'s.

Owns finding frames: behind an offset, in a file that grows, that is torn at its end or has a changed byte anywhere.
Invariant: a frame that is given as sound is byte for byte what was written, its header included.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import xxhash

from gyre_base.runcodec import RunFileError

MAGIC = b"gyre.gtr/1\n"
BLOCK, INDEX, RECORD = FRAME_KINDS = 1, 2, 3
SYNC = b"\xf7gtr"  # begins a header; no UTF-8 text holds it, so it is rare in what lies between
_HEADER = struct.Struct("<4sIIIB")  # SYNC, stored bytes, size, checksum of the stored bytes, kind; then three of a seal
HEADER_BYTES = _HEADER.size + 3
_SEARCH_BYTES = 1 << 20
_CHECK = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Frame:
    """Bytes [start, end) of a file: a frame, or (not `sound`) what stands where one should.

    `size`: bytes of the unpacked block, or of a record's head. An unsound frame whose header is whole has its kind and
    what is stored under it; without such a header its kind is 0.
    """

    start: int
    end: int
    kind: int
    size: int
    stored: bytes
    sound: bool


def pack_frame(kind: int, size: int, *parts: Any) -> bytes:
    """One frame with its header: `parts`, bytes and contiguous arrays, one after the other. Raises struct.error for
    4 GiB and more.
    """
    length, check = 0, xxhash.xxh3_64()
    for part in parts:
        length += len(part) if type(part) is bytes else part.nbytes
        check.update(part)
    head = _HEADER.pack(SYNC, length, size, check.intdigest() & _CHECK, kind)
    return b"".join((head, _seal(head), *parts))


def _seal(head: bytes) -> bytes:
    """What proves a header, its length above all: without it nobody knows where the next frame begins."""
    return xxhash.xxh32_digest(head)[:3]


def is_framed(file: BinaryIO) -> bool:
    """Whether a file that can be sought is of this form, as far as it goes: a torn magic counts. The place is kept."""
    here = file.tell()
    file.seek(0)
    start = file.read(len(MAGIC))
    file.seek(here)
    return bool(start) and MAGIC.startswith(start)


class Frames:
    """The frames of a file from `offset` to its present end. Iterate again to go on: a torn end is read once it is
    whole.

    `torn`: (offset, bytes) at the end in which no frame is sound. What is not sound and has a sound frame behind it is
    given as an unsound frame that ends where that one begins.
    """

    def __init__(self, file: BinaryIO, offset: int = 0) -> None:
        """The file can be sought. Frames begin at `offset`, or behind the magic."""
        self._file = file
        self.offset = offset
        self.torn: tuple[int, int] | None = None

    def __iter__(self) -> Iterator[Frame]:
        """Raises RunFileError if the file does not begin with the magic."""
        size = self._file.seek(0, 2)
        self.torn = None
        if self.offset == 0 and not self._begun():
            self.torn = (0, size) if size else None
            return
        while self.offset < size:
            frame = self._frame(self.offset, size)
            if not frame.sound:
                found = self._search(frame.start + 1, size)
                if found is None:
                    self.torn = (frame.start, size - frame.start)
                    return
                frame = Frame(frame.start, found, frame.kind, frame.size, frame.stored, sound=False)
            self.offset = frame.end
            yield frame

    def _begun(self) -> bool:
        """Whether the magic is whole."""
        start = self._read(0, len(MAGIC))
        if not MAGIC.startswith(start):
            raise RunFileError("not a binary run file of this version")
        self.offset = len(MAGIC) if start == MAGIC else 0
        return start == MAGIC

    def _frame(self, start: int, size: int) -> Frame:
        """What stands at an offset; `end` is right only if it is sound."""
        head = self._read(start, HEADER_BYTES)
        if len(head) < HEADER_BYTES or not head.startswith(SYNC) or _seal(head[:-3]) != head[-3:]:
            return Frame(start, size, 0, 0, b"", sound=False)
        _, length, told, check, kind = _HEADER.unpack_from(head)
        end = start + HEADER_BYTES + length
        if end > size:
            return Frame(start, size, 0, 0, b"", sound=False)
        stored = self._file.read(length)
        sound = len(stored) == length and xxhash.xxh3_64_intdigest(stored) & _CHECK == check
        return Frame(start, end, kind, told, stored, sound)

    def _search(self, start: int, size: int) -> int | None:
        """Where the next sound frame begins: behind damage, or inside a torn frame onto which others were written."""
        while start < size:
            window = self._read(start, _SEARCH_BYTES)
            at = window.find(SYNC)
            while at >= 0:
                if start + at < size and self._frame(start + at, size).sound:
                    return start + at
                at = window.find(SYNC, at + 1)
            if len(window) < _SEARCH_BYTES:
                return None
            start += _SEARCH_BYTES - len(SYNC) + 1
        return None

    def _read(self, start: int, size: int) -> bytes:
        self._file.seek(start)
        return self._file.read(size)


def frame_at(data: bytes, start: int) -> Frame:
    """The frame that `data` was read as, from a place that `Frames` gave before; it may have changed since."""
    found = Frames(io.BytesIO(data))._frame(0, len(data))
    return Frame(start, start + len(data), found.kind, found.size, found.stored, found.sound)
