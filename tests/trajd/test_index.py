"""The index finds every call of an execution, in damaged and growing logs too."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gyre_base.runfile import Call, Reward, framed
from gyre_base.runframes import Frames
from tests.trajd.calls import Log
from trajtools.trajd.index import CallIndex, damage


def ids(index: CallIndex, execution: str, extent: dict[str, int] | None = None) -> list[str]:
    return [call.call for call in index.load(execution, extent).calls]


def test_calls_of_interleaved_executions_are_found_with_their_tokens(tmp_path: Path):
    log = Log(tmp_path)
    start = np.arange(10, dtype=np.int32)
    a = log.call("a", 0, start)
    b = log.call("b", 0, start)
    log.call("a", 1, np.append(a, 7).astype(np.int32), base="c0", keep=len(a))
    log.call("b", 1, np.append(b, 9).astype(np.int32), base="c0", keep=len(b))
    index = CallIndex(tmp_path)
    index.scan()
    assert ids(index, "a") == ids(index, "b") == ["c0", "c1"]
    assert index.load("a").calls[1].prompt_ids.tolist() == [*a.tolist(), 7]
    assert (index.records, index.executions, index.unplaced) == (5, 2, 1)
    assert ids(index, "nobody") == []


def test_a_torn_tail_is_read_once_it_is_whole(tmp_path: Path):
    log = Log(tmp_path)
    log.execution("a", turns=1)
    frame = framed(Call(exec="a", call="c9"))
    index = CallIndex(tmp_path)
    log.add(frame[:40])
    assert index.scan() == 2 and index.scan() == 0
    log.add(frame[40:])
    assert index.scan() == 1
    assert ids(index, "a") == ["c0", "c9"]


def test_a_file_that_is_just_begun_is_read_once_it_is_written(tmp_path: Path):
    log = Log(tmp_path)
    log.execution("a", turns=2)
    data, index = log.path.read_bytes(), CallIndex(tmp_path)
    for size in (0, 4, 11, 20, len(data)):
        log.path.write_bytes(data[:size])
        index.scan()
    assert ids(index, "a") == ["c0", "c1"] and index.extent == {log.path.name: len(data)}


def test_a_new_life_of_proxyd_continues_an_execution_in_another_file(tmp_path: Path):
    for life in (2, 10, 9):  # by number, not by name
        Log(tmp_path, life).call("a", life, np.arange(life, dtype=np.int32))
    index = CallIndex(tmp_path)
    index.scan()
    assert ids(index, "a") == ["c2", "c9", "c10"]


def test_shards_with_their_lives_are_one_log_of_which_each_execution_has_its_own(tmp_path: Path):
    index = CallIndex(tmp_path)
    for life in (1, 2, 3):  # scanned in between, as by a daemon
        for shard in (0, 1):
            Log(tmp_path, life, shard).execution(f"x{shard}", turns=life)
        index.scan()
    again = CallIndex(tmp_path)
    again.scan()
    for found in (index, again):
        for name in ("x0", "x1"):
            loaded = found.load(name)
            assert [c.call for c in loaded.calls] == ["c0", "c1", "c2"]  # of an earlier life too: duplicates
            assert damage(loaded.report) == {"duplicates": 3}
    assert index.extent == again.extent and len(index.extent) == 6


def test_a_relabelled_call_has_its_last_label(tmp_path: Path):
    log = Log(tmp_path)
    log.execution("a", turns=2)
    log.relabel("a", "c1", "summary", "main-summary")
    index = CallIndex(tmp_path)
    index.scan()
    assert [(c.purpose, c.label) for c in index.load("a").calls] == [("turn", "main"), ("summary", "main-summary")]


def test_what_is_appended_after_an_extent_does_not_change_what_was_loaded(tmp_path: Path):
    log = Log(tmp_path)
    log.execution("a", turns=2)
    index = CallIndex(tmp_path)
    index.scan()
    extent = dict(index.extent)
    log.call("a", 5, np.arange(3, dtype=np.int32))
    Log(tmp_path, 2).call("a", 6, np.arange(3, dtype=np.int32))
    again = CallIndex(tmp_path)
    again.scan()
    assert ids(again, "a", extent) == ["c0", "c1"]
    assert ids(again, "a") == ["c0", "c1", "c5", "c6"]


def test_a_record_behind_a_torn_one_is_found(tmp_path: Path):
    log = Log(tmp_path)
    log.execution("a", turns=1)
    log.add(framed(Reward(exec="a", status="scored", value=1.0))[:30])
    log.execution("b", turns=1)
    index = CallIndex(tmp_path)
    index.scan()
    assert ids(index, "a") == ["c0"] and ids(index, "b") == ["c0"]
    assert (index.records, index.unplaced) == (4, 2)


def test_a_changed_byte_in_the_tokens_of_a_call_is_damage_of_its_execution_alone(tmp_path: Path):
    log = Log(tmp_path)
    for name in ("a", "b"):
        log.execution(name, turns=3)
    data = bytearray(log.path.read_bytes())
    with log.path.open("rb") as file:
        second = list(Frames(file))[2]
    data[second.end - 3] ^= 8
    log.path.write_bytes(bytes(data))
    index = CallIndex(tmp_path)
    index.scan()
    loaded = index.load("a")
    assert [call.call for call in loaded.calls] == ["c0"]
    assert damage(loaded.report) == {"bad_records": 2}  # it, and the one that leans on it
    assert ids(index, "b") == ["c0", "c1", "c2"] and not damage(index.load("b").report)
