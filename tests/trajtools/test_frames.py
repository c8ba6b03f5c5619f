"""Frames: what is written is read back, every cut leaves the whole frames before it, no flipped byte goes unnoticed."""

from __future__ import annotations

import dataclasses
import io
import struct

import msgpack
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from trajbuild import make_call, random_execution

from gyre_base import runframes
from gyre_base.runcodec import to_object
from gyre_base.runfile import (
    Call,
    CallWriter,
    ExecEnd,
    ExecStart,
    Intent,
    Note,
    Reward,
    RunHeader,
    RunReader,
    encode,
    framed,
    read_run,
    record_frame,
    repair_tail,
)
from gyre_base.runframes import MAGIC, SYNC, Frames
from gyre_base.runpacked import BlockWriter

words = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
plain = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 63) - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | words
)
json_values = st.recursive(plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3))
FIELDS = {f.name for f in dataclasses.fields(Call)} | {"k", "base", "keep", "h", "policy", "prompt", "completion"}
extras = st.dictionaries(words.filter(lambda name: name not in FIELDS), json_values, max_size=3)
ids = st.lists(st.integers(0, 2**31 - 1), max_size=6).map(lambda x: np.array(x, np.int32))
shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
named = st.dictionaries(
    words,
    st.tuples(st.sampled_from(["u1", "i2", "i4", "f4", "f8"]), shapes).map(lambda x: np.ones(x[1], x[0])),
    max_size=2,
)


@st.composite
def calls(draw):
    completion = draw(ids)
    values = st.floats(width=32, allow_nan=True)
    logprobs = draw(st.none() | st.lists(values, min_size=len(completion), max_size=len(completion)))
    return dataclasses.replace(
        make_call(draw(words), draw(ids), completion, logprobs, execution=draw(words)),
        extra=draw(extras),
        arrays=draw(named),
    )


records = st.lists(
    st.one_of(
        calls(),
        st.builds(Note, text=words, exec=st.none() | words),
        st.builds(Intent, exec=words, call=words, t0=st.floats(0, 1e10)),
        st.builds(Reward, exec=words, status=words, value=st.none() | st.floats(-1e9, 1e9)),
        st.builds(RunHeader, run=words, tokenizer=st.dictionaries(words, plain, max_size=2)),
        st.builds(ExecStart, exec=words, group=words),
        st.builds(ExecEnd, exec=words, calls=st.none() | st.integers(0, 99)),
    ),
    max_size=8,
)


def said(record):
    """Everything that a record says, arrays bit for bit."""
    if not isinstance(record, Call):
        return to_object(record)
    about = {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}
    lists = {name: about.pop(name) for name in ("prompt_ids", "completion_ids", "logprobs", "arrays")}
    logprobs = lists["logprobs"]
    arrays = {n: (a.dtype.str, a.shape, a.tobytes()) for n, a in lists["arrays"].items()}
    bits = None if logprobs is None else np.where(np.isfinite(logprobs), logprobs, np.float32("nan")).tobytes()
    return about, lists["prompt_ids"].tolist(), lists["completion_ids"].tolist(), bits, arrays


def unique(found):
    """One call per id: a second one would be a duplicate or a conflict."""
    seen = set()
    return [
        r for r in found if not isinstance(r, Call) or ((r.exec, r.call) not in seen and not seen.add((r.exec, r.call)))
    ]


def file_of(*frames):
    return MAGIC + b"".join(frames)


def read(data):
    found, report = read_run(io.BytesIO(data))
    return [said(r) for r in found], report


def in_blocks(found):
    file = io.BytesIO()
    writer = BlockWriter(file)
    for record in found:
        writer.write(CallWriter().object(record) if isinstance(record, Call) else to_object(record))
    writer.close()
    return file.getvalue()


@given(records)
def test_any_records_come_back_from_frames_blocks_and_lines(found):
    found = unique(found)
    for data in (file_of(*map(framed, found)), in_blocks(found), b"".join(map(encode, found))):
        got, report = read(data)
        assert got == [said(r) for r in found]
        assert not report.bad and report.torn is None


def chain(rng, n=5):
    """Frames of calls that lean on one another, each with a named array."""
    writer, text, out, before = CallWriter(form=record_frame, keyframe_calls=4), [1, 2, 3], [], None
    for i in range(n):
        call = make_call(
            f"c{i}", text, rng.integers(0, 300, 4), seq=i, arrays={"experts": rng.integers(0, 9, (4, 2, 3), np.uint8)}
        )
        out.append(writer.call(call, before, 0 if before is None else len(text) - 1))
        text, before = [*text, *call.completion_ids.tolist(), 7], call.call
    return out


@given(st.integers(0, 10**6))
@settings(max_examples=2)
def test_every_cut_leaves_the_whole_frames_before_it(seed):
    frames = chain(np.random.default_rng(seed))
    data = file_of(*frames)
    whole, _ = read(data)
    edges = np.cumsum([len(MAGIC), *map(len, frames)]).tolist()
    for cut in range(len(data) + 1):
        got, report = read(data[:cut])
        before = max([edge for edge in edges if edge <= cut], default=0)
        assert got == whole[: max(0, sum(edge <= cut for edge in edges) - 1)]
        assert report.torn == ((before, cut - before) if before < cut else None) and not report.bad


@given(st.integers(0, 10**6), st.integers(1, 255))
@settings(max_examples=20)
def test_every_flipped_byte_is_noticed_and_costs_its_frame_only(seed, mask):
    frames = [framed(make_call(f"c{i}", [i, 2], [3, i], seq=i)) for i in range(4)]
    data = file_of(*frames)
    whole, _ = read(data)
    edges = np.cumsum([len(MAGIC), *map(len, frames)]).tolist()
    for at in np.random.default_rng(seed).permutation(len(data)).tolist()[:200]:
        flipped = bytearray(data)
        flipped[at] ^= mask
        got, report = read(bytes(flipped))
        if at < len(MAGIC):
            assert report.bad or report.torn
            continue
        number = sum(edge <= at for edge in edges) - 1
        assert got == [*whole[:number], *whole[number + 1 :]]
        last = number == len(frames) - 1
        start, end = edges[number], edges[number + 1]
        assert [(b.offset, b.end) for b in report.bad] == ([] if last else [(start, end)])
        assert report.torn == ((start, end - start) if last else None)


@pytest.mark.parametrize("kept", [3, 30, 60])
def test_frames_behind_a_torn_one_are_found(kept):
    one, two, three = (framed(make_call(f"c{i}", [1, 2, i], seq=i)) for i in range(3))
    got, report = read(file_of(one, two[:kept], three))
    assert [call[0]["call"] for call in got] == ["c0", "c2"]
    start = len(MAGIC) + len(one)
    assert [(b.offset, b.end) for b in report.bad] == [(start, start + kept)] and report.torn is None


@pytest.mark.parametrize("window", [5, 64, 100])
def test_the_next_frame_is_found_wherever_it_lies_in_what_is_searched(window, monkeypatch):
    monkeypatch.setattr(runframes, "_SEARCH_BYTES", window)
    for gap in range(1, 2 * window):
        got, report = read(file_of(b"\0" * gap, framed(make_call("a"))))
        assert [call[0]["call"] for call in got] == ["a"]
        assert [(b.offset, b.end) for b in report.bad] == [(len(MAGIC), len(MAGIC) + gap)]


def test_what_only_looks_like_a_frame_is_none():
    noise = np.random.default_rng(0).integers(0, 256, 3 << 20, dtype=np.uint8).tobytes()
    two = framed(make_call("b", seq=1))
    got, report = read(file_of(framed(make_call("a")), SYNC * 9 + noise, two[:21] + two))
    assert [call[0]["call"] for call in got] == ["a", "b"] and len(report.bad) == 1


def test_a_reader_goes_on_behind_a_frame_while_the_file_grows(tmp_path):
    rng = np.random.default_rng(5)
    data = file_of(*chain(rng, 40), framed(Note(text="end")))
    whole, _ = read(data)
    path = tmp_path / "log.gtr"
    path.touch()
    reader, got, at = RunReader(path), [], 0
    frames, seen = None, 0
    while at < len(data):
        step = int(rng.choice([1, 5, 40, 400]))
        with path.open("ab") as file:
            file.write(data[at : at + step])
        at = min(at + step, len(data))
        got += [said(located.record) for located in reader.records()]
        assert reader.offset + (reader.report.torn or (0, 0))[1] == at
        with path.open("rb") as file:
            frames = Frames(file, frames.offset if frames else 0)
            seen += sum(1 for _ in frames)
        assert seen == len(got)
    assert got == whole and not reader.report.bad and reader.report.torn is None


def test_a_reader_from_an_offset_reads_what_is_behind_it(tmp_path):
    path = tmp_path / "log.gtr"
    path.write_bytes(file_of(*(framed(Note(text=str(i))) for i in range(5))))
    places = list(RunReader(path).records())
    assert [x.record.text for x in RunReader(path, places[2].end).records()] == ["3", "4"]


@pytest.mark.parametrize("cut", [5, len(MAGIC), len(MAGIC) + 9, -4])
def test_a_torn_end_is_cut_off_before_an_append_and_kept(cut, tmp_path):
    whole = file_of(framed(make_call("a")), framed(make_call("b", seq=1)))
    path = tmp_path / "log.gtr"
    path.write_bytes(whole[:cut])
    lost = repair_tail(path)
    assert path.read_bytes() + lost == whole[:cut]
    report = read_run(path)[1]
    assert report.torn is None and not report.bad
    assert not lost or (tmp_path / "log.gtr.torn").read_bytes() == lost
    assert repair_tail(path) == b""


def test_a_frame_is_what_the_page_of_the_run_file_says():
    call = make_call("a", [7, 8], [9], [-0.5], arrays={"experts": np.array([[1, 2]], np.uint8)})
    data = framed(call)
    sync, stored, size, check, kind = struct.unpack("<IIIIB", data[:17])
    assert (sync, stored, kind) == (0x727467F7, len(data) - 20, 3)
    assert check == xxhash.xxh3_64_intdigest(data[20:]) & 0xFFFFFFFF
    assert data[17:20] == xxhash.xxh32(data[:17]).digest()[:3]
    obj, sizes, others = msgpack.unpackb(data[20 : 20 + size])
    assert (obj["k"], obj["call"], sizes, others) == ("call", "a", [2, 1, 1], [["experts", "|u1", [1, 2]]])
    assert data[20 + size :] == struct.pack("<iiifBB", 7, 8, 9, -0.5, 1, 2)


def test_a_frame_of_a_later_kind_is_skipped_and_counted():
    got, report = read(file_of(runframes.pack_frame(9, 0, b"later"), framed(make_call("a"))))
    assert len(got) == 1 and not report.bad and report.unknown_kinds == {"frame 9": 1}


def test_a_record_that_no_writer_of_ours_made_is_left_out_with_its_reason():
    strange = [
        b"",
        b"\xc1",
        msgpack.packb([]),
        msgpack.packb([7]),
        msgpack.packb([{"k": "call", "exec": 3}]),
        msgpack.packb([{"k": "call", "exec": "e", "call": "x"}, [9, 9, 9]]),
        msgpack.packb([{"a": 1}]),
    ]
    frames = [runframes.pack_frame(3, len(head), head) for head in strange]
    got, report = read(file_of(*frames, runframes.pack_frame(1, 9, b"no zstd"), framed(make_call("a"))))
    assert len(got) == 1 and len(report.bad) == len(strange) + 1 and all(bad.reason for bad in report.bad)


def test_float32_bits_and_ids_are_those_of_the_engine():
    x = np.random.default_rng(0).integers(0, 1 << 31, 50_000, dtype=np.uint32).view(np.float32)
    x = -x[np.isfinite(x)]
    call = make_call(completion=np.arange(len(x)) + 2**31 - 1 - len(x), logprobs=x)
    ids, bits = call.completion_ids, x.view(np.uint32)
    for data in (file_of(framed(call)), encode(call)):
        [back], _ = read_run(io.BytesIO(data))
        assert np.array_equal(back.logprobs.view(np.uint32), bits) and np.array_equal(back.completion_ids, ids)


@given(st.integers(0, 10**6))
@settings(max_examples=20)
def test_a_log_of_frames_says_what_its_lines_say(seed):
    told = random_execution(np.random.default_rng(seed), calls=20)
    line, frame = CallWriter(keyframe_calls=5), CallWriter(form=record_frame, keyframe_calls=5)
    before, pairs = {}, []
    for call in told:  # a delta against the call before, where both begin alike
        text = call.prompt_ids.tolist()
        base = next((name for name, start in before.items() if len(text) > 1 and start == text[:2]), None)
        pairs.append((call, base, 2 if base is not None else 0))
        before[call.call] = [*text, *call.completion_ids.tolist()][:2]
    lines, frames = ([writer.call(*pair) for pair in pairs] for writer in (line, frame))
    assert any(b'"base"' in x for x in lines)
    assert read(b"".join(lines))[0] == read(file_of(*frames))[0] == [said(call) for call in told]
