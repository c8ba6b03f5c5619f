"""The commands as a user meets them: results on stdout, one clear line for bad input, exit codes of DESIGN 12."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import orjson
import pytest
from click.testing import CliRunner
from trajbuild import Story, make_call, story

from gyre_base.runfile import ExecEnd, ExecStart, encode
from gyre_cli.trajtools import main
from trajtools.load import load

DATA = Path(__file__).parent / "data"


def run(*arguments, given=None):
    return CliRunner().invoke(main, [str(a) for a in arguments], input=given)


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


def test_writing_commands_are_filters_too(log, tmp_path):
    torn = log.read_bytes() + b'{"k":"call","exec'
    for words, given, code in (
        (["score", "-", "-o", tmp_path / "scored", "--set", "e=0"], log.read_bytes(), 0),
        (["repair", "-", "-o", tmp_path / "whole"], torn, 1),
        (["convert", "-", "-o", tmp_path / "converted.jsonl"], log.read_bytes(), 0),
        (["diff", "-", log], log.read_bytes(), 0),
        (["diff", log, "-"], log.read_bytes(), 0),
    ):
        done = run(*words, given=given)
        assert done.exit_code == code, (words, done.output)
    assert (tmp_path / "whole").read_bytes() == log.read_bytes()
    assert load(tmp_path / "scored").executions["e"].reward.value == 0.0
    for words in (["diff", "-", "-"], ["score", "-", "-o", tmp_path / "x", "--rewards", "-"]):
        done = run(*words, given=log.read_bytes())
        assert done.exit_code == 2 and "standard input" in done.stderr


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


def test_durations_go_from_a_recorded_run_to_the_simulator_and_the_planner(tmp_path):
    from gyre_cli.cellctl import main as cellctl

    lines = []
    for i in range(6):
        name, group = f"e{i}", f"t{i % 2}"
        lines.append(encode(ExecStart(exec=name, task=group, group=group, started=0.0)))
        lines += [encode(dataclasses.replace(call, exec=name)) for call in story().calls]
        lines.append(encode(ExecEnd(exec=name, status="finished", calls=6, ended=3600.0 * (1 + i))))
    (tmp_path / "run.jsonl").write_bytes(b"".join(lines))
    (tmp_path / "durations").write_text(run("stats", tmp_path / "run.jsonl", "--json").stdout)
    rows = [orjson.loads(line) for line in (tmp_path / "durations").read_bytes().splitlines()]
    assert rows[1:] == [
        {"task": "t0", "executions": 3, "duration_s": [3600.0, 10800.0, 18000.0]},
        {"task": "t1", "executions": 3, "duration_s": [7200.0, 14400.0, 21600.0]},
    ]
    few = ["--durations", str(tmp_path / "durations"), "--seeds", "1", "--json"]
    simulated = CliRunner().invoke(
        cellctl, ["simulate", "--profile", "qwengyre-122b", "--policy", "elastic", "--steps", "1", *few]
    )
    assert simulated.exit_code == 0, simulated.output
    assert 1.0 < orjson.loads(simulated.stdout)["hours"] < 7.0  # the model's own would be days
    planned = CliRunner().invoke(cellctl, ["plan", "--gpus", "16", *few])
    assert planned.exit_code in (0, 1) and "gain_over_colocate" in orjson.loads(planned.stdout)


@pytest.mark.parametrize("source", ["", "calls"])
def test_the_calls_of_a_run_come_with_the_outcomes_beside_them(source, tmp_path):
    (tmp_path / "calls").mkdir()
    for name, told in (("g1-00.0", {"outcome": "scored", "score": 0.5, "wall_s": 90.0}), ("g1-01.0", None)):
        calls = [encode(dataclasses.replace(call, exec=name)) for call in story().calls]
        (tmp_path / "calls" / f"{name}.jsonl").write_bytes(b"".join(calls))
        (tmp_path / "executions" / name).mkdir(parents=True)
        if told is not None:
            (tmp_path / "executions" / name / "outcome.json").write_bytes(orjson.dumps(told))
    rows = [orjson.loads(line) for line in run("stats", tmp_path / source, "--json").stdout.splitlines()]
    assert rows[0]["outcomes"] == {"scored": 1, "unscored": 1} and rows[0]["mean_score"] == 0.5
    assert rows[0]["execution_s"]["max"] == 90.0 and rows[1]["task"] == ""
    assert rows[2] == {"task": "g1", "executions": 1, "duration_s": [90.0]}
    assert "g1-00.0  scored 0.5" in run("tree", tmp_path / source).stdout
    assert run("dedup", tmp_path / source, "-o", tmp_path / "slim.jsonl").exit_code == 0
    assert load(tmp_path / "slim.jsonl").executions["g1-00.0"].reward.value == 0.5


def test_an_empty_folder_is_said_to_be_empty(tmp_path):
    done = run("dedup", tmp_path)
    assert done.exit_code == 2 and "no run files in" in done.stderr


def test_long_ids_are_shortened_for_people_and_found_again_by_their_short_form_or_beginning(tmp_path):
    names = ["cf68495905ed448292205651ccb4cde3", "cf77777705ed448292205651ccb4cde3"]
    calls = [make_call(name, [1, 2], [i], label="main", seq=i, t0=i) for i, name in enumerate(names)]
    (tmp_path / "in.jsonl").write_bytes(b"".join(map(encode, calls)))
    assert "cf684959…cde3" in run("show", tmp_path / "in.jsonl").stdout
    for given in ("cf684959…cde3", "cf68", names[0]):
        assert orjson.loads(run("show", tmp_path / "in.jsonl", "-", given, "--json").stdout)["head"]["call"] == names[0]
    both = run("show", tmp_path / "in.jsonl", "-", "cf")
    assert both.exit_code == 2 and "several calls begin with cf" in both.stderr and names[1] in both.stderr
