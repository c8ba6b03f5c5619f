"""Real executor process, real harness and evaluator processes; cellctl and proxyd are played by the test."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from gyre_base import bus
from gyre_base import messages as m
from gyre_base.keys import make_keys
from gyre_base.vocabulary import Outcome
from gyre_exec import keeping
from tests.exec.rig import Cellctl, ExecutorProcess, Proxyd, make_run, nothing_left, processes_of, rig, task

WRITE = ("write", "answer", "seven77")


async def test_an_execution_that_finishes_is_scored_and_only_its_outcome_stays(tmp_path: Path) -> None:
    async with rig(tmp_path) as (cellctl, proxyd, executor):
        await cellctl.order("e1", task(["call", "hi"], ["stream", "ho"], ["env", "env.json"], WRITE))
        done = await cellctl.outcome("e1")
        assert (done.outcome, done.score, done.parts) == (Outcome.SCORED, 0.7, {"length": 0.7, "there": 1.0})
        assert (done.calls, done.harness_errors, done.exit_code, done.evaluator) == (2, 0, 0, "judge.py")
        assert len(done.evaluator_version) == 16 and done.error == "" and done.waited_s == 0.0
        call, headers, body = proxyd.requests[0]
        assert len(call) == 32 and body["messages"][0]["content"] == "hi"
        assert headers["Authorization"] == "Bearer " + make_keys(executor.run).token("e1")
        assert proxyd.paths == ["/x/e1/v1/chat/completions"] * 2
        folder = executor.run.path("executions", "e1")
        await cellctl.until(lambda: [p.name for p in folder.iterdir()] == ["outcome.json"])
        assert json.loads((folder / "outcome.json").read_text())["score"] == 0.7


async def test_a_harness_sees_a_minimal_environment_and_its_workspace(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"keep_workspaces": True, "harness_env": {"NOTES": "{workspace}/notes", "EXTRA": "1"}}
    async with rig(tmp_path, **settings) as (cellctl, _proxyd, executor):
        await cellctl.order("e1", task(["call", "x"], ["env", "env.json"], WRITE))
        await cellctl.outcome("e1")
        place = executor.run.path("executions", "e1", "workspace")
        env = json.loads((place / "env.json").read_text())
        assert (env["HOME"], env["NOTES"], env["EXTRA"]) == (str(place), f"{place}/notes", "1")
        assert env["OPENAI_BASE_URL"] == env["ANTHROPIC_BASE_URL"] + "/v1"
        assert set(env) <= {
            *("PATH", "HOME", "TMPDIR", "LANG", "OPENAI_BASE_URL", "OPENAI_API_KEY", "OPENAI_MODEL", "LC_CTYPE"),
            *("ANTHROPIC_BASE_URL", "ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_MODEL", "NOTES", "EXTRA"),
            *("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"),
        }
        assert env["CUDA_VISIBLE_DEVICES"] == ""
        assert (place / "src/deep/file.txt").read_text() == "x" and not (place / "mode").exists()


async def test_time_up_scores_what_is_there_and_an_empty_workspace_has_nothing_to_score(tmp_path: Path) -> None:
    async with rig(tmp_path) as (cellctl, _proxyd, executor):
        await cellctl.order("late", task(["call", "x"], WRITE, ["sleep", 60]), limit_s=1.0)
        await cellctl.order("empty", task(["call", "x"]))
        late, empty = await cellctl.outcome("late"), await cellctl.outcome("empty")
        assert (late.outcome, late.score, late.exit_code) == (Outcome.PARTIAL, 0.7, -signal.SIGTERM)
        assert 0.9 < late.wall_s < 10.0
        assert (empty.outcome, empty.score) == (Outcome.NO_ARTIFACT, 0.0)
        assert await nothing_left(executor.run)


async def test_a_failing_evaluator_is_never_a_zero(tmp_path: Path) -> None:
    once = tmp_path / "once"
    cases: dict[str, tuple[str, str]] = {
        "crash": ("crash", "the judge is ill"),
        "silent": ("silent", "wrote no score"),
        "rubbish": ("rubbish {not json", "not JSON"),
        "nan": ('rubbish {"score": NaN}', "finite"),
        "text": ('rubbish {"score": "1"}', "not a number"),
        "truth": ('rubbish {"score": true}', "not a number"),
        "huge": ('rubbish {"score": 1' + "0" * 400 + "}", "finite"),
        "list": ("rubbish [1]", "list"),
        "hang": ("hang", "did not end within 1 s"),
    }
    async with rig(tmp_path / "run") as (cellctl, _proxyd, executor):
        for name, (mode, _) in cases.items():
            await cellctl.order(name, task(["call", "x"], WRITE, mode=mode, timeout_s=1.0 if name == "hang" else 10.0))
        await cellctl.order("flaky", task(["call", "x"], WRITE, mode=f"flaky {once}"))
        for name, (_, word) in cases.items():
            done = await cellctl.outcome(name)
            assert (done.outcome, done.score) == (Outcome.EVALUATOR_FAILED, None), name
            assert word in done.error, (name, done.error)
        flaky = await cellctl.outcome("flaky")
        assert (flaky.outcome, flaky.score, flaky.error) == (Outcome.SCORED, 0.7, "")
        assert await nothing_left(executor.run)


async def test_children_that_ignore_term_or_leave_the_session_are_gone_with_their_harness(tmp_path: Path) -> None:
    async with rig(tmp_path) as (cellctl, _proxyd, executor):
        await cellctl.order("quick", task(["call", "x"], ["fork"], ["escape"], WRITE))
        await cellctl.order("slow", task(["call", "x"], ["stubborn"], ["fork"], ["escape"], WRITE, ["sleep", 60]), 1.0)
        quick, slow = await cellctl.outcome("quick"), await cellctl.outcome("slow")
        assert (quick.outcome, slow.outcome, slow.exit_code) == (Outcome.SCORED, Outcome.PARTIAL, -signal.SIGKILL)
        assert processes_of(executor.run) == []


async def test_what_a_harness_said_stays_compressed_and_a_hundred_megabytes_are_bounded(tmp_path: Path) -> None:
    said = ["say", "stdout", "hello\n"], ["say", "stderr", "careful\n"], ["say", "transcript", '{"turns": 3}']
    env = {"TRANSCRIPT": "{transcript}"}
    async with rig(tmp_path, printed_mib=2, harness_env=env) as (cellctl, _proxyd, executor):
        await cellctl.order("loud", task(["call", "x"], WRITE, ["print", 100], ["say", "stdout", "the end"]))
        await cellctl.order("quiet", task(["call", "x"], *said, WRITE))
        await cellctl.order("odd", task(["call", "x"], ["link-transcript", "/etc/passwd"], WRITE))
        for name in ("loud", "quiet", "odd"):
            assert (await cellctl.outcome(name, 40.0)).outcome is Outcome.SCORED
        loud, quiet, odd = (executor.run.path("executions", name) for name in ("loud", "quiet", "odd"))
        await cellctl.until(lambda: not (odd / "harness").exists() and not (loud / "harness").exists())
        assert sorted(p.name for p in loud.iterdir()) == ["outcome.json", "stdout.zst"]
        text = keeping.read(loud, "stdout")
        assert 2 << 20 < len(text) < (2 << 20) + 8192 and text.endswith(b"the end") and b"bytes left out" in text
        assert (loud / "stdout.zst").stat().st_size < 64 << 10
        kept = {name: keeping.read(quiet, name) for name in keeping.KEPT}
        assert kept == {"stdout": b"hello\n", "stderr": b"careful\n", "transcript.json": b'{"turns": 3}'}
        assert sorted(p.name for p in odd.iterdir()) == ["outcome.json"], "a link to another file was followed"


async def test_a_harness_that_never_reached_the_model_is_our_failure(tmp_path: Path) -> None:
    async with rig(tmp_path) as (cellctl, _proxyd, _executor):
        await cellctl.order("mad", task(["raise"]))
        await cellctl.order("gave-up-later", task(["call", "x"], ["raise"]))
        mad = await cellctl.outcome("mad")
        assert mad.outcome is Outcome.INFRA_FAILED and "the agent lost its mind" in mad.error
        assert (await cellctl.outcome("gave-up-later")).outcome is Outcome.NO_ARTIFACT


async def test_an_order_that_can_not_run_says_why(tmp_path: Path) -> None:
    broken = task()
    del broken["evaluator"]
    async with rig(tmp_path) as (cellctl, _proxyd, _executor):
        await cellctl.order("no-judge", broken)
        await cellctl.order("../../up", task())
        await cellctl.order("no-task", {"id": "nowhere"})
        done = await cellctl.outcome("no-judge")
        assert done.outcome is Outcome.UNSCORED and "no `evaluator`" in done.error
        assert (await cellctl.outcome("../../up")).outcome is Outcome.UNSCORED
        assert (await cellctl.outcome("no-task")).outcome is Outcome.UNSCORED


async def test_proxyd_dies_and_moves_while_calls_wait_and_no_harness_sees_it(tmp_path: Path) -> None:
    seen: dict[str, str] = {}

    async def hang(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        seen[body["messages"][0]["content"]] = request.headers["X-Gyre-Call"]
        if len(seen) % 2:  # half of them die in mid-answer
            answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await answer.prepare(request)
            await answer.write(b"data: half")
        await asyncio.sleep(60)
        raise AssertionError

    async def waited(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        text = body["messages"][0]["content"]
        assert seen.setdefault(text, request.headers["X-Gyre-Call"]) == request.headers["X-Gyre-Call"]
        await asyncio.sleep(0.3)
        return web.Response(
            text="data: [DONE]\n\n", content_type="text/event-stream", headers={"X-Gyre-Waited": "0.25"}
        )

    async with rig(tmp_path, hang) as (cellctl, proxyd, executor):
        for number in range(10):
            await cellctl.order(f"e{number}", task(["stream", f"first {number}"], ["call", f"x {number}"], WRITE), 2.0)
        await cellctl.until(lambda: len(seen) == 10)
        await proxyd.stop()
        await asyncio.sleep(2.5)  # longer than the harness limit
        another = Proxyd(executor.run, waited)
        await another.start()
        for number in range(10):
            done = await cellctl.outcome(f"e{number}")
            assert (done.outcome, done.harness_errors, done.calls) == (Outcome.SCORED, 0, 2), done
            assert done.waited_s > 2.5
        assert len({call for call, _, _ in another.requests}) == 20
        await another.stop()


async def test_a_cancelled_execution_ends_at_once(tmp_path: Path) -> None:
    async with rig(tmp_path) as (cellctl, _proxyd, executor):
        await cellctl.order("e1", task(["call", "x"], ["sleep", 60]))
        await cellctl.until(lambda: bool(processes_of(executor.run)))
        await cellctl.say(m.CancelExecution(execution="e1", why="superseded"))
        await cellctl.say(m.CancelExecution(execution="never heard of", why="superseded"))
        done = await cellctl.outcome("e1")
        assert (done.outcome, done.score, done.error) == (Outcome.CANCELLED, None, "superseded")
        assert (await cellctl.outcome("never heard of")).outcome is Outcome.CANCELLED
        assert processes_of(executor.run) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_an_executor_that_is_stopped_leaves_no_process(tmp_path: Path, number: int) -> None:
    async with rig(tmp_path) as (cellctl, _proxyd, executor):
        for place in range(12):
            await cellctl.order(f"e{place}", task(["stubborn"], ["fork"], ["sleep", 60]))
        await cellctl.until(lambda: len(processes_of(executor.run)) == 24)
        code = await executor.stop(number)
        assert await nothing_left(executor.run)
        assert code == (0 if number == signal.SIGTERM else -signal.SIGKILL)
        if number == signal.SIGTERM:
            await cellctl.until(lambda: bool(cellctl.goodbyes))
            assert list(executor.run.path("executions").glob("*/workspace")) == []
            assert executor.run.endpoint("ex0") is None


async def test_outcomes_are_repeated_until_noted_and_a_new_cellctl_hears_what_is_held(tmp_path: Path) -> None:
    async with rig(tmp_path) as (cellctl, _proxyd, executor):
        cellctl.notes = False
        await cellctl.order("e1", task(["call", "x"], WRITE))
        await cellctl.outcome("e1")
        await cellctl.order("e1", task(["call", "x"], WRITE))  # a duplicate: the outcome is said again at once
        await cellctl.until(lambda: len(cellctl.said) >= 2)
        second = Cellctl(executor.run)
        await second.start()
        await second.until(lambda: bool(second.hellos and second.said))
        assert cellctl.hellos[0].holds == () and second.hellos[0].holds == ("e1",)
        client = bus.Client(executor.run, make_keys(executor.run), "ex0")
        reply = await client.ask(m.StatusRequest())
        assert (reply.rows[0]["finished"], reply.rows[0]["reported"]) == ({"scored": 1}, 0)
        assert isinstance(await client.ask(m.StatusRequest(what="moon")), m.Refused)
        client.close()
        await second.stop()


async def test_a_second_start_ends_what_the_first_left(tmp_path: Path) -> None:
    """Even when the guard died with the executor."""
    async with rig(tmp_path) as (cellctl, _proxyd, executor):
        await cellctl.order("e1", task(["sleep", 60]))
        await cellctl.until(lambda: executor.run.path("executions", "e1", "pid").exists())
        guard = [p for p in Path("/proc").iterdir() if p.name.isdigit() and _parent(p) == executor.process.pid]
        for path in guard:
            if b"guard.py" in (path / "cmdline").read_bytes():
                os.kill(int(path.name), signal.SIGKILL)
        await executor.stop(signal.SIGKILL)
        assert processes_of(executor.run)
        again = ExecutorProcess(executor.run)
        await cellctl.until(lambda: len(cellctl.hellos) == 2)
        assert await nothing_left(executor.run)
        assert not executor.run.path("executions", "e1", "workspace").exists()
        await again.stop()


def _parent(path: Path) -> int:
    try:
        return int((path / "stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return 0


async def test_a_bad_start_is_one_clear_line(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", harness=[])
    for root, code, words in (
        (tmp_path / "none", 4, "is not a run directory"),
        (run.root, 2, "tasks.harness is empty"),
    ):
        command = (sys.executable, "-m", "gyre_exec.daemon", "--run", str(root))
        process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
        _, err = await process.communicate()
        assert (process.returncode, err.decode().count("\n")) == (code, 1)
        assert words in err.decode()


async def test_an_executor_that_was_given_up_says_hello_again_with_what_it_holds(tmp_path: Path) -> None:
    async with rig(tmp_path) as (cellctl, _proxyd, _executor):
        await cellctl.order("e1", task(["sleep", 3.0], WRITE))
        await asyncio.sleep(0.5)
        await cellctl.say(m.Welcome(life=cellctl.life))  # what cellctl says to a heartbeat of a peer it does not know
        await cellctl.until(lambda: len(cellctl.hellos) == 2)
        assert cellctl.hellos[-1].holds == ("e1",)
