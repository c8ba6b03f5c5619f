"""The byte-splice reader says what the plain parse says, on damaged and odd files too."""

from __future__ import annotations

import dataclasses
import io
import json

import numpy as np
import orjson
import pytest
from trajbuild import make_call

from gyre_base import runlines
from gyre_base.runfile import CallWriter, RunReader, encode
from gyre_base.runtape import SENTINEL, numbers
from trajtools.forest import Forest

SEEDS = 1200


def long_calls(rng, calls=8):
    """Growing, branching and repeated histories of a few hundred tokens, so that cutting is worth it."""
    out, texts = [], [rng.integers(0, 50_000, int(rng.integers(60, 140)))]
    for i in range(calls):
        text = texts[int(rng.integers(len(texts)))]
        completion = rng.integers(0, 50_000, int(rng.integers(0, 12)))
        logprobs = None if rng.random() < 0.1 else -rng.random(len(completion))
        out.append(make_call(f"c{i}", text, completion, logprobs, execution=f"e{int(rng.integers(2))}"))
        more = rng.integers(0, 50_000, int(rng.integers(0, 20)))
        match int(rng.integers(6)):
            case 0:
                texts.append(np.concatenate([text[: len(text) // 2], more]))
            case 1:
                texts.append(text[: max(1, len(text) - 7)])
            case 2:
                texts.append(np.concatenate([text, completion[:-1], more]))
            case _:
                texts.append(np.concatenate([text, completion, more]))
    return out


def lines_of(rng, calls):
    """Each call in one of the forms a writer may choose."""
    writer, last = CallWriter(), {}
    for call in calls:
        line = encode(call)
        match int(rng.integers(7)):
            case 0:
                line = json.dumps(orjson.loads(line)).encode() + b"\n"
            case 1:
                obj = list(orjson.loads(line).items())
                line = orjson.dumps(dict(obj[i] for i in rng.permutation(len(obj)).tolist())) + b"\n"
            case 2:
                base = last.get(call.exec)
                whole = np.concatenate([base.prompt_ids, base.completion_ids]) if base is not None else []
                n = min(len(whole), len(call.prompt_ids))
                same = np.array_equal(whole[:n], call.prompt_ids[:n])
                line = writer.call(call, base.call if base and same else None, n if same else 0)
                last[call.exec] = call
            case 3:
                obj = orjson.loads(line)
                del obj["h"]
                line = orjson.dumps(obj) + b"\n"
        yield line


def damaged(rng, line):
    """One line with something odd in it, mostly none."""
    at = int(rng.integers(len(line)))
    digit = line.find(b"[") + 1 + int(rng.integers(40))
    match int(rng.integers(22)):
        case 0:
            return line[:at]  # torn and glued to the next
        case 1:
            return line[:at] + bytes([int(rng.integers(32, 127))]) + line[at + 1 :]
        case 2:
            return line.replace(b'"prompt_ids":[', b'"extra":{"prompt_ids":[1,2]},"prompt_ids":[')
        case 3:
            return line.replace(b'"prompt_ids":', b'"note":"\\"prompt_ids\\":[1,2,3]","prompt_ids":')
        case 4:
            return line.replace(b'"prompt_ids":', b'"prompt_ids":[7,8],"prompt_ids":')
        case 5:
            return line.rstrip(b"\n}") + b',"prompt_ids":[5]}\n'
        case 6:
            return line.replace(b",", b" ,", 12)
        case 7:
            return line[:digit] + b" " + line[digit:]
        case 8:
            return line[:digit] + rng.choice([b"0", b"-", b".5", b",,", b"[", b"]", b'"', b"e3"]) + line[digit:]
        case 9:
            return line.replace(b'"prompt_ids"', b'"prompt_ids" ').replace(b"[", b"[ ", 1)
        case 10:
            return line.replace(b'"exec":"e0"', b'"exec":"e1"')
        case 11:
            return line.rstrip(b"\n") + b"\r\n\n"
        case 12:
            return b'{"x":' + line.rstrip(b"\n") + b"}\n"
        case 13:
            return line.replace(b'"prompt_ids":[', f'"prompt_ids":[{SENTINEL},'.encode())
        case 14:
            return line + line
    return line


def told(data, fast):
    reader = RunReader(io.BytesIO(data), fast=fast)
    records = [(x.offset, x.end, content(x.record)) for x in reader.records()]
    return records, dataclasses.asdict(reader.report)


def content(record):
    arrays = ("prompt_ids", "completion_ids", "logprobs")
    fields = {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}
    return {
        k: (None if v is None else (v.tobytes(), v.dtype.str)) if k in arrays else v for k, v in fields.items()
    }  # fmt: skip


@pytest.mark.parametrize("part", range(4))
def test_the_fast_reader_equals_the_plain_parse_on_fuzzed_files(part, monkeypatch):
    shortcuts = 0
    for seed in range(part * SEEDS // 4, (part + 1) * SEEDS // 4):
        rng = np.random.default_rng(seed)
        monkeypatch.setattr(runlines, "BLOCK_BYTES", [1 << 20, 3000][seed % 2])  # or every line slides the buffer
        lines = [damaged(rng, line) for line in lines_of(rng, long_calls(rng))]
        order = rng.permutation(len(lines)).tolist() if rng.random() < 0.3 else range(len(lines))
        data = b"".join(lines[i] for i in order)
        fast, plain = told(data, True), told(data, False)
        assert fast == plain, f"seed {seed}"
        shortcuts += len(fast[0])
    assert shortcuts > SEEDS  # the files are not all damage


def test_the_shortcut_is_taken_for_canonical_pretty_and_reordered_lines(monkeypatch):
    import gyre_base.runreader as reader

    taken = []
    for name in ("shortened", "spliced"):
        real = getattr(reader, name)
        monkeypatch.setattr(reader, name, lambda *a, real=real: taken.append(real(*a)) or taken[-1])
    text = np.arange(1000, 1400)
    first, second = make_call("a", text), make_call("b", [*text, 4, 5, 6, 7])
    obj = orjson.loads(encode(second))
    forms = [encode(second), json.dumps(obj).encode() + b"\n", orjson.dumps(dict(reversed(obj.items()))) + b"\n"]
    for form in forms:
        taken.clear()
        records, report = told(encode(first) + form, True)
        assert len(records) == 2 and not report["bad"]
        assert taken[-1].keep >= 400 and len(taken[-1].rest) < 700
    assert len(forms[0]) > 2000


@pytest.mark.parametrize("seed", range(20))
def test_a_forest_that_trusts_the_readers_memory_is_the_one_of_copies(seed, monkeypatch):
    rng = np.random.default_rng(seed)
    known = []
    real = Forest._resume
    monkeypatch.setattr(Forest, "_resume", lambda self, prompt: known.append(real(self, prompt)) or known[-1])
    trusting, comparing = Forest("e0"), Forest("e0")
    data = b"".join(encode(dataclasses.replace(call, exec="e0")) for call in long_calls(rng, 30))
    for located in RunReader(io.BytesIO(data)).records():
        trusting.insert(located.record)
        comparing.insert(dataclasses.replace(located.record, prompt_ids=located.record.prompt_ids.copy()))
    assert trusting.digest() == comparing.digest()
    assert any(tokens for _, _, tokens in known)  # else this test says nothing


def test_a_prompt_stays_what_it_was_while_later_calls_grow_and_branch():
    rng = np.random.default_rng(5)
    calls = long_calls(rng, 40)
    reader = RunReader(io.BytesIO(b"".join(map(encode, calls))))
    kept = [(x.record.prompt_ids, x.record.completion_ids) for x in reader.records()]
    for call, (prompt, completion) in zip(calls, kept, strict=True):
        assert prompt.tolist() == call.prompt_ids.tolist()
        assert completion.tolist() == call.completion_ids.tolist()
        with pytest.raises(ValueError, match="read-only"):
            prompt[:1] = 0


@pytest.mark.parametrize(
    "text", [b"1,02", b",1", b"1,", b"1,,2", b"4294967296", b"2147483648", b"1 2", b"-1", b"1.0", b"1e3", b"[1]"]
)
def test_only_plainly_written_ids_are_converted_without_json(text):
    assert numbers(text) is None
    assert numbers(b"0,7,2147483647").tolist() == [0, 7, 2147483647]
