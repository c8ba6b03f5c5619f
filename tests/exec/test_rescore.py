"""A real executor's kept states, shown and measured again by the commands a user types."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from gyre_base.rundir import RunDir
from gyre_exec import states
from gyre_exec.show import NoSuchExecution, gather
from tests.cli.conftest import say
from tests.exec.rig import rig, task

LENGTHS = {"g-00.0": 5, "g-01.0": 7, "g-02.0": 0}


async def recorded(root: Path) -> RunDir:
    """Three ended executions: two that wrote an answer, one whose workspace stayed as it was; one cancelled one."""
    async with rig(root, keep_workspaces=True) as (cellctl, _proxyd, executor):
        for name, length in LENGTHS.items():
            steps: list[Any] = [["call", "x"], ["print", 1]]
            steps += [["write", "answer", "a" * length], ["write", "readme.md", "bye\n"]] if length else []
            await cellctl.order(name, task(*steps))
        for name in LENGTHS:
            await cellctl.outcome(name)
    return executor.run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return asyncio.run(recorded(tmp_path_factory.mktemp("r") / "a run"))


def rescored(
    run: RunDir, ruler: Any, folder: Path, *more: str
) -> tuple[int, dict[str, Any], list[dict[str, Any]], str]:
    """(exit code, the agreement row, the rows written, stderr)."""
    (folder / "ruler.json").write_text(json.dumps(ruler))
    said = say("gyre", "rescore", str(run.root), "--evaluator", str(folder / "ruler.json"), "--json", *more)
    facts = json.loads(said.stdout.splitlines()[0]) if said.stdout else {}
    file = run.path("rescores", f"{ruler.get('name')}.jsonl")
    return (
        said.returncode,
        facts,
        [json.loads(x) for x in file.read_text().splitlines()] if file.exists() else [],
        said.stderr,
    )


def test_another_ruler_measures_the_same_states_and_the_old_scores_stay(run: RunDir, tmp_path: Path) -> None:
    (tmp_path / "count.sh").write_text('n=$(wc -c < "$1/answer") && echo "{\\"score\\": $n}" > "$2"')
    before = {p: p.read_bytes() for p in run.path("executions").glob("*/outcome.json")}
    ruler = {"name": "count", "version": "7", "command": ["bash", "count.sh", "{workspace}", "{out}"]}
    code, facts, rows, err = rescored(run, ruler, tmp_path)
    assert code == 1 and "g-02.0: the evaluator ended with exit code 1" in err  # that one has no answer to count
    assert {r["execution"]: r["score"] for r in rows} == {"g-00.0": 5.0, "g-01.0": 7.0, "g-02.0": None}
    assert (facts["states"], facts["compared"], facts["failed"]) == (3, 2, 1)
    assert (facts["old_mean"], facts["new_mean"]) == (pytest.approx(0.6), 6.0)
    assert before == {p: p.read_bytes() for p in run.path("executions").glob("*/outcome.json")}
    assert all(r["version"].startswith("7+") and r["state"] for r in rows)


def test_a_second_start_measures_only_what_is_missing(run: RunDir, tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = f'echo x >> {log}; test -e "$0/answer" || test -e {tmp_path}/well && echo "{{\\"score\\": 1}}" > "$1"'
    ruler = {"name": "counted", "command": ["sh", "-c", script, "{workspace}", "{out}"], "retries": 0}
    assert rescored(run, ruler, tmp_path, "--limit", "1")[0] == 0 and log.read_text() == "x\n"
    assert rescored(run, ruler, tmp_path)[0] == 1 and log.read_text() == "x\n" * 3
    (tmp_path / "well").touch()
    code, facts, rows, _ = rescored(run, ruler, tmp_path)
    assert (code, facts["failed"], log.read_text()) == (0, 0, "x\n" * 4)
    assert sorted(r["outcome"] for r in rows) == ["evaluator_failed", "scored", "scored", "scored"]
    with open(run.path("rescores", "counted.jsonl"), "ab") as file:
        file.write(b'{"torn')
    assert rescored(run, ruler, tmp_path)[0] == 0 and log.read_text() == "x\n" * 4


def test_a_run_without_kept_states_says_what_to_set(run: RunDir, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(run.root, bare)
    for folder in (bare / "executions").glob("*/workspace"):
        shutil.rmtree(folder)
    shutil.rmtree(bare / "workspaces.git", ignore_errors=True)
    (tmp_path / "r.json").write_text('{"command": ["true"]}')
    said = say("gyre", "rescore", str(bare), "--evaluator", str(tmp_path / "r.json"))
    assert said.returncode == 1 and "3 executions were not kept; set tasks.snapshots" in said.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"command": 3}', "`evaluator.command` must be a list"),
        ("{", "cannot be read as an evaluator"),
        ("[]", "object"),
    ],
)
def test_a_bad_ruler_is_bad_usage(run: RunDir, tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "r.json").write_text(text)
    said = say("gyre", "rescore", str(run.root), "--evaluator", str(tmp_path / "r.json"))
    assert (said.returncode, said.stdout) == (2, "") and words in said.stderr and said.stderr.count("\n") == 1


# ---- gyre show ----------------------------------------------------------------------------------------------------


def test_one_execution_is_on_one_page(run: RunDir) -> None:
    page = gather(run, "g-01")
    assert (page.execution, page.executor, page.order["task"]["id"]) == ("g-01.0", "ex0", "t")
    assert page.outcome is not None and page.outcome["score"] == 0.7
    assert page.changes is not None and [(c.what, c.path, c.lines) for c in page.changes] == [
        ("added", "answer", ("@@ -0,0 +1 @@", "+" + "a" * 7)),
        ("changed", "readme.md", ("@@ -1 +1 @@", "-hello", "+bye")),
    ]
    clocks = {what: seconds for what, seconds, _ in page.clocks}
    assert clocks["harness limit"] == 30.0 and clocks["evaluation limit"] == 5.0
    assert page.stdout.endswith("x") and len(page.stdout) <= 4_000 and page.stderr == ""


def test_the_page_is_for_terminals_programs_and_browsers(run: RunDir, tmp_path: Path) -> None:
    said = say("gyre", "show", "g-00.0", "--run", str(run.root))
    assert said.returncode == 0 and "\x1b" not in said.stdout
    for words in (
        "outcome                scored",
        "score parts (1 of 2 in full)",
        "    +aaaaa",
        "end of stderr\n  nothing",
    ):
        assert words in said.stdout
    body = json.loads(say("gyre", "show", "g-00.0", "--json", "--run", str(run.root)).stdout)
    assert body["outcome"]["outcome"] == "scored" and body["clocks"]["harness limit"] == 30.0
    html = tmp_path / "page.html"
    assert say("gyre", "show", "g-00.0", "--run", str(run.root), "--html", str(html)).returncode == 0
    text = html.read_text()
    assert "<script" not in text and "http" not in text.replace("http://www.w3.org/2000/svg", "") and "+aaaaa" in text


async def test_progress_is_measured_while_it_runs_and_is_no_score(tmp_path: Path) -> None:
    async with rig(tmp_path, progress_every_s=0.2) as (cellctl, _proxyd, executor):
        steps: list[Any] = [["call", "x"], ["write", "answer", "aaa"], ["sleep", 1.5], ["write", "answer", "a" * 9]]
        await cellctl.order("p-00.0", task(*steps))
        await cellctl.order(
            "p-01.0", {**task(["sleep", 1.0], ["write", "answer", "a"], ["call", "x"]), "partial": False}
        )
        assert (await cellctl.outcome("p-00.0")).score == 0.9
        await cellctl.outcome("p-01.0")
    page = gather(executor.run, "p-00.0")
    assert page.progress and {row["score"] for row in page.progress} <= {None, 0.3, 0.9}
    assert 0.3 in {row["score"] for row in page.progress}
    assert gather(executor.run, "p-01.0").progress == ()  # can't be graded before it has ended


def test_without_a_name_there_is_a_line_for_each(run: RunDir) -> None:
    lines = say("gyre", "show", "--run", str(run.root)).stdout.splitlines()
    assert lines[0].split() == ["execution", "task", "outcome", "score", "calls", "wall_s", "waited_s"]
    assert [line.split()[:4] for line in lines[1:4]] == [
        ["g-00.0", "t", "scored", "0.5"],
        ["g-01.0", "t", "scored", "0.7"],
        ["g-02.0", "t", "no_artifact", "0"],
    ]


def test_an_unknown_execution_names_near_ones(run: RunDir) -> None:
    with pytest.raises(NoSuchExecution, match=r"near: g-0\d\.0"):
        gather(run, "g-09.0")
    said = say("gyre", "show", "g-09.0", "--run", str(run.root))
    assert (said.returncode, said.stdout) == (2, "") and "no execution 'g-09.0'" in said.stderr


def test_a_kept_state_is_found_and_others_are_not(run: RunDir) -> None:
    assert states.find(run, "g-00.0") is not None and states.find(run, "nobody") is None
