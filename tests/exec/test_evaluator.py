"""Evaluators as processes: test runners, a judge behind a real HTTP server, copies that nobody else sees."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from gyre_exec import child as children
from gyre_exec import tasks
from gyre_exec.evaluator import evaluate, version_of
from gyre_exec.events import Evaluated
from gyre_exec.rulers import Evaluator, evaluator_of
from gyre_exec.tasks import Task
from gyre_exec.workspace import Plain
from gyre_exec.workspace_kinds import Bwrap

TESTS = {
    "test_add.py": (
        "from add import add\n\ndef test_one():\n    assert add(1, 2) == 3\n\n"
        "def test_two():\n    assert add(2, 2) == 5\n"
    ),
    "test_rest.py": "import missing\n\ndef test_three():\n    pass\n",
}


def state(root: Path, **files: str) -> Path:
    root.mkdir(parents=True)
    for name, text in files.items():
        (root / name.replace("__", ".")).write_text(text)
    return root


async def run(tmp_path: Path, ruler: Evaluator, limit_s: float = 60.0, **files: str) -> Evaluated:
    """One evaluation in a place with a space and an umlaut in its path."""
    folder = tmp_path / "höch st" / "e1"
    if not (folder / "workspace").exists():
        state(folder / "workspace", **files)
    task = Task(id="t", instruction="do", workspace={}, evaluator=ruler, folder=str(tmp_path))
    done = await evaluate("e1", task, ruler, folder / "workspace", Plain(folder=folder / "scoring"), limit_s)
    assert not (folder / "scoring").exists() and not children.RUNNING
    return done


async def test_pytest_measures_the_share_and_what_does_not_load_counts_as_failed(tmp_path: Path) -> None:
    ruler = evaluator_of({"kind": "pytest", "tests": TESTS, "expected": 3, "version": 2}, "x")
    done = await run(tmp_path, ruler, add__py="def add(a, b):\n    return a + b\n")
    assert (done.verdict, done.score, done.error) == ("scored", 1 / 3, "")
    assert done.parts == {"test_add.test_one": 1.0, "test_add.test_two": 0.0, "test_rest": 0.0}
    assert done.evaluator == "pytest" and done.version == version_of(ruler, "") and done.version.startswith("2+")


async def test_an_agent_can_not_stand_in_for_the_test_runner(tmp_path: Path) -> None:
    """What lies in the workspace is imported by tests, never by the runner's own start."""
    evil = "import sys; print('stolen', file=sys.stderr); raise SystemExit(0)"
    ruler = evaluator_of({"kind": "pytest", "tests": {"test_a.py": "def test_a():\n    assert True\n"}}, "x")
    done = await run(tmp_path, ruler, pytest__py=evil, sitecustomize__py=evil, conftest__py=evil)
    assert (done.verdict, done.score) == ("scored", 1.0)


async def test_a_runner_that_reports_nothing_has_failed(tmp_path: Path) -> None:
    ruler = evaluator_of({"kind": "junit", "command": ["sh", "-c", "echo no such module >&2; exit 4"]}, "x")
    done = await run(tmp_path, ruler)
    assert done.verdict == "failed" and done.score is None
    assert "wrote no score" in done.error and "exit code 4: no such module" in done.error


async def test_every_evaluator_sees_what_the_agent_left_and_not_what_another_one_did(tmp_path: Path) -> None:
    greedy = 'cd "$0" && n=$(ls | wc -l) && rm -rf ./* && echo "{\\"score\\": $n}" > "$1"'
    ruler = evaluator_of({"command": ["sh", "-c", greedy, "{workspace}", "{out}"]}, "x")
    for _ in range(2):
        assert (await run(tmp_path, ruler, a="1", b="2")).score == 2.0
    assert sorted(p.name for p in (tmp_path / "höch st/e1/workspace").iterdir()) == ["a", "b"]


async def test_links_are_copied_as_links_and_pipes_stay_behind(tmp_path: Path) -> None:
    folder = state(tmp_path / "höch st/e1/workspace", a="1")
    (folder / "out").symlink_to("/etc")
    (folder / "locked").mkdir(mode=0o000)
    os.mkfifo(folder / "pipe")
    listing = 'cd "$0" && test -L out && test ! -e pipe && echo "{\\"score\\": 1}" > "$1"'
    done = await run(tmp_path, evaluator_of({"command": ["sh", "-c", listing, "{workspace}", "{out}"]}, "x"))
    assert (done.score, done.error) == (1.0, "")


async def test_an_evaluator_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    ruler = evaluator_of({"command": ["sh", "-c", "sleep 600 & sleep 600"], "timeout_s": 0.3}, "x")
    done = await run(tmp_path, ruler)
    assert done.verdict == "hung" and "did not end within 0.3 s" in done.error


async def test_secrets_come_by_name_and_only_those(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "s3cret")
    monkeypatch.setenv("OTHER", "no")
    script = 'test "$KEY" = s3cret && test "$NONE" = dflt && test -z "$OTHER" && echo "{\\"score\\": 1}" > "$0"'
    body = {"command": ["sh", "-c", script, "{out}"], "env": {"KEY": "${JUDGE_KEY}", "NONE": "${NOTHING:-dflt}"}}
    assert (await run(tmp_path, evaluator_of(body, "x"))).score == 1.0


async def test_a_harbor_verifier_without_walls_is_refused(tmp_path: Path) -> None:
    done = await run(tmp_path, evaluator_of({"kind": "harbor", "command": ["bash", "{tests}/test.sh"]}, "x"))
    assert done.verdict == "failed" and "needs walls" in done.error


def test_the_version_is_that_of_everything_that_measures(tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text("1")
    body: dict[str, Any] = {"command": ["python", "judge.py"], "tests": {"a": "1"}}
    first = version_of(evaluator_of(body, "x"), str(tmp_path))
    others = [
        version_of(evaluator_of({**body, "tests": {"a": "2"}}, "x"), str(tmp_path)),
        version_of(evaluator_of({**body, "kind": "junit"}, "x"), str(tmp_path)),
        version_of(evaluator_of({**body, "command": ["python", "judge.py", "-v"]}, "x"), str(tmp_path)),
        version_of(evaluator_of({**body, "version": "2"}, "x"), str(tmp_path)),
    ]
    (tmp_path / "judge.py").write_text("22")
    others.append(version_of(evaluator_of(body, "x"), str(tmp_path)))
    assert len({first, *others}) == 6
    assert version_of(evaluator_of({**body, "timeout_s": 9, "retries": 3}, "x"), str(tmp_path)) == others[-1]


# ---- a rubric -----------------------------------------------------------------------------------------------------

CRITERIA = [
    {"name": "tests", "text": "There are tests.", "weight": 3},
    {"name": "names", "text": "Names say what things are."},
]


@asynccontextmanager
async def judge_at(answer: Callable[[dict[str, Any], int], web.Response]) -> AsyncIterator[tuple[str, list[Any]]]:
    """An OpenAI-compatible endpoint; `answer(body, how many came before)`."""
    seen: list[Any] = []

    async def handle(request: web.Request) -> web.Response:
        body = await request.json()
        seen.append((request.headers.get("Authorization"), body))
        return answer(body, len(seen) - 1)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
    yield f"http://127.0.0.1:{port}/v1", seen
    await runner.cleanup()


def says(text: str) -> web.Response:
    return web.json_response({"choices": [{"message": {"role": "assistant", "content": text}}]})


def verdict(**scores: Any) -> str:
    return "Sure:\n" + json.dumps({"criteria": [{"name": n, "reason": "r", "score": s} for n, s in scores.items()]})


def rubric(**more: Any) -> Evaluator:
    return evaluator_of({"kind": "rubric", "criteria": CRITERIA, "model": "judge-1", **more}, "x")


async def test_a_rubric_is_the_weighted_mean_of_what_the_judge_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with judge_at(lambda body, n: says(verdict(tests=1, names=0.5))) as (url, seen):
        monkeypatch.setenv("OPENAI_BASE_URL", url)
        monkeypatch.setenv("MY_KEY", "k")
        done = await run(tmp_path, rubric(api_key_env="MY_KEY"), a__py="x = 1", b__bin="\0")
        assert (done.verdict, done.score, done.parts) == ("scored", 0.875, {"tests": 1.0, "names": 0.5})
        key, body = seen[0]
        text = body["messages"][1]["content"]
        assert (key, body["model"], body["temperature"]) == ("Bearer k", "judge-1", 0)
        assert "x = 1" in text and "(binary, 1 bytes)" in text and "There are tests." in text
        assert body["messages"][0]["content"].split("marks ")[1][:20] in text


async def test_a_judge_is_asked_again_while_it_is_busy_and_without_what_it_does_not_know(tmp_path: Path) -> None:
    def answer(body: dict[str, Any], before: int) -> web.Response:
        if before == 0:
            return web.json_response({"error": "busy"}, status=429)
        if "response_format" in body:
            return web.json_response({"error": "response_format?"}, status=400)
        return says(verdict(tests=0, names=0))

    async with judge_at(answer) as (url, seen):
        done = await run(tmp_path, rubric(base_url=url), a="1")
        assert (done.verdict, done.score, len(seen)) == ("scored", 0.0, 3)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("I would say four out of five.", "no verdict in the form asked for"),
        (verdict(tests=1), "criterion 'names' the score None"),
        (verdict(tests=1, names=7), "the score 7, not a number from 0 to 1"),
        (verdict(tests=True, names=1), "the score True"),
    ],
)
async def test_a_judge_without_a_usable_verdict_has_failed(tmp_path: Path, text: str, words: str) -> None:
    async with judge_at(lambda body, n: says(text)) as (url, _):
        done = await run(tmp_path, rubric(base_url=url), a="1")
    assert done.verdict == "failed" and done.score is None and words in done.error


async def test_a_refused_key_or_a_missing_endpoint_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    assert "has no endpoint" in (await run(tmp_path, rubric(), a="1")).error
    async with judge_at(lambda body, n: web.json_response({"error": "who are you"}, status=401)) as (url, seen):
        assert "answered 401" in (await run(tmp_path, rubric(base_url=url), a="1")).error
        assert len(seen) == 1


async def test_a_judge_is_shown_nothing_from_outside_the_workspace(tmp_path: Path) -> None:
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "key.py").write_text("s3cret")
    folder = state(tmp_path / "höch st/e1/workspace", a__py="mine")
    (folder / "src").symlink_to(tmp_path / "private")
    (folder / "b.py").symlink_to(tmp_path / "private" / "key.py")
    async with judge_at(lambda body, n: says(verdict(tests=1, names=1))) as (url, seen):
        done = await run(tmp_path, rubric(base_url=url, files=["**/*.py", "src/*.py"]))
        assert done.score == 1.0 and "mine" in str(seen) and "s3cret" not in str(seen)


async def test_nothing_in_the_workspace_is_nothing_to_score(tmp_path: Path) -> None:
    assert (await run(tmp_path, rubric(base_url="http://127.0.0.1:1"))).verdict == "no_artifact"


async def test_a_score_of_the_wrong_kind_is_a_failure_not_a_zero(tmp_path: Path) -> None:
    for text in ("{}", '{"score": null}', '{"score": "1"}', "rubbish"):
        ruler = evaluator_of({"command": ["sh", "-c", f"echo '{text}' > \"$0\"", "{out}"]}, "x")
        done = await run(tmp_path, ruler)
        assert (done.verdict, done.score) == ("failed", None), text
    await asyncio.sleep(0)


# ---- behind walls -------------------------------------------------------------------------------------------------


def walls_stand() -> bool:
    words = ["bwrap", "--unshare-user", "--unshare-net", "--ro-bind", "/", "/", "true"]
    return shutil.which("bwrap") is not None and subprocess.run(words, capture_output=True).returncode == 0


needs_walls = pytest.mark.skipif(not walls_stand(), reason="bubblewrap is not installed or may make no namespace")


async def behind(tmp_path: Path, task: Task, **files: str) -> Evaluated:
    folder = tmp_path / "run" / "executions" / "e1"
    state(folder / "workspace", **files)
    done = await evaluate("e1", task, task.evaluator, folder / "workspace", Bwrap(folder=folder / "scoring"), 20.0)
    assert not (folder / "scoring").exists() and not children.RUNNING
    return done


@needs_walls
async def test_a_harbor_verifier_finds_its_places_and_nothing_else(tmp_path: Path) -> None:
    """/app, /tests and /logs are there; the run directory and the network are not."""
    script = f"""
set -e
mkdir -p /logs/verifier
test "$(cat /app/hello.txt)" = hello && test "$(pwd)" = /app
test -f /tests/expected.txt && test ! -e {tmp_path} && test "$KEY" = k
python3 - <<'X' && exit 9
import socket
socket.create_connection(("192.0.2.1", 80), timeout=1)
X
echo 0.75 > /logs/verifier/reward.txt
echo '{{"style": 0.5}}' > /logs/verifier/reward.json
exit 1
"""
    toml = '[verifier]\nenv = { KEY = "k" }\n'
    (task,) = tasks.load(harbor_task(tmp_path / "täsk one", toml, script))
    done = await behind(tmp_path, task, hello__txt="hello")
    assert (done.verdict, done.score, done.parts, done.evaluator) == ("scored", 0.75, {"style": 0.5}, "harbor"), done


@needs_walls
async def test_a_harbor_verifier_that_writes_no_reward_has_failed(tmp_path: Path) -> None:
    (task,) = tasks.load(harbor_task(tmp_path / "t", "", "echo sorry; exit 3"))
    done = await behind(tmp_path, task, a="")
    assert done.verdict == "failed" and "wrote no reward.txt" in done.error and "sorry" in done.error


@needs_walls
async def test_the_agents_code_under_test_sees_neither_the_run_nor_the_task_files(tmp_path: Path) -> None:
    places = [str(tmp_path), str(Path.home() / ".cache"), "/home"]
    spy = f"from pathlib import Path\nfound = [p for p in {places} if Path(p).exists()]\n"
    tests = {"test_spy.py": "import spy\n\ndef test_nothing():\n    assert spy.found == []\n"}
    ruler = evaluator_of({"kind": "pytest", "tests": tests}, "x")
    task = Task(id="t", instruction="do", workspace={}, evaluator=ruler, folder=str(tmp_path))
    done = await behind(tmp_path, task, spy__py=spy)
    assert (done.verdict, done.score, done.error) == ("scored", 1.0, "")


def harbor_task(folder: Path, toml: str, script: str) -> Path:
    (folder / "tests").mkdir(parents=True)
    (folder / "task.toml").write_text(toml)
    (folder / "instruction.md").write_text("Say hello.")
    (folder / "tests/test.sh").write_text(script)
    (folder / "tests/expected.txt").write_text("hello")
    return folder
