"""The run directory (DESIGN 11): where everything of one run lives, and how a second start finds it again.

Mode 0700. Owns names of files; knows nothing of their content but the life counters and endpoint files.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gyre_base.allocation import this_host

FOLDERS = ("keys", "endpoints", "journal", "calls", "executions", "checkpoints", "log", "metrics", "lives", "weights")


class RunDirError(Exception):
    """The directory can't serve: says what to do."""


class RunLocked(RunDirError):
    """Another process holds this role of the run."""


@dataclass(frozen=True)
class EndpointFile:
    """endpoints/<name>.json: where a daemon listens in its present life."""

    name: str
    kind: str
    address: str
    life: int
    pid: int
    extra: dict[str, Any]


class RunDir:
    """Paths and small atomic files of one run."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root).absolute()

    @classmethod
    def create(cls, root: str | os.PathLike[str]) -> RunDir:
        """Make the tree. Raises RunDirError if it can't be written."""
        run = cls(root)
        try:
            run.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.chmod(run.root, 0o700)
            for folder in FOLDERS:
                (run.root / folder).mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise RunDirError(
                f"cannot write the run directory {run.root}: {error.strerror}; choose another with --run"
            ) from None
        return run

    @classmethod
    def create_new(cls, root: str | os.PathLike[str]) -> RunDir:
        """`create` where a person names the place: never in a directory that holds something else, whose mode and
        content would be taken over. Raises RunDirError.
        """
        place = Path(root)
        with contextlib.suppress(OSError):
            if not (place / "run.json").exists() and any(e.name not in FOLDERS for e in place.iterdir()):
                raise RunDirError(f"{place} holds other files and is not a run directory; choose another with --run")
        return cls.create(root)

    @classmethod
    def open(cls, root: str | os.PathLike[str]) -> RunDir:
        """An existing run. Raises RunDirError if there is none."""
        run = cls(root)
        there = False
        with contextlib.suppress(OSError):  # such as a name that is too long
            there = (run.root / "run.json").is_file()
        if not there:
            raise RunDirError(
                f"{run.root} is not a run directory (no run.json); start one with `gyre up` or name it with --run"
            )
        return run

    def path(self, *parts: str) -> Path:
        return self.root.joinpath(*parts)

    def write_atomic(self, relative: str, text: str, mode: int = 0o600) -> None:
        """Whole file or none of it, also for a reader on another node."""
        target = self.root / relative
        temporary = target.with_name(f".{target.name}.{os.getpid()}")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)

    def next_life(self, daemon: str) -> int:
        """Count this start of `daemon`; numbers only grow, over requeues too."""
        path = self.root / "lives" / daemon
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            life = int(file.read() or 0) + 1
            file.seek(0)
            file.write(str(life))
            file.flush()
            os.fsync(file.fileno())
        return life

    @contextmanager
    def lock(self, daemon: str) -> Iterator[None]:
        """One process per daemon name. Raises RunLocked naming the holder; the kernel frees the lock when it dies."""
        path = self.root / "lives" / f"{daemon}.lock"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(descriptor, 300, 0).decode() or "unknown"
                raise RunLocked(
                    f"{daemon} already runs for {self.root} (pid@host {holder}); stop it with `gyre stop`"
                ) from None
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}@{this_host()}".encode(), 0)
            yield
        finally:
            os.close(descriptor)

    def publish(self, endpoint: EndpointFile) -> None:
        body = {
            "name": endpoint.name,
            "kind": endpoint.kind,
            "address": endpoint.address,
            "life": endpoint.life,
            "pid": endpoint.pid,
            "extra": endpoint.extra,
        }
        self.write_atomic(f"endpoints/{endpoint.name}.json", json.dumps(body))

    def endpoint(self, name: str) -> EndpointFile | None:
        """The newest word of `name`, or None before its first start."""
        try:
            body = json.loads((self.root / "endpoints" / f"{name}.json").read_text())
        except FileNotFoundError:
            return None
        return EndpointFile(**body)

    def retract(self, name: str) -> None:
        (self.root / "endpoints" / f"{name}.json").unlink(missing_ok=True)
