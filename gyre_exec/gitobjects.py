"""Git's object files, written and read by this process: a blob, tree or commit under the hash of its content.

Written loose, by rename, so that several processes may write the same one at once. Read loose; what somebody has packed
(`git gc`) is asked of git. Files of any size go through in chunks.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

CHUNK_BYTES = 1 << 20
LEVEL = 1  # most of a workspace is small text; a higher level costs more than it saves


class SnapshotError(Exception):
    """It can't be kept, or what was kept can't be read."""


class FileChanged(OSError):
    """Somebody writes to a file that is being kept."""


class Objects:
    """The objects of one repository."""

    def __init__(self, repository: Path) -> None:
        self._repository = repository
        self.folder = f"{repository}/objects"

    def place(self, oid: str) -> str:
        return f"{self.folder}/{oid[:2]}/{oid[2:]}"

    def write(self, kind: bytes, body: bytes) -> str:
        """Its id. Raises OSError."""
        head = b"%s %d\0" % (kind, len(body))
        oid = hashlib.sha1(head + body, usedforsecurity=False).hexdigest()
        self._store(oid, head, (body,))
        return oid

    def write_file(self, file: IO[bytes], size: int) -> str:
        """The blob of an open file's first `size` bytes. Raises OSError, FileChanged if they are fewer or change."""
        if size <= CHUNK_BYTES:
            return self.write(b"blob", b"".join(_exactly(file, size)))
        head = b"blob %d\0" % size
        digest = hashlib.sha1(head, usedforsecurity=False)
        for chunk in _exactly(file, size):
            digest.update(chunk)
        file.seek(0)
        self._store(digest.hexdigest(), head, _unchanged(_exactly(file, size), head, digest.digest()))
        return digest.hexdigest()

    def _store(self, oid: str, head: bytes, chunks: Iterable[bytes]) -> None:
        place = self.place(oid)
        if os.path.exists(place):  # noqa: PTH110 - once per file of every workspace: no Path is made for it
            return
        Path(place).parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix="tmp_obj_", dir=self.folder)
        try:
            with open(descriptor, "wb") as out:
                packer = zlib.compressobj(LEVEL)
                out.write(packer.compress(head))
                for chunk in chunks:
                    out.write(packer.compress(chunk))
                out.write(packer.flush())
            Path(temporary).chmod(0o444)
            os.replace(temporary, place)
        except BaseException:
            Path(temporary).unlink()
            raise

    def read(self, oid: str) -> bytes:
        """The content. Raises SnapshotError."""
        return b"".join(self.chunks(oid))

    def chunks(self, oid: str) -> Iterator[bytes]:
        """The same, piece by piece."""
        try:
            with open(self.place(oid), "rb") as file:
                yield from _content(file, oid)
        except FileNotFoundError:
            yield self._ask_git(oid)
        except OSError as error:
            raise SnapshotError(f"object {oid}: {error.strerror or error}") from None

    def _ask_git(self, oid: str) -> bytes:
        command = ["git", "--git-dir", str(self._repository), "cat-file", "--batch"]
        try:
            done = subprocess.run(command, input=oid.encode() + b"\n", capture_output=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise SnapshotError(f"object {oid} can't be read from {self._repository}: {error}") from None
        head, _, body = done.stdout.partition(b"\n")
        if head.endswith(b"missing"):
            raise SnapshotError(f"object {oid} is not in {self._repository}")
        return body[:-1]


def _content(file: IO[bytes], oid: str) -> Iterator[bytes]:
    """Without the header."""
    unpacker, head = zlib.decompressobj(), b""
    in_head = True
    while not unpacker.eof:
        raw = unpacker.unconsumed_tail or file.read(CHUNK_BYTES)
        if not raw:
            raise SnapshotError(f"object {oid} is cut off")
        try:
            data = unpacker.decompress(raw, CHUNK_BYTES)
        except zlib.error as error:
            raise SnapshotError(f"object {oid} is damaged ({error})") from None
        if in_head:
            head += data
            _, found, data = head.partition(b"\0")
            in_head = not found
        if data and not in_head:
            yield data


def _exactly(file: IO[bytes], size: int) -> Iterator[bytes]:
    """Raises FileChanged if the file is shorter than it was."""
    left = size
    while left:
        chunk = file.read(min(CHUNK_BYTES, left))
        if not chunk:
            raise FileChanged("it became shorter while it was kept")
        left -= len(chunk)
        yield chunk


def _unchanged(chunks: Iterable[bytes], head: bytes, digest: bytes) -> Iterator[bytes]:
    """Raises FileChanged at the end if they are not those of `digest`."""
    again = hashlib.sha1(head, usedforsecurity=False)
    for chunk in chunks:
        again.update(chunk)
        yield chunk
    if again.digest() != digest:
        raise FileChanged("it changed while it was kept")
