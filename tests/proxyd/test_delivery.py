"""A fake harness on real sockets: relay and proxyd between it and a scripted engine, broken at every place."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from gyre_base.shards import proxyd_name
from gyre_exec.relay import Relay, RelayLimits
from gyre_exec.upstream import Address, Upstreams, address_of
from proxyd.core import Router
from proxyd.events import Refuse, Submit
from tests.proxyd.fakes import World
from tests.proxyd.test_core import arrived, only, opened, table

ANSWER = 'I look.\n<tool_call>\n{"name": "Read", "arguments": {"path": "f1.md"}}\n</tool_call>'
BODIES: dict[str, dict[str, Any]] = {
    "messages": {"model": "m", "max_tokens": 64, "messages": [{"role": "user", "content": "task"}]},
    "chat/completions": {"model": "m", "messages": [{"role": "user", "content": "task"}]},
    "responses": {"model": "m", "input": [{"type": "message", "role": "user", "content": "task"}]},
}
LAST = {"messages": b"message_stop", "chat/completions": b"[DONE]", "responses": b"response.completed"}


class Harness:
    """Speaks to a relay in front of the world's proxyd."""

    def __init__(self, world: World) -> None:
        self.world = world
        limits = RelayLimits(quiet_s=0.05, ping_s=0.1, orphan_s=5.0)
        self.relay = Relay(Upstreams(self._find, world.shards), limits)

    def _find(self, shard: int) -> Address | None:
        endpoint = self.world.run.endpoint(proxyd_name(shard))
        return address_of(str(endpoint.extra["http"])) if endpoint is not None else None

    async def begin(self, execution: str) -> None:
        self.relay.open(execution)
        await self.world.cellctl.open(execution)

    def url(self, execution: str, path: str) -> str:
        return f"{self.relay.base_url(execution)}/v1/{path}"

    async def whole(self, execution: str, path: str, **more: Any) -> bytes:
        headers = {"Authorization": f"Bearer {self.world.keys.token(execution)}"}
        body = {**BODIES[path], **more}
        async with self.world.session.post(self.url(execution, path), json=body, headers=headers) as response:
            assert response.status == 200, await response.text()
            return await response.read()

    async def until_event(self, execution: str, path: str, events: int) -> int:
        """Read a stream up to so many events, then hang up rudely. Gives how many there were."""
        headers = {"Authorization": f"Bearer {self.world.keys.token(execution)}", "Connection": "close"}
        seen, rest = 0, b""
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(connector=connector) as session:
            body = {**BODIES[path], "stream": True}
            async with session.post(self.url(execution, path), json=body, headers=headers) as response:
                while seen < events:
                    piece = await response.content.read(1)
                    if not piece:
                        break
                    rest += piece
                    seen += rest.endswith(b"\n\n")
                assert response.connection is None or response.connection.transport is not None
                if response.connection is not None and response.connection.transport is not None:
                    response.connection.transport.abort()
        return seen


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def harness(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> AsyncIterator[Harness]:
    async with World(tmp_path_factory.mktemp("run"), tokenizer) as world:
        made = Harness(world)
        await made.relay.start()
        yield made
        await made.relay.stop()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("path", BODIES)
async def test_every_form_is_streamed_to_its_last_event_and_once_more_after_delivery(
    harness: Harness, path: str
) -> None:
    name = f"s-{path.partition('/')[0]}"
    engine = await harness.world.engine(name, lambda prompt: harness.world.says(ANSWER))
    await harness.begin(name)
    await harness.world.cellctl.serve(engine)
    streamed = await harness.whole(name, path, stream=True)
    assert LAST[path] in streamed.rstrip().rpartition(b"\n\n")[2] and b"f1.md" in streamed
    await harness.whole(name, path, stream=True)
    assert len(engine.requests) == 2, "after delivery the same request is a wish for a sibling"
    attempts = sorted(c.attempt.n for c in harness.world.calls(name).values())
    assert attempts == [0, 1]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_hang_up_while_it_is_made_meets_the_same_tokens_as_a_stream_and_as_one_piece(harness: Harness) -> None:
    engine = await harness.world.engine("f1", lambda prompt: harness.world.says(ANSWER), hold_after=3)
    await harness.begin("f1")
    await harness.world.cellctl.serve(engine)
    for events in (1, 2):  # the early headers and comments
        assert await harness.until_event("f1", "messages", events) == events
    engine.release()
    body = json.loads(await harness.whole("f1", "messages"))
    assert len(engine.requests) == 1 and body["content"][-1]["input"] == {"path": "f1.md"}
    (call,) = harness.world.calls("f1").values()
    assert call.completion_ids.tolist() == harness.world.says(ANSWER) and call.attempt.n == 0


@pytest.mark.asyncio(loop_scope="module")
async def test_a_hang_up_at_every_event_of_the_answer_loses_and_doubles_nothing(harness: Harness) -> None:
    """Whether the end arrived is the kernel's to say: either it is the same call again, or a sibling of a whole one."""
    engine = await harness.world.engine("e1", lambda prompt: harness.world.says(ANSWER))
    await harness.begin("e1")
    await harness.world.cellctl.serve(engine)
    whole = (await harness.whole("e1", "messages", stream=True)).count(b"event: ")
    for events in range(1, whole + 1):
        await harness.until_event("e1", "messages", events)
        again = await harness.whole("e1", "messages", stream=True)
        assert again.count(b"event: ") == whole and b"message_stop" in again
    calls = harness.world.calls("e1")
    assert len(calls) == len(engine.requests)
    assert all(c.completion_ids.tolist() == harness.world.says(ANSWER) for c in calls.values())


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("path", BODIES)
async def test_an_overflow_has_the_words_and_the_place_that_each_harness_compacts_on(
    harness: Harness, path: str
) -> None:
    name = f"o-{path.partition('/')[0]}"
    engine = await harness.world.engine(name, lambda prompt: harness.world.says("never"))
    await harness.begin(name)
    await harness.world.cellctl.serve(engine)
    key = "input" if path == "responses" else "messages"
    long = {key: [{"type": "message", "role": "user", "content": "x y " * 400}]}
    headers = {"Authorization": f"Bearer {harness.world.keys.token(name)}"}
    body = {**BODIES[path], **long, "stream": True}
    async with harness.world.session.post(harness.url(name, path), json=body, headers=headers) as response:
        status, text = response.status, await response.text()
    if path == "responses":
        failed = json.loads(text.partition("data: ")[2].partition("\n")[0])
        assert status == 200 and failed["type"] == "response.failed"
        assert failed["response"]["error"]["code"] == "context_length_exceeded"
    elif path == "messages":
        said = json.loads(text)["error"]
        assert status == 400 and said["type"] == "invalid_request_error"
        assert said["message"].startswith("prompt is too long: ") and said["message"].endswith(" tokens > 400 maximum")
    else:
        assert status == 400 and json.loads(text)["error"]["code"] == "context_length_exceeded"
    assert not engine.requests


@pytest.mark.asyncio(loop_scope="module")
async def test_a_client_that_is_gone_for_good_leaves_nothing_at_the_engine(harness: Harness) -> None:
    engine = await harness.world.engine("g1", lambda prompt: harness.world.says(ANSWER), hold_after=2)
    harness.relay._limits = RelayLimits(quiet_s=0.05, ping_s=0.1, orphan_s=0.2)
    await harness.begin("g1")
    await harness.world.cellctl.serve(engine)
    await harness.until_event("g1", "messages", 1)
    await harness.world.cellctl.until(lambda: engine.running)
    await harness.world.cellctl.until(lambda: not engine.running, seconds=5.0)
    harness.relay._limits = RelayLimits(quiet_s=0.05, ping_s=0.1, orphan_s=5.0)


async def test_a_killed_proxyd_is_a_slow_answer(tmp_path: Path, tokenizer: Path) -> None:
    async with World(tmp_path / "run", tokenizer) as world:
        harness = Harness(world)
        await harness.relay.start()
        engine = await world.engine("a", lambda prompt: world.says(ANSWER), hold_after=4)
        await harness.begin("e1")
        await world.cellctl.serve(engine)
        call = asyncio.create_task(harness.whole("e1", "messages", stream=True))
        await world.cellctl.until(lambda: 4 in engine.running.values())
        await world.stop_proxyd(signal.SIGKILL)
        engine.release()
        await world.start_proxyd()
        await world.cellctl.serve(engine)
        streamed = await call
        assert streamed.startswith(b": waiting") and b"message_stop" in streamed
        (recorded,) = world.calls("e1").values()
        assert recorded.completion_ids.tolist() == world.says(ANSWER)
        account, _ = harness.relay.close("e1")
        assert account.errors == 0 and account.resent >= 1
        await harness.relay.stop()


def test_a_call_is_held_for_as_long_as_no_engine_serves() -> None:
    core = Router()
    core.handle(opened("e"), 0.0)
    assert core.handle(arrived("k"), 0.0) == []
    core.handle(table(1, "a", away="a"), 1.0)
    assert not only(core.handle(table(2, "a", away="a"), 700.0), Refuse)
    (submit,) = only(core.handle(table(3, "a"), 7200.0), Submit)
    assert submit.sampled == 0
