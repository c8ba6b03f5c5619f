"""A real proxyd process between a scripted engine, a fake cellctl and plain HTTP."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import pytest_asyncio

from gyre_base import messages as m
from gyre_base.bus import Client
from gyre_base.runfile import context_digest
from gyre_cli import report
from tests.proxyd.fakes import REPOSITORY, FakeEngine, World

SYSTEM = {"role": "system", "content": "You write Python modules from their specifications."}
TASK = {"role": "user", "content": "Write f1.py from f1.md"}
TOOLS = [{"type": "function", "function": {"name": "read_file", "parameters": {"type": "object"}}}]
READ = '<tool_call>\n{"name": "read_file", "arguments": {"path": "f1.md"}}\n</tool_call>'


def echo(answer: dict[str, Any]) -> dict[str, Any]:
    """The assistant message as a client sends it back."""
    message = answer["choices"][0]["message"]
    return {k: message[k] for k in ("role", "content", "tool_calls") if k in message}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> AsyncIterator[World]:
    """One proxyd for the tests that leave it running; each has its own execution and engines."""
    async with World(tmp_path_factory.mktemp("run"), tokenizer) as made:
        yield made


def split(prompt: list[int], whole: list[int], start: int) -> list[int]:
    """The rest of a scripted answer when `prompt` already holds a part of it."""
    done = prompt[start:]
    assert whole[: len(done)] == done, "the tokens so far are not those that were sampled"
    return whole[len(done) :]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_call_is_answered_recorded_and_continued_with_its_exact_ids(world: World) -> None:
    answers = [world.says(READ), world.says("Done.")]
    engine = await world.engine("a2", lambda prompt: answers[min(len(engine.requests) - 1, 1)])
    await world.cellctl.open("x2")
    await world.cellctl.serve(engine)
    status, first, headers = await world.chat_call("x2", [SYSTEM, TASK], "call-1", tools=TOOLS, unknown_field=1)
    assert status == 200, first
    choice = first["choices"][0]
    assert choice["finish_reason"] == "tool_calls" and headers["X-Gyre-Call"] == "call-1"
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"path": "f1.md"}
    assert first["usage"]["prompt_tokens"] == len(engine.requests[0]["input_ids"])
    assert first["usage"]["completion_tokens"] == len(answers[0])

    result = {"role": "tool", "tool_call_id": choice["message"]["tool_calls"][0]["id"], "content": "spec"}
    history = [SYSTEM, TASK, echo(first), result]
    history[2]["tool_calls"][0]["function"]["arguments"] = '{ "path":"f1.md" }'  # spacing changes on the way
    status, second, _ = await world.chat_call("x2", history, "call-2", tools=TOOLS, stream=True)
    assert status == 200 and second.rstrip().endswith("data: [DONE]")
    calls = world.calls("x2")
    one, two = calls["call-1"], calls["call-2"]
    before = [*one.prompt_ids.tolist(), *one.completion_ids.tolist()]
    assert two.prompt_ids.tolist()[: len(before)] == before and two.parent == "call-1"
    assert one.completion_ids.tolist() == answers[0]
    for request, call in zip(engine.requests, (one, two), strict=True):
        assert request["input_ids"] == call.prompt_ids.tolist()
        assert call.context == context_digest(np.array(request["input_ids"], np.int32))
        assert request["sampling_params"]["temperature"] == 1.0
    assert one.logprobs is not None
    assert one.logprobs.tolist() == [np.float32(engine.logprob(i)) for i in answers[0]]
    assert [(s.policy, s.start, s.end) for s in one.spans] == [("0.0", 0, len(answers[0]))]
    assert (one.label, one.agent.id, one.seq, two.seq) == ("main", "main", 0, 1)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_drain_in_mid_generation_moves_the_call_and_loses_nothing(world: World) -> None:
    whole = world.says("a long answer that is cut in its middle")
    start = 0
    first = await world.engine("a3", lambda prompt: whole, hold_after=5)
    second = await world.engine("b3", lambda prompt: split(prompt, whole, start), version="0.1")
    await world.cellctl.open("x3")
    await world.cellctl.serve(first, second, away=("b3",))
    call = asyncio.create_task(world.chat_call("x3", [SYSTEM, TASK], "c1"))
    await world.cellctl.until(lambda: 5 in first.running.values())
    start = len(first.requests[0]["input_ids"])
    await world.cellctl.serve(first, second, away=("a3",))
    await world.cellctl.say(m.DrainCell(cell="a3", epoch=3))
    status, body, headers = await call
    assert status == 200, body
    drained = (await world.cellctl.until(lambda: world.cellctl.said(m.CellDrained)))[0]
    assert (drained.cell, drained.epoch, drained.moved, drained.moved_mid_generation) == ("a3", 3, 1, 1)
    assert not first.running
    recorded = world.calls("x3")["c1"]
    assert recorded.completion_ids.tolist() == whole
    assert [(s.policy, s.start, s.end) for s in recorded.spans] == [("0.0", 0, 5), ("0.1", 5, len(whole))]
    assert recorded.logprobs is not None
    assert recorded.logprobs.tolist() == [np.float32(first.logprob(i)) for i in whole]
    assert second.requests[0]["sampling_params"]["max_new_tokens"] == 64 - 5
    assert float(headers["X-Gyre-Waited"]) >= 0.0 and body["usage"]["prompt_tokens"] == start
    assert recorded.extra["capture"]["resent"] == [start + 5, start + 4]  # sent again; not computed again
    assert report.resent_tokens(world.run) == {"tokens_resent": start + 5, "tokens_resent_read": start + 4}
    await world.cellctl.say(m.DrainCell(cell="a3", epoch=3), m.DrainCell(cell="a3", epoch=2))  # again; and a stale one
    await world.cellctl.until(lambda: len(world.cellctl.said(m.CellDrained)) >= 2)
    await asyncio.sleep(0.1)
    assert {d.epoch for d in world.cellctl.said(m.CellDrained)} == {3}


@pytest.mark.asyncio(loop_scope="module")
async def test_an_engine_that_dies_in_mid_stream_is_replaced_and_its_tokens_are_kept(world: World) -> None:
    whole = world.says("the engine dies under this answer")
    start = 0
    first = await world.engine("a4", lambda prompt: whole, hold_after=4)
    second = await world.engine("b4", lambda prompt: split(prompt, whole, start))
    await world.cellctl.open("x4")
    await world.cellctl.serve(first, second, away=("b4",))
    call = asyncio.create_task(world.chat_call("x4", [SYSTEM, TASK], "c1"))
    await world.cellctl.until(lambda: 4 in first.running.values())
    start = len(first.requests[0]["input_ids"])
    await world.cellctl.serve(first, second)
    first.die_after = 4
    first.release()
    status, body, _ = await call
    assert status == 200, body
    lost = (await world.cellctl.until(lambda: world.cellctl.said(m.EngineLost)))[0]
    assert (lost.cell, lost.url) == ("a4", first.url)
    assert world.calls("x4")["c1"].completion_ids.tolist() == whole


async def test_a_killed_proxyd_continues_histories_and_answers_finished_calls_again(
    tmp_path: Path, tokenizer: Path
) -> None:
    async with World(tmp_path / "run", tokenizer) as world:
        answers = [world.says("One."), world.says("Two."), world.says("Three.")]
        engine = await world.engine("a", lambda prompt: answers[len(engine.requests) - 1])
        await world.cellctl.open("e1")
        await world.cellctl.serve(engine)
        _, one, _ = await world.chat_call("e1", [SYSTEM, TASK], "c1")
        history = [SYSTEM, TASK, echo(one), {"role": "user", "content": "more"}]
        engine.hold_after = 1
        pending = asyncio.create_task(world.chat_call("e1", history, "c2"))
        await world.cellctl.until(lambda: engine.running)
        await world.stop_proxyd(signal.SIGKILL)
        with pytest.raises(Exception):  # noqa: B017 - whatever a cut connection looks like
            await pending
        engine.release()
        await world.start_proxyd()
        assert world.cellctl.hellos[-1].holds == ("e1",)
        await world.cellctl.serve(engine)
        status, again, _ = await world.chat_call("e1", [SYSTEM, TASK], "c1")
        assert status == 200 and again["choices"] == one["choices"] and again["usage"] == one["usage"]
        assert len(engine.requests) == 2, "a finished call was sampled again"
        status, _, _ = await world.chat_call("e1", history, "c2")
        assert status == 200
        calls = world.calls()
        before = [*calls["c1"].prompt_ids.tolist(), *calls["c1"].completion_ids.tolist()]
        assert calls["c2"].prompt_ids.tolist()[: len(before)] == before and calls["c2"].parent == "c1"
        assert len(list(world.run.path("calls").glob("proxyd-*.gtr"))) == 2


@pytest.mark.asyncio(loop_scope="module")
async def test_one_call_id_is_one_call_in_flight_and_afterwards(world: World) -> None:
    engine = await world.engine("a5", lambda prompt: world.says("Same."), hold_after=2)
    await world.cellctl.open("x5")
    await world.cellctl.serve(engine)
    both = [asyncio.create_task(world.chat_call("x5", [SYSTEM, TASK], "c1", stream=s)) for s in (False, True)]
    await world.cellctl.until(lambda: 2 in engine.running.values())
    engine.release()
    plain, streamed = await asyncio.gather(*both)
    later = await world.chat_call("x5", [SYSTEM, TASK], "c1")
    assert len(engine.requests) == 1
    assert plain[1] == later[1] and "Same." in streamed[1]
    fresh = await world.chat_call("x5", [SYSTEM, TASK], "c2")  # another id: a wish for another sample
    assert fresh[0] == 200 and len(engine.requests) == 2
    attempt = world.calls("x5")["c2"].attempt
    assert (attempt.of, attempt.n) == ("c1", 1)


@pytest.mark.asyncio(loop_scope="module")
async def test_without_a_call_id_a_repeat_after_delivery_is_a_new_sample(world: World) -> None:
    engine = await world.engine("a6", lambda prompt: world.says("Hi."))
    await world.cellctl.open("x6")
    await world.cellctl.serve(engine)
    ids = [(await world.chat_call("x6", [TASK]))[2]["X-Gyre-Call"] for _ in range(2)]
    assert ids[0] != ids[1] and len(engine.requests) == 2


@pytest.mark.asyncio(loop_scope="module")
async def test_who_has_no_token_leaves_no_trace(world: World) -> None:
    engine = await world.engine("a7", lambda prompt: world.says("Hi."))
    await world.cellctl.open("x7")
    await world.cellctl.serve(engine)
    for token in ("", "wrong", world.keys.token("e2"), "\u00e9"):
        status, body, _ = await world.chat_call("x7", [TASK], "c1", token=token.encode().decode("latin-1"))
        assert status == 401 and body["error"]["code"] == "invalid_api_key"
    assert not engine.requests and not world.calls("x7")


@pytest.mark.asyncio(loop_scope="module")
async def test_bad_requests_get_the_dialects_own_words(world: World) -> None:
    engine = await world.engine("a8", lambda prompt: world.says("Hi."))
    await world.cellctl.open("x8")
    await world.cellctl.serve(engine)
    long = {"role": "user", "content": "x y " * 400}
    status, body, _ = await world.chat_call("x8", [SYSTEM, long], "c1")
    prompt = len(world.chat.render_whole([_message(SYSTEM), _message(long)]))
    assert status == 400 and body["error"]["code"] == "context_length_exceeded"
    assert body["error"]["message"] == (
        f"This model's maximum context length is 400 tokens. However, your messages resulted in {prompt} tokens. "
        "Please reduce the length of the messages."
    )
    headers = {"Authorization": f"Bearer {world.keys.token('x8')}"}
    base = world.base("x8")
    for body_bytes in (b"{", b"[]", b"{}", b'{"messages": [{"role": "sage"}]}'):
        async with world.session.post(f"{base}/v1/chat/completions", data=body_bytes, headers=headers) as response:
            assert response.status == 400
            assert (await response.json())["error"]["type"] == "invalid_request_error"
    async with world.session.post(f"{base}/v1/nothing", data=b"{}", headers=headers) as response:
        assert response.status == 404 and "error" in await response.json()
    async with world.session.get(f"{base}/v1/models", headers=headers) as response:
        assert (await response.json())["data"][0]["id"] == "gyre-policy"
    assert not engine.requests and not world.calls("x8")


@pytest.mark.asyncio(loop_scope="module")
async def test_a_call_waits_for_its_execution_and_for_an_engine(world: World) -> None:
    await world.cellctl.serve()
    call = asyncio.create_task(world.chat_call("x9", [TASK], "c1"))
    await asyncio.sleep(0.3)
    await world.cellctl.open("x9", temperature=0.0)
    await asyncio.sleep(0.3)
    assert not call.done()
    engine = await world.engine("a9", lambda prompt: world.says("Hi."))
    await world.cellctl.serve(engine)
    status, _, headers = await call
    assert status == 200 and float(headers["X-Gyre-Waited"]) >= 0.2
    assert engine.requests[0]["sampling_params"]["temperature"] == 0.0
    assert world.calls("x9")["c1"].sampling.temperature == 0.0


@pytest.mark.asyncio(loop_scope="module")
async def test_a_closed_execution_is_aborted_and_refused(world: World) -> None:
    engine = await world.engine("a10", lambda prompt: world.says("Never heard."), hold_after=2)
    await world.cellctl.open("x10")
    await world.cellctl.serve(engine)
    call = asyncio.create_task(world.chat_call("x10", [TASK], "c1"))
    await world.cellctl.until(lambda: 2 in engine.running.values())
    await world.cellctl.say(m.CloseExecution(execution="x10"))
    assert (await call)[0] == 403
    await world.cellctl.until(lambda: not engine.running)
    assert (await world.chat_call("x10", [TASK], "c3"))[0] == 403
    assert not world.calls("x10")


async def test_kills_and_drains_under_load_are_not_seen_in_any_record(tmp_path: Path, tokenizer: Path) -> None:
    async with World(tmp_path / "run", tokenizer) as world:
        opening = list(world.chat.opening.ids)

        def answer_to(prompt: list[int]) -> list[int]:
            """An answer that depends on the whole prompt before it."""
            return [*((len(prompt) * 7 + n) % 90 + 10 for n in range(20)), world.chat.end_id]

        def script(prompt: list[int]) -> list[int]:
            """The prompt comes bare or with a part of the answer."""
            at = max(n for n in range(len(prompt)) if prompt[n : n + len(opening)] == opening) + len(opening)
            return split(prompt, answer_to(prompt[:at]), at)

        engines = [await world.engine(name, script) for name in "ab"]
        for n in range(10):
            await world.cellctl.open(f"e{n}")
        await world.cellctl.serve(*engines)
        load = asyncio.gather(*(_work(world, f"e{n}") for n in range(10)))
        for epoch in (1, 2):
            await asyncio.sleep(0.1)
            leaving = "ab"[epoch % 2]
            await world.cellctl.serve(*engines, away=(leaving,))
            await world.cellctl.say(m.DrainCell(cell=leaving, epoch=epoch))
            await asyncio.sleep(0.05)
            await world.stop_proxyd(signal.SIGKILL)
            await world.start_proxyd()
            await world.cellctl.serve(*engines)
        await load
        for n in range(10):
            calls = world.calls(f"e{n}")
            assert sorted(calls) == [f"c{turn}" for turn in range(5)]
            before: list[int] = []
            for turn in range(5):
                call = calls[f"c{turn}"]
                prompt, completion = call.prompt_ids.tolist(), call.completion_ids.tolist()
                assert prompt[: len(before)] == before, "a history did not continue with its own ids"
                assert completion == answer_to(prompt), "tokens were lost or doubled"
                assert call.spans[0].start == 0 and call.spans[-1].end == len(completion)
                before = prompt + completion


async def _work(world: World, execution: str) -> None:
    """A harness behind a relay: five turns, each sent again under its id until a whole answer is there."""
    history: list[dict[str, Any]] = [SYSTEM, {"role": "user", "content": f"task of {execution}"}]
    for turn in range(5):
        while True:
            try:
                status, body, _ = await world.chat_call(execution, history, f"c{turn}")
                break
            except (aiohttp.ClientError, OSError):
                await asyncio.sleep(0.05)
        assert status == 200, body
        history = [*history, echo(body), {"role": "user", "content": f"turn {turn}"}]
        await asyncio.sleep(0.1)


async def test_a_new_cellctl_is_greeted_and_views_answer(tmp_path: Path, tokenizer: Path) -> None:
    async with World(tmp_path / "run", tokenizer) as world:
        engine = await world.engine("a", lambda prompt: world.says("Hi."))
        await world.cellctl.open("e1")
        await world.cellctl.serve(engine)
        await world.chat_call("e1", [TASK], "c1")
        await world.cellctl.restart()
        await world.cellctl.until(lambda: len(world.cellctl.hellos) >= 2)
        assert world.cellctl.hellos[-1].holds == ("e1",)
        client = Client(world.run, world.keys, "proxyd-0")
        views = {}
        for what in ("status", "routes", "sessions", "tail", "nonsense"):
            views[what] = (await client.ask(m.StatusRequest(what=what))).rows
        assert views["status"][0]["calls_finished"] == 1
        assert views["routes"][0]["cell"] == "a" and views["routes"][0]["executions"] == 1
        assert views["sessions"][0]["execution"] == "e1" and views["tail"][0]["call"] == "c1"
        assert "no view" in views["nonsense"][0]["error"]
        assert isinstance(await client.ask(m.OperatorOrder(verb="drain", argument="zz")), m.Refused)
        assert isinstance(await client.ask(m.OperatorOrder(verb="drain", argument="a")), m.Done)
        assert not (await client.ask(m.StatusRequest(what="routes"))).rows[0]["routable"]
        assert views["status"][0]["loop_lag_p99_ms"] >= 0.0
        url = world.base("e1").rpartition("/x/")[0] + "/metrics"
        async with world.session.get(url) as response:
            assert response.status == 401
        async with world.session.get(url, headers={"Authorization": f"Bearer {world.keys.admin}"}) as response:
            text = await response.text()
        families = dict(line.split(" ") for line in text.splitlines() if not line.startswith("#"))
        assert families['gyre_proxyd_calls_finished_total{shard="0"}'] == "1"
        assert families['gyre_proxyd_routable{shard="0",cell="a"}'] == "0"
        assert families['gyre_proxyd_tokens_total{shard="0",kind="sampled"}'] == str(len(world.says("Hi.")))
        assert "gyre_proxyd_loop_lag_seconds" in text and "e1" not in text and "f1.md" not in text
        await _commands(world.run.root)
        client.close()


async def _commands(root: Path) -> None:
    """What a person sees: the same rows by `proxyd ...`, and exit 4 for what is refused."""

    async def command(*words: str) -> tuple[int | None, str]:
        made = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "gyre_cli.proxyd", *words, "--run", str(root), stdout=-1, stderr=-1, cwd=REPOSITORY
        )
        out, err = await made.communicate()
        return made.returncode, (out + err).decode()

    outcomes = await asyncio.gather(command("tail", "e1", "--json"), command("undrain", "a"), command("drain", "zz"))
    assert outcomes[0][0] == 0 and json.loads(outcomes[0][1])["call"] == "c1"
    assert outcomes[1][0] == 0 and outcomes[2][0] == 4 and "cells: a" in outcomes[2][1]


async def test_proxyd_ends_cleanly_and_keeps_no_text_outside_the_call_log(tmp_path: Path, tokenizer: Path) -> None:
    async with World(tmp_path / "run", tokenizer) as world:
        engine = await world.engine("a", lambda prompt: world.says("A secret answer."), hold_after=3)
        await world.cellctl.open("e1")
        await world.cellctl.serve(engine)
        call = asyncio.create_task(world.chat_call("e1", [TASK], "c1"))
        await world.cellctl.until(lambda: 3 in engine.running.values())
        began = time.monotonic()
        assert await world.stop_proxyd() == 0
        assert time.monotonic() - began < 8.0
        with pytest.raises(Exception):  # noqa: B017
            await call
        await world.cellctl.until(lambda: not engine.running)
        assert world.run.endpoint("proxyd-0") is None
        for folder in ("journal", "log"):
            for path in world.run.path(folder).iterdir():
                assert "f1.md" not in path.read_text() and "secret" not in path.read_text()


@pytest.mark.asyncio(loop_scope="module")
async def test_the_other_dialect_reaches_the_same_tree(world: World) -> None:
    answers = [world.says(READ), world.says("Done.")]
    engine = await world.engine("a13", lambda prompt: answers[len(engine.requests) - 1])
    await world.cellctl.open("x13")
    await world.cellctl.serve(engine)
    headers = {"x-api-key": world.keys.token("x13")}
    url = f"{world.base('x13')}/v1/messages?beta=true"
    history: list[Any] = [{"role": "user", "content": "Write f1.py"}]
    body = {"model": "m", "max_tokens": 50, "system": "s", "messages": history, "metadata": {"user_id": "u"}}
    async with world.session.post(url, json=body, headers={**headers, "X-Gyre-Call": "c1"}) as response:
        first = await response.json()
    assert (first["stop_reason"], first["content"][0]["input"]) == ("tool_use", {"path": "f1.md"})
    result = {
        "type": "tool_result",
        "tool_use_id": first["content"][0]["id"],
        "content": [{"type": "text", "text": "r"}],
    }
    history += [{"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
    async with world.session.post(
        url, json={**body, "stream": True}, headers={**headers, "X-Gyre-Call": "c2"}
    ) as response:
        events = await response.text()
    assert events.rstrip().endswith('data: {"type":"message_stop"}') and "Done." in events
    assert world.calls("x13")["c2"].parent == "c1"
    async with world.session.post(
        f"{world.base('x13')}/v1/messages/count_tokens", json=body, headers=headers
    ) as response:
        assert (await response.json())["input_tokens"] > 10
    async with world.session.post(url, json=body, headers={"x-api-key": "wrong"}) as response:
        assert response.status == 401 and (await response.json())["error"]["type"] == "authentication_error"


@pytest.mark.asyncio(loop_scope="module")
async def test_a_compaction_relabels_the_summary_call(world: World) -> None:
    answers = ["I read it.", "f1 is half written.", "Done."]
    engine = await world.engine("a11", lambda prompt: world.says(answers[len(engine.requests) - 1]))
    await world.cellctl.open("x11")
    await world.cellctl.serve(engine)
    _, one, _ = await world.chat_call("x11", [SYSTEM, TASK], "c1")
    ask = {"role": "user", "content": "Summarise."}
    await world.chat_call("x11", [SYSTEM, TASK, echo(one), ask], "c2")
    after = {"role": "user", "content": TASK["content"] + "\n\nSo far: f1 is half written."}
    await world.chat_call("x11", [SYSTEM, after], "c3")
    note = world.notes("x11")[0]
    assert (note.text, note.exec) == ("relabel", "x11")
    assert dict(note.extra) == {"call": "c2", "purpose": "summary", "label": "main-summary"}
    assert world.calls("x11")["c3"].agent.id == "main"


def _message(given: dict[str, Any]) -> Any:
    from proxyd.conversation import Message

    return Message(given["role"], given["content"])


def test_the_fake_engine_repeats_on_abort_what_a_real_one_repeats() -> None:
    engine = FakeEngine("a", lambda prompt: [1, 2, 3])
    chunk = json.loads(engine._abort_chunk("r", [9], [1, 2, 3], 2)[6:])
    assert chunk["output_ids"] == [2] and len(chunk["meta_info"]["output_token_logprobs"]) == 2
