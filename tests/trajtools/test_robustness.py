"""The robustness contract of the run file, case by case, as a user of the commands meets it (docs, "Damaged files")."""

from __future__ import annotations

import io
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import orjson
import pytest
from click.testing import CliRunner
from trajbuild import make_call, random_execution, story

from gyre_base import runlines
from gyre_base.runfile import CallWriter, ExecEnd, Intent, Note, Reward, encode, framed, repair_tail
from gyre_base.runframes import MAGIC
from gyre_cli.trajtools import main
from trajtools.choose import Rules, choose
from trajtools.load import Stream, load


def run(*arguments, given=None):
    return CliRunner().invoke(main, [str(a) for a in arguments], input=given)


def lines_in(path):
    return [orjson.loads(x) for x in path.read_bytes().splitlines()]


def told(source, **options):
    return orjson.loads(run("dedup", source, "--json", **options).stdout)


# ---- the end of a file ---------------------------------------------------------------------------------------------


def test_a_torn_last_line_is_reported_with_its_offset_and_fine_unless_strict(log):
    whole = log.read_bytes()
    log.write_bytes(whole[:-9])
    done = run("dedup", log)
    at = whole[:-9].rfind(b"\n") + 1
    assert done.exit_code == 0 and f"torn last line in run.jsonl at byte {at}" in done.stdout
    assert run("dedup", log, "--strict").exit_code == 1


def test_a_last_line_that_only_lacks_its_newline_is_data(log):
    log.write_bytes(log.read_bytes()[:-1])
    assert run("dedup", log, "--strict").exit_code == 0
    assert load(log).executions["e"].reward.value == 1.0


def test_a_writer_repairs_the_tail_before_it_appends_and_keeps_what_it_cut(log):
    whole = log.read_bytes()
    log.write_bytes(whole + b'{"k":"call","exec":"e","call":"c9","pro')
    repair_tail(log)
    with log.open("ab") as file:
        file.write(encode(make_call("c9", [1, 2, 3, 9], seq=6)))
    assert not load(log).reports["run.jsonl"].bad and "c9" in load(log).executions["e"].forest
    assert log.with_name("run.jsonl.torn").read_bytes() == b'{"k":"call","exec":"e","call":"c9","pro'


# ---- bad lines -----------------------------------------------------------------------------------------------------


@pytest.fixture
def damaged(log):
    """(the log with a line of garbage and a torn record glued to a whole one, its good lines)."""
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join([*lines[:2], b"garbage \xff\n", lines[2][:30] + lines[3], *lines[4:]]))
    return log, [*lines[:2], lines[3], *lines[4:]], lines[2][:30]


def test_a_bad_middle_line_is_counted_named_and_the_answer_is_no(damaged):
    path, good, _ = damaged
    done = run("dedup", path)
    at = len(good[0] + good[1])
    assert done.exit_code == 1
    assert f"left out of run.jsonl at byte {at}, 10 bytes: not JSON" in done.stdout
    assert told(path)["damage"]["bad_records"] == 2


def test_dedup_sets_bad_lines_aside_with_offset_and_reason(damaged, tmp_path):
    path, good, torn = damaged
    before = path.read_bytes()
    done = run("dedup", path, "-o", tmp_path / "slim.jsonl")
    assert done.exit_code == 1 and "slim.jsonl.taken.jsonl" in done.stdout
    at = len(good[0] + good[1])
    taken = lines_in(tmp_path / "slim.jsonl.taken.jsonl")
    assert [(t["file"], t["offset"], t["bytes"]) for t in taken] == [("run.jsonl", at, 10), ("run.jsonl", at + 10, 30)]
    assert "base64" in taken[0] and taken[1]["text"] == torn.decode() and all(t["reason"] for t in taken)
    assert path.read_bytes() == before
    assert run("check", tmp_path / "slim.jsonl").stdout.startswith("1 execution")


def test_a_torn_prefix_glued_to_a_whole_record_gives_the_record_back(damaged):
    path, _, _ = damaged
    assert "records recovered behind a torn one: 1" in run("dedup", path).stdout
    assert "c2" in load(path).executions["e"].forest and "c1" not in load(path).executions["e"].forest


def test_repair_writes_the_good_lines_byte_for_byte_and_the_rest_aside(damaged, tmp_path):
    path, good, torn = damaged
    before = path.read_bytes()
    done = run("repair", path, "-o", tmp_path / "good.jsonl")
    assert done.exit_code == 1 and path.read_bytes() == before
    assert (tmp_path / "good.jsonl").read_bytes() == b"".join(good)
    taken = lines_in(tmp_path / "good.jsonl.taken.jsonl")
    assert [t["offset"] for t in taken] == [len(good[0] + good[1]), len(good[0] + good[1]) + 10]
    assert "base64" in taken[0] and taken[1]["text"] == torn.decode()
    assert run("repair", tmp_path / "good.jsonl", "-o", tmp_path / "again.jsonl").exit_code == 0


def test_repair_takes_out_orphans_and_a_torn_tail(tmp_path):
    writer, text, lines = CallWriter(), [7, 8], []
    for i in range(4):
        call = make_call(f"c{i}", text, [i, 9])
        lines.append(writer.call(call, f"c{i - 1}" if i else None, len(text) - 1 if i else 0))
        text = [*text, i, 9, 5]
    (tmp_path / "in.jsonl").write_bytes(lines[0] + b"x\n" + lines[2] + lines[3][:40])
    done = run("repair", tmp_path / "in.jsonl", "-o", tmp_path / "out.jsonl")
    assert done.exit_code == 1 and (tmp_path / "out.jsonl").read_bytes() == lines[0]
    assert len((tmp_path / "out.jsonl.taken.jsonl").read_bytes().splitlines()) == 3


# ---- lines that are odd --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("line", [b"12", b'"x"', b"[]", b"null", b"true", b"{}", b'{"k":7}'])
def test_valid_json_that_is_no_record_is_a_bad_line(line, log):
    log.write_bytes(line + b"\n" + log.read_bytes())
    done = told(log)
    assert (done["damage"]["bad_records"], done["calls"]) == (1, 6)
    assert run("dedup", log).exit_code == 1


def test_an_unknown_kind_is_skipped_and_counted(log):
    log.write_bytes(b'{"k":"hologram","exec":"e"}\n' + log.read_bytes())
    done = run("dedup", log)
    assert done.exit_code == 0 and "records of unknown kind 'hologram': 1" in done.stdout


@pytest.mark.parametrize(
    "change",
    [
        lambda data: b"\xef\xbb\xbf" + data,
        lambda data: data.replace(b"\n", b"\r\n"),
        lambda data: data.replace(b"\n", b"\n\n\n"),
        lambda data: data.replace(b"\n", b"\n" + b"\x00" * 4096),
        lambda data: b"\x00" * 70_000 + b"\n" + data,
        lambda data: b"\n".join(b"  " + line + b"\t" for line in data.splitlines()),
    ],
    ids=["bom", "crlf", "blank-lines", "nul-runs", "nul-head", "indented"],
)
def test_harmless_bytes_around_lines_change_nothing(change, log):
    before = {name: e.forest.digest() for name, e in load(log).executions.items()}
    log.write_bytes(change(log.read_bytes()))
    assert {name: e.forest.digest() for name, e in load(log).executions.items()} == before
    assert run("dedup", log, "--strict").exit_code == 0


def test_a_newer_major_version_is_refused_in_one_line(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"k":"run","schema":"gyre.run/2"}\n')
    done = run("dedup", tmp_path / "in.jsonl")
    assert done.exit_code == 2 and "update gyre" in done.stderr and len(done.stderr.splitlines()) == 1


# ---- the same id twice ---------------------------------------------------------------------------------------------


def test_the_same_call_again_is_ignored_whatever_its_form(log):
    before = load(log).executions["e"].forest.digest()
    writer, calls = CallWriter(), story().calls
    writer.call(calls[0])
    shorter = writer.call(calls[3], base="c0", keep=1)
    log.write_bytes(log.read_bytes() + encode(calls[2]) + shorter)
    assert run("dedup", log).exit_code == 0
    assert told(log)["damage"]["duplicates"] == 2 and load(log).executions["e"].forest.digest() == before


@pytest.mark.parametrize("at_once", [0, 100])
@pytest.mark.parametrize("files", [1, 2])
def test_another_payload_under_an_id_quarantines_the_execution_and_no_other(files, at_once, log):
    other = make_call("c0", [1, 2, 3], [9, 9])
    neighbour = [encode(make_call(f"n{i}", [1, 2], [i, 7], execution="f", label="main", seq=i)) for i in range(2)]
    if files == 2:
        log.with_name("late.jsonl").write_bytes(encode(other) + b"".join(neighbour))
    else:
        log.write_bytes(log.read_bytes() + encode(other) + b"".join(neighbour))
    stream = Stream(log.parent if files == 2 else log, at_once=at_once)
    choices = {e.id: choose(e.forest, withheld=e.withheld()) for e in stream.executions()}
    assert choices["e"].owned == 0 and set(choices["e"].dropped) == {"conflict"}
    assert sum(choices["e"].dropped.values()) == choices["e"].sampled
    assert choices["f"].owned > 0
    assert [c[:2] for c in stream.recording.conflicts] == [("e", "c0")]


def test_a_conflict_is_said_by_every_command_and_sampled_by_none(log, tmp_path):
    log.write_bytes(log.read_bytes() + encode(make_call("c0", [1], [9])))
    done = run("dedup", log)
    assert done.exit_code == 1 and "1 execution quarantined" in done.stdout
    assert (told(log)["quarantined"], told(log)["owned"]) == (1, 0)
    assert run("check", log).exit_code == 1 and "came twice" in run("check", log).stdout
    assert "c0 came twice" in run("show", log).stdout
    assert "conflict 13" in run("choose", log).stdout
    sampled = run("sample", log, "-o", tmp_path / "s", "--json")
    assert orjson.loads(sampled.stdout)["withheld"] == {"conflict": 1} and not (tmp_path / "s").read_bytes()


@pytest.mark.parametrize("name", ["slim.jsonl", "slim.gtr"])
def test_a_quarantined_execution_stays_so_in_what_is_made_of_it(name, log, tmp_path):
    log.write_bytes(log.read_bytes() + encode(make_call("c0", [1], [9])))
    run("dedup", log, "-o", tmp_path / name)
    run("convert", tmp_path / name, "-o", tmp_path / "again.jsonl")
    for path in (tmp_path / name, tmp_path / "again.jsonl"):
        done = run("dedup", path)
        assert done.exit_code == 0 and "1 execution quarantined" in done.stdout  # the file itself is sound
        assert load(path).executions["e"].withheld() == "conflict"


# ---- calls that are missing ----------------------------------------------------------------------------------------


def lost_intent(data):
    return data + encode(Intent(exec="e", call="gone"))


def lost_line(data):
    return b"".join(line for line in data.splitlines(keepends=True) if b'"call":"c3"' not in line)


def lost_count(data):
    return data + encode(ExecEnd(exec="e", status="finished", calls=8))


@pytest.mark.parametrize(
    ("lose", "says"),
    [
        (lost_intent, "was dispatched and never logged"),
        (lost_line, "no call has the number 3"),
        (lost_count, "its writer logged 8 calls, 6 are here"),
    ],
)
def test_an_incomplete_execution_is_never_silently_complete(lose, says, log):
    log.write_bytes(lose(log.read_bytes()))
    for command in ("dedup", "stats", "show", "check"):
        done = run(command, log)
        assert says in done.stdout, command
        assert done.exit_code == (1 if command == "check" else 0)
    assert told(log)["incomplete"] == 1


@pytest.mark.parametrize("lose", [lost_intent, lost_line, lost_count])
def test_what_is_left_of_it_trains_unless_masked(lose, log):
    log.write_bytes(lose(log.read_bytes()))
    [execution] = load(log).executions.values()
    kept = choose(execution.forest, withheld=execution.withheld())
    masked = choose(execution.forest, withheld=execution.withheld(Rules(incomplete="mask")))
    assert kept.owned > 0 and masked.owned == 0 and masked.dropped == {"incomplete": masked.sampled}
    assert run("sample", log).stdout
    done = run("sample", log, "--incomplete", "mask")
    assert not done.stdout and "1 of them because of: incomplete" in done.stderr
    assert "incomplete" in run("choose", log, "--incomplete", "mask").stdout


def test_a_complete_execution_is_not_called_incomplete(log):
    log.write_bytes(log.read_bytes() + encode(ExecEnd(exec="e", status="finished", calls=6)))
    assert told(log)["incomplete"] == 0 and run("sample", log, "--incomplete", "mask").stdout


# ---- size ----------------------------------------------------------------------------------------------------------


def test_a_line_of_64_megabytes_is_a_line(tmp_path):
    prompt = np.arange(6_200_000, dtype=np.int32) + 1_000_000_000
    (tmp_path / "in.jsonl").write_bytes(encode(make_call("a", prompt)) + encode(make_call("b", [7])))
    assert (tmp_path / "in.jsonl").stat().st_size > 64 << 20
    assert load(tmp_path / "in.jsonl").executions["e"].forest.unique_tokens() == 6_200_000 + 2 + 3


_PEAK = """
import re, sys
from gyre_cli.trajtools import main
try:
    main(["dedup", "--json", sys.argv[1]])
except SystemExit as done:
    assert not done.code, done.code
print(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1], file=sys.stderr)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_a_line_of_256_megabytes_is_read_in_a_few_times_its_size(tmp_path):
    path, tokens = tmp_path / "in.jsonl", 24_500_000
    block = np.arange(500_000, dtype=np.int32) + 1_000_000_000
    text = orjson.dumps(block, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
    with path.open("wb") as file:  # in pieces: the test itself stays small
        file.write(b'{"k":"call","exec":"e","call":"a","label":"main","prompt_ids":[')
        for i in range(tokens // len(block)):
            file.write(b"," * bool(i) + text)
        file.write(b'],"completion_ids":[4,5],"logprobs":[-0.5,-1.0]}\n')
        file.write(encode(make_call("b", [7], seq=1, label="main")))
    assert path.stat().st_size > 256 << 20
    done = subprocess.run([sys.executable, "-c", _PEAK, str(path)], capture_output=True, text=True, check=True)
    path.unlink()
    assert orjson.loads(done.stdout)["tokens_unique"] == tokens + 2 + 3
    assert int(done.stderr) << 10 < 7 * (256 << 20)


@pytest.mark.parametrize("block", [64, 1000])
def test_lines_longer_than_a_block_are_read_alike(block, monkeypatch):
    rng = np.random.default_rng(block)
    text, lines = rng.integers(0, 50_000, 300), []
    for i in range(30):
        lines.append(encode(make_call(f"c{i}", text, rng.integers(0, 50_000, 9), seq=i)))
        text = np.concatenate([text[: int(rng.choice([len(text), 250]))], rng.integers(0, 50_000, 20)])
    data = b"\n".join(lines) + b'{"k":"call"'
    before = load(io.BytesIO(data)).executions["e"].forest.digest()
    monkeypatch.setattr(runlines, "BLOCK_BYTES", block)
    recording = load(io.BytesIO(data))
    assert recording.executions["e"].forest.digest() == before
    assert recording.reports["-"].torn == (len(data) - 11, 11)


def said_both_ways(path, tmp_path):
    """What a stream of a file says, all at once and one execution at a time."""
    said = []
    for at_once in (0, 100):
        stream = Stream(path, at_once=at_once, side=tmp_path / f"side{at_once}")
        digests = {e.id: (e.forest.digest(), e.withheld()) for e in stream.executions()}
        assert len(stream.recording.executions) == (9 if at_once else 0)  # those of before were let go
        [report] = stream.recording.reports.values()
        conflicts = stream.recording.conflicts
        said.append((digests, len(report.bad), report.duplicates, report.torn, stream.recording.size, conflicts))
    assert said[0] == said[1]
    assert said[0][0]["e0"][1] == "conflict" and len(said[0][5]) == 1
    assert lines_in(tmp_path / "side0") == lines_in(tmp_path / "side100")
    return said[0]


@pytest.mark.parametrize("seed", range(8))
def test_one_execution_at_a_time_says_what_all_at_once_says(seed, tmp_path):
    rng = np.random.default_rng(seed)
    calls = [c for i in range(9) for c in random_execution(rng, calls=6, execution=f"e{i}")]
    lines = [encode(c) for c in calls]
    lines[5] = lines[5][:50] + lines[17]  # glued over executions
    lines[9] = b"garbage\n"
    lines[11] = orjson.dumps(dict(reversed(orjson.loads(lines[11]).items()))) + b"\n"
    lines.append(encode(make_call(calls[3].call, [1], [9], execution="e0")))
    (tmp_path / "in.jsonl").write_bytes(b"".join(lines[i] for i in rng.permutation(len(lines))) + lines[3][:20])
    said_both_ways(tmp_path / "in.jsonl", tmp_path)


@pytest.mark.parametrize("seed", range(8))
def test_one_execution_at_a_time_out_of_frames_says_what_all_at_once_says(seed, tmp_path):
    rng = np.random.default_rng(seed)
    calls = [c for i in range(9) for c in random_execution(rng, calls=6, execution=f"e{i}")]
    frames = [framed(c) for c in calls]
    frames[5] = frames[5][:50] + frames[17]  # glued over executions
    frames[9] = b"garbage"
    frames[11] = frames[11][:-1] + bytes([frames[11][-1] ^ 1])
    frames.append(framed(make_call(calls[3].call, [1], [9], execution="e0")))
    frames = [frames[i] for i in rng.permutation(len(frames))]
    (tmp_path / "in.gtr").write_bytes(MAGIC + b"".join([*frames, framed(Note(text="last")), frames[3][:60]]))
    said = said_both_ways(tmp_path / "in.gtr", tmp_path)
    assert 1 <= said[1] <= 3 and said[3] is not None  # neighbours in damage are one piece


# ---- what no command does ------------------------------------------------------------------------------------------


def commands(source, out):
    return [
        ("dedup", source, "-o", out / "o.jsonl"),
        ("stats", source),
        ("check", source),
        ("tree", source, "--svg", out / "o.svg", "--html", out / "o.html"),
        ("show", source),
        ("choose", source),
        ("sample", source, "-o", out / "o.samples"),
        ("score", source, "-o", out / "o.scored", "--set", "e=1"),
        ("diff", source, source),
        ("convert", source, "-o", out / "o.gtr"),
        ("repair", source, "-o", out / "o.repaired"),
    ]


def test_no_command_changes_its_input_opens_a_connection_or_needs_a_tokenizer(log, tmp_path, monkeypatch):
    def refuse(*a, **kw):
        raise AssertionError("a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    before, at = log.read_bytes(), log.stat().st_mtime_ns
    out = tmp_path / "out"
    out.mkdir()
    for words in commands(log, out):
        done = run(*words)
        assert done.exit_code == 0, (words, done.output, done.exception)
    assert (log.read_bytes(), log.stat().st_mtime_ns) == (before, at)
    assert {p.name for p in tmp_path.iterdir()} == {"run.jsonl", "out"}


def test_every_command_speaks_json(log, tmp_path):
    for words in commands(log, tmp_path):
        done = run(*words, "--json")
        assert done.exit_code == 0, (words, done.output, done.exception)
        rows = [orjson.loads(line) for line in done.stdout.splitlines()]
        assert rows and all(isinstance(row, dict) for row in rows)


def test_dedup_writes_the_same_bytes_for_the_same_set_of_calls(tmp_path):
    rng = np.random.default_rng(2)
    lines = [encode(c) for i in range(3) for c in random_execution(rng, execution=f"e{i}")]
    outs = []
    for n in range(6):
        (tmp_path / "in.jsonl").write_bytes(b"".join(lines[i] for i in rng.permutation(len(lines))))
        run("dedup", tmp_path / "in.jsonl", "-o", tmp_path / f"o{n}.jsonl")
        outs.append((tmp_path / f"o{n}.jsonl").read_bytes())
    assert len(set(outs)) == 1


def test_rewards_in_a_torn_file_never_become_zero(log):
    log.write_bytes(log.read_bytes() + encode(Reward(exec="e", status="evaluator_failed", error="crashed"))[:-4])
    assert load(log).executions["e"].reward.value == 1.0


@pytest.mark.parametrize("name", ["claude_session.jsonl", "binary"])
def test_repair_of_what_is_no_run_file_is_refused_and_says_what_to_do(name, log, tmp_path):
    source = Path(__file__).parent / "data" / name
    if name == "binary":
        source = tmp_path / "in.gtr"
        run("convert", log, "-o", source)
    done = run("repair", source, "-o", tmp_path / "o.jsonl")
    assert done.exit_code == 2 and "trajtools convert" in done.stderr and not (tmp_path / "o.jsonl").exists()
