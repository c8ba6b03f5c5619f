"""What stays of an execution on disk: its outcome, and what its harness said, compressed.

    executions/<id>/outcome.json, stdout.zst, stderr.zst, transcript.json.zst

All are bounded; an empty stream leaves no file. The workspace itself stays as a snapshot (snapshot.py). Whatever the
agent wrote is read with suspicion: no link is followed, nothing but a regular file is opened.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import IO

import orjson
import zstandard

from gyre_base import messages as m
from gyre_base import wire
from gyre_exec import child as children
from gyre_exec.restless import open_plainly, remove_tree

log = logging.getLogger(__name__)
KEPT = {"stdout": "stdout", "stderr": "stderr", "transcript.json": "harness/transcript.json"}  # name -> where it is
COPY_BYTES = 1 << 20
SINK_EXTRA_BYTES = 8_192  # a stream that was bounded while it came has its mark and its end in addition
LEVEL = 3  # 10:1 on harness output at 300 MB/s; more costs CPU that harnesses want


def write_outcome(folder: Path, finished: m.ExecutionFinished) -> None:
    """By rename, not forced to disk: cellctl's journal is what a restart believes."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = folder / ".outcome.json"
    temporary.write_bytes(orjson.dumps(wire.to_json(finished)) + b"\n")
    os.replace(temporary, folder / "outcome.json")


def tidy(folder: Path, *, keep: bool, limit: int) -> None:
    """Compress what is kept, remove what need not stay. Never raises: disk trouble here must not cost an outcome."""
    for name, place in KEPT.items():
        try:
            pack(folder / place, folder / f"{name}.zst", limit)
        except OSError as error:
            log.warning("%s is not kept: %s", folder / place, error)
    for name in ("scoring", "pid", "stdout", "stderr") if keep else ("scoring", "pid", *KEPT, "workspace", "harness"):
        try:
            remove_tree(folder / name)
        except OSError as error:
            log.warning("%s stays: %s", folder / name, error)


def pack(source: Path, target: Path, limit: int) -> None:
    """A compressed copy of at most `limit` bytes: of a longer one the beginning and the end. Raises OSError."""
    file = open_plainly(source)
    if file is None:
        return
    with file:
        size = os.fstat(file.fileno()).st_size
        if not size:
            return
        temporary = target.with_name(f".{target.name}")
        with open(temporary, "wb") as out, zstandard.ZstdCompressor(level=LEVEL).stream_writer(out) as stream:
            if size <= limit + SINK_EXTRA_BYTES:
                _copy(file, stream, size)
            else:
                _copy(file, stream, limit // 2)
                stream.write(b"\n[gyre: %d bytes left out]\n" % (size - limit // 2 * 2))
                file.seek(size - limit // 2)
                _copy(file, stream, limit // 2)
        os.replace(temporary, target)


def read(folder: Path, name: str, limit: int = 64 << 20) -> bytes:
    """What is kept of `name` (a key of KEPT), packed already or not yet. Empty if there is nothing."""
    for path in (folder / f"{name}.zst", folder / KEPT[name]):
        file = open_plainly(path)
        if file is not None:
            with file:
                if path.suffix != ".zst":
                    return file.read(limit)
                with zstandard.ZstdDecompressor().stream_reader(file) as stream:
                    return stream.read(limit)
    return b""


def _copy(source: IO[bytes], target: IO[bytes], count: int) -> None:
    while count > 0 and (data := source.read(min(COPY_BYTES, count))):
        target.write(data)
        count -= len(data)


def note_pid(folder: Path, owner: str, pid: int) -> None:
    """For a later life of `owner`: which process group this was."""
    (folder / "pid").write_text(f"{owner} {pid} {children.birth_of(pid)}")


def sweep(executions: Path, owner: str, limit: int) -> int:
    """At start: end what an earlier life of `owner` left running; what it recorded is packed. Gives their number."""
    found = 0
    for entry in os.scandir(executions):
        folder = Path(entry.path)
        if (folder / "pid").exists() and children.kill_stale(folder / "pid", owner):
            tidy(folder, keep=False, limit=limit)
            found += 1
    return found
