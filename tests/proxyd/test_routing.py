"""Experts of a mixture: asked for, spliced where a call moved, and recorded with it; what no engine said is unknown."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import pytest_asyncio

from gyre_base import messages as m
from gyre_base.config import ConfigError, from_tree
from gyre_base.routing import NAME, known, shape_of
from gyre_base.runfile import Call
from proxyd.engine import LONG_CHUNK, _Events
from proxyd.stream import Sampled
from tests.proxyd.fakes import FakeEngine, World
from tests.proxyd.test_end_to_end import SYSTEM, TASK, split

MODEL = {"model_type": "qwen3_moe", "num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> AsyncIterator[World]:
    model = tmp_path_factory.mktemp("model")
    (model / "config.json").write_text(json.dumps(MODEL))
    engine = {"kind": "sglang", "routed_experts": True}
    async with World(tmp_path_factory.mktemp("run"), tokenizer, engine=engine, model={"path": str(model)}) as made:
        yield made


def expected(call: Call, *parts: tuple[FakeEngine | None, int, int]) -> list[Any]:
    """Rows of a call whose tokens [start, end) each engine sampled; None where nobody says."""
    text, first = [*call.prompt_ids.tolist(), *call.completion_ids.tolist()], len(call.prompt_ids) - 1
    out: list[Any] = []
    for engine, start, end in parts:
        places = range(first + start, first + end)
        out += [engine.experts(text[at], at) if engine is not None else None for at in places]
    return out


def rows(call: Call) -> list[Any]:
    found = call.arrays[NAME]
    return [row.tolist() if known(found[[t]])[0] else None for t, row in enumerate(found)]


async def moved(world: World, name: str, first: FakeEngine, second: FakeEngine, whole: list[int]) -> Call:
    """A call that a drain moves after five tokens."""
    await world.cellctl.open(name)
    await world.cellctl.serve(first, second, away=(second.name,))
    call = asyncio.create_task(world.chat_call(name, [SYSTEM, TASK], "c1"))
    await world.cellctl.until(lambda: 5 in first.running.values())
    await world.cellctl.serve(first, second, away=(first.name,))
    await world.cellctl.say(m.DrainCell(cell=first.name, epoch=3))
    status, body, _ = await call
    assert status == 200, body
    return world.calls(name)["c1"]


@pytest.mark.asyncio(loop_scope="module")
async def test_each_engine_is_asked_for_the_rows_of_what_it_samples_alone(world: World) -> None:
    whole = world.says("a long answer that is cut in its middle")
    first = await world.engine("a1", lambda prompt: whole, hold_after=5, routes=1)
    second = await world.engine("b1", lambda p: split(p, whole, len(first.requests[0]["input_ids"])), routes=4)
    call = await moved(world, "x1", first, second, whole)
    prompt = len(call.prompt_ids)
    asked = [engine.requests[0]["routed_experts_start_len"] for engine in (first, second)]
    assert asked == [prompt - 1, prompt + 5 - 1]
    assert rows(call) == expected(call, (first, 0, 5), (second, 5, len(whole)))
    assert call.arrays[NAME].dtype.itemsize == 1
    assert "unrouted" not in call.extra["capture"]


@pytest.mark.asyncio(loop_scope="module")
async def test_rows_that_an_engine_keeps_to_itself_are_unknown_and_counted(world: World) -> None:
    whole = world.says("a long answer that is cut in its middle")
    first = await world.engine("a2", lambda prompt: whole, hold_after=5, routes=None)
    second = await world.engine("b2", lambda p: split(p, whole, len(first.requests[0]["input_ids"])))
    call = await moved(world, "x2", first, second, whole)
    assert rows(call) == expected(call, (None, 0, 5), (second, 5, len(whole)))
    assert call.extra["capture"]["unrouted"] == 5


@pytest.mark.asyncio(loop_scope="module")
async def test_the_rows_of_an_engine_that_died_are_unknown(world: World) -> None:
    whole = world.says("the engine dies under this answer")
    first = await world.engine("a3", lambda prompt: whole, hold_after=4)
    second = await world.engine("b3", lambda p: split(p, whole, len(first.requests[0]["input_ids"])))
    await world.cellctl.open("x3")
    await world.cellctl.serve(first, second, away=("b3",))
    asked = asyncio.create_task(world.chat_call("x3", [SYSTEM, TASK], "c1"))
    await world.cellctl.until(lambda: 4 in first.running.values())
    await world.cellctl.serve(first, second)
    first.die_after = 4
    first.release()
    status, body, _ = await asked
    assert status == 200, body
    call = world.calls("x3")["c1"]
    assert rows(call) == expected(call, (None, 0, 4), (second, 4, len(whole)))


async def test_nobody_is_asked_when_it_is_off(tmp_path: Path, tokenizer: Path) -> None:
    async with World(tmp_path / "run", tokenizer) as world:
        engine = await world.engine("a", lambda prompt: world.says("Yes."))
        await world.cellctl.open("e1")
        await world.cellctl.serve(engine)
        assert (await world.chat_call("e1", [SYSTEM, TASK], "c1"))[0] == 200
        assert not any("routed" in key for key in engine.requests[0])
        assert not world.calls()["c1"].arrays


def test_what_can_not_be_recorded_is_refused(tmp_path: Path) -> None:
    for kind in ("tiny", "emulate"):
        with pytest.raises(ConfigError, match=f"{kind} serves no mixture of experts"):
            from_tree({"engine": {"kind": kind, "routed_experts": True}})
    tree = {"engine": {"kind": "sglang", "routed_experts": True}, "model": {"path": str(tmp_path)}}
    with pytest.raises(ConfigError, match=r"config\.json"):
        shape_of(from_tree(tree))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", "num_hidden_layers": 2}))
    with pytest.raises(ConfigError, match="has no experts"):
        shape_of(from_tree(tree))
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    assert shape_of(from_tree(tree)) is not None
    assert shape_of(from_tree({})) is None


def test_a_long_last_chunk_is_read_whatever_its_pieces() -> None:
    meta = {"completion_tokens": 1, "output_token_logprobs": [[-1.0, 7, None]], "finish_reason": {"type": "stop"}}
    text = "Q" * (3 * LONG_CHUNK)
    chunks = [{"output_ids": [7], "meta_info": {**meta, "finish_reason": None}}]
    chunks += [{"output_ids": [], "meta_info": {**meta, "output_token_logprobs": [], "routed_experts": text}}]
    stream = b"".join(b"data: " + orjson.dumps(chunk) + b"\n\n" for chunk in chunks) + b"data: [DONE]\n\n"
    for size in (len(stream), LONG_CHUNK + 1, 9001):
        for shift in range(3):  # the end of the chunk falls into one piece, or between two
            sampled, heard = Sampled("0.0"), list[int]()
            events = _Events(sampled, heard.append)
            first = (stream.index(b"\n\ndata: [DONE]") + shift) % size
            for at in (0, *range(first, len(stream), size)):
                end = first if at == 0 else at + size
                events(200, stream[at:end])
            assert (sampled.ids, sampled.finish, sampled.routed == text, sum(heard)) == ([7], "stop", True, 2)
