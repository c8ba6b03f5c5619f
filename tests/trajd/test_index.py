"""The index finds every call of an execution, in damaged and growing logs too."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gyre_base.runfile import encode
from gyre_base.runrecords import Reward
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
    assert (index.lines, index.executions, index.unplaced) == (5, 2, 1)
    assert ids(index, "nobody") == []


def test_a_torn_tail_is_read_once_it_is_whole(tmp_path: Path):
    log = Log(tmp_path)
    log.execution("a", turns=1)
    line = log.path.read_bytes().splitlines(keepends=True)[-1].replace(b'"call":"c0"', b'"call":"c9"')
    index = CallIndex(tmp_path)
    log.add(line[:40])
    assert index.scan() == 2 and index.scan() == 0
    log.add(line[40:])
    assert index.scan() == 1
    assert ids(index, "a") == ["c0", "c9"]


def test_a_new_life_of_proxyd_continues_an_execution_in_another_file(tmp_path: Path):
    for life in (2, 10, 9):  # by number, not by name
        Log(tmp_path, life).call("a", life, np.arange(life, dtype=np.int32))
    index = CallIndex(tmp_path)
    index.scan()
    assert ids(index, "a") == ["c2", "c9", "c10"]


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
    log.add(encode(Reward(exec="a", status="scored", value=1.0))[:30])
    log.execution("b", turns=1)
    index = CallIndex(tmp_path)
    index.scan()
    assert ids(index, "a") == ["c0"] and ids(index, "b") == ["c0"]
    assert damage(index.load("b").report) == {"bad_lines": 1, "recovered": 1}
