"""`gyre quickstart` that nobody disturbs: what it promises, and what every command says of it from another process."""

from __future__ import annotations

import json
import shutil
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gyre_cli.quickstart import digest_of_sources
from tests.system.conftest import once
from tests.system.running import RAMBLING, Run, command

pytestmark = pytest.mark.slow
STEPS, HELD_OUT = 4, 4
SMALLER = ("scheduler.group_size=8", "scheduler.slots_per_cell=24", "trainer.micro_step_tokens=512")
QUICKSTART = ("quickstart", "--steps", str(STEPS), "--heldout", str(HELD_OUT), "--json")
QUESTIONS = (
    ("gyre", "status"),
    ("cellctl", "status"),
    ("cellctl", "explain"),
    ("cellctl", "explain", "c1"),
    ("proxyd", "status"),
    ("proxyd", "routes"),
    ("proxyd", "sessions"),
    ("trajd", "status"),
    ("trajd", "batches"),
    ("celld", "status"),
    ("celld", "status", "c2"),
)


@dataclass
class Done:
    """A finished run and what the commands answered while it ran."""

    run: Run
    summary: dict[str, Any]
    answers: dict[str, Any]


@pytest.fixture(scope="session")
def done(shared: Path, warm_model: Path) -> Done:
    """One run for all tests here, whichever workers they land on."""
    folder = once(shared / "undisturbed", lambda folder: serve(folder, warm_model), proof="answers.json")
    run = Run(folder, warm_model, RAMBLING)
    summary = json.loads((run.root / "summary.json").read_text())
    return Done(run, summary, json.loads((folder / "answers.json").read_text()))


def serve(folder: Path, model: Path) -> None:
    """The warm start is found in the cache: a short one is put there."""
    shutil.copytree(model, folder / "cache" / "gyre" / f"quickstart-{digest_of_sources()}")
    with Run(folder, model, RAMBLING) as run:
        settings = [word for setting in SMALLER for word in ("--set", setting)]
        run.start(*QUICKSTART, *settings, XDG_CACHE_HOME=str(folder / "cache"))
        run.until(lambda status: status["run"] == "training")
        assert command("cellctl", "freeze", run=run.root).returncode == 0
        said = {" ".join(words): command(*words, "--json", run=run.root) for words in QUESTIONS}
        assert {stranger(str(row["url"])) for row in run.rows("proxyd-0", "routes")} == {401}
        assert command("cellctl", "thaw", run=run.root).returncode == 0
        run.finish()
        answers = {words: {"code": a.returncode, "out": a.stdout, "err": a.stderr} for words, a in said.items()}
        (folder / "answers.json").write_text(json.dumps(answers))


def stranger(engine: str) -> int:
    """The status for one who may reach an engine's port but has no key of the run."""
    request = urllib.request.Request(f"{engine}/generate", data=b'{"input_ids": [1]}', method="POST")
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_the_summary_is_all_that_is_on_stdout(done):
    assert [json.loads(line) for line in done.run.out().splitlines()] == [done.summary]


def test_every_step_is_done_and_no_token_is_trained_twice(done):
    summary = done.summary
    assert (summary["policy"], summary["steps"]) == ("elastic", STEPS)
    assert done.run.batches() == list(range(STEPS))
    assert (summary["tokens_trained_twice"], summary["context_mismatches"]) == (0, 0)
    assert summary["tokens_trained"] > 0


def test_the_weights_of_every_batch_sum_to_one(done):
    steps = [event for event in done.run.journal("cellctl") if event["tag"] == "step.done"]
    assert [step["metrics"]["weights_sum"] for step in steps] == pytest.approx([1.0] * STEPS, abs=1e-9)


def test_cells_turn_and_no_execution_notices(done):
    summary = done.summary
    assert summary["role_switches"] >= 2
    assert (summary["executions_interrupted"], summary["executions_retried"]) == (0, 0)
    trained = summary["groups_per_batch"] * summary["group_size"] * STEPS
    assert sum(summary["executions"]["train"].values()) == trained


def test_more_than_one_cell_trains(done):
    steps = [event["metrics"]["cells"] for event in done.run.journal("cellctl") if event["tag"] == "step.done"]
    assert max(steps) >= 2


def test_every_cell_ends_in_rollout_with_the_last_version(done):
    said = [event for event in done.run.journal("cellctl") if event["tag"] == "cell.role"]
    last = {event["cell"]: (event["role"], event["version"]) for event in said}
    assert last == dict.fromkeys(("c0", "c1", "c2"), ("rollout", f"0.{STEPS}"))


def test_held_out_tasks_are_measured_before_and_after(done):
    summary = done.summary
    for when in ("before", "after"):
        assert summary[f"heldout_pass_tasks_{when}"] == summary[f"heldout_greedy_tasks_{when}"] == HELD_OUT
        assert 0.0 <= summary[f"heldout_pass_{when}"] <= 1.0


def test_the_journal_replays_to_the_same_commands(done):
    replayed = command("cellctl", "replay", str(done.run.root / "journal" / "cellctl.jsonl"), "--json")
    assert replayed.returncode == 0, replayed.stdout
    assert json.loads(replayed.stdout)["same"] is True


def test_the_call_log_holds_every_rule(done):
    checked = command("trajtools", "check", str(done.run.root / "calls"))
    assert checked.returncode == 0, checked.stdout
    assert "all rules hold" in checked.stdout


@pytest.mark.parametrize("report", ["dedup", "stats"])
def test_reports_read_the_call_log(done, report):
    told = command("trajtools", report, str(done.run.root / "calls"), "--json")
    assert told.returncode == 0, told.stderr
    first, *_ = told.stdout.splitlines()  # what follows it (of stats) is one object per task
    assert json.loads(first)["calls"] == done.summary["calls"]


@pytest.mark.parametrize("words", QUESTIONS, ids=" ".join)
def test_commands_answer_from_another_process_one_object_per_line(done, words):
    answer = done.answers[" ".join(words)]
    assert (answer["code"], answer["err"]) == (0, "")
    rows = [json.loads(line) for line in answer["out"].splitlines()]
    assert all(isinstance(row, dict) for row in rows)
    assert rows or words in (("trajd", "batches"), ("proxyd", "sessions"))  # nothing applied, all done: no rows


def test_the_report_of_a_finished_run_needs_no_daemon(done):
    told = command("gyre", "report", "--json", run=done.run.root)
    assert json.loads(told.stdout) == done.summary
    assert done.run.left() == []


def test_a_finished_run_leaves_a_picture(done):
    assert {path.name for path in done.run.root.glob("run.*")} >= {"run.png", "run.svg", "run.json", "run.toml"}
