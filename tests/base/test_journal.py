"""Journals survive a crash at any byte."""

from __future__ import annotations

import pytest

from gyre_base import journal as journals
from gyre_base import messages as m
from gyre_base.daemon import Send


def entries(path):
    return list(journals.read(path))


def write(path, count):
    journal = journals.Journal(path)
    for i in range(count):
        journal.write(float(i), m.Welcome(life=i), [Send("a:b", m.Done(note=str(i)))], durable=True)
    journal.close()


def test_a_tail_torn_at_any_byte_costs_only_that_entry(tmp_path):
    whole = tmp_path / "whole.jsonl"
    write(whole, 3)
    data = whole.read_bytes()
    last = data.rstrip(b"\n").rfind(b"\n") + 1
    for cut in range(last + 1, len(data)):
        path = tmp_path / f"cut{cut}.jsonl"
        path.write_bytes(data[:cut])
        write(path, 1)
        assert [e.event["life"] for e in entries(path)] == [0, 1, 0]
        assert path.with_suffix(".jsonl.torn").read_bytes() == data[last:cut] + b"\n"


def test_a_bad_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "j.jsonl"
    write(path, 2)
    path.write_bytes(path.read_bytes().replace(b'"life":0', b'"life":', 1))
    with pytest.raises(ValueError, match=r"j\.jsonl:1"):
        entries(path)


def test_commands_carry_their_address(tmp_path):
    path = tmp_path / "j.jsonl"
    write(path, 1)
    assert entries(path)[0].commands == [{"peer": "a:b", "tag": "done", "note": "0"}]


def test_held_entries_go_out_in_order_with_the_next_one_or_when_asked(tmp_path):
    path = tmp_path / "j.jsonl"
    journal = journals.Journal(path)
    journal.write(0.0, m.Welcome(life=0), [], held=True)
    assert not entries(path)
    journal.write(1.0, m.Welcome(life=1), [])
    journal.write(2.0, m.Welcome(life=2), [], held=True)
    assert [e.event["life"] for e in entries(path)] == [0, 1]
    journal.flush()
    journal.write(3.0, m.Welcome(life=3), [], held=True)
    assert [e.event["life"] for e in entries(path)] == [0, 1, 2]
    journal.close()
    assert [e.event["life"] for e in entries(path)] == [0, 1, 2, 3]
