"""Task files: what is read, and that every refusal names the place and what to do."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gyre_exec import tasks
from gyre_exec.fields import TaskError, path_problem
from gyre_exec.rulers import Evaluator, bases, fill
from gyre_exec.workspace import Plain, WorkspaceError, write_files

GOOD: dict[str, Any] = {
    "id": "t-1",
    "instruction": "do it",
    "workspace": {"a.md": "text", "src/b.py": ""},
    "evaluator": {"command": ["python", "-I", "judge.py"], "tests": {"test_a.py": "x"}, "timeout_s": 3},
}


RUBRIC: dict[str, Any] = {"kind": "rubric", "model": "m", "criteria": [{"name": "a", "text": "b"}]}


def changed(**change: Any) -> dict[str, Any]:
    return {key: value for key, value in {**GOOD, **change}.items() if value is not ...}


def test_a_good_line_is_a_frozen_task(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(json.dumps(GOOD) + "\n\n" + json.dumps(changed(id="t-2", limit_s=9)) + "\n")
    first, second = tasks.load(tmp_path / "t.jsonl")
    ruler = Evaluator(command=("python", "-I", "judge.py"), tests={"test_a.py": "x"}, timeout_s=3.0, name="judge.py")
    assert first == tasks.Task(
        id="t-1",
        instruction="do it",
        workspace={"a.md": "text", "src/b.py": ""},
        evaluator=ruler,
        partial=ruler,
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
    with pytest.raises(TaskError) as caught:
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
    assert fill(command, values, bases=bases(str(tmp_path / "tasks"))) == [
        sys.executable,
        "-I",
        str(tmp_path / "tasks/judge.py"),
        str(tmp_path / "up.py"),
        "none.py",
        "/o",
        "${out}",
        "/t/x",
    ]


def harbor(folder: Path, toml: str = "", **files: str) -> Path:
    """A Harbor task directory as its authors make them."""
    for name, text in {
        "instruction.md": "Übe",
        "task.toml": toml or 'version = "1.0"\n[agent]\ntimeout_sec = 60\n[verifier]\ntimeout_sec = 5.5\n',
        "tests/test.sh": "echo 1 > /logs/verifier/reward.txt",
        "environment/Dockerfile": "FROM python:3.13-slim",
        **{name.replace("__", "/"): text for name, text in files.items()},
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_a_harbor_task_as_it_is_in_the_wild(tmp_path: Path) -> None:
    toml = """
schema_version = "1.1"
artifacts = ["/logs/artifacts/model.patch"]
[task]
name = "org/sorter"
authors = [{ name = "A", email = "a@b.c" }]
[metadata]
difficulty = "hard"
expert_time_estimate_min = 180.0
[metadata.gyre]
partial = false
retries = 3
[verifier]
timeout_sec = 900.0
env = { JUDGE_KEY = "${JUDGE_KEY:-none}" }
[agent]
timeout_sec = 1800
user = "agent"
[environment]
build_timeout_sec = 600.0
docker_image = "registry.example.com/sorter:1"
cpus = 2
memory = "4G"
storage_mb = 10240
allow_internet = true
workdir = "/srv/app"
mcp_servers = []
[environment.env]
MODE = "strict"
[solution.env]
"""
    (task,) = tasks.load(harbor(tmp_path / "sorter", toml, tests__test_state__py="def test_a(): ..."))
    assert (task.id, task.instruction, task.limit_s, task.partial) == ("sorter", "Übe", 1800.0, None)
    assert task.needs == tasks.Needs(
        image="registry.example.com/sorter:1",
        dockerfile=True,
        workdir="/srv/app",
        cpus=2,
        memory_mb=4096,
        storage_mb=10240,
        network=True,
        env={"MODE": "strict"},
    )
    ruler = task.evaluator
    assert (ruler.kind, ruler.timeout_s, ruler.retries, sorted(ruler.tests)) == (
        "harbor", 900.0, 3, ["test.sh", "test_state/py"],
    )  # fmt: skip
    assert ruler.env == {"JUDGE_KEY": "${JUDGE_KEY:-none}"}


def test_every_bad_directory_of_a_tree_is_named_with_its_line(tmp_path: Path) -> None:
    harbor(tmp_path / "good one")
    harbor(tmp_path / "ünïcode/mål täsk").rename(tmp_path / "mål täsk")
    (tmp_path / "ünïcode").rmdir()
    (harbor(tmp_path / "no-tests") / "tests/test.sh").unlink()
    harbor(tmp_path / "bad-toml", "[agent]\ntimeout_sec = 5\n[verifier\n")
    harbor(tmp_path / "bad-values", '[agent]\ntimeout_sec = "ten"\n\n[environment]\ncpus = 1\nmemory = "lots"\n')
    harbor(tmp_path / "bad-steps", '[agent]\ntimeout_sec = 1\n[[steps]]\nname = "a"\n')
    harbor(tmp_path / "two-boxes", environment__compose="").joinpath("environment/docker-compose.yaml").write_text("")
    (harbor(tmp_path / "no-words") / "instruction.md").write_text(" ")
    (harbor(tmp_path / "not-text") / "task.toml").write_bytes(b"\xff")
    problems = [p.removeprefix(f"{tmp_path}/") for p in tasks.check([tmp_path])]
    starts = [
        "bad-steps/task.toml:3: a task of several steps",
        "bad-toml/task.toml:3: not TOML",
        "bad-values/task.toml:2: `agent.timeout_sec` must be a number of seconds above 0, not 'ten'",
        "bad-values/task.toml:6: `environment.memory` must be a size such as 4G",
        "no-tests: no evaluator; a Harbor task keeps it in tests/test.sh",
        "no-words (task no-words): `instruction` is missing",
        "not-text/task.toml: cannot be read as UTF-8",
        "two-boxes/environment: several containers",
    ]
    assert len(problems) == len(starts)
    assert [p for p, start in zip(problems, starts, strict=True) if not p.startswith(start)] == []
    good = [t for t in tasks.survey([tmp_path]) if isinstance(t, tasks.Task)]
    assert [re.sub("-[0-9a-f]{6}$", "", t.id) for t in good] == ["good_one", "m_l_t_sk"]
    with pytest.raises(WorkspaceError, match="needs a container"):
        Plain(tmp_path / "e").prepare(good[0])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"evalutor": 1, "evaluator": ...}, "unknown key 'evalutor', did you mean 'evaluator'"),
        ({"partial": "maybe"}, "`partial` must be true, false or an evaluator"),
        ({"partial": {"command": 3}}, "partial: `evaluator.command` must be a list"),
        ({"needs": {"cpu": 1}}, "unknown key needs.cpu"),
        ({"needs": {"memory_mb": True}}, "needs.memory_mb must be a whole number"),
        ({"evaluator": {"kind": "magic"}}, "evaluator.kind must be one of"),
        ({"evaluator": {"kind": "rubric", "model": "m"}}, "a rubric needs `criteria`"),
        ({"evaluator": {"kind": "rubric", "criteria": [{"name": "a", "text": "b"}]}}, "a rubric needs `model`"),
        ({"evaluator": {"kind": "rubric", "criteria": [{"name": "a"}], "model": "m"}}, "criteria[1] must have"),
        ({"evaluator": {**RUBRIC, "samples": 0}}, "evaluator.samples must be a whole number from 1 to 100"),
        (
            {"evaluator": {**RUBRIC, "files": ["../*"]}},
            "evaluator.files must be a list of patterns below the workspace",
        ),
        ({"evaluator": {**RUBRIC, "base_url": "judge:80"}}, "evaluator.base_url must be an http or https address"),
        ({"evaluator": {"command": ["x"], "retries": -1}}, "evaluator.retries must be a whole number"),
        ({"evaluator": {"command": ["x"], "version": "a b"}}, "name and version are letters"),
        ({"evaluator": {"command": ["x"], "env": {"A": 1}}}, "evaluator.env must be an object of texts"),
    ],
)
def test_what_a_task_says_beyond_the_four_words_is_checked_too(change: dict[str, Any], words: str) -> None:
    with pytest.raises(TaskError) as caught:
        tasks.from_dict(changed(**change), folder="", where="here")
    assert words in str(caught.value)


def test_a_task_says_whether_and_how_partial_work_is_graded() -> None:
    def ruler(partial: Any) -> Any:
        return tasks.from_dict(changed(partial=partial), folder="", where="here").ruler(time_up=True)

    assert ruler(...) == ruler(True) == tasks.from_dict(GOOD, folder="", where="here").evaluator
    assert ruler(False) is None
    assert ruler({"command": ["sh", "lenient.sh"]}).name == "lenient.sh"


def test_one_id_in_two_files_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text("")
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text(json.dumps(GOOD))
    problems = tasks.check([tmp_path / "a.jsonl", tmp_path / "b.jsonl"])
    assert len(problems) == 1 and "the id t-1 is also in" in problems[0] and "rename one" in problems[0]


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)  # the first draw is slow on a busy machine
@given(
    body=st.fixed_dictionaries(
        {},
        optional={
            "id": JSON | st.just("t"),
            "instruction": JSON | st.just("x"),
            "workspace": JSON,
            "evaluator": JSON
            | st.fixed_dictionaries({"command": JSON | st.just(["x"])}, optional={"tests": JSON, "kind": JSON}),
            "limit_s": JSON,
            "partial": JSON | st.booleans(),
            "needs": JSON | st.dictionaries(st.sampled_from(sorted(tasks.NEEDS)), JSON, max_size=3),
        },
    )
)
def test_any_json_is_a_task_or_a_task_error(body: dict[str, Any]) -> None:
    try:
        task = tasks.from_dict(body, folder="/f", where="here")
    except TaskError as error:
        assert str(error).startswith("here")
    else:
        assert task.evaluator.command and task.instruction.strip()


@given(path=st.text(alphabet="ab./\\\0 ü", max_size=12) | st.text(max_size=300))
def test_an_accepted_path_stays_below_the_directory(path: str) -> None:
    if path_problem(path) is None:
        full = os.path.normpath(f"/top/of/all/{path}")
        assert full == "/top/of/all/" + path and full.startswith("/top/of/all/")


@given(
    files=st.dictionaries(
        st.lists(st.text(alphabet="abü .-", min_size=1, max_size=5), min_size=1, max_size=3).map("/".join),
        st.text(max_size=20),
        max_size=5,
    )
)
@settings(deadline=None)
def test_files_come_back_as_written(files: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> None:
    root = tmp_path_factory.mktemp("w")
    try:
        tasks.from_dict(changed(workspace=files), folder="", where="here")
    except TaskError:
        return
    write_files(root, files)
    found = {p.relative_to(root).as_posix(): p.read_bytes().decode() for p in root.rglob("*") if p.is_file()}
    assert found == files
