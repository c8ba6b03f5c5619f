"""A call log as proxyd writes it, under the commands: live, torn, damaged, and as lines for a person to look into."""

from __future__ import annotations

import orjson
import pytest
from click.testing import CliRunner
from trajbuild import story

from gyre_base.runfile import CallWriter, Intent, Note, RunHeader, framed, record_frame
from gyre_base.runframes import MAGIC, Frames
from gyre_cli.trajtools import main
from trajtools.load import load


def run(*arguments):
    return CliRunner().invoke(main, [str(a) for a in arguments])


@pytest.fixture
def calls(tmp_path):
    """The one file of a run's calls/: a header, six calls of one execution of which two are deltas, a relabel."""
    (tmp_path / "calls").mkdir()
    path = tmp_path / "calls" / "proxyd-0-1.gtr"
    writer = CallWriter(form=record_frame)
    frames = [framed(RunHeader(run="r", writer="proxyd-0"))]
    for call in story().calls:
        base, keep = {"c3": ("c0", 5), "c4": ("c3", 9)}.get(call.call, (None, 0))
        frames.append(writer.call(call, base, keep))
    about = {"call": "c5", "purpose": "turn", "label": "main"}
    path.write_bytes(MAGIC + b"".join([*frames, framed(Note(text="relabel", exec="e", extra=about))]))
    return path


def places(path):
    with path.open("rb") as file:
        return list(Frames(file))


def flip(path, frame, back=2):
    data = bytearray(path.read_bytes())
    data[frame.end - back] ^= 16
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("command", ["dedup", "stats", "tree", "show", "check", "choose"])
def test_every_report_reads_a_log_and_its_run(command, calls, tmp_path):
    for source in (calls, calls.parent, tmp_path):
        done = run(command, source)
        assert done.exit_code == 0 and done.stdout
        assert done.stdout == run(command, calls).stdout


def test_a_log_as_lines_and_as_blocks_says_the_same(calls, tmp_path):
    for name in ("run.jsonl", "run.gtr"):
        assert run("convert", calls, "-o", tmp_path / name).exit_code == 0
        assert run("diff", calls, tmp_path / name).exit_code == 0
    rows = [orjson.loads(line) for line in (tmp_path / "run.jsonl").read_bytes().splitlines()]
    assert [row["k"] for row in rows] == ["run", "note", *["call"] * 6]
    assert load(tmp_path / "run.gtr").executions["e"].forest.digest() == load(calls).executions["e"].forest.digest()


def test_a_torn_last_frame_is_told_and_fine_unless_strict(calls):
    last = places(calls)[-1]
    calls.write_bytes(calls.read_bytes()[:-3])
    done = run("dedup", calls)
    size = last.end - last.start - 3
    assert f"torn last frame in proxyd-0-1.gtr at byte {last.start}: {size} bytes, not read" in done.stdout
    assert done.exit_code == 0 and run("dedup", calls, "--strict").exit_code == 1
    assert "the last frame is torn" in run("check", calls).stdout


def test_a_changed_byte_is_told_with_its_offset_and_the_rest_is_read(calls):
    frame = places(calls)[2]
    flip(calls, frame)
    done = run("dedup", calls)
    size = frame.end - frame.start
    assert f"left out of proxyd-0-1.gtr at byte {frame.start}, {size} bytes: its checksum does not fit" in done.stdout
    assert done.exit_code == 1 and run("check", calls).exit_code == 1
    assert sorted(m.id for m in load(calls).executions["e"].forest.marks()) == ["c0", "c2", "c3", "c4", "c5"]


def test_a_call_that_leans_on_a_damaged_one_is_left_out_and_told(calls):
    flip(calls, places(calls)[1])
    told = orjson.loads(run("dedup", calls, "--json").stdout)
    assert [reason for *_, reason in told["damage"]["bad"]] == [
        "its checksum does not fit",
        "its base c0 is missing (an orphan until the next full call)",
        "its base c3 is missing (an orphan until the next full call)",
    ]


def test_repair_copies_good_frames_byte_for_byte_and_sets_the_rest_aside(calls, tmp_path):
    found = places(calls)
    data = calls.read_bytes()
    calls.write_bytes(data + framed(Intent(exec="e", call="c9"))[:-1])
    flip(calls, found[2])
    before = calls.read_bytes()
    done = run("repair", calls, "-o", tmp_path / "good.gtr")
    assert done.exit_code == 1 and calls.read_bytes() == before
    assert (tmp_path / "good.gtr").read_bytes() == data[: found[2].start] + data[found[2].end :]
    taken = [orjson.loads(line) for line in (tmp_path / "good.gtr.taken.jsonl").read_bytes().splitlines()]
    assert [(t["offset"], t["reason"]) for t in taken] == [
        (found[2].start, "its checksum does not fit"),
        (len(data), "the last frame is torn"),
    ]
    assert run("repair", tmp_path / "good.gtr", "-o", tmp_path / "again.gtr").exit_code == 0


@pytest.mark.parametrize("size", [0, 4, len(MAGIC)])
def test_a_life_that_wrote_nothing_is_no_trouble(size, calls):
    (calls.parent / "proxyd-0-2.gtr").write_bytes(MAGIC[:size])
    done = run("dedup", calls.parent)
    assert done.exit_code == 0 and done.stdout.startswith("1 execution, 6 calls")


def test_a_torn_log_takes_a_score_behind_its_whole_frames(calls, tmp_path):
    whole = calls.read_bytes()
    calls.write_bytes(whole + framed(Note(text="torn"))[:-1])
    assert run("score", calls, "-o", tmp_path / "scored.gtr", "--set", "e=0.5").exit_code == 0
    assert (tmp_path / "scored.gtr").read_bytes().startswith(whole)
    assert load(tmp_path / "scored.gtr").executions["e"].reward.value == 0.5
    run("convert", calls, "-o", tmp_path / "blocks.gtr")
    done = run("score", tmp_path / "blocks.gtr", "-o", tmp_path / "x.gtr", "--set", "e=1")
    assert done.exit_code == 2 and "trajtools convert" in done.stderr
