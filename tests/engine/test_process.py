"""The tiny engine as a process: start, keys, memory that is really given back, the end."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from celld.engine_client import EngineClient, EngineRefused, EngineUnreachable, EngineUnsuitable
from celld.tiny.model import TinyConfig, TinyQwen3, save
from celld.tiny.server import main
from tests.engine.calls import Caller
from tests.engine.process import EngineProcess

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with 16 MB of parameters, so that letting go of them shows."""
    folder = tmp_path_factory.mktemp("large")
    config = TinyConfig(vocab_size=16_000, hidden_size=256, intermediate_size=512, initializer_range=0.05)
    save(TinyQwen3(config).initialise(0), folder)
    return folder


async def test_release_gives_the_memory_back_to_the_system(large: Path):
    with EngineProcess(large, "--max-running-requests", "8", "--weight-version", "0.0") as process:
        async with Caller(process.url) as engine:
            prompts = [[i, *range(2, 1500)] for i in range(8)]
            answers = await asyncio.gather(*(engine.generate(p, max_new_tokens=4) for p in prompts))
            full = process.resident_bytes()
            await engine.control.release()
            _, info = await info_of(engine)
            assert (info["kv_bytes"], info["weights_bytes"]) == (0, 0)
            kv_bytes = 2 * 8 * 1500 * 2 * 2 * 2 * 32 * 4  # rows and kept prefixes: tokens, layers, k and v, heads, E
            assert full - process.resident_bytes() > 0.7 * (kv_bytes + 30_000_000)
            await engine.control.resume()
            again = await engine.generate(prompts[3], max_new_tokens=4)
            assert again["output_ids"] == answers[3]["output_ids"]
            assert again["meta_info"]["cached_tokens"] == 0


async def info_of(engine: Caller) -> tuple[int, dict[str, Any]]:
    async with engine.session.get(engine.url + "/server_info") as response:
        return response.status, (await response.json())["internal_states"][0]


@pytest.fixture(scope="module")
def keyed(models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of an engine with the plain key `low` and the admin key `top`."""
    folder = tmp_path_factory.mktemp("keys")
    (folder / "admin").write_text("top\n")
    (folder / "plain").write_text("low\n")
    options = ("--admin-api-key-file", str(folder / "admin"), "--api-key-file", str(folder / "plain"))
    with EngineProcess(models[0], *options) as process:
        yield process.url


async def test_control_needs_the_admin_key_and_the_rest_the_plain_one(keyed: str):
    async with EngineClient(keyed) as stranger, EngineClient(keyed, api_key="low") as router:
        for refused in (stranger.model_info(), stranger.abort_all(), router.abort_all(), router.pause("abort")):
            with pytest.raises(EngineRefused) as caught:
                await refused
            assert caught.value.status == 401
        assert (await router.model_info())["is_generation"]
    async with EngineClient(keyed, api_key="low", admin_key="top") as agent:
        await agent.probe()
        await agent.pause("abort")
        await agent.proceed()


async def test_a_probe_names_every_setting_to_change(keyed: str, monkeypatch: pytest.MonkeyPatch):
    async with EngineClient(keyed, api_key="low") as client:
        ask = client._get

        async def spoiled(path: str, timeout_s: float | None = None) -> Any:
            answer = await ask(path, timeout_s)
            if path == "/server_info":
                answer.update(incremental_streaming_output=False, enable_memory_saver=False)
            return answer

        monkeypatch.setattr(client, "_get", spoiled)
        with pytest.raises(EngineUnsuitable) as caught:
            await client.probe()
        assert len(caught.value.remedies) == 2
        assert "--incremental-streaming-output" in str(caught.value)


async def test_a_full_engine_turns_requests_away_and_term_hands_out_partial_answers(models: tuple[Path, Path]):
    with EngineProcess(models[0], "--max-queued-requests", "3") as process:
        async with Caller(process.url) as engine:
            await engine.slow(0.02)
            tasks = [asyncio.create_task(engine.stream([5, 6, i], max_new_tokens=1000)) for i in range(3)]
            await engine.running(3)
            status, _ = await engine.post("/generate", {"input_ids": [5]})
            assert status == 503
            process.process.send_signal(signal.SIGTERM)
            for answer in await asyncio.gather(*tasks):
                assert answer["meta_info"]["finish_reason"]["type"] == "abort"
                assert 0 < answer["meta_info"]["completion_tokens"] < 1000
            assert process.process.wait(10) == 0
        async with EngineClient(process.url) as client:
            assert not await client.alive()
            with pytest.raises(EngineUnreachable):
                await client.loads()


@pytest.mark.parametrize("reason", ["port", "model", "context", "key"])
def test_what_keeps_it_from_starting_is_one_line_and_an_exit_code(
    models: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], reason: str
):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        options, code, part = {
            "port": (["--model", str(models[0]), "--port", str(taken.getsockname()[1])], 4, "can't listen"),
            "model": (["--model", str(tmp_path)], 2, "config.json"),
            "context": (["--model", str(models[0]), "--context-length", "99999"], 2, "--context-length"),
            "key": (["--model", str(models[0]), "--api-key-file", str(tmp_path / "no")], 2, "key file"),
        }[reason]
        assert main(options) == code
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), part in err) == ("", 1, True)
