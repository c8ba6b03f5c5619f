"""What gyre relies on in an engine, over HTTP; see conftest.py for how to run it on a real one."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from celld.engine_client import EngineRefused
from celld.sglang.launch import PAGE_TOKENS
from celld.tiny.model import TinyQwen3
from tests.engine.calls import Caller, generate_body, joined, logprobs, new_rid

LONG = 200  # tokens
REAL = os.environ.get("GYRE_ENGINE") == "sglang"
pytestmark = pytest.mark.timeout(900 if REAL else 60)  # the first test waits for the engines
STEP_S = 0.03  # of a slowed engine: LONG takes six seconds, which is long enough to get a word in


def only_tiny(why: str) -> pytest.MarkDecorator:
    """Marks what the real engine does otherwise; nothing that gyre relies on may need it."""
    return pytest.mark.skipif(REAL, reason=why)


needs_a_model = pytest.mark.needs_a_model  # what the emulated engine has not: skipped there, with the reason


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, 300) for _ in range(length)]


def forward_logprobs(model: TinyQwen3, ids: list[int], new: list[int], temperature: float = 1.0) -> torch.Tensor:
    """log_softmax(logits / T) of `new` after `ids`, by the whole model at once."""
    with torch.no_grad():
        logits = model(torch.tensor([ids + new]))[0, len(ids) - 1 : -1]
    return torch.log_softmax(logits / temperature, dim=-1).gather(1, torch.tensor(new)[:, None])[:, 0]


def worst(model: TinyQwen3, ids: list[int], answer: dict[str, Any], temperature: float = 1.0) -> float:
    expected = forward_logprobs(model, ids, answer["output_ids"], temperature)
    return float((expected - torch.tensor(logprobs(answer))).abs().max())


# -- generation -------------------------------------------------------------------------------------------------


async def test_an_answer_has_ids_logprobs_counts_and_version_spans(engine: Caller):
    ids, rid = prompt(9), new_rid()
    answer = await engine.generate(ids, rid=rid, max_new_tokens=7)
    meta = answer["meta_info"]
    assert len(answer["output_ids"]) == 7
    assert meta["id"] == rid
    assert meta["finish_reason"] == {"type": "length", "length": 7}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (9, 7, 0)
    assert meta["output_token_logprobs_length"] == 7
    assert meta["weight_version"] == "0.0"
    assert meta["weight_versions"] == [{"version": "0.0", "start": 0, "end": 7}]
    assert all(pair[2] is None for pair in meta["output_token_logprobs"])
    assert meta["e2e_latency"] > 0


async def test_chunks_are_increments_and_add_up_to_the_whole_answer(engine: Caller):
    ids = prompt(12)
    whole = await engine.generate(ids, max_new_tokens=50)
    parts = [part async for part in engine.chunks(ids, max_new_tokens=50, stream_interval=8)]
    assert len(parts) >= 4
    assert [token for part in parts for token in part["output_ids"]] == whole["output_ids"]
    assert [part["meta_info"]["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
    done = 0
    for part in parts:
        done += len(part["output_ids"])
        assert part["meta_info"]["completion_tokens"] == done
        assert [pair[1] for pair in part["meta_info"]["output_token_logprobs"]] == part["output_ids"]
    assert parts[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 50}
    assert parts[-1]["meta_info"]["weight_versions"] == [{"version": "0.0", "start": 0, "end": 50}]


@needs_a_model("logprobs and cached prefixes")
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
async def test_logprobs_are_those_of_a_full_forward_pass(engine: Caller, reference: TinyQwen3, temperature: float):
    ids = prompt(40, seed=3)
    answer = await engine.generate(ids, temperature=temperature, max_new_tokens=80)
    assert worst(reference, ids, answer, temperature or 1.0) <= 1e-4
    again = ids + answer["output_ids"] + prompt(5, seed=4)  # now most of it comes from the cache
    answer = await engine.stream(again, temperature=temperature, max_new_tokens=40)
    assert answer["meta_info"]["cached_tokens"] >= (len(ids) + 79) // PAGE_TOKENS * PAGE_TOKENS
    assert worst(reference, again, answer, temperature or 1.0) <= 1e-4


@needs_a_model("likely tokens")
async def test_greedy_takes_the_most_likely_token(engine: Caller, reference: TinyQwen3):
    ids = prompt(20, seed=5)
    answer = await engine.generate(ids, max_new_tokens=30)
    with torch.no_grad():
        logits = reference(torch.tensor([ids + answer["output_ids"]]))[0, len(ids) - 1 : -1]
    assert logits.argmax(dim=-1).tolist() == answer["output_ids"]


@needs_a_model("it takes as many tokens as were asked for")
async def test_a_stop_token_ends_the_answer_and_is_part_of_it(engine: Caller):
    ids = prompt(8, seed=6)
    free = (await engine.generate(ids, max_new_tokens=20))["output_ids"]
    stop = free[10]
    answer = await engine.generate(ids, max_new_tokens=20, stop_token_ids=[stop], ignore_eos=False)
    assert answer["output_ids"] == free[: free.index(stop) + 1]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


@needs_a_model("it samples nothing")
@only_tiny("SGLang heeds sampling_seed only with --enable-deterministic-inference, which costs speed")
async def test_a_seed_fixes_the_sample_whatever_runs_beside_it(engine: Caller):
    ids = prompt(10, seed=7)
    alone = await engine.generate(ids, temperature=1.0, sampling_seed=11, max_new_tokens=40)
    crowd = [engine.generate(prompt(30, seed=100 + i), temperature=1.0, max_new_tokens=60) for i in range(12)]
    busy, *_ = await asyncio.gather(
        engine.generate(ids, temperature=1.0, sampling_seed=11, max_new_tokens=40),
        *crowd,
    )
    other = await engine.generate(ids, temperature=1.0, sampling_seed=12, max_new_tokens=40)
    assert busy["output_ids"] == alone["output_ids"] != other["output_ids"]


@needs_a_model("it samples nothing")
async def test_samples_follow_the_model_distribution(engine: Caller, reference: TinyQwen3):
    ids = prompt(6, seed=8)
    answers = await asyncio.gather(*(engine.generate(ids, temperature=0.5, max_new_tokens=1) for _ in range(600)))
    counts = torch.bincount(torch.tensor([a["output_ids"][0] for a in answers]), minlength=reference.config.vocab_size)
    with torch.no_grad():
        expected = torch.softmax(reference(torch.tensor([ids]))[0, -1] / 0.5, dim=-1) * len(answers)
    likely = expected > 5
    chi = float(((counts - expected)[likely] ** 2 / expected[likely]).sum())
    freedom = int(likely.sum())
    assert chi < freedom + 4 * (2 * freedom) ** 0.5 + 8


@needs_a_model("logprobs")
async def test_forty_requests_at_once_all_match_the_full_forward_pass(engine: Caller, reference: TinyQwen3):
    prompts = [prompt(5 + 7 * i % 90, seed=i) for i in range(40)]
    answers = await asyncio.gather(
        *(engine.stream(p, temperature=1.0, max_new_tokens=20 + i) for i, p in enumerate(prompts))
    )
    assert [a["meta_info"]["completion_tokens"] for a in answers] == [20 + i for i in range(40)]
    assert max(worst(reference, p, a) for p, a in zip(prompts, answers, strict=True)) <= 1e-4


# -- abort and hand-over ------------------------------------------------------------------------------------------


async def under_way(engine: Caller, ids: list[int], rid: str, **params: Any) -> asyncio.Task[dict[str, Any]]:
    """A stream under way on an engine that is slow from now on: its first chunk has been seen."""
    await engine.slow(STEP_S)
    seen = asyncio.Event()

    async def read() -> dict[str, Any]:
        parts = []
        async for part in engine.chunks(ids, rid=rid, max_new_tokens=LONG, **params):
            parts.append(part)
            seen.set()
        return joined(parts)

    task = asyncio.create_task(read())
    await seen.wait()
    return task


async def the_end(engine: Caller, task: asyncio.Task[dict[str, Any]]) -> dict[str, Any]:
    """The answer, at full speed."""
    await engine.slow(0)
    return await task


async def test_a_request_aborted_here_and_continued_there_equals_an_uninterrupted_run(engine: Caller, other: Caller):
    ids = prompt(30, seed=9)
    rid = new_rid()
    task = await under_way(engine, ids, rid)
    await engine.control.abort(rid)
    first = await task
    assert first["meta_info"]["finish_reason"]["type"] == "abort"
    assert 0 < len(first["output_ids"]) < LONG
    assert first["meta_info"]["weight_versions"][-1]["end"] == len(first["output_ids"])
    rest = LONG - len(first["output_ids"])
    second = await other.generate(ids + first["output_ids"], max_new_tokens=rest)
    whole = await other.generate(ids, max_new_tokens=LONG)
    assert first["output_ids"] + second["output_ids"] == whole["output_ids"]
    moved = torch.tensor(logprobs(first) + logprobs(second))
    assert float((moved - torch.tensor(logprobs(whole))).abs().max()) <= 1e-4


@needs_a_model("it has no keys and values")
async def test_a_call_that_moves_reads_its_prompt_from_the_shared_store(engine: Caller, other: Caller):
    """Same greedy tokens, logprobs to 1e-5, nine tenths of the prompt not computed again."""
    ids, rid = prompt(300, seed=21), new_rid()
    whole = await other.generate(ids, max_new_tokens=LONG, cache_salt="another policy")
    task = await under_way(engine, ids, rid, cache_salt="0.0")
    await engine.control.abort(rid)
    first = await the_end(engine, task)
    assert first["meta_info"]["finish_reason"]["type"] == "abort"
    await engine.control.flush(20)  # refused until the store has all of it
    moved = ids + first["output_ids"]
    parts = [p async for p in other.chunks(moved, max_new_tokens=LONG - len(first["output_ids"]), cache_salt="0.0")]
    second = joined(parts)
    assert first["output_ids"] + second["output_ids"] == whole["output_ids"]
    drift = torch.tensor(logprobs(first) + logprobs(second)) - torch.tensor(logprobs(whole))
    assert float(drift.abs().max()) <= 1e-5
    assert second["meta_info"]["cached_tokens"] >= 0.9 * len(moved)
    assert second["meta_info"]["cached_tokens_details"]["storage"] >= 0.9 * len(moved)


@needs_a_model("it has no keys and values")
async def test_the_shared_store_gives_nothing_to_another_salt(engine: Caller, other: Caller):
    ids = prompt(120, seed=22)
    await engine.generate(ids, cache_salt="0.0")
    await engine.control.flush(20)
    assert (await other.generate(ids, cache_salt="0.1"))["meta_info"]["cached_tokens"] == 0


async def test_an_aborted_whole_request_answers_200_with_its_partial_ids(engine: Caller):
    rid = new_rid()
    await engine.slow(STEP_S)
    task = asyncio.create_task(engine.generate(prompt(10), rid=rid, max_new_tokens=LONG))
    await engine.running(1)
    await engine.control.abort(rid)
    answer = await task
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert answer["meta_info"]["completion_tokens"] == len(answer["output_ids"]) == len(logprobs(answer))


async def test_abort_takes_every_id_that_begins_with_the_given_one(engine: Caller):
    name = new_rid()
    short, longer, another = name + "-1", name + "-10", name + "-2"
    await engine.slow(STEP_S)
    tasks = [
        asyncio.create_task(engine.generate(prompt(5, seed=i), rid=rid, max_new_tokens=LONG))
        for i, rid in enumerate((short, longer, another))
    ]
    await engine.running(3)
    await engine.control.abort(short)
    await engine.slow(0)
    reasons = [(await task)["meta_info"]["finish_reason"]["type"] for task in tasks]
    assert reasons == ["abort", "abort", "length"]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_away_aborts_its_request(engine: Caller, stream: bool):
    aborted = await engine.metric("num_aborted_requests_total")
    await engine.slow(STEP_S)
    rid = new_rid()
    if stream:
        task = await under_way(engine, prompt(5), rid)
    else:
        task = asyncio.create_task(engine.generate(prompt(5), rid=rid, max_new_tokens=LONG))
        await engine.running(1)
    task.cancel()
    await engine.control.wait_idle(20)
    assert await engine.metric("num_aborted_requests_total") == aborted + 1


# -- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"input_ids": []}, "input_ids"),
        pytest.param(
            {"input_ids": [1, 2, 10**6]}, "input_ids", marks=only_tiny("an id outside the vocabulary kills SGLang")
        ),
        pytest.param({"input_ids": [1, -1]}, "input_ids", marks=only_tiny("and so does a negative one")),
        ({"input_ids": "abc"}, "input_ids"),
        ({"input_ids": [5] * 5000}, "context length"),
        ({"sampling_params": {"max_new_tokens": 5000}}, "context length"),
        ({"sampling_params": {"temperature": -1}}, "temperature"),
        ({"sampling_params": {"top_p": 0}}, "top_p"),
        ({"sampling_params": {"top_k": 0}}, "top_k"),
        ({"sampling_params": {"max_new_tokens": -3}}, "max_new_tokens"),
        ({"sampling_params": {"no_such_parameter": 1}}, "no_such_parameter"),
        pytest.param({"text": "hello"}, "", marks=only_tiny("SGLang prefers ids to a text beside them")),
    ],
)
async def test_a_bad_request_is_refused_with_the_reason(engine: Caller, change: dict[str, Any], part: str):
    status, answer = await engine.post("/generate", {**generate_body(prompt(4)), **change})
    assert status == 400
    assert part in str(answer)


async def test_a_body_that_is_not_json_is_refused(engine: Caller):
    assert (await engine.post("/generate", b"{"))[0] == 400
    assert (await engine.post("/pause_generation", b""))[0] == 400


async def test_an_id_in_flight_can_not_be_used_twice(engine: Caller):
    rid = new_rid()
    await engine.slow(STEP_S)
    task = asyncio.create_task(engine.generate(prompt(5), rid=rid, max_new_tokens=LONG))
    await engine.running(1)
    status, answer = await engine.post("/generate", generate_body(prompt(5), rid=rid))
    assert (status, "Duplicate request ID" in answer["error"]["message"]) == (400, True)
    await engine.control.abort(rid)
    await task


async def test_a_bad_stream_request_is_an_error_event(engine: Caller):
    async with engine.session.post(
        engine.url + "/generate", json={"input_ids": [5] * 5000, "stream": True, "sampling_params": {}}
    ) as response:
        text = await response.text()
    assert '"error"' in text
    assert text.endswith("data: [DONE]\n\n")


# -- pause, memory, weights -----------------------------------------------------------------------------------------


async def test_a_pause_holds_new_requests_until_it_ends(engine: Caller):
    await engine.control.pause("abort")
    task = asyncio.create_task(engine.generate(prompt(5), max_new_tokens=5))
    await asyncio.sleep(0.3)
    assert not task.done()
    assert await engine.control.alive()
    await engine.control.proceed()
    assert (await task)["meta_info"]["completion_tokens"] == 5


async def test_the_default_pause_aborts_what_runs(engine: Caller):
    task = await under_way(engine, prompt(5), new_rid())
    assert (await engine.post("/pause_generation", {}))[0] == 200
    assert (await task)["meta_info"]["finish_reason"]["type"] == "abort"


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_a_pause_that_keeps_requests_changes_nothing_of_their_answers(engine: Caller, mode: Any):
    ids = prompt(20, seed=10)
    expected = await engine.generate(ids, max_new_tokens=LONG)
    await engine.control.flush(5)
    task = await under_way(engine, ids, new_rid())
    await engine.control.pause(mode)
    before = await engine.control.loads()
    await asyncio.sleep(0.2)
    assert not task.done()
    await engine.control.proceed()
    answer = await the_end(engine, task)
    assert answer["output_ids"] == expected["output_ids"]
    if not REAL:  # its numbers stand still in a pause
        assert (before.running, before.waiting) == ((0, 1) if mode == "retract" else (1, 0))
    assert answer["meta_info"]["num_retractions"] == (1 if mode == "retract" else 0)


async def test_flush_is_refused_while_a_request_runs_and_waits_if_told_to(engine: Caller):
    task = await under_way(engine, prompt(5), new_rid())
    with pytest.raises(EngineRefused):
        await engine.control.flush()
    await engine.slow(0)
    await engine.control.flush(20)
    assert (await task)["meta_info"]["completion_tokens"] == LONG


async def test_release_is_refused_while_a_request_runs(engine: Caller):
    task = await under_way(engine, prompt(5), rid := new_rid())
    with pytest.raises(EngineRefused):
        await engine.control.release()
    await engine.control.abort(rid)
    await task


async def test_an_engine_that_released_everything_serves_again_with_new_weights(
    engine: Caller, models: tuple[Path, Path], other: Caller
):
    ids = prompt(10, seed=11)
    before = await engine.generate(ids)
    await engine.control.wait_idle(5)
    await engine.control.pause("retract")
    await engine.control.flush(5)
    await engine.control.release()
    held = asyncio.create_task(engine.generate(ids))
    await asyncio.sleep(0.2)
    assert not held.done()
    await engine.control.resume(("weights",))
    await engine.control.update_weights(models[1], "0.1")
    await engine.control.resume(("kv_cache",))
    await engine.control.proceed()
    answer = await held
    assert answer["meta_info"]["weight_versions"] == [{"version": "0.1", "start": 0, "end": 24}]
    await other.control.update_weights(models[1], "0.1")
    assert answer["output_ids"] == (await other.generate(ids))["output_ids"] != before["output_ids"]


@needs_a_model("it has no weights")
@only_tiny("the real engine's weights are undefined until an update")
async def test_memory_taken_again_in_a_pause_has_the_old_weights_when_the_pause_ends(engine: Caller):
    ids = prompt(30, seed=31)
    before = await engine.generate(ids, cache_salt="paused")
    await engine.control.pause("abort")
    await engine.control.release()
    await engine.control.resume()
    held = asyncio.create_task(engine.generate(ids, cache_salt="paused again"))
    await engine.control.proceed()
    assert (await held)["output_ids"] == before["output_ids"]


@pytest.mark.parametrize(("mode", "flush"), [("retract", True), ("in_place", False)])
async def test_an_update_in_a_pause_splits_the_answer_into_version_spans(
    engine: Caller, models: tuple[Path, Path], mode: Any, flush: bool
):
    ids = prompt(10, seed=12)
    task = await under_way(engine, ids, new_rid())
    await engine.control.pause(mode)
    await engine.control.update_weights(models[1], "0.1", flush=flush)
    assert await engine.control.weight_version() == "0.1"
    await engine.control.proceed()
    answer = await the_end(engine, task)
    first, second = answer["meta_info"]["weight_versions"]
    assert (first["version"], first["start"]) == ("0.0", 0)
    assert (second["version"], second["start"], second["end"]) == ("0.1", first["end"], LONG)
    assert answer["meta_info"]["weight_version"] == "0.1"
    if mode == "retract":  # everything after the split comes from the new weights alone
        fresh = await engine.generate(ids + answer["output_ids"][: first["end"]], max_new_tokens=LONG - first["end"])
        assert answer["output_ids"][first["end"] :] == fresh["output_ids"]


@only_tiny("refused while KV is on its way to the shared store; gyre pauses and flushes before every update")
async def test_an_update_without_a_pause_waits_for_what_is_in_flight(engine: Caller, models: tuple[Path, Path]):
    task = await under_way(engine, prompt(5), new_rid())
    update = asyncio.create_task(engine.control.update_weights(models[1], "0.1"))
    await asyncio.sleep(0.2)
    answer = await the_end(engine, task)
    await update
    assert answer["meta_info"]["weight_versions"] == [{"version": "0.0", "start": 0, "end": LONG}]
    assert (await engine.generate(prompt(5)))["meta_info"]["weight_version"] == "0.1"


async def test_a_failed_update_leaves_weights_and_version_as_they_were(engine: Caller, tmp_path: Path):
    sums = await engine.control.checksums()
    with pytest.raises(EngineRefused):
        await engine.control.update_weights(tmp_path / "nothing", "0.9")
    assert await engine.control.weight_version() == "0.0"
    assert await engine.control.checksums() == sums


@needs_a_model("keys and values")
async def test_a_salt_keeps_an_updated_engine_from_reusing_old_keys_and_values(
    engine: Caller, models: tuple[Path, Path]
):
    ids = prompt(60, seed=13)
    await engine.generate(ids, cache_salt="0.0")
    assert (await engine.generate(ids, cache_salt="0.0"))["meta_info"]["cached_tokens"] >= 32
    await engine.control.update_weights(models[1], "0.1", flush=False)
    answer = await engine.generate(ids, cache_salt="0.1")
    assert answer["meta_info"]["cached_tokens"] == 0
    await engine.control.flush(5)
    assert (await engine.generate(ids, cache_salt="0.1"))["output_ids"] == answer["output_ids"]


async def test_renaming_the_version_aborts_unless_told_not_to(engine: Caller):
    task = await under_way(engine, prompt(5), new_rid())
    assert (await engine.post("/update_weight_version", {"new_version": "7.0", "abort_all_requests": False}))[0] == 200
    answer = await the_end(engine, task)
    assert [span["version"] for span in answer["meta_info"]["weight_versions"]] == ["0.0", "7.0"]
    task = await under_way(engine, prompt(5), new_rid())
    assert (await engine.post("/update_weight_version", {"new_version": "0.0"}))[0] == 200
    assert (await task)["meta_info"]["finish_reason"]["type"] == "abort"


async def test_a_weight_session_is_a_bracket(engine: Caller):
    assert (await engine.post("/end_weight_update", {}))[0] == 400
    assert (await engine.post("/begin_weight_update", {}))[0] == 200
    assert (await engine.post("/begin_weight_update", {}))[0] == 400
    assert (await engine.post("/end_weight_update", {}))[0] == 200


# -- what it says of itself -----------------------------------------------------------------------------------------


async def test_the_probe_accepts_it_and_names_what_it_serves(engine: Caller, models: tuple[Path, Path]):
    facts = await engine.control.probe(token_id=5, need_release=not REAL)  # the memory saver needs CUDA
    assert (facts.model_path, facts.weight_version) == (str(models[0]), "0.0")
    assert facts.max_running_requests > 0


async def test_loads_metrics_and_models_tell_what_runs(engine: Caller):
    task = await under_way(engine, prompt(5), rid := new_rid())
    await engine.running(1)
    if not REAL:  # it publishes this one every forty steps
        assert await engine.metric("num_running_reqs") == 1
    async with engine.session.get(engine.url + "/v1/models") as response:
        assert (await response.json())["object"] == "list"
    await engine.control.abort(rid)
    await task


async def test_health_answers_200(engine: Caller):
    async with engine.session.get(engine.url + "/health", timeout=aiohttp.ClientTimeout(10)) as response:
        assert response.status == 200
