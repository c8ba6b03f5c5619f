"""The run file: what is written is read back, and damage costs what it must and no more."""

from __future__ import annotations

import dataclasses
import io

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trajbuild import make_call

from gyre_base.runfile import (
    Agent,
    Attempt,
    Call,
    CallWriter,
    ExecEnd,
    ExecStart,
    Intent,
    Note,
    Reward,
    RunFileError,
    RunHeader,
    RunReader,
    Sampling,
    Span,
    encode,
    read_run,
    repair_tail,
)


def bits(logprobs):
    return None if logprobs is None else np.asarray(logprobs, np.float32).view(np.uint32).tolist()


def content(call):
    plain = {
        f.name: getattr(call, f.name)
        for f in dataclasses.fields(call)
        if f.name not in ("prompt_ids", "completion_ids", "logprobs")
    }
    return plain | {"p": call.prompt_ids.tolist(), "c": call.completion_ids.tolist(), "l": bits(call.logprobs)}


def read_calls(data):
    records, report = read_run(io.BytesIO(data))
    return [r for r in records if isinstance(r, Call)], report


def chain(n, execution="e", writer=None):
    """n calls, each continuing the one before by two tokens; (calls, lines) in delta form."""
    writer = writer or CallWriter()
    calls, lines, text = [], [], [7, 8, 9]
    for i in range(n):
        call = make_call(f"c{i}", text, (100 + i, 200 + i), execution=execution, seq=i)
        keep = 0 if i == 0 else len(calls[-1].prompt_ids) + len(calls[-1].completion_ids)
        lines.append(writer.call(call, base=f"c{i - 1}" if i else None, keep=keep))
        calls.append(call)
        text = [*text, 100 + i, 200 + i, 300 + i]
    return calls, lines


def test_every_kind_reads_back_as_written():
    records = [
        RunHeader(run="r", writer="test", created=1.5, tokenizer={"name": "t", "vocab": 640}),
        ExecStart(exec="e", task="t", group="g", started=2.0, extra={"later": [1]}),
        Intent(exec="e", call="c0", t0=1.0),
        Reward(exec="e", status="scored", value=0.0, parts={"a": 1.0}, evaluator={"name": "x"}),
        Reward(exec="e", status="evaluator_failed", value=None, error="crashed"),
        ExecEnd(exec="e", status="finished", calls=1),
        Note(text="hello", extra={"n": 1}),
    ]
    back, report = read_run(io.BytesIO(b"".join(map(encode, records))))
    assert back == records
    assert not report.bad


def test_a_call_reads_back_with_unknown_keys_at_every_level():
    line = orjson.loads(encode(make_call()))
    line["colour"] = "blue"
    line["agent"]["mood"] = "calm"
    [call], _ = read_calls(orjson.dumps(line))
    assert call.extra == {"colour": "blue", "agent": {"mood": "calm"}}
    again = orjson.loads(encode(call))
    assert again["colour"] == "blue"
    assert again["agent"] == {"id": "main", "role": "main", "mood": "calm"}


def test_all_fields_of_a_call_survive():
    call = make_call(
        seq=3, t0=1.25, t1=2.5, agent=Agent(id="a1", role="sub-agent", parent="c0"), purpose="summary",
        label="sub-agent-summary", parent="c0", attempt=Attempt(of="c0", n=1), delivered=False, finish="stop",
        spans=(Span("0.1", 0, 1), Span("0.2", 1, 2)), sampling=Sampling(temperature=0.7, top_p=0.9, top_k=20),
        context="ab",
    )  # fmt: skip
    [back], _ = read_calls(encode(call))
    assert content(back) == content(call)


@given(st.lists(st.floats(width=32, max_value=0.0), min_size=1, max_size=50))
def test_logprobs_round_trip_exactly_as_float32(values):
    [back], _ = read_calls(encode(make_call(completion=range(len(values)), logprobs=values)))
    expected = np.array(values, np.float32)
    expected[~np.isfinite(expected)] = np.nan
    assert bits(back.logprobs) == bits(expected)


def test_random_float32_bit_patterns_round_trip():
    x = np.random.default_rng(0).integers(0, 1 << 31, 200_000, dtype=np.uint32).view(np.float32)
    x = -x[np.isfinite(x)]
    [back], _ = read_calls(encode(make_call(completion=np.zeros(len(x)), logprobs=x)))
    assert np.array_equal(back.logprobs.view(np.uint32), x.view(np.uint32))


@pytest.mark.parametrize("keyframe_calls", [1, 2, 5, 1000])
def test_delta_form_says_the_same_as_full_form(keyframe_calls):
    calls, lines = chain(20, writer=CallWriter(keyframe_calls=keyframe_calls))
    full, _ = read_calls(b"".join(map(encode, calls)))
    delta, report = read_calls(b"".join(lines))
    assert [content(c) for c in delta] == [content(c) for c in full] == [content(c) for c in calls]
    assert not report.bad
    assert sum(b'"base"' not in line for line in lines) == -(-20 // keyframe_calls)


def test_a_delta_line_costs_its_new_tokens_only():
    long = np.arange(100_000)
    writer = CallWriter()
    writer.call(make_call("a", long))
    line = writer.call(make_call("b", [*long, 4, 5, 6]), base="a", keep=100_002)
    assert len(line) < 500


def test_a_writer_that_does_not_know_the_base_writes_in_full():
    call = make_call("b", [1, 2, 3, 4, 5, 6])
    assert b'"base"' not in CallWriter().call(call, base="a", keep=5)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_delta_against_any_earlier_call_reads_back(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    writer, calls, lines = CallWriter(keyframe_calls=int(rng.integers(1, 6))), [], []
    for i in range(int(rng.integers(1, 25))):
        base, keep, prompt = None, 0, rng.integers(0, 4, rng.integers(0, 6))
        if calls and rng.random() < 0.8:
            b = calls[rng.integers(len(calls))]
            whole = np.concatenate([b.prompt_ids, b.completion_ids])
            base, keep = b.call, int(rng.integers(0, len(whole) + 1))
            prompt = np.concatenate([whole[:keep], prompt])
        calls.append(make_call(f"c{i}", prompt, rng.integers(0, 4, rng.integers(0, 5))))
        lines.append(writer.call(calls[-1], base=base, keep=keep))
    back, report = read_calls(b"".join(lines))
    assert not report.bad
    assert [content(c) for c in back] == [content(c) for c in calls]


def test_a_torn_tail_at_every_byte_loses_only_the_torn_line():
    _, lines = chain(3)
    data = b"".join(lines)
    ends = [0, *np.cumsum([len(line) for line in lines]).tolist()]
    for cut in range(len(data) + 1):
        calls, report = read_calls(data[:cut])
        whole = sum(end - 1 <= cut for end in ends[1:])  # a last line that only lacks its newline is data
        assert len(calls) == whole
        torn = cut not in ends and cut + 1 not in ends
        assert (report.torn is not None) == torn
        if torn:
            assert report.torn == (ends[whole], cut - ends[whole])


def test_a_reader_goes_on_where_a_growing_file_ended(tmp_path):
    _, lines = chain(4)
    path = tmp_path / "calls.jsonl"
    path.write_bytes(lines[0] + lines[1][:30])
    reader = RunReader(path)
    assert [x.record.call for x in reader.records()] == ["c0"]
    assert reader.report.torn == (len(lines[0]), 30)
    path.write_bytes(b"".join(lines))
    located = list(reader.records())
    assert [x.record.call for x in located] == ["c1", "c2", "c3"]
    assert [x.offset for x in located] == [len(b"".join(lines[:i])) for i in (1, 2, 3)]
    assert reader.report.torn is None


def test_repair_tail_keeps_what_it_cuts(tmp_path):
    _, lines = chain(2)
    path = tmp_path / "calls.jsonl"
    path.write_bytes(lines[0] + lines[1][:30])
    assert repair_tail(path) == lines[1][:30]
    assert path.read_bytes() == lines[0]
    assert (tmp_path / "calls.jsonl.torn").read_bytes() == lines[1][:30]
    path.write_bytes(lines[0] + lines[1][:-1])
    assert repair_tail(path) == b""
    assert path.read_bytes() == lines[0] + lines[1]


def test_a_bad_middle_line_is_counted_and_orphans_only_up_to_the_next_keyframe():
    _, lines = chain(10, writer=CallWriter(keyframe_calls=5))
    lines[2] = b"garbage\n"
    calls, report = read_calls(b"".join(lines))
    assert [c.call for c in calls] == ["c0", "c1", "c5", "c6", "c7", "c8", "c9"]
    assert len(report.bad) == 3
    assert report.bad[0].offset == len(lines[0] + lines[1])


def test_a_flipped_digit_that_still_parses_is_found():
    _, lines = chain(1)
    line = lines[0].replace(b'"prompt_ids":[7', b'"prompt_ids":[6')
    calls, report = read_calls(line)
    assert not calls
    assert "hash" in report.bad[0].reason


def test_a_torn_record_glued_to_a_whole_one_gives_the_whole_one_back():
    _, lines = chain(1)
    calls, report = read_calls(encode(make_call("x"))[:40] + lines[0])
    assert [c.call for c in calls] == ["c0"]
    assert report.recovered == 1
    assert len(report.bad) == 1


@pytest.mark.parametrize(
    "line",
    [
        b"12\n",
        b'"text"\n',
        b"[]\n",
        b"{}\n",
        b'{"k":3}\n',
        b'{"k":"call","exec":"e"}\n',
        b'{"k":"call","exec":"e","call":"x","prompt_ids":[1.5]}\n',
        b'{"k":"call","exec":"e","call":"x","prompt_ids":[-1]}\n',
        b'{"k":"call","exec":"e","call":"x","prompt_ids":[4294967296]}\n',
        b'{"k":"call","exec":"e","call":"x","prompt_ids":[true]}\n',
        b'{"k":"call","exec":"e","call":"x","prompt_ids":[[1],[2,3]]}\n',
        b'{"k":"call","exec":"e","call":"x","prompt_ids":{"a":1}}\n',
        b'{"k":"call","exec":"e","call":"x","completion_ids":[1],"logprobs":["a"]}\n',
        b'{"k":"call","exec":"e","call":"x","t0":"noon"}\n',
        b'{"k":"call","exec":"e","call":"x","agent":"main"}\n',
        b'{"k":"call","exec":"e","call":"x","policy":[["0.1"]]}\n',
        b'{"k":"call","exec":"e","call":"x","base":"y","keep":-1}\n',
        b'{"k":"reward","status":"scored"}\n',
        b'{"k":"exec","exec":7}\n',
        b'{"k":"run","schema":"other/1"}\n',
    ],
)
def test_a_line_that_is_no_record_is_quarantined_with_a_reason(line):
    calls, report = read_calls(line + encode(make_call()))
    assert len(calls) == 1
    assert len(report.bad) == 1
    assert report.bad[0].reason


def test_blank_lines_crlf_bom_and_nul_runs_are_harmless():
    line = encode(make_call()).rstrip()
    calls, report = read_calls(b"\xef\xbb\xbf\r\n\n\x00\x00\x00\n" + b"\x00\x00" + line + b"\r\n")
    assert [c.call for c in calls] == ["c0"]
    assert not report.bad


def test_unknown_kinds_are_skipped_with_a_count_and_minor_versions_are_read():
    data = b'{"k":"run","schema":"gyre.run/1.7"}\n{"k":"hologram"}\n' + encode(make_call())
    calls, report = read_calls(data)
    assert len(calls) == 1
    assert report.unknown_kinds == {"hologram": 1}


def test_a_higher_major_version_is_refused():
    with pytest.raises(RunFileError, match=r"gyre\.run/2"):
        read_calls(b'{"k":"run","schema":"gyre.run/2"}\n')


def test_duplicates_are_ignored_whatever_their_form():
    calls, lines = chain(3)
    back, report = read_calls(b"".join(lines) + b"".join(map(encode, calls)) + lines[2])
    assert [c.call for c in back] == ["c0", "c1", "c2"]
    assert report.duplicates == 4
    assert not report.conflicts


def test_the_same_id_with_another_payload_is_a_conflict():
    first, second = make_call(), make_call(completion=(4, 6))
    back, report = read_calls(encode(first) + encode(second))
    assert [content(c) for c in back] == [content(first)]
    assert report.conflicts == [("e", "c0", len(encode(first)))]


def test_unequal_lengths_leave_a_call_as_context_only():
    line = orjson.loads(encode(make_call()))
    line["logprobs"] = [-1.0]
    del line["h"]
    [call], report = read_calls(orjson.dumps(line))
    assert call.logprobs is None
    assert call.completion_ids.tolist() == [4, 5]
    assert report.defects[0].kept
    with pytest.raises(ValueError, match="logprobs"):
        encode(make_call(logprobs=(-1.0,)))


def test_two_executions_may_use_the_same_call_ids():
    _, a = chain(3, execution="a")
    _, b = chain(3, execution="b")
    calls, report = read_calls(b"".join(x for pair in zip(a, b, strict=True) for x in pair))
    assert [(c.exec, c.call) for c in calls] == [(e, f"c{i}") for i in range(3) for e in "ab"]
    assert not report.bad
