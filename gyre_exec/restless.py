"""Files of an agent, which may vanish, grow or change their kind while they are read or removed.

A process that the agent left behind, or the harness's own in the background, does so at any moment, also between a
look at a name and its use. Nothing is reached through a link, nothing but a regular file is opened, and no depth or
mode is too much for `remove_tree`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO

GONE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ESTALE, errno.EINVAL}  # or something else by now
CLOSED = {errno.EACCES, errno.EPERM, errno.ENAMETOOLONG}  # by the agent: it was not left for us
LEFT_OUT = frozenset(GONE | CLOSED)  # of what is read
DEPTH, PATH_BYTES = 200, 2_000  # of directories that are kept and scored; an agent's runaway loop makes thousands
CHANGED = frozenset(
    {errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EBUSY, errno.ESTALE}
)
TRIES = 100
PAUSE_S = 0.01
_PLACE = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LIST = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def too_deep(inside: str) -> bool:
    """Whether a directory at this path of a workspace (with a slash at its end) is left out of what is kept."""
    return inside.count("/") > DEPTH or len(os.fsencode(inside)) > PATH_BYTES


@contextlib.contextmanager
def listed(name: str | Path, folder: int | None = None) -> Iterator[tuple[int, list[os.DirEntry[str]]]]:
    """A directory (of the open directory `folder`) as a descriptor, and what is in it. Raises OSError if it is none."""
    here = os.open(name, _LIST | os.O_NOFOLLOW, dir_fd=folder)
    try:
        with os.scandir(here) as found:
            entries = list(found)
        yield here, entries
    finally:
        os.close(here)


def open_plainly(path: str | Path, folder: int | None = None) -> IO[bytes] | None:
    """A regular file, through no link; None if there is none that we may read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError:
        return None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        return None
    return os.fdopen(descriptor, "rb")


def remove_tree(path: Path) -> None:
    """Gone, whatever is in it. A link is removed, not followed. Raises OSError if it can't be done, also if somebody
    fills it as fast as it is emptied.
    """
    for tries in range(TRIES):
        try:
            _remove(path)
            return
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno not in CHANGED or tries == TRIES - 1:
                raise
        time.sleep(PAUSE_S)


def _remove(path: Path) -> None:
    if path.is_symlink() or not path.is_dir():
        path.unlink()
        return
    top = _opened(str(path), None)
    try:
        _empty(top)
    finally:
        os.close(top)
    path.rmdir()


def _empty(top: int) -> None:
    """What is below a directory is moved up to the top before it is emptied itself: no path gets long, whatever the
    depth, and two descriptors are enough.
    """
    mark, moved = f".{uuid.uuid4().hex}", 0
    while folders := _without_files(top):
        for name in folders:
            with contextlib.suppress(FileNotFoundError):
                folder = _opened(name, top)
                try:
                    for below in _without_files(folder):
                        moved += 1
                        _lift(below, folder, f"{mark}{moved}", top)
                finally:
                    os.close(folder)
                os.rmdir(name, dir_fd=top)


def _without_files(folder: int) -> list[str]:
    """Removes all that are not directories, and names those."""
    with os.scandir(folder) as found:
        entries = [(e.name, e.is_dir(follow_symlinks=False)) for e in found]
    for name, is_folder in entries:
        if not is_folder:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)
    return [name for name, is_folder in entries if is_folder]


def _lift(name: str, folder: int, new: str, top: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.close(_opened(name, folder))  # a directory that is moved must be open to us
        os.rename(name, new, src_dir_fd=folder, dst_dir_fd=top)


def _opened(name: str, folder: int | None) -> int:
    """A descriptor of a directory that is ours to change from now on."""
    place = os.open(name, _PLACE, dir_fd=folder)
    try:
        door = f"/proc/self/fd/{place}"  # the directory itself, whoever has its name by now
        with contextlib.suppress(PermissionError):  # another user's: it may be open to us all the same
            os.chmod(door, stat.S_IRWXU)
        return os.open(door, _LIST)
    finally:
        os.close(place)
