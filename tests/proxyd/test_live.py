"""Live delivery: relay and proxyd on real sockets with a scripted engine, and what may be told early, in property."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_base import messages as m
from gyre_base.runfile import Span
from proxyd.chat import ChatModel
from proxyd.dialects import BadRequest
from proxyd.live import Chunk, Seal, Speech, progress_of
from proxyd.records import Progress
from proxyd.service import Open, since
from proxyd.stream import Sampled
from tests.proxyd.fakes import World
from tests.proxyd.test_delivery import ANSWER, BODIES, LAST, Harness

STREAM: dict[str, Any] = {"stream": True}


class Listener:
    """A harness that reads a stream as it comes."""

    def __init__(self, harness: Harness, execution: str, path: str) -> None:
        self.harness, self.execution, self.path = harness, execution, path
        self.heard = b""
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        headers = {"Authorization": f"Bearer {self.harness.world.keys.token(self.execution)}"}
        url, body = self.harness.url(self.execution, self.path), {**BODIES[self.path], **STREAM}
        async with self.harness.world.session.post(url, json=body, headers=headers) as response:
            assert response.status == 200, await response.text()
            async for piece in response.content.iter_any():
                self.heard += piece

    async def until(self, words: str) -> None:
        await self.harness.world.cellctl.until(lambda: words in said(self.path, self.heard))


def said(path: str, stream: bytes) -> str:
    """The text that a stream has told."""
    out = ""
    for line in stream.split(b"\n"):
        if not line.startswith(b"data: {"):
            continue
        try:
            event = json.loads(line[6:])
        except json.JSONDecodeError:
            continue  # its end is still to come
        if path == "messages":
            out += event.get("delta", {}).get("text", "")
        elif path == "responses":
            out += event["delta"] if event["type"] == "response.output_text.delta" else ""
        else:
            out += "".join(c["delta"].get("content") or "" for c in event["choices"])
    return out


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def harness(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> AsyncIterator[Harness]:
    folder = tmp_path_factory.mktemp("run")
    async with World(folder, tokenizer, rollout={"delivery": "live"}) as world:
        made = Harness(world)
        await made.relay.start()
        yield made
        await made.relay.stop()


def told_once(path: str, stream: bytes) -> bool:
    """The whole answer, each word of it once, up to the final event, and nothing of ours."""
    whole = said(path, stream) == "I look."
    ended = LAST[path] in stream.rstrip().rpartition(b"\n\n")[2] and stream.count(LAST[path]) in (1, 2)
    return whole and ended and b"f1.md" in stream and b"gyre-so-far" not in stream and b"gyre-waited" not in stream


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("path", BODIES)
async def test_text_goes_out_as_it_is_sampled_and_the_end_with_the_record(harness: Harness, path: str) -> None:
    world, name = harness.world, f"live-{path.partition('/')[0]}"
    count = len(world.chat.encode("I look."))
    engine = await world.engine(name, lambda prompt: world.says(ANSWER), hold_after=count)
    await harness.begin(name)
    await world.cellctl.serve(engine)
    listener = Listener(harness, name, path)
    await listener.until("I look")
    assert not world.calls(name) and LAST[path] not in listener.heard
    engine.release()
    await listener.task
    assert told_once(path, listener.heard), listener.heard
    (call,) = world.calls(name).values()
    assert call.completion_ids.tolist() == world.says(ANSWER)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("path", BODIES)
async def test_a_move_and_a_hang_up_in_the_middle_are_not_seen(harness: Harness, path: str) -> None:
    world, name = harness.world, f"move-{path.partition('/')[0]}"
    first = await world.engine(f"{name}-a", lambda prompt: world.says(ANSWER), hold_after=3)
    second = await world.engine(f"{name}-b", lambda prompt: world.says(ANSWER)[3:], hold_after=1)
    await harness.begin(name)
    await world.cellctl.serve(first)
    listener = Listener(harness, name, path)
    await world.cellctl.until(lambda: 3 in first.running.values() and listener.heard)
    await world.cellctl.serve(first, second, away=(first.name,))
    await world.cellctl.say(m.DrainCell(cell=first.name, epoch=1))
    await world.cellctl.until(lambda: second.running)
    listener.task.cancel()
    await asyncio.gather(listener.task, return_exceptions=True)
    again = Listener(harness, name, path)
    await asyncio.sleep(0.1)
    second.release()
    await again.task
    assert told_once(path, again.heard), again.heard
    (call,) = world.calls(name).values()
    assert call.completion_ids.tolist() == world.says(ANSWER) and call.attempt.n == 0
    assert [r["input_ids"][-3:] for r in second.requests] == [world.says(ANSWER)[:3]]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("path", BODIES)
async def test_an_answer_that_can_not_be_ended_ends_with_an_error_and_never_clean(harness: Harness, path: str) -> None:
    world, name = harness.world, f"over-{path.partition('/')[0]}"
    engine = await world.engine(name, lambda prompt: world.says(ANSWER), hold_after=5)
    await harness.begin(name)
    await world.cellctl.serve(engine)
    listener = Listener(harness, name, path)
    await world.cellctl.until(lambda: listener.heard)
    await world.cellctl.say(m.CloseExecution(execution=name))
    (end,) = await asyncio.gather(listener.task, return_exceptions=True)
    assert LAST[path] not in listener.heard and f"execution {name} is closed".encode() in listener.heard, end
    account, _ = harness.relay.close(name)
    assert account.errors == 1
    engine.release()


@pytest.mark.parametrize("path", BODIES)
async def test_a_killed_proxyd_goes_on_with_the_tokens_that_were_told(
    tmp_path: Path, tokenizer: Path, path: str
) -> None:
    """The engine would say something else the second time: what was told decides."""
    async with World(tmp_path / "run", tokenizer, rollout={"delivery": "live"}) as world:
        harness = Harness(world)
        await harness.relay.start()
        answer = world.says(ANSWER)
        start = len(world.chat.encode("I look."))
        other = world.says("Something else.")
        engine = await world.engine("a", lambda prompt: answer, hold_after=start)
        await harness.begin("e1")
        await world.cellctl.serve(engine)
        listener = Listener(harness, "e1", path)
        await listener.until("I look")
        told = said(path, listener.heard)
        await world.cellctl.until(lambda: start in engine.running.values())
        prompt = engine.requests[0]["input_ids"]
        engine.script = lambda given: answer[len(given) - len(prompt) :] if len(given) > len(prompt) else other
        await world.stop_proxyd(signal.SIGKILL)
        engine.release()
        await world.start_proxyd()
        await world.cellctl.serve(engine)
        await listener.task
        assert said(path, listener.heard).startswith(told) and told_once(path, listener.heard), listener.heard
        (recorded,) = world.calls("e1").values()
        assert recorded.completion_ids.tolist() == answer
        assert recorded.logprobs.tolist() == [engine.logprob(i) for i in answer]
        account, _ = harness.relay.close("e1")
        assert account.errors == 0 and account.resent >= 1
        await harness.relay.stop()


# ---- what may be told before the end --------------------------------------------------------------------------------

PARTS = st.sampled_from(
    [
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        '\n{"name": "f", "arguments": {}}\n',
        "\n",
        " ",
        "é",
        "🙂",
        "<t",
    ]
)
TEXTS = st.lists(st.one_of(PARTS, st.text("ab \n<", max_size=5)), max_size=12).map("".join)


@settings(max_examples=300, deadline=None)
@given(text=TEXTS, cuts=st.lists(st.integers(1, 6), min_size=1, max_size=8), thinks=st.booleans())
def test_what_is_told_is_how_the_answer_begins(
    chat: ChatModel, thinker: ChatModel, text: str, cuts: list[int], thinks: bool
) -> None:
    chat = thinker if thinks else chat
    ids, at, turn = chat.encode(text), 0, 0
    speech, reasoning, content = Speech(chat), "", ""
    while at < len(ids):
        size = cuts[turn % len(cuts)]
        more = speech.take(ids[at : at + size])
        reasoning, content = reasoning + more[0], content + more[1]
        at, turn = at + size, turn + 1
        whole = chat.parse([*ids, chat.end_id], "c").spoken
        assert whole.reasoning.startswith(reasoning) and whole.text.startswith(content)
    if not {"<", "\n"} & set(text) and "\ufffd" not in chat.decode(ids) and text.strip():
        assert (reasoning + content) == text, "nothing was held that is sure"


@pytest.mark.parametrize("finish", ["stop", "length", ""])
def test_all_but_the_last_token_of_an_answer_is_told_before_the_disk(chat: ChatModel, finish: str) -> None:
    opened = Open("e:c", "e", "c", None, 9, 0.0, b"", "", Progress())  # type: ignore[arg-type]
    opened.progress = Progress([1, 2], [-1.0, -2.0], [Span("0.0", 0, 2)])
    opened.sampled, opened.asked = Sampled("0.1", [3, 4, 5], [-3.0, -4.0, -5.0], finish=finish), 7
    assert since(opened, 0, chat.stop_ids) == Chunk([1, 2], [-1.0, -2.0], "0.0")
    wanted = [3, 4, 5] if not finish else [3, 4]
    assert since(opened, 2, chat.stop_ids) == Chunk(wanted, [-3.0, -4.0, -5.0][: len(wanted)], "0.1")
    assert since(opened, 2 + len(wanted), chat.stop_ids) is None
    opened.progress = Progress([1, 2, 3], [-1.0, -2.0, -3.0], [Span("0.0", 0, 2), Span("0.1", 2, 3)])
    opened.sampled, opened.complete = None, True
    assert since(opened, 1, chat.stop_ids) == Chunk([2], [-2.0], "0.0")
    assert since(opened, 2, chat.stop_ids) is None


def test_lines_of_another_call_or_out_of_order_are_refused() -> None:
    seal = Seal("key", "e", "c")
    one, two = Chunk([1, 2], [-0.5, float("nan")], "0.0"), Chunk([3], [-1.0], "0.1")
    lines = [seal.line(one, 0, 7), seal.line(two, 2, 7)]
    chunks, created = seal.read(b"\n".join(lines))
    made = progress_of(chunks)
    assert (made.ids, created) == ([1, 2, 3], 7) and made.logprobs[0] == -0.5 and made.logprobs[1] != made.logprobs[1]
    assert [(s.policy, s.start, s.end) for s in made.spans] == [("0.0", 0, 2), ("0.1", 2, 3)]
    for bad in (lines[1], lines[0].replace(b"[1,2]", b"[1,4]"), b"x", b"\n".join(reversed(lines))):
        with pytest.raises(BadRequest):
            seal.read(bad)
    with pytest.raises(BadRequest):
        Seal("key", "e", "d").read(lines[0])
