"""Bad input: one line on stderr that says what to do, nothing on stdout, the right exit code, nothing lost.

1 the answer is no, 2 bad usage, 3 the daemon does not answer, 4 refused in this state.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gyre_base.rundir import RunDir
from tests.cli.conftest import ROOT, complains, make_run, say, until

NO, USAGE, NO_ANSWER, REFUSED = 1, 2, 3, 4
NOWHERE = "203.0.113.7"  # of a block kept for documents: no machine has it
TASK = {
    "id": "a",
    "instruction": "Do it.",
    "workspace": {},
    "evaluator": {"command": ["python", "judge.py"], "tests": {"t": ""}},
}


def configured(folder: Path, tasks: list[dict], more: str = "") -> Path:
    """A configuration that would do, but for what the test makes of it."""
    (folder / "judge.py").write_text("")
    (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    path = folder / "gyre.toml"
    path.write_text(f'model.path = "model"\ntasks.train = "tasks.jsonl"\ntasks.harness = ["true"]\n{more}')
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    return path


def up(folder: Path, config: Path) -> subprocess.CompletedProcess[str]:
    return say("gyre", "up", "--config", str(config), "--run", str(folder / "run"))


# ---- configuration and tasks ----------------------------------------------------------------------------------------


def test_a_wrong_key_names_the_right_one(tmp_path):
    config = configured(tmp_path, [TASK], "scheduler.slot_per_cell = 3\n")
    complains(up(tmp_path, config), USAGE, "scheduler.slot_per_cell", "did you mean scheduler.slots_per_cell?")
    assert not (tmp_path / "run").exists()


def test_a_missing_configuration_says_how_to_get_one(tmp_path):
    complains(up(tmp_path, tmp_path / "none.toml"), USAGE, "none.toml", "`gyre init` writes one")


@pytest.mark.parametrize(
    ("more", "key"),
    [('tasks.heldout = "none.jsonl"\n', "tasks.heldout"), ("model.tokenizer = 'none'\n", "model.tokenizer")],
)
def test_a_missing_file_is_named_with_its_key(tmp_path, more, key):
    complains(up(tmp_path, configured(tmp_path, [TASK], more)), USAGE, key, "none")
    assert not (tmp_path / "run").exists()


def test_a_task_without_an_evaluator_is_named_by_file_and_line(tmp_path):
    broken = {key: value for key, value in TASK.items() if key != "evaluator"}
    config = configured(tmp_path, [TASK, {**broken, "id": "b"}])
    complains(up(tmp_path, config), USAGE, "tasks.jsonl:2", "evaluator")
    assert not (tmp_path / "run").exists()


def test_a_written_configuration_is_not_written_over(tmp_path):
    path = tmp_path / "gyre.toml"
    assert say("gyre", "init", str(path)).returncode == 0
    path.write_text("# mine")
    complains(say("gyre", "init", str(path)), REFUSED, "exists")
    assert path.read_text() == "# mine"


@pytest.mark.parametrize(
    ("setting", "word"),
    [
        ("rubbish", "KEY=VALUE"),
        ("jmax=1", "trajectories.jmax"),
        ("scheduler.steps=many", "scheduler.steps must be int"),
    ],
)
def test_a_setting_that_is_rubbish_is_refused_before_anything_is_made(tmp_path, setting, word):
    cache = tmp_path / "cache"
    said = say("gyre", "quickstart", "--run", str(tmp_path / "run"), "--set", setting, XDG_CACHE_HOME=str(cache))
    complains(said, USAGE, word)
    assert not cache.exists()


def test_a_second_start_is_refused_and_says_which_settings_a_started_run_does_not_take(tmp_path):
    root = make_run(tmp_path / "run")
    config = configured(tmp_path, [TASK], "scheduler.steps = 7\n")
    with RunDir(root).lock("supervisor"):
        said = up(tmp_path, config)
    assert (said.returncode, said.stdout) == (REFUSED, "")
    note, *_, refusal = said.stderr.splitlines()
    assert "scheduler.steps = 7" in note and "Another --run starts anew" in note
    assert "already runs" in refusal and "gyre stop" in refusal


# ---- run directories ------------------------------------------------------------------------------------------------


def test_a_file_in_the_way_of_the_run_directory(tmp_path):
    config = configured(tmp_path, [TASK])
    (tmp_path / "run").write_text("mine")
    complains(up(tmp_path, config), USAGE, "cannot write", str(tmp_path / "run"), "--run")
    assert (tmp_path / "run").read_text() == "mine"


def test_a_quickstart_into_a_file_fails_in_the_first_second(tmp_path):
    (tmp_path / "run").write_text("mine")
    said = say("gyre", "quickstart", "--run", str(tmp_path / "run"), XDG_CACHE_HOME=str(tmp_path / "cache"))
    complains(said, USAGE, "cannot write", "--run")
    assert not (tmp_path / "cache").exists()


def test_fresh_removes_nothing_that_is_no_run(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").write_text("years of work")
    said = say("gyre", "quickstart", "--run", str(tmp_path / "thesis"), "--fresh")
    complains(said, USAGE, "not a run directory", "--run")
    assert (tmp_path / "thesis" / "chapter").exists()


@pytest.mark.parametrize("words", [("gyre", "status"), ("gyre", "report"), ("gyre", "stop"), ("cellctl", "status")])
def test_what_is_no_run_directory_is_named(tmp_path, words):
    complains(say(*words, "--run", str(tmp_path)), USAGE, str(tmp_path), "not a run directory", "gyre up")


def test_a_report_before_the_end(idle_run):
    complains(say("gyre", "report", "--run", str(idle_run)), NO, "not done", "gyre status")


# ---- daemons --------------------------------------------------------------------------------------------------------


def test_nothing_to_stop(idle_run):
    complains(say("gyre", "stop", "--run", str(idle_run)), NO_ANSWER, "nothing runs")


@pytest.mark.parametrize(
    "words", [("cellctl", "status"), ("proxyd", "routes"), ("trajd", "status"), ("celld", "status")]
)
def test_a_dead_daemon_is_named_with_its_log(idle_run, words):
    complains(say(*words, "--run", str(idle_run), "--json"), NO_ANSWER, "does not answer", f"log/{words[0]}")


def test_a_daemon_that_was_killed_does_not_answer(tmp_path):
    root = make_run(tmp_path / "run")
    line = [sys.executable, "-m", "gyre_cli.cellctl", "run", "--run", str(root)]
    with subprocess.Popen(line, env={**os.environ, "PYTHONPATH": str(ROOT)}) as process:
        until(lambda: RunDir(root).endpoint("cellctl") is not None)
        process.kill()
    stopped = ("cellctl does not answer", "nobody supervises this run, it is at step 0/")
    complains(say("gyre", "status", "--run", str(root)), NO_ANSWER, *stopped)
    (root / "summary.json").write_text("{}")
    complains(
        say("cellctl", "status", "--run", str(root)), NO_ANSWER, "does not answer", "the run is done: gyre report"
    )


@pytest.mark.parametrize("name", ["cellctl", "trajd"])
def test_a_daemon_whose_journal_is_damaged_says_where_and_is_not_started_again_and_again(name, tmp_path):
    root = make_run(tmp_path / "run")
    (root / "journal" / f"{name}.jsonl").write_text('{"at": 1.0}\n{"at": 2.0}\n')
    complains(say(name, "run", "--run", str(root)), USAGE, f"{name}.jsonl:1", "not a journal entry")


def test_a_second_daemon_of_the_same_name_is_refused(scheduler):
    complains(say("cellctl", "run", "--run", str(scheduler)), REFUSED, "cellctl already runs", "gyre stop")


def test_an_unknown_cell_is_answered_with_the_known_ones(scheduler):
    complains(say("cellctl", "explain", "c9", "--run", str(scheduler)), USAGE, "'c9'", "c0, c1")
    complains(say("celld", "status", "c9", "--run", str(scheduler)), USAGE, "'c9'", "c0, c1")
    complains(say("celld", "run", "--cell", "c9", "--run", str(scheduler)), USAGE, "'c9'", "c0, c1")


def test_an_order_that_can_not_be_carried_out_is_refused_with_the_reason(scheduler):
    said = say("cellctl", "flip", "c1", "--to", "train", "--run", str(scheduler))
    complains(said, REFUSED, "c1 is starting", "only a cell in rollout")


def test_answers_are_data_on_stdout_alone(scheduler):
    for words in (("gyre", "status"), ("cellctl", "status"), ("cellctl", "explain")):
        said = say(*words, "--run", str(scheduler), "--json")
        assert (said.returncode, said.stderr) == (0, "")
        assert all(isinstance(json.loads(line), dict) for line in said.stdout.splitlines())
        piped = say(*words, "--run", str(scheduler))
        assert piped.returncode == 0 and "\x1b" not in piped.stdout


@pytest.mark.parametrize(
    "words", [("cellctl", "run"), ("trajd", "run"), ("proxyd", "run"), ("gyre", "exec", "--name", "ex0")]
)
def test_an_address_that_this_machine_does_not_have(tmp_path, words):
    root = make_run(tmp_path / "run", bind=NOWHERE)
    complains(say(*words, "--run", str(root)), USAGE, NOWHERE, "cluster.bind")


def test_a_run_on_an_address_that_this_machine_does_not_have_is_not_begun(tmp_path):
    complains(
        up(tmp_path, configured(tmp_path, [TASK], f'cluster.bind = "{NOWHERE}"\n')), USAGE, "cluster.bind", NOWHERE
    )
    assert not (tmp_path / "run").exists()


def test_a_run_whose_address_this_machine_no_longer_has_ends_with_a_word_before_any_daemon_starts(tmp_path):
    root = make_run(tmp_path / "run", bind=NOWHERE)
    said = up(tmp_path, tmp_path / "none.toml")
    assert (said.returncode, said.stdout) == (USAGE, "")
    word = said.stderr.splitlines()[-1]
    assert word.startswith("error: ") and NOWHERE in word and "cluster.bind" in word
    assert not (root / "lives" / "cellctl").exists()


def test_a_stopped_warm_start_leaves_nothing_running(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    line = [sys.executable, "-m", "gyre_cli.gyre", "quickstart", "--run", str(tmp_path / "run")]
    with subprocess.Popen(line, env=environment, stderr=subprocess.DEVNULL) as process:
        until(lambda: len(speaking_of(tmp_path)) > 1)  # the teacher
        process.terminate()
    until(lambda: speaking_of(tmp_path) == [])


def speaking_of(folder: Path) -> list[int]:
    """Processes with this folder in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and os.fsencode(folder) in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


# ---- reading files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dedup", "stats", "check"])
def test_a_file_that_is_not_there(tmp_path, name):
    complains(say("trajtools", name, str(tmp_path / "none.jsonl")), USAGE, "none.jsonl")


def test_a_file_that_is_no_journal(tmp_path):
    (tmp_path / "j.jsonl").write_text("hello\n")
    complains(say("cellctl", "replay", str(tmp_path / "j.jsonl")), USAGE, "j.jsonl:1", "not a journal")
    complains(say("cellctl", "replay", str(tmp_path / "none.jsonl")), USAGE, "none.jsonl")
