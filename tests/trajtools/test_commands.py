"""The commands as a user meets them: results on stdout, one clear line for bad input, exit codes of DESIGN 12."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import orjson
import pytest
from click.testing import CliRunner
from trajbuild import Story, make_call, random_execution

from gyre_base.runfile import CallWriter, ExecStart, Intent, Reward, encode
from gyre_cli.trajtools import main
from trajtools.load import Stream, load

DATA = Path(__file__).parent / "data"


def run(*arguments, given=None):
    return CliRunner().invoke(main, [str(a) for a in arguments], input=given)


def story():
    told = Story()
    text = told.say([1, 2, 3], [10, 11])
    sub = told.say([1, 20], [21, 22], agent="s1")
    told.say([*sub, 5], [23, 24, 25], agent="s1")
    text = told.say([*text, 6], [12, 13, 14])
    told.say([*text, 8], [50, 51], purpose="summary")
    told.say([1, 2, 50, 51], [15])
    return told


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "run.jsonl"
    rewards = encode(Reward(exec="e", status="scored", value=1.0))
    path.write_bytes(encode(ExecStart(exec="e", group="g")) + b"".join(map(encode, story().calls)) + rewards)
    return path


# ---- each command --------------------------------------------------------------------------------------------------


def test_tree_draws_branches_under_the_line_they_leave(log):
    done = run("tree", log)
    assert done.exit_code == 0
    assert done.stdout.splitlines() == [
        "e  scored 1  6 calls  43 tokens recorded, 22 distinct (2.0x), 13 trained",
        "└─ main-summary  3 calls c0..c4  0 → 12 tokens  7 sampled  7 trained",
        "   ├─ sub-agent s1  2 calls c1..c2  1 → 8 tokens  5 sampled  5 trained  [sub-agent at 1, 4 lost]",
        "   └─ main  1 call c5  2 → 5 tokens  1 sampled  1 trained  [compaction at 2, 10 lost]",
    ]


def test_tree_folds_by_depth_and_says_what_it_folded(log):
    assert run("tree", log, "--depth", "0").stdout.splitlines()[-1] == "   └─ … 2 more branches, 3 calls"


def test_tree_as_json_has_one_object_per_line_of_the_tree(log):
    rows = [orjson.loads(line) for line in run("tree", log, "--json").stdout.splitlines()]
    assert [(r["parent"], r["kind"], r["left_by"]) for r in rows] == [
        (None, "main-summary", ""), (0, "sub-agent", "sub-agent"), (0, "main", "compaction"),
    ]  # fmt: skip


def test_pictures_are_well_formed_escaped_and_fetch_nothing(tmp_path):
    told = Story(execution="<e & co>")
    told.say([1], [2], agent='"a<b>"')
    (tmp_path / "in.jsonl").write_bytes(b"".join(map(encode, told.calls)))
    assert run("tree", tmp_path / "in.jsonl", "--svg", tmp_path / "t.svg", "--html", tmp_path / "t.html").exit_code == 0
    ET.parse(tmp_path / "t.svg")
    page = (tmp_path / "t.html").read_text()
    assert "<script" not in page and "&lt;e &amp; co&gt;" in page and "src=" not in page


def test_show_goes_from_executions_to_calls_to_one_call(log):
    assert "c4" in run("show", log).stdout
    assert "10 11" in run("show", log, "e", "c0").stdout
    assert run("show", log, "-", "c0").exit_code == 0
    missing = run("show", log, "e", "nobody")
    assert missing.exit_code == 2 and "no call nobody" in missing.stderr


def test_choose_says_what_is_kept_and_why(log):
    lines = run("choose", log, "--jmax", "2").stdout.splitlines()
    assert lines[0].startswith("e: 2 kept, 8 of 13 sampled tokens trained (62%)")
    assert "slots are full (Jmax 2)" in lines[3]


def test_score_attaches_rewards_and_leaves_the_calls_byte_for_byte(log, tmp_path):
    (tmp_path / "r").write_text('{"exec":"e","value":0}\n{"exec":"ghost","value":1}\n')
    done = run("score", log, "-o", tmp_path / "scored.jsonl", "--rewards", tmp_path / "r")
    assert done.exit_code == 1 and "ghost" in done.stdout
    assert (tmp_path / "scored.jsonl").read_bytes().startswith(log.read_bytes())
    reward = load(tmp_path / "scored.jsonl").executions["e"].reward
    assert (reward.status, reward.value) == ("scored", 0.0)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"exec":"e","value":null,"status":"scored"}', "never 0"),
        ('{"exec":"e","value":"1"}', "not a number"),
        ('{"exec":"e","value":1,"status":"great"}', "no outcome"),
        ('{"value":1}', "no exec"),
        ("{", "not JSON"),
    ],
)
def test_a_reward_that_cannot_be_meant_is_refused(line, says, log, tmp_path):
    (tmp_path / "r").write_text(line)
    done = run("score", log, "-o", tmp_path / "o", "--rewards", tmp_path / "r")
    assert done.exit_code == 2 and says in done.stderr and not (tmp_path / "o").exists()


def test_null_is_unscored_and_reaches_no_baseline(log, tmp_path):
    assert run("score", log, "-o", tmp_path / "o.jsonl", "--set", "e=null").exit_code == 0
    assert load(tmp_path / "o.jsonl").executions["e"].reward.status == "unscored"
    row = orjson.loads(run("sample", tmp_path / "o.jsonl").stdout.splitlines()[0])
    assert row["advantage"] is None and row["score"] is None


def test_flat_and_tree_samples_own_the_same_tokens_and_weigh_one(log):
    flat = [orjson.loads(x) for x in run("sample", log).stdout.splitlines()]
    [tree] = [orjson.loads(x) for x in run("sample", log, "--form", "tree").stdout.splitlines()]
    owned = sorted(t for row in flat for t, mine in zip(row["tokens"], row["owned"], strict=True) if mine)
    assert owned == sorted(t for t, mine in zip(tree["tokens"], tree["owned"], strict=True) if mine)
    assert sum(sum(row["owned"]) * row["weight"] for row in flat) == pytest.approx(1.0, abs=1e-9)
    tin, tout = tree["tin"], tree["tout"]
    for b, (_, _, parent) in enumerate(tree["segments"]):
        above, walked = {a for a in range(len(tin)) if tin[a] <= tin[b] < tout[a]}, {b}
        while parent >= 0:
            walked.add(parent)
            parent = tree["segments"][parent][2]
        assert above == walked


def test_diff_names_the_first_token_that_differs(log, tmp_path):
    calls = story().calls
    calls[3].prompt_ids[4] = 99
    (tmp_path / "other.jsonl").write_bytes(b"".join(map(encode, calls)))
    done = run("diff", log, tmp_path / "other.jsonl")
    assert done.exit_code == 1
    assert "tokens     e c3: first at 4" in done.stdout and "reward" in done.stdout


def test_convert_refuses_what_a_form_cannot_hold(log, tmp_path):
    done = run("convert", DATA / "nemogym_rollout.jsonl", "-o", tmp_path / "x", "--to", "gtr")
    assert done.exit_code == 2 and ".gtr" in done.stderr


@pytest.mark.parametrize("command", ["dedup", "stats", "check", "tree", "show", "choose", "sample"])
def test_every_reading_command_is_a_filter_with_json(command, log):
    done = run(command, "--json", "-", given=log.read_bytes())
    assert done.exit_code == 0
    assert all(isinstance(orjson.loads(line), dict) for line in done.stdout.splitlines())


@pytest.mark.parametrize("command", ["dedup", "stats", "check", "tree", "show", "choose", "sample"])
@pytest.mark.parametrize(("text", "says"), [("hello\n", "not JSON"), ('{"a":1}\n', "keys a"), ("[1,2]", "list")])
def test_bad_input_is_one_clear_line(command, text, says, tmp_path):
    (tmp_path / "in").write_text(text)
    done = run(command, tmp_path / "in")
    assert done.exit_code == 2
    assert len(done.stderr.splitlines()) == 1 and says in done.stderr
    gone = run(command, tmp_path / "nowhere")
    assert gone.exit_code == 2 and "no such file" in gone.stderr


def test_inputs_are_never_an_output(log):
    before = log.read_bytes()
    for arguments in (("dedup", log, "-o", log), ("convert", log, "-o", log), ("repair", log, "-o", log)):
        done = run(*arguments)
        assert done.exit_code == 2 and "never changed" in done.stderr
    assert log.read_bytes() == before


def test_a_tokenizer_turns_the_examples_into_text(log, tmp_path):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    Tokenizer(WordLevel({f"w{i}": i for i in range(60)}, unk_token="w0")).save(str(tmp_path / "tokenizer.json"))
    assert "became 'w20'" in run("dedup", log, "--tokenizer", tmp_path).stdout
    assert "w10 w11" in run("show", log, "e", "c0", "--tokenizer", tmp_path).stdout
    assert run("dedup", log, "--tokenizer", tmp_path / "none").exit_code == 2


def test_help_imports_nothing_heavy():
    look = "print([m for m in ('numpy', 'rich', 'tokenizers') if m in sys.modules])"
    code = f"import sys; from gyre_cli.trajtools import main; {look}"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


# ---- the robustness contract ---------------------------------------------------------------------------------------


def test_a_torn_last_line_is_reported_and_fine_unless_strict(log):
    whole = log.read_bytes()
    log.write_bytes(whole[:-9])
    done = run("dedup", log)
    assert done.exit_code == 0 and "torn last line in run.jsonl at byte" in done.stdout
    assert run("dedup", log, "--strict").exit_code == 1
    log.write_bytes(whole[:-1])  # whole but for its newline: data
    assert run("dedup", log, "--strict").exit_code == 0


def test_a_bad_middle_line_is_counted_and_repair_takes_it_out_with_its_reason(log, tmp_path):
    lines = log.read_bytes().splitlines(keepends=True)
    bad = [*lines[:2], b"garbage \xff\n", lines[2][:30] + lines[3], *lines[4:]]
    log.write_bytes(b"".join(bad))
    assert run("dedup", log).exit_code == 1
    done = run("repair", log, "-o", tmp_path / "good.jsonl")
    assert done.exit_code == 1 and log.read_bytes() == b"".join(bad)
    assert (tmp_path / "good.jsonl").read_bytes() == b"".join([*lines[:2], lines[3], *lines[4:]])
    taken = [orjson.loads(x) for x in (tmp_path / "good.jsonl.taken.jsonl").read_bytes().splitlines()]
    assert [t["offset"] for t in taken] == [len(lines[0] + lines[1]), len(lines[0] + lines[1]) + 10]
    assert "base64" in taken[0] and taken[1]["text"] == lines[2][:30].decode() and all(t["reason"] for t in taken)
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


def test_conflicts_and_lost_calls_are_never_silent(log):
    log.write_bytes(log.read_bytes() + encode(make_call("c0", [1], [9])) + encode(Intent(exec="e", call="gone")))
    assert run("dedup", log).exit_code == 1
    done = run("check", log)
    assert done.exit_code == 1 and "came twice" in done.stdout and "was dispatched and never logged" in done.stdout


def test_valid_json_that_is_no_record_has_a_defined_outcome(log):
    odd = b'\xef\xbb\xbf\r\n12\n"x"\n[]\nnull\n{"k":"hologram"}\n\x00\x00\x00\n\n'
    log.write_bytes(odd + log.read_bytes().replace(b"\n", b"\r\n"))
    done = run("dedup", log, "--json")
    damage = orjson.loads(done.stdout)["damage"]
    assert done.exit_code == 1
    assert (damage["bad_lines"], damage["unknown_kinds"]) == (4, {"hologram": 1})
    assert orjson.loads(done.stdout)["calls"] == 6


def test_a_newer_major_version_is_refused_in_one_line(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"k":"run","schema":"gyre.run/2"}\n')
    done = run("dedup", tmp_path / "in.jsonl")
    assert done.exit_code == 2 and "update gyre" in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_line_of_64_megabytes_is_a_line(tmp_path):
    prompt = np.arange(6_200_000, dtype=np.int32) + 1_000_000_000
    (tmp_path / "in.jsonl").write_bytes(encode(make_call("a", prompt)) + encode(make_call("b", [7])))
    assert (tmp_path / "in.jsonl").stat().st_size > 64 << 20
    assert load(tmp_path / "in.jsonl").executions["e"].forest.unique_tokens() == 6_200_000 + 2 + 3


@pytest.mark.parametrize("seed", range(8))
def test_one_execution_at_a_time_says_what_all_at_once_says(seed, tmp_path):
    rng = np.random.default_rng(seed)
    calls = [c for i in range(9) for c in random_execution(rng, calls=6, execution=f"e{i}")]
    lines = [encode(c) for c in calls]
    lines[5] = lines[5][:50] + lines[17]  # glued over executions
    lines[9] = b"garbage\n"
    lines[11] = orjson.dumps(dict(reversed(orjson.loads(lines[11]).items()))) + b"\n"
    (tmp_path / "in.jsonl").write_bytes(b"".join(lines[i] for i in rng.permutation(len(lines))) + lines[3][:20])
    told = []
    for at_once in (0, 100):
        stream = Stream(tmp_path / "in.jsonl", at_once=at_once)
        digests = {e.id: e.forest.digest() for e in stream.executions()}
        [report] = stream.recording.reports.values()
        told.append((digests, len(report.bad), report.duplicates, report.torn, stream.recording.size))
    assert told[0] == told[1]


def test_dedup_writes_the_same_bytes_for_the_same_set_of_calls(tmp_path):
    rng = np.random.default_rng(2)
    lines = [encode(c) for i in range(3) for c in random_execution(rng, execution=f"e{i}")]
    outs = []
    for n in range(6):
        (tmp_path / "in.jsonl").write_bytes(b"".join(lines[i] for i in rng.permutation(len(lines))))
        run("dedup", tmp_path / "in.jsonl", "-o", tmp_path / f"o{n}.jsonl")
        outs.append((tmp_path / f"o{n}.jsonl").read_bytes())
    assert len(set(outs)) == 1
