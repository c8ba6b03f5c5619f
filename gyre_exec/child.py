"""Child processes in sessions of their own, cheap to start, bounded in what they print, gone with all their children.

vfork + exec (subprocess without preexec), a pidfd instead of a waiting thread, a pipe per stream read without
blocking. Owns signals and reaping: a group is killed while its leader is still a zombie, so its number can't have
been given to another. What escapes into a session of its own comes back to us (PR_SET_CHILD_SUBREAPER) and is
recognised by its environment; out of a process namespace (a walled workspace) nothing escapes at all. No child of ours
sees a GPU.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

log = logging.getLogger(__name__)
READ_BYTES = 65_536
READS_PER_TURN = 16
TAIL_BYTES = 4_096
SWEEP_ROUNDS = 50
SWEEP_EVERY_S = 0.02
POLL_S = 0.05
NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "NVIDIA_VISIBLE_DEVICES": "void"}
Tree = Mapping[int, list[int]]  # the children of every process
RUNNING: dict[int, Child] = {}  # everything that this process has started and not reaped


class Sink:
    """A stream into a file that stops growing at `limit`; the end is kept too. A full disk costs output, no more."""

    def __init__(self, path: Path | None, limit: int) -> None:
        self._path, self._limit = path, limit
        self._file: IO[bytes] | None = None
        self.seen = 0
        self._tail = b""

    def feed(self, data: bytes) -> None:
        room = self._limit - self.seen
        self.seen += len(data)
        self._tail = (self._tail + data)[-TAIL_BYTES:] if len(data) < TAIL_BYTES else data[-TAIL_BYTES:]
        if room > 0 and self._path is not None:
            self._write(data[:room])

    def _write(self, data: bytes) -> None:
        try:
            if self._file is None and self._path is not None:
                self._file = open(self._path, "wb", buffering=0)  # noqa: SIM115 - closed in `close`
            if self._file is not None:
                self._file.write(data)
        except OSError as error:
            log.warning("%s is not kept any further: %s", self._path, error)
            self._path = None

    def tail(self) -> str:
        return self._tail.decode("utf-8", "replace").strip()

    def close(self) -> None:
        if self._file is None:
            return
        dropped = self.seen - self._limit
        if dropped > 0:
            kept = self._tail[-min(dropped, TAIL_BYTES) :]
            self._write(b"\n[gyre: %d bytes left out]\n" % (dropped - len(kept)) + kept)
        self._file.close()
        self._file = None


class Child:
    """One process group. `exited` carries the exit code once the leader is reaped and the group is killed."""

    def __init__(self, process: subprocess.Popen[bytes], marker: bytes, walled: bool) -> None:
        self.pid = process.pid
        self.walled = walled
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._process = process
        self._marker = marker
        self._streams: list[tuple[int, Sink]] = []
        self._pidfd = -1

    def signal(self, number: int) -> None:
        """To the whole group; nothing if it is gone."""
        if self.pid in RUNNING:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def warn(self, tree: Tree | None = None) -> None:
        """TERM: to the whole group, or to all that runs within the walls (the walls would fall at once)."""
        if not self.walled:
            self.signal(signal.SIGTERM)
            return
        for pid in inmates(self.pid, tree):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGTERM)

    def kill(self, tree: Tree | None = None) -> None:
        """KILL to the group and to what left it; the first process within walls takes all others along."""
        below = descendants(self.pid, tree)
        self.signal(signal.SIGKILL)
        for pid in below:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    def watch(self, streams: list[tuple[int, Sink]]) -> None:
        loop = asyncio.get_running_loop()
        self._streams = streams
        for descriptor, sink in streams:
            os.set_blocking(descriptor, False)
            loop.add_reader(descriptor, self._readable, descriptor, sink)
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except OSError:  # a kernel before 5.3
            loop.call_later(POLL_S, self._poll)
        else:
            loop.add_reader(self._pidfd, self._gone)

    def _readable(self, descriptor: int, sink: Sink) -> None:
        if not _drain(descriptor, sink, READS_PER_TURN):
            asyncio.get_running_loop().remove_reader(descriptor)

    def _poll(self) -> None:
        if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            asyncio.get_running_loop().call_later(POLL_S, self._poll)
        else:
            self._gone()

    def _gone(self) -> None:
        """The leader is a zombie: kill what is left of its group, then reap it."""
        loop = asyncio.get_running_loop()
        if self._pidfd >= 0:
            loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
        self.signal(signal.SIGKILL)
        GUARD.forget(self.pid)
        code = self._process.wait()
        del RUNNING[self.pid]
        for descriptor, sink in self._streams:
            loop.remove_reader(descriptor)
            _drain(descriptor, sink, READS_PER_TURN)
            os.close(descriptor)
            sink.close()
        self._sweep(code, SWEEP_ROUNDS)

    def _sweep(self, code: int, rounds: int) -> None:
        """`exited` waits until no escaped child is left (or will not die in a second: then that is logged)."""
        if rounds and sweep_orphans(self._marker):
            asyncio.get_running_loop().call_later(SWEEP_EVERY_S, self._sweep, code, rounds - 1)
            return
        if not rounds:
            log.error("a process of %s does not die", self._marker.decode(errors="replace"))
        if not self.exited.done():
            self.exited.set_result(code)


def _drain(descriptor: int, sink: Sink, reads: int) -> bool:
    """Read what is there. False at the end of the stream."""
    for _ in range(reads):
        try:
            data = os.read(descriptor, READ_BYTES)
        except BlockingIOError:
            return True
        if not data:
            return False
        sink.feed(data)
    return True


def spawn(
    argv: Sequence[str],
    *,
    cwd: Path,
    env: Mapping[str, str],
    stdout: Sink,
    stderr: Sink,
    marker: str,
    pass_fds: Sequence[int] = (),
    walled: bool = False,
) -> Child:
    """Start it; raises OSError if it can't be. `marker` is a text found in the environment of all its children."""
    out_read, out_write = os.pipe()
    err_read, err_write = os.pipe()
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=out_write,
            stderr=err_write,
            cwd=cwd,
            env={**NO_GPU, **env},
            start_new_session=True,
            pass_fds=pass_fds,
        )
    except (OSError, ValueError) as error:
        os.close(out_read)
        os.close(err_read)
        raise error if isinstance(error, OSError) else OSError(str(error)) from None
    finally:
        os.close(out_write)
        os.close(err_write)
    child = Child(process, marker.encode(), walled)
    RUNNING[child.pid] = child
    GUARD.watch(child.pid)
    child.watch([(out_read, stdout), (err_read, stderr)])
    return child


# ---- what outlives its parent -------------------------------------------------------------------------------------


def become_subreaper() -> None:
    """Linux: grandchildren whose parent ended become ours instead of init's."""
    pr_set_child_subreaper = 36
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_child_subreaper, 1, 0, 0, 0)


def sweep_orphans(marker: bytes) -> bool:
    """Reap the dead ones, kill those that carry `marker`. True if some were killed, so a further look is due."""
    killed = False
    for pid in reap():
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                environment = file.read()
            if marker in environment:
                killed = True
                os.kill(pid, signal.SIGKILL)
        except OSError:
            continue
    return killed


def reap() -> list[int]:
    """What came to us when its parent ended: the dead are reaped, the living named."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children", "rb") as file:
            ours = [int(p) for p in file.read().split()]
    except OSError:
        return []
    living = []
    for pid in ours:
        if pid not in RUNNING and pid != GUARD.pid:
            with contextlib.suppress(OSError):
                if os.waitpid(pid, os.WNOHANG)[0] == 0:
                    living.append(pid)
    return living


def process_tree() -> dict[int, list[int]]:
    """The children of every process. By parent as the kernel tells it: a list per thread would miss some."""
    tree: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208 - once for a thousand names
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    parent = int(file.read().rpartition(b")")[2].split()[1])
            except (OSError, IndexError):
                continue
            tree.setdefault(parent, []).append(int(name))
    return tree


def descendants(pid: int, tree: Tree | None = None) -> list[int]:
    """Every process below `pid`, parents first."""
    tree = process_tree() if tree is None else tree
    found, at = [pid], 0
    while at < len(found):
        found += tree.get(found[at], ())
        at += 1
    return found[1:]


def inmates(pid: int, tree: Tree | None = None) -> list[int]:
    """Those below `pid` in a process namespace deeper than ours, but for the first of that: it keeps the others."""
    depth = len(_numbers(os.getpid()))
    return [p for p in descendants(pid, tree) if len(numbers := _numbers(p)) > depth and numbers[-1] != 1]


def _numbers(pid: int) -> list[int]:
    """The process's numbers in its namespaces, outermost first."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            return [int(n) for n in file.read().partition(b"\nNSpid:")[2].partition(b"\n")[0].split()]
    except OSError:
        return []


class Guard:
    """The small process that kills our groups if we are killed ourselves."""

    def __init__(self) -> None:
        self.pid = 0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        script = str(Path(__file__).with_name("guard.py"))
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", script], stdin=subprocess.PIPE, start_new_session=True, bufsize=0
        )
        self.pid = self._process.pid

    def watch(self, group: int) -> None:
        self._say(b"+%d\n" % group)

    def forget(self, group: int) -> None:
        self._say(b"-%d\n" % group)

    def _say(self, line: bytes) -> None:
        if self._process is None or self._process.stdin is None:
            return
        try:
            self._process.stdin.write(line)
        except OSError:  # somebody killed the guard: a new one learns all groups
            log.warning("the guard process is gone; starting another")
            self._process.wait()
            self.start()
            for pid in RUNNING:
                with contextlib.suppress(OSError):
                    self._process.stdin.write(b"+%d\n" % pid)

    def stop(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            self._process.wait()
        self._process, self.pid = None, 0


GUARD = Guard()


async def kill_all(grace_s: float) -> None:
    """Every child: TERM, a grace, KILL; returns when all are reaped. Whatever came to us from them goes too."""
    children = list(RUNNING.values())
    if children:
        tree = process_tree()
        for child in children:
            child.warn(tree)
        await asyncio.wait([c.exited for c in children], timeout=grace_s)
        tree = process_tree()
        for child in children:
            if not child.exited.done():
                child.kill(tree)
        await asyncio.wait([c.exited for c in children], timeout=5.0)
    for pid in reap():
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


# ---- what an earlier life left ------------------------------------------------------------------------------------


def birth_of(pid: int) -> str:
    """A mark that tells this process from a later one with the same number: its start time since boot."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rsplit(b")", 1)[1].split()[19].decode()
    except (OSError, IndexError):
        return ""


def kill_stale(pid_file: Path, owner: str) -> bool:
    """Kill the group that `owner` noted in an earlier life, if it is still that one. True if the file was `owner`'s."""
    try:
        name, pid, birth = pid_file.read_text().split()
    except (OSError, ValueError):
        return False
    if name != owner:
        return False
    if birth and birth_of(int(pid)) == birth:
        with contextlib.suppress(OSError):
            os.killpg(int(pid), signal.SIGKILL)
    pid_file.unlink(missing_ok=True)
    return True
