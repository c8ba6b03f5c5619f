"""The emulated engine: the simulator's law of load, and the surface that the agent's client needs."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from celld.emulate.pool import Pace, Pool
from celld.engine_client import EngineClient, EngineRefused


@given(
    slots=st.integers(1, 8),
    slope=st.floats(0.0, 0.6),
    work=st.lists(st.tuples(st.floats(0.0, 20.0), st.integers(1, 50)), min_size=1, max_size=12),
)
@settings(max_examples=60, deadline=None)
def test_the_pool_decodes_by_the_simulators_law(slots, slope, work):
    from cellctl.simulate.serving import Serving

    starts = sorted((at, f"r{number}", tokens) for number, (at, tokens) in enumerate(work))
    serving = Serving(slope, 0.5, 1e9)
    serving.add_slots(slots)
    pool = Pool(Pace(slots=slots, tokens_per_s=1.0, load_slope=slope, load_floor=0.5))
    ours: dict[str, float] = {}
    theirs: dict[str, float] = {}
    queue = list(starts)
    while queue or serving.running:
        end, begin = serving.next_end(), queue[0][0] if queue else float("inf")
        serving.advance(min(end, begin))
        if end <= begin:
            theirs[serving.end()[0]] = end
        else:
            _, name, tokens = queue.pop(0)
            serving.start(name, float(tokens))
    queue = list(starts)
    while queue or pool.running:
        due, begin = pool.next_due(), queue[0][0] if queue else float("inf")
        pool.advance(min(due, begin))
        for name, _, last in pool.reports():
            if last:
                ours[name] = min(due, begin)
        if begin < due:
            _, name, tokens = queue.pop(0)
            pool.start(name, tokens, 1 << 20)
    assert ours == pytest.approx(theirs, abs=1e-3)


def test_a_request_keeps_its_tokens_when_it_leaves():
    pool = Pool(Pace(slots=2, tokens_per_s=10.0, load_floor=1.0))
    pool.start("a", 100, 1000)
    pool.advance(3.0)
    assert pool.remove("a") == 30
    assert (pool.request_s, pool.tokens, pool.next_due()) == (3.0, 30, float("inf"))


def test_a_held_pool_gets_nothing_done():
    pool = Pool(Pace(slots=2, tokens_per_s=10.0))
    pool.start("a", 100, 1000)
    pool.held = True
    pool.advance(3.0)
    assert (pool.done("a"), pool.request_s, pool.next_due()) == (0, 0.0, float("inf"))


@pytest.fixture
async def engine(tmp_path: Path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    key = tmp_path / "key"
    key.write_text("secret")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["--model", str(tmp_path / "model"), "--port", str(port), "--slots", "4", "--tokens-per-s", "50"]
    words += ["--admin-api-key-file", str(key), "--weight-version", "0.0", "--release-s", "0.05"]
    with subprocess.Popen([sys.executable, "-m", "celld.emulate.server", *words], stdout=subprocess.DEVNULL) as process:  # noqa: ASYNC220
        async with EngineClient(f"http://127.0.0.1:{port}", admin_key="secret") as client:
            await client.wait_serving(30.0)
            yield client, tmp_path / "model"
        process.terminate()
        assert process.wait(10.0) == 0


async def generate(client: EngineClient, tokens: int, rid: str = "r") -> dict:
    body = {"rid": rid, "input_ids": [1, 2], "sampling_params": {"max_new_tokens": tokens}, "return_logprob": True}
    return await client._post("/generate", body)


async def test_it_is_fit_for_rollout_and_takes_its_time(engine):
    client, _ = engine
    assert (await client.probe()).weight_version == "0.0"
    began = time.monotonic()
    answer = await generate(client, 10)
    assert time.monotonic() - began >= 10 / 50 * 0.99  # never faster than its law
    assert len(answer["output_ids"]) == answer["meta_info"]["completion_tokens"] == 10
    assert answer["meta_info"]["weight_versions"] == [{"version": "0.0", "start": 0, "end": 10}]
    assert await client.tokens() == 14  # with the probe's


async def test_an_abort_gives_what_there_is_and_a_busy_engine_refuses_to_let_go(engine):
    client, _ = engine
    task = asyncio.create_task(generate(client, 10_000))
    while not (await client.loads()).running:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    with pytest.raises(EngineRefused):
        await client.release()
    await asyncio.sleep(0.1)
    await client.abort("r")
    answer = await task
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(answer["output_ids"]) < 10_000


async def test_the_order_of_a_role_switch(engine):
    client, model = engine
    await client.pause("retract")
    await client.flush()
    await client.release()
    held = asyncio.create_task(generate(client, 3))
    await asyncio.sleep(0.1)
    assert (await client.loads()).running == 0 and not held.done()
    await client.resume(("weights",))
    await client.update_weights(model, "0.1")
    await client.resume(("kv_cache",))
    await client.proceed()
    assert await client.weight_version() == "0.1"
    assert (await held)["meta_info"]["weight_version"] == "0.1"


async def test_control_needs_the_key(engine):
    client, _ = engine
    async with EngineClient(client.base_url, admin_key="wrong") as stranger:
        with pytest.raises(EngineRefused, match="401"):
            await stranger.abort_all()
