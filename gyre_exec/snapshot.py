"""Workspaces as git keeps them: workspaces.git of the run, one commit per execution, its parent the task's start.

    git --git-dir RUN/workspaces.git diff refs/executions/g00012-03.0^ refs/executions/g00012-03.0

What is equal is stored once, whoever left it: a group shares its start, and every file that two members left alike. No
git process runs per execution, and no rule of the workspace's own (.gitignore, filters, nested repositories) changes
what is kept. A name that git can't hold, `.git`, is kept as `%2Egit` (and `%2E`, `%25` at the beginning of a name as
`%252E`, `%2525`). Files with their x bit, links and directories are kept; sockets, pipes and devices are not, nor what
is nested absurdly deep.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gyre_exec.gitobjects import FileChanged, Objects, SnapshotError
from gyre_exec.restless import LEFT_OUT, listed, open_plainly, too_deep

FOLDER = "workspaces.git"
CONFIG = "[core]\n\trepositoryformatversion = 0\n\tbare = true\n[gc]\n\tauto = 0\n"
WHO = b"gyre <gyre@localhost> 0 +0000"  # a fixed time: equal starts are one commit
TRIES = 5  # at a file that somebody writes to
TREE, LINK, FILE, PROGRAM = b"40000", b"120000", b"100644", b"100755"


@dataclass(frozen=True)
class Entry:
    """A name in a tree."""

    mode: bytes
    name: bytes
    oid: str


@dataclass(frozen=True)
class Change:
    """A file or link that differs; None on the side where it is not there."""

    path: str
    old: Entry | None
    new: Entry | None


@dataclass
class Room:
    """What may still be kept of one workspace."""

    left_bytes: int

    def take(self, count: int) -> None:
        self.left_bytes -= count
        if self.left_bytes < 0:
            raise SnapshotError("the workspace is larger than the run keeps (tasks.disk_mib)")


class Store:
    """The repository of a run. Making a Store touches nothing; keeping makes what is missing."""

    def __init__(self, run: Path) -> None:
        self.root = run / FOLDER
        self.objects = Objects(self.root)
        self._starts: dict[object, str] = {}

    # ---- keep -----------------------------------------------------------------------------------------------------

    def keep(self, execution: str, folder: Path, start: str, limit_bytes: int) -> str:
        """Commit what is in `folder` with `start` (a commit, or empty) as its parent. Raises SnapshotError."""
        commit = self._commit(folder, start, execution, limit_bytes)
        try:
            _write(self._ref(execution), commit.encode() + b"\n")
        except OSError as error:
            raise SnapshotError(f"{self._ref(execution)}: {error.strerror or error}") from None
        return commit

    def start(self, key: object, folder: Path, limit_bytes: int) -> str:
        """The commit of a task's workspace as it is given, made once per `key`. Raises SnapshotError."""
        if key not in self._starts:
            self._starts[key] = self._commit(folder, "", "start", limit_bytes)
        return self._starts[key]

    def _commit(self, folder: Path, parent: str, message: str, limit_bytes: int) -> str:
        try:
            self._make()
            tree = self._tree(folder, None, Room(limit_bytes), "")
            lines = [b"tree " + tree.encode()] + ([b"parent " + parent.encode()] if parent else [])
            lines += [b"author " + WHO, b"committer " + WHO, b"", message.encode() + b"\n"]
            return self.objects.write(b"commit", b"\n".join(lines))
        except OSError as error:
            raise SnapshotError(f"{folder} can't be kept: {error.strerror or error}") from None

    def _make(self) -> None:
        if not (self.root / "HEAD").exists():
            self.root.mkdir(mode=0o700, exist_ok=True)
            for name in ("objects", "refs/executions"):
                (self.root / name).mkdir(mode=0o700, parents=True, exist_ok=True)
            _write(self.root / "config", CONFIG.encode())
            _write(self.root / "HEAD", b"ref: refs/heads/none\n")

    def _tree(self, name: str | Path, above: int | None, room: Room, inside: str) -> str:
        """`above`: descriptor of the directory in which `name` is. `inside`: its path in the workspace."""
        with listed(name, above) as (here, found):
            entries = [entry for item in found if (entry := self._entry(item, here, room, inside)) is not None]
        entries.sort(key=lambda e: e.name + b"/" if e.mode == TREE else e.name)
        body = b"".join(b"%s %s\0%s" % (e.mode, e.name, bytes.fromhex(e.oid)) for e in entries)
        return self.objects.write(b"tree", body)

    def _entry(self, item: os.DirEntry[str], here: int, room: Room, inside: str) -> Entry | None:
        """None for what is not kept. What we may not read (the agent closed it) was not left for us, and what is gone
        when we come to it is as gone as if it had been so before.
        """
        try:
            found = item.stat(follow_symlinks=False)
            name = _quoted(os.fsencode(item.name))
            if stat.S_ISDIR(found.st_mode):
                below = f"{inside}{item.name}/"
                return None if too_deep(below) else Entry(TREE, name, self._tree(item.name, here, room, below))
            if stat.S_ISLNK(found.st_mode):
                target = os.fsencode(os.readlink(item.name, dir_fd=here))
                return Entry(LINK, name, self.objects.write(b"blob", target))
            if stat.S_ISREG(found.st_mode):
                return self._file(item.name, here, name, room)
        except OSError as error:
            if error.errno not in LEFT_OUT:
                raise
        return None

    def _file(self, item: str, here: int, name: bytes, room: Room) -> Entry | None:
        """As it is at one moment, or half way through a change that does not end."""
        file = open_plainly(item, here)
        if file is None:
            return None
        with file:
            for tries in range(TRIES):
                found = os.fstat(file.fileno())
                room.take(found.st_size)
                mode = PROGRAM if found.st_mode & 0o100 else FILE
                try:
                    return Entry(mode, name, self.objects.write_file(file, found.st_size))
                except FileChanged:
                    if tries == TRIES - 1:
                        raise
                    room.take(-found.st_size)
                    file.seek(0)
        return None

    # ---- read -----------------------------------------------------------------------------------------------------

    def _ref(self, execution: str) -> Path:
        return self.root / "refs" / "executions" / execution

    def find(self, execution: str) -> str | None:
        """The commit of an execution, or None."""
        try:
            return self._ref(execution).read_text().strip()
        except OSError:
            return self._packed_ref(f"refs/executions/{execution}")

    def _packed_ref(self, ref: str) -> str | None:
        try:
            lines = (self.root / "packed-refs").read_text().splitlines()
        except OSError:
            return None
        return next((line.split()[0] for line in lines if line.endswith(f" {ref}")), None)

    def trees(self, commit: str) -> tuple[str, str]:
        """The trees of a commit's start (empty if it has none) and of itself. Raises SnapshotError."""
        lines = self.objects.read(commit).decode().partition("\n\n")[0].splitlines()
        words = dict(line.split(" ", 1) for line in lines)
        return (self.trees(words["parent"])[1] if "parent" in words else ""), words["tree"]

    def restore(self, commit: str, target: Path) -> None:
        """The workspace as it was, in a new directory. Raises SnapshotError."""
        try:
            target.mkdir(parents=True, mode=0o700)
            self._restore(self.trees(commit)[1], target)
        except OSError as error:
            raise SnapshotError(f"{target}: {error.strerror or error}") from None

    def _restore(self, tree: str, target: Path) -> None:
        for entry in self.entries(tree):
            place = target / os.fsdecode(_unquoted(entry.name))
            if entry.mode == TREE:
                place.mkdir(mode=0o700)
                self._restore(entry.oid, place)
            elif entry.mode == LINK:
                place.symlink_to(os.fsdecode(self.objects.read(entry.oid)))
            else:
                with open(place, "xb") as file:
                    for chunk in self.objects.chunks(entry.oid):
                        file.write(chunk)
                place.chmod(0o755 if entry.mode == PROGRAM else 0o644)

    def entries(self, tree: str) -> list[Entry]:
        body, at, out = self.objects.read(tree), 0, []
        while at < len(body):
            end = body.index(b"\0", at)
            mode, _, name = body[at:end].partition(b" ")
            at = end + 21
            out.append(Entry(mode, name, body[end + 1 : at].hex()))
        return out

    def changes(self, old: str, new: str, above: str = "") -> Iterator[Change]:
        """Files and links in which two trees differ, by path; equal subtrees are not looked into."""
        before = {e.name: e for e in self.entries(old)} if old else {}
        after = {e.name: e for e in self.entries(new)} if new else {}
        for name in sorted({*before, *after}):
            was, now = before.get(name), after.get(name)
            if was == now:
                continue
            path = above + os.fsdecode(_unquoted(name))
            old_tree, new_tree = (e.oid if e is not None and e.mode == TREE else "" for e in (was, now))
            old_file, new_file = (e if e is not None and e.mode != TREE else None for e in (was, now))
            if old_file or new_file:
                yield Change(path, old_file, new_file)
            if old_tree or new_tree:
                yield from self.changes(old_tree, new_tree, f"{path}/")


def _quoted(name: bytes) -> bytes:
    if name.lower() == b".git":
        return b"%2E" + name[1:]
    return b"%25" + name[1:] if name.startswith((b"%2E", b"%25")) else name


def _unquoted(name: bytes) -> bytes:
    if name.startswith(b"%2E"):
        return b"." + name[3:]
    return b"%" + name[3:] if name.startswith(b"%25") else name


def _write(path: Path, data: bytes) -> None:
    """By rename."""
    descriptor, temporary = tempfile.mkstemp(prefix=".tmp", dir=path.parent)
    with open(descriptor, "wb") as file:
        file.write(data)
    os.replace(temporary, path)
