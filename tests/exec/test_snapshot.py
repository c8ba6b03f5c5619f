"""Snapshots: what goes in comes out, git agrees with every object, what is equal is stored once."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_exec.gitobjects import SnapshotError
from gyre_exec.snapshot import Store

LIMIT = 1 << 30


def fill(folder: Path, files: Mapping[str, bytes]) -> Path:
    for name, data in files.items():
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
    return folder


def seen(folder: Path) -> dict[str, object]:
    """Everything that should survive: contents, links, the x bit, empty directories."""
    out: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            out[name] = ("link", str(path.readlink()))
        elif path.is_dir():
            out[name] = "directory"
        else:
            out[name] = (path.read_bytes(), bool(path.stat().st_mode & 0o100))
    return out


def git(store: Store, *words: str) -> str:
    command = ["git", "--git-dir", str(store.root), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def objects(store: Store) -> int:
    return sum(1 for p in (store.root / "objects").rglob("*") if p.is_file())


def test_a_workspace_comes_back_as_it_was_and_git_reads_it(tmp_path: Path) -> None:
    place = fill(
        tmp_path / "w",
        {
            "a b/ünï\ncode": b"\x00\xff",
            "run.sh": b"#!/bin/sh\n",
            ".gitignore": b"*\n",
            ".gitattributes": b"* text=auto\n",
            "crlf": b"one\r\ntwo\r\n",
            "repo/.git/HEAD": b"ref: refs/heads/main\n",
            "repo/.GIT/x": b"1",
            "%2Egit": b"2",
            "%25": b"3",
            "large": os.urandom(3 << 20),
        },
    )
    (place / "run.sh").chmod(0o755)
    (place / "empty").mkdir()
    (place / "link").symlink_to("/etc/passwd")
    (place / "gone").symlink_to("nowhere")
    os.mkfifo(place / "pipe")
    store = Store(tmp_path)
    start = store.start("t", fill(tmp_path / "s", {"run.sh": b"#!/bin/sh\n", "old": b"x"}), LIMIT)
    commit = store.keep("g-00.0", place, start, LIMIT)
    store.restore(commit, tmp_path / "back")
    (place / "pipe").unlink()
    assert seen(tmp_path / "back") == seen(place)
    assert store.find("g-00.0") == commit and store.find("nobody") is None
    assert "missing" not in git(store, "fsck", "--full", "--strict")
    assert git(store, "show", "-s", "--format=%s %P", "refs/executions/g-00.0").split() == ["g-00.0", start]
    named = git(
        store, "diff", "--name-status", "-z", "--no-renames", "refs/executions/g-00.0^", "refs/executions/g-00.0"
    )
    by_git = dict(zip(named.split("\0")[1::2], named.split("\0")[0::2], strict=False))
    ours = {
        c.path: "A" if c.old is None else "D" if c.new is None else "M" for c in store.changes(*store.trees(commit))
    }
    assert len(by_git) == len(ours) and by_git["old"] == ours["old"] == "D" and ours["run.sh"] == "M"


def test_a_group_shares_what_is_equal(tmp_path: Path) -> None:
    store, files = Store(tmp_path), {f"src/file{n}": b"%d" % n * 50 for n in range(40)}
    fill(tmp_path / "start", files)
    start = store.start("t", tmp_path / "start", LIMIT)
    before = objects(store)
    for member in range(16):
        place = fill(tmp_path / f"w{member}", {**files, "answer": b"%d" % (member % 2)})
        store.keep(f"g-{member:02d}.0", place, start, LIMIT)
    assert objects(store) == before + 2 + 2 + 16, "two answers, two trees, and a commit each"
    again = Store(tmp_path)
    assert again.start("t", tmp_path / "start", LIMIT) == start and objects(again) == before + 20


def test_a_repository_that_somebody_packed_is_still_read(tmp_path: Path) -> None:
    store = Store(tmp_path)
    commit = store.keep("e", fill(tmp_path / "w", {"a/b": b"hello", "c": b""}), "", LIMIT)
    git(store, "gc", "-q", "--prune=now")
    git(store, "pack-refs", "--all")
    assert not Path(store.objects.place(commit)).exists()
    assert store.find("e") == commit
    store.restore(commit, tmp_path / "back")
    assert seen(tmp_path / "back") == seen(tmp_path / "w")


def test_what_can_not_be_kept_or_read_says_so(tmp_path: Path) -> None:
    store = Store(tmp_path)
    place = fill(tmp_path / "w", {"a": b"x" * 2000, "b": b"y" * 2000})
    with pytest.raises(SnapshotError, match=r"larger than the run keeps \(tasks.disk_mib\)"):
        store.keep("e", place, "", 3000)
    assert store.find("e") is None
    commit = store.keep("e", place, "", 4000)
    blob = Path(store.objects.place(store.entries(store.trees(commit)[1])[0].oid))
    blob.chmod(0o600)
    for damage, word in ((blob.read_bytes()[:9], "cut off"), (b"rubbish", "damaged")):
        blob.write_bytes(damage)
        shutil.rmtree(tmp_path / "back", ignore_errors=True)
        with pytest.raises(SnapshotError, match=word):
            store.restore(commit, tmp_path / "back")
    with pytest.raises(SnapshotError, match="can't be kept"):
        store.keep("f", tmp_path / "none", "", LIMIT)
    with pytest.raises(SnapshotError, match="is not in"):
        store.restore("0" * 40, tmp_path / "nothing")


names = st.text(st.characters(blacklist_characters="/\0", blacklist_categories=("Cs",)), min_size=1, max_size=8)
odd = st.sampled_from([".git", ".GIT", "%2Egit", "%25", "%2E", "a", "a-b", "a.b", "a0"])
parts = st.one_of(names, odd).filter(lambda n: n not in (".", "..") and len(n.encode()) < 200)
trees = st.recursive(st.binary(max_size=20), lambda inner: st.dictionaries(parts, inner, max_size=5), max_leaves=12)


def plant(folder: Path, tree: Mapping[str, object]) -> None:
    folder.mkdir()
    for name, inside in tree.items():
        if isinstance(inside, dict):
            plant(folder / name, inside)
        elif isinstance(inside, bytes):
            (folder / name).write_bytes(inside)


@settings(max_examples=25, deadline=None)
@given(tree=st.dictionaries(parts, trees, max_size=6))
def test_any_tree_comes_back_and_git_finds_no_fault(
    tree: dict[str, object], tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("t")
    plant(root / "w", tree)
    store = Store(root)
    commit = store.keep("e", root / "w", "", LIMIT)
    store.restore(commit, root / "back")
    assert seen(root / "back") == seen(root / "w")
    assert stat.S_IMODE(store.root.stat().st_mode) == 0o700
    kept = git(store, "ls-tree", "-r", "-z", "--name-only", commit).split("\0")
    assert len([n for n in kept if n]) == sum(1 for what in seen(root / "w").values() if what != "directory")
