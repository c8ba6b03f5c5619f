"""Trees that somebody changes while they are removed, kept, copied or measured: no error, no link followed, no hang."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gyre_exec import keeping
from gyre_exec.gitobjects import FileChanged, Objects
from gyre_exec.quota import usage
from gyre_exec.restless import open_plainly, remove_tree
from gyre_exec.snapshot import Store
from gyre_exec.states import copy_state

LIMIT = 1 << 30
KINDS = ("file", "folder", "link", "pipe", "gone", "moved", "longer")


def fill(root: Path, rng: random.Random) -> None:
    for folder in ("", "a", "a/b", "c", "c/d/e"):
        (root / folder).mkdir(parents=True, exist_ok=True)
        for n in range(6):
            (root / folder / f"f{n}").write_bytes(rng.randbytes(rng.choice((0, 10, 5000))))


def disturb(root: Path, rng: random.Random, outside: Path) -> None:
    """One change of one name: another kind, another place, or none."""
    place = root / rng.choice(("", "a", "a/b", "c", "c/d", "c/d/e")) / f"f{rng.randrange(6)}"
    kind = rng.choice(KINDS)
    if kind == "longer":
        with open(os.open(place, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK), "ab") as file:
            file.write(b"x" * rng.randrange(3000))
        return
    if kind == "moved":
        place.rename(root / rng.choice(("a", "c", "c/d")) / f"f{rng.randrange(6)}")
        return
    if place.is_dir() and not place.is_symlink():
        for below in place.iterdir():
            below.unlink()
        place.rmdir()
    else:
        place.unlink(missing_ok=True)
    match kind:
        case "file":
            place.write_bytes(b"y" * 100)
        case "folder":
            place.mkdir()
            (place / "below").write_bytes(b"z")
        case "link":
            place.symlink_to(outside)
        case "pipe":
            os.mkfifo(place)


@contextlib.contextmanager
def restless(root: Path, seed: int, outside: Path) -> Iterator[None]:
    """Somebody who changes everything below `root` as fast as it goes."""
    rng, ends = random.Random(seed), threading.Event()

    def change() -> None:
        while not ends.is_set():
            with contextlib.suppress(OSError):
                disturb(root, rng, outside)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


def removed(root: Path, work: Path) -> None:
    remove_tree(root)
    assert not os.path.lexists(root)


def kept(root: Path, work: Path) -> None:
    store = Store(work)
    for n in range(5):
        commit = store.keep(f"x-{n}", root, "", LIMIT)
        store.restore(commit, work / f"back{n}")
        assert not list((work / f"back{n}").rglob("precious"))


def copied(root: Path, work: Path) -> None:
    for n in range(5):
        copy_state(root, work / f"copy{n}")
        assert not list((work / f"copy{n}").rglob("precious"))


def measured(root: Path, work: Path) -> None:
    for _ in range(20):
        assert usage(root, LIMIT) >= 0


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("use", [removed, kept, copied, measured])
def test_what_changes_meanwhile_is_no_trouble(use: Callable[[Path, Path], None], seed: int, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    root = tmp_path / "root"
    fill(root, random.Random(seed))
    with restless(root, seed, outside):
        use(root, tmp_path)
    assert (outside / "precious").read_text() == "x"


def test_what_is_put_into_a_folder_while_it_is_removed_goes_too(tmp_path: Path) -> None:
    """A process whose working directory is in there: it is reached by no path of ours."""
    root = tmp_path / "root"
    (root / "deep/er").mkdir(parents=True)
    script = "import time\nn = 0\nwhile True: open(f'f{n}', 'w').close(); n = (n + 1) % 50; time.sleep(0.002)"
    process = subprocess.Popen([sys.executable, "-c", script], cwd=root / "deep/er", stderr=subprocess.DEVNULL)
    try:
        while not list((root / "deep/er").iterdir()):
            time.sleep(0.01)
        remove_tree(root)
        assert not root.exists()
    finally:
        process.kill()
        process.wait()


def test_tidying_never_raises_and_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "executions" / "x"
    fill(folder / "workspace", random.Random(1))
    fill(folder / "harness", random.Random(2))
    (folder / "harness" / "transcript.json").write_text("{}")
    with restless(folder / "harness", 1, tmp_path), restless(folder / "workspace", 2, tmp_path):
        keeping.tidy(folder, keep=False, limit=1 << 20)
    assert [p.name for p in folder.iterdir()] == ["transcript.json.zst"]


@pytest.fixture
def nested(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Directories below each other, deeper than any path may be long."""
    root = tmp_path / "root"
    root.mkdir()
    at = os.open(root, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir(request.param, dir_fd=at)
        below = os.open(request.param, os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=at))
    os.close(at)
    yield root
    remove_tree(root)  # pytest can't


@pytest.mark.parametrize("nested", ["d", "d" * 255], indirect=True)
def test_no_depth_is_too_much(nested: Path, tmp_path: Path) -> None:
    """What an agent's loop of mkdir and cd leaves is kept and scored without its depths."""
    (nested / "answer").write_text("42")
    store = Store(tmp_path)
    store.restore(store.keep("x", nested, "", LIMIT), tmp_path / "back")
    copy_state(nested, tmp_path / "copy")
    for place in (tmp_path / "copy", tmp_path / "back"):
        assert (place / "answer").read_text() == "42"
        assert sum(1 for _ in place.rglob("d*")) in (200, 7)
    assert usage(nested, LIMIT) > 0
    remove_tree(nested)
    assert not nested.exists()


def test_removal_copes_with_locked_directories_and_follows_no_link(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o750)
    (outside / "precious").write_text("x")
    place = tmp_path / "place"
    (place / "locked/deep").mkdir(parents=True)
    (place / "locked/deep/file").write_text("x")
    (place / "link").symlink_to(outside)
    (place / "locked/link").symlink_to(outside)
    (place / "locked/deep").chmod(0o000)
    (place / "locked").chmod(0o000)
    remove_tree(place)
    remove_tree(place)
    (tmp_path / "top").symlink_to(outside)
    remove_tree(tmp_path / "top")
    assert not place.exists() and not os.path.lexists(tmp_path / "top")
    assert (outside / "precious").exists() and outside.stat().st_mode & 0o777 == 0o750


def test_a_file_that_changes_between_its_hash_and_its_copy_is_never_kept_under_the_wrong_name(tmp_path: Path) -> None:
    """A large file is read twice: what is stored must be what was hashed."""

    class Changing:
        """As an open file that is written to between the two readings."""

        def __init__(self) -> None:
            self.data, self.at = b"a" * (3 << 20), 0

        def read(self, count: int) -> bytes:
            found = self.data[self.at : self.at + count]
            self.at += len(found)
            return found

        def seek(self, at: int) -> None:
            self.data, self.at = b"b" * len(self.data), at

    (tmp_path / "objects").mkdir()
    with pytest.raises(FileChanged):
        Objects(tmp_path).write_file(Changing(), 3 << 20)  # type: ignore[arg-type]
    assert not [p for p in (tmp_path / "objects").rglob("*") if p.is_file()]


def opens(path: Path) -> bool:
    file = open_plainly(path)
    if file is not None:
        file.close()
    return file is not None


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "pipe")
    assert [name for name in ("file", "link", "pipe", ".", "none") if opens(tmp_path / name)] == ["file"]
