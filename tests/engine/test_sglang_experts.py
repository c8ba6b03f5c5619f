"""Experts that two real engines chose for a call that moved, recorded by proxyd and replayed by the trainer:
`make test-sglang`."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import numpy as np
import pytest
import torch

from celld.engine_client import EngineClient
from celld.sglang.launch import check_model
from celld.tiny.model import TinyConfig, TinyQwen3
from celld.weights import hf_files, write_directory
from gyre_base import messages as m
from gyre_base.microstep import PackedExecution
from gyre_base.routing import NAME, RoutingShape, known
from gyre_base.runfile import Call
from tests.engine.calls import Caller, generate_body, logprobs
from tests.engine.process import sglang_pair
from tests.proxyd.fakes import World
from tests.proxyd.tokens import write_tokenizer
from tests.system.running import EXAMPLE, RAMBLING, Run, changed, rambling_task
from tests.trainer import experts
from tests.trainer.conftest import unlike_norms
from trajtools.choose import Rules, choose
from trajtools.forest import Forest
from trajtools.pack import pack

pytestmark = [
    pytest.mark.skipif(os.environ.get("GYRE_ENGINE") != "sglang", reason="needs real engines: make test-sglang"),
    pytest.mark.timeout(900),
]
SHAPE = TinyConfig(
    vocab_size=512, hidden_size=128, intermediate_size=96, num_hidden_layers=6, head_dim=32, initializer_range=0.08
)
LAYERS, CHOSEN = SHAPE.num_hidden_layers, experts.CHOSEN
USER = {"role": "user", "content": " ".join(f"Module {n} reads f{n}.md." for n in range(30))}  # enough for the store


def make_mixture(folder: Path, shape: TinyConfig, spread: float) -> None:
    """Random, of the kind that this SGLang can serve (`check_model`). `spread` of its scores."""
    twin = TinyQwen3(shape)
    for layer in twin.model.layers:
        layer.mlp = experts.Experts(shape, normalised=True)
    arrays = {name: tensor.detach().numpy() for name, tensor in unlike_norms(twin.initialise(5)).state_dict().items()}
    embedding = arrays["model.embed_tokens.weight"]
    arrays["lm_head.weight"] = np.roll(embedding, 7, axis=0) * (spread / embedding.std())
    config = experts.config_of(shape=shape) | {"mlp_only_layers": [], "tie_word_embeddings": False}
    check_model(config)
    write_directory(folder, hf_files(arrays, config))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts") / "model"
    make_mixture(folder, SHAPE, 0.2)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def urls(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    python = os.environ["GYRE_SGLANG_PYTHON"]
    with sglang_pair(python, model, tmp_path_factory.mktemp("sglang"), routed_experts=True) as pair:
        yield pair


@pytest.fixture(scope="module")
def shape(model: Path) -> RoutingShape:
    return RoutingShape.of(json.loads((model / "config.json").read_text()))


async def test_the_probe_asks_for_rows_of_this_model(urls: tuple[str, str], shape: RoutingShape) -> None:
    async with EngineClient(urls[0]) as client:
        await client.probe(token_id=5, need_release=False, routing=shape)
        other = dataclasses.replace(shape, chosen=3)
        with pytest.raises(Exception, match="not those of this model"):
            await client.probe(token_id=5, need_release=False, routing=other)


async def moved_call(world: World, urls: tuple[str, str]) -> Call:
    """One that the second engine goes on with, from the store of keys and values of the first. When its middle is
    depends on the machine: a call that has ended by then is tried again sooner, one of which nothing was stored later.
    """
    wait_s = 1.0
    first, second = (SimpleNamespace(name=n, url=u, version="0.0") for n, u in zip("ab", urls, strict=True))
    await world.session.close()
    world.session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=400))
    for attempt in range(20):
        name = f"x{attempt}"
        await world.cellctl.open(name)
        await world.cellctl.serve(first, second, away=("b",))
        asked = asyncio.create_task(world.chat_call(name, [USER], "c1"))
        async with EngineClient(urls[0]) as engine:
            while not asked.done() and not (await engine.loads()).running:  # noqa: ASYNC110 - in another process
                await asyncio.sleep(0.05)
        await asyncio.sleep(wait_s)
        wait_s *= 0.6 if asked.done() else 1.2
        await world.cellctl.serve(first, second, away=("a",))
        await world.cellctl.say(m.DrainCell(cell="a", epoch=attempt))
        status, body, _ = await asked
        assert status == 200, body
        call = world.calls(name)["c1"]
        _, read = call.extra["capture"].get("resent", (0, 0))
        if read > 0 and len(call.spans) == 2 and len(call.completion_ids) > 40:
            return call
    raise AssertionError("no call was moved in its middle and found its prefix in the store")


async def test_what_two_engines_chose_is_what_the_trainer_chooses_and_replays(
    model: Path, urls: tuple[str, str], tmp_path: Path
) -> None:
    setting = {"kind": "sglang", "routed_experts": True, "context_length": 1000}
    async with World(
        tmp_path / "run", model, engine=setting, model={"path": str(model)}, rollout={"max_new_tokens": 100}
    ) as world:
        call = await moved_call(world, urls)
    rows = call.arrays[NAME]
    print("spans", call.spans, "resent, read", call.extra["capture"]["resent"])
    assert rows.shape == (len(call.completion_ids), LAYERS, CHOSEN) and known(rows).all()
    assert "unrouted" not in call.extra["capture"]
    packed = packed_of(call)
    assert packed.replayed().sum() == len(call.completion_ids)
    same, gap, replayed_gap = against_the_trainer(model, [packed])
    assert same >= 0.98
    assert replayed_gap <= gap + 1e-6
    assert replayed_gap <= 1e-3


async def test_replay_brings_an_engine_in_bf16_and_a_trainer_in_fp32_nearer(
    model: Path, shape: RoutingShape, tmp_path: Path
) -> None:
    """Roundings send some tokens to other experts; of those the log-probabilities are farthest apart."""
    python, count = os.environ["GYRE_SGLANG_PYTHON"], 60
    packed, rng = [], np.random.default_rng(0)
    with sglang_pair(python, model, tmp_path, routed_experts=True, dtype="bfloat16") as urls:
        for number, url in enumerate((*urls, *urls)):
            prompt = rng.integers(5, 500, 40).astype(np.int32)
            async with Caller(url) as engine:
                body = generate_body(prompt.tolist(), temperature=1.0, max_new_tokens=count)
                body |= {"return_routed_experts": True, "routed_experts_start_len": len(prompt) - 1}
                status, answer = await engine.post("/generate", body)
            assert status == 200, answer
            call = Call(
                exec=f"e{number}",
                call="c1",
                prompt_ids=prompt,
                completion_ids=np.array(answer["output_ids"], np.int32),
                logprobs=np.array(logprobs(answer), np.float32),
                arrays={NAME: shape.reported(answer["meta_info"]["routed_experts"], count)},
            )
            packed.append(packed_of(call))
    same, gap, replayed_gap = against_the_trainer(model, packed)
    assert 0.5 < same < 1.0
    assert replayed_gap < gap


def packed_of(call: Call) -> PackedExecution:
    forest = Forest(call.exec)
    forest.insert(call)
    return pack(choose(forest, Rules(unlabelled=True)))


def against_the_trainer(model: Path, packed: list[PackedExecution]) -> tuple[float, float, float]:
    """(share of rows that its own router would choose, mean distance to the recorded log-probabilities without and with
    replay)."""
    from celld.trainer import cpu, loss, tree
    from celld.trainer.model import Policy, read_config, read_tensors

    cpu.start_parallel()
    policy = Policy(read_config(model))
    policy.load(read_tensors(model))
    chosen: dict[int, torch.Tensor] = {}

    def watch(router: torch.nn.Module) -> None:
        layer = router.layer_number - 1
        router.register_forward_hook(lambda _, given, out: chosen.update({layer: out[1]}))

    for module in policy.module.modules():
        if hasattr(module, "router_replay"):
            watch(module)

    def gap(executions: list[PackedExecution]) -> float:
        goal = loss.targets(executions, 0)
        with torch.no_grad():
            logp, _ = policy.logprobs(tree.plan(executions), goal.rows_N, goal.tokens_N, 1.0)
        return float((logp - goal.behaviour_N).abs().mean())

    plain = gap([dataclasses.replace(each, routing=None) for each in packed])
    own = torch.stack([chosen[layer].nonzero()[:, 1].reshape(-1, CHOSEN) for layer in range(LAYERS)], 1).numpy()
    starts = np.cumsum([0, *map(len, packed)])
    at = np.concatenate([each.routing.at + start for each, start in zip(packed, starts, strict=False)])
    rows = np.concatenate([each.routing.experts for each in packed])
    same = float((np.sort(rows, axis=2) == np.sort(own[at], axis=2)).all(axis=2).mean())
    replayed = gap(packed)
    print(f"same rows {same:.4f}, logprob gap {plain:.3g}, with replay {replayed:.3g}")
    return same, plain, replayed


def test_a_run_replays_the_experts_of_all_that_it_trains(tmp_path: Path) -> None:
    """All daemons, two cells that turn, real engines, real ranks: nothing is lost where nothing dies."""
    model = tmp_path / "model"
    make_mixture(model, dataclasses.replace(SHAPE, vocab_size=992, eos_token_id=2), 0.04)
    for file in (EXAMPLE / "tokenizer").iterdir():
        shutil.copy(file, model)
    setting = changed(RAMBLING, cluster__cells=2, engine__kind="sglang", engine__device="cpu", engine__kv_store=True)
    setting["engine"] |= {"python": os.environ["GYRE_SGLANG_PYTHON"], "routed_experts": True}
    setting["cluster"]["peer_timeout_s"] = 60.0
    setting["rollout"]["max_new_tokens"] = 64
    setting["scheduler"]["steps"] = 2
    with Run(tmp_path, model, setting) as run:
        tasks = [rambling_task(f"train-{i}", turns=(1, 4)[i % 2]) for i in range(4)]  # the long ones are left when
        (tmp_path / "train.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))  # a cell turns
        summary = run.start().finish(800)
        steps = [entry["metrics"] for entry in run.journal("cellctl") if entry["tag"] == "step.done"]
        assert not run.left()
    print("moved", summary["calls_moved"], [(step["replayed_share"], step["logprob_gap"]) for step in steps])
    assert summary["steps"] == len(steps) == 2
    assert summary["calls_moved"] > 0
    assert summary["replayed_share"] == 1.0
    assert steps[0]["logprob_gap"] <= 1e-4
