"""Task files: what is read, and that every refusal names the place and what to do."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre_exec import tasks
from gyre_exec.workspace import Plain, WorkspaceError, remove_tree, write_files

GOOD: dict[str, Any] = {
    "id": "t-1",
    "instruction": "do it",
    "workspace": {"a.md": "text", "src/b.py": ""},
    "evaluator": {"command": ["python", "-I", "judge.py"], "tests": {"test_a.py": "x"}, "timeout_s": 3},
}


def changed(**change: Any) -> dict[str, Any]:
    return {key: value for key, value in {**GOOD, **change}.items() if value is not ...}


def test_a_good_line_is_a_frozen_task(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(json.dumps(GOOD) + "\n\n" + json.dumps(changed(id="t-2", limit_s=9)) + "\n")
    first, second = tasks.load(tmp_path / "t.jsonl")
    assert first == tasks.Task(
        id="t-1",
        instruction="do it",
        workspace={"a.md": "text", "src/b.py": ""},
        evaluator=tasks.Evaluator(
            command=("python", "-I", "judge.py"), tests={"test_a.py": "x"}, timeout_s=3.0, name="judge.py"
        ),
        folder=str(tmp_path),
    )
    assert second.limit_s == 9.0


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (changed(evaluator=...), "t.jsonl:2 (task t-1): no `evaluator`; add"),
        (changed(evaluator={"command": "python x"}), "`evaluator.command` must be a list"),
        (changed(evaluator={"command": ["x", "{testz}"]}), "unknown placeholder {testz}"),
        (changed(evaluator={"command": ["x"], "timeout_s": -1}), "evaluator.timeout_s must be a number of seconds"),
        (changed(evaluator={"command": ["x"], "timeout_s": True}), "must be a number of seconds"),
        (changed(evaluator={"command": ["x"], "tests": {"../t": ""}}), "it leads out of the directory"),
        (changed(id="a/b"), "t.jsonl:2: `id` must be"),
        (changed(id=...), "`id` must be"),
        (changed(instruction="  "), "`instruction` is missing"),
        (changed(instruction="a\0b"), "NUL"),
        (changed(instruction="a\ud800b"), "half a character"),
        (changed(workspace={"/etc/passwd": ""}), "an absolute path; use a relative path"),
        (changed(workspace={"a/../../b": ""}), "it leads out"),
        (changed(workspace={"a//b": ""}), "plain form"),
        (changed(workspace={"a": "", "a/b": ""}), "a file and a directory at once"),
        (changed(workspace={"a": 3}), "must be text, not int"),
        (changed(workspace={"a": "\ud800"}), "half a character"),
        (changed(workspace=[]), "must be an object"),
        ([1], "not an object"),
    ],
)
def test_a_bad_line_is_named_with_its_place_and_a_way_out(tmp_path: Path, body: Any, words: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(changed(id="other")) + "\n" + json.dumps(body) + "\n")
    (tmp_path / "judge.py").write_text("")
    with pytest.raises(tasks.TaskError) as caught:
        tasks.load(path)
    assert words in str(caught.value) and "t.jsonl:2" in str(caught.value) and "\n" not in str(caught.value)
    assert tasks.check([path]) == [str(caught.value)]


def test_check_names_every_problem_and_missing_scripts(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join([json.dumps(GOOD), "{", json.dumps(GOOD), json.dumps(changed(id="c", evaluator=...))]))
    problems = tasks.check([path, tmp_path / "none.jsonl"])
    assert [p.split(str(tmp_path))[1][:11] for p in problems] == [
        "/t.jsonl (t",
        "/t.jsonl:2:",
        "/t.jsonl:3:",
        "/t.jsonl:4 ",
        "/none.jsonl",
    ]
    assert "judge.py does not exist; put it beside" in problems[0] and "already used in line 1" in problems[2]


def test_an_empty_file_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text("\n")
    assert "no task in it" in tasks.check([tmp_path / "t.jsonl"])[0]


def test_the_shipped_tasks_are_in_order() -> None:
    shipped = sorted((Path(__file__).parents[2] / "examples/quickstart/tasks").glob("*.jsonl"))
    assert shipped and tasks.check(shipped) == []


def test_commands_find_the_interpreter_and_files_beside_the_tasks(tmp_path: Path) -> None:
    (tmp_path / "up.py").write_text("")
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/judge.py").write_text("")
    command = ["python", "-I", "judge.py", "up.py", "none.py", "{out}", "${out}", "{task_file_dir}/x"]
    values = {"out": "/o", "task_file_dir": "/t"}
    assert tasks.fill(command, values, bases=tasks.bases(str(tmp_path / "tasks"))) == [
        sys.executable,
        "-I",
        str(tmp_path / "tasks/judge.py"),
        str(tmp_path / "up.py"),
        "none.py",
        "/o",
        "${out}",
        "/t/x",
    ]


def test_harbor_directories_become_tasks(tmp_path: Path) -> None:
    for name in ("good one", "no-tests", "bad-toml"):
        (tmp_path / name / "tests").mkdir(parents=True)
        (tmp_path / name / "environment").mkdir()
        (tmp_path / name / "instruction.md").write_text("Übe")
        (tmp_path / name / "task.toml").write_text("[agent]\ntimeout_sec = 60\n[verifier]\ntimeout_sec = 5.5\n")
        (tmp_path / name / "tests/test.sh").write_text("echo 1")
    (tmp_path / "no-tests/tests/test.sh").unlink()
    (tmp_path / "bad-toml/task.toml").write_text("[agent")
    problems = tasks.check([tmp_path])
    assert len(problems) == 2 and "not TOML" in problems[0] and "no evaluator" in problems[1]
    (task,) = tasks.load(tmp_path / "good one")
    assert (task.id, task.limit_s, task.evaluator.timeout_s, task.container) == ("good_one", 60.0, 5.5, True)
    with pytest.raises(WorkspaceError, match="needs a container"):
        Plain(tmp_path / "e").prepare(task)


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)


@given(
    body=st.fixed_dictionaries(
        {},
        optional={
            "id": JSON | st.just("t"),
            "instruction": JSON | st.just("x"),
            "workspace": JSON,
            "evaluator": JSON | st.fixed_dictionaries({"command": JSON | st.just(["x"])}, optional={"tests": JSON}),
            "limit_s": JSON,
        },
    )
)
def test_any_json_is_a_task_or_a_task_error(body: dict[str, Any]) -> None:
    try:
        task = tasks.from_dict(body, folder="/f", where="here")
    except tasks.TaskError as error:
        assert str(error).startswith("here")
    else:
        assert task.evaluator.command and task.instruction.strip()


@given(path=st.text(alphabet="ab./\\\0 ü", max_size=12) | st.text(max_size=300))
def test_an_accepted_path_stays_below_the_directory(path: str) -> None:
    if tasks.path_problem(path) is None:
        full = os.path.normpath(f"/top/of/all/{path}")
        assert full == "/top/of/all/" + path and full.startswith("/top/of/all/")


@given(
    files=st.dictionaries(
        st.lists(st.text(alphabet="abü .-", min_size=1, max_size=5), min_size=1, max_size=3).map("/".join),
        st.text(max_size=20),
        max_size=5,
    )
)
def test_files_come_back_as_written(files: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> None:
    root = tmp_path_factory.mktemp("w")
    try:
        tasks.from_dict(changed(workspace=files), folder="", where="here")
    except tasks.TaskError:
        return
    write_files(root, files)
    found = {p.relative_to(root).as_posix(): p.read_bytes().decode() for p in root.rglob("*") if p.is_file()}
    assert found == files


def test_removal_copes_with_locked_directories_and_follows_no_link(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    place = tmp_path / "place"
    (place / "locked/deep").mkdir(parents=True)
    (place / "link").symlink_to(outside)
    (place / "locked").chmod(0o000)
    remove_tree(place)
    remove_tree(place)
    assert not place.exists() and (outside / "precious").exists()
