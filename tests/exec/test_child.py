"""Processes: what they print is bounded, what they start is gone."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre_exec import child as children
from gyre_exec.evaluator import BadScore, read_score


@pytest.fixture
async def guard() -> AsyncIterator[children.Guard]:
    children.GUARD.start()
    yield children.GUARD
    children.GUARD.stop()


def start(code: str, folder: Path, limit: int = 1000) -> tuple[children.Child, children.Sink]:
    out, err = children.Sink(folder / "out", limit), children.Sink(None, 0)
    env = {"HOME": str(folder)}
    argv = [sys.executable, "-I", "-S", "-c", code]
    return children.spawn(argv, cwd=folder, env=env, stdout=out, stderr=err, marker=str(folder)), out


async def test_exit_codes_and_output_arrive(tmp_path: Path, guard: children.Guard) -> None:
    child, out = start("import sys; print('hello'); sys.exit(7)", tmp_path)
    assert await child.exited == 7 and out.tail() == "hello" and (tmp_path / "out").read_text() == "hello\n"
    assert children.RUNNING == {}


@given(parts=st.lists(st.binary(max_size=3000), max_size=8), limit=st.integers(0, 4000))
def test_a_sink_keeps_the_beginning_and_the_end(
    parts: list[bytes], limit: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("s") / "out"
    sink, everything = children.Sink(path, limit), b"".join(parts)
    for part in parts:
        sink.feed(part)
    sink.close()
    kept = path.read_bytes() if path.exists() else b""
    assert kept[:limit] == everything[:limit] or not limit
    if len(everything) <= limit:
        assert kept == everything
    elif limit:
        assert kept.endswith(everything[-min(len(everything) - limit, 4096) :]) and len(kept) <= limit + 4096 + 60


async def test_a_program_that_is_not_there_is_an_os_error(tmp_path: Path) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        with pytest.raises(OSError):
            children.spawn(
                [str(tmp_path / "none")],
                cwd=tmp_path,
                env={},
                stdout=children.Sink(None, 0),
                stderr=children.Sink(None, 0),
                marker="m",
            )
    assert len(list(Path("/proc/self/fd").iterdir())) == before


async def test_a_kernel_without_pidfd_is_polled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise OSError

    monkeypatch.setattr(os, "pidfd_open", refuse)
    child, _ = start("import time; time.sleep(0.1)", tmp_path)
    assert await asyncio.wait_for(child.exited, 10) == 0


async def test_a_killed_guard_is_replaced_and_knows_all_groups(tmp_path: Path, guard: children.Guard) -> None:
    child, _ = start("import time; time.sleep(60)", tmp_path)
    os.kill(guard.pid, 9)
    await asyncio.sleep(0.1)
    other, _ = start("pass", tmp_path)
    await other.exited
    process = guard._process
    assert process is not None and process.stdin is not None
    guard._process = None  # as if we died
    process.stdin.close()
    process.wait()
    guard.pid = 0
    assert await asyncio.wait_for(child.exited, 10) == -9


async def test_a_pid_file_of_another_process_kills_nobody(tmp_path: Path) -> None:
    child, _ = start("import time; time.sleep(60)", tmp_path)
    for text, ours in (
        (f"other {child.pid} {children.birth_of(child.pid)}", False),
        (f"me {child.pid} 12345", True),
        ("", False),
    ):
        (tmp_path / "pid").write_text(text)
        assert children.kill_stale(tmp_path / "pid", "me") is ours
        await asyncio.sleep(0.02)
        assert not child.exited.done()
    (tmp_path / "pid").write_text(f"me {child.pid} {children.birth_of(child.pid)}")
    assert children.kill_stale(tmp_path / "pid", "me")
    assert await child.exited == -9


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "3", "{}", '{"score": null}', '{"score": 1, "parts": []}', '{"score": 1, "parts": {"a": "x"}}'],
)
def test_a_score_file_must_keep_the_contract(tmp_path: Path, text: str) -> None:
    (tmp_path / "s").write_text(text)
    with pytest.raises(BadScore):
        read_score(tmp_path / "s")


def test_scores_may_be_any_finite_number(tmp_path: Path) -> None:
    for text, score, parts in (
        ('{"score": -3, "parts": {"a": true, "b": 0.5}}', -3.0, {"a": 1.0, "b": 0.5}),
        ('{"score": 0}', 0.0, {}),
        ('{"no_artifact": true, "score": 5}', None, {}),
    ):
        (tmp_path / "s").write_text(text)
        reading = read_score(tmp_path / "s")
        assert (reading.score, reading.parts) == (score, parts)
