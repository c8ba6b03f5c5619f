"""What only a GPU can show, in less than ten minutes: `make test-gpu`. Skipped with the reason where there is none.

All in fp32 without TF32. The other side of each comparison is plain torch on the CPU.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from celld.sglang import launch
from celld.tiny.model import TinyConfig, TinyQwen3, load, save
from celld.trainer import context, cpu, flex, tree
from celld.trainer import loss as losses
from celld.trainer.model import Policy
from celld.trainer.optimizer import AdamW
from gyre_base.config import TrainerConfig
from tests.engine.calls import Caller
from tests.engine.process import end_group, wait_answering
from tests.engine.test_contract import worst
from tests.trainer import experts
from tests.trainer.conftest import SMALL, unlike_norms
from tests.trainer.forests import random_micro_step
from tests.trainer.test_tree_and_loss import flattened_loss

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
    pytest.mark.timeout(540),
]
OPTIONS = losses.LossOptions(clip_low=0.2, clip_high=4.0)
WIDE_HEADS = dataclasses.replace(SMALL, head_dim=16)  # FlexAttention's least


@pytest.fixture(scope="module", params=["dense", "experts"])
def pair(request) -> tuple[Policy, TinyQwen3]:
    """A policy on the GPU and its plain twin on the CPU."""
    cpu.start_parallel()
    if request.param == "dense":
        config, twin = WIDE_HEADS.to_hf(), unlike_norms(TinyQwen3(WIDE_HEADS).initialise(3))
    else:
        shape = dataclasses.replace(experts.SHAPE, head_dim=16)
        config, twin = experts.config_of(shape=shape), experts.twin(shape=shape)
    policy = Policy(config)
    policy.load(dict(twin.state_dict()))
    return policy, twin


def trained(policy: Policy, executions) -> float:
    """The loss; the gradient is in the policy."""
    device = policy.gradient.device
    assert device.type == "cuda"
    plan, goal = tree.plan(executions).to(device), losses.targets(executions, 0).to(device)
    policy.zero_gradient()
    logp, _ = policy.logprobs(plan, goal.rows_N, goal.tokens_N, 1.0)
    total, _ = losses.loss_sum(logp, goal, OPTIONS)
    total.backward()
    policy.finish_gradient()
    return float(total.detach())


@pytest.mark.parametrize("seed", range(3))
def test_a_forest_on_the_gpu_trains_like_flattened_rows_on_the_cpu(pair, seed):
    policy, twin = pair
    executions = random_micro_step(seed, 3, segments=9, longest=60).executions
    twin.zero_grad()
    flat = flattened_loss(twin, executions, OPTIONS)
    flat.backward()
    assert trained(policy, executions) == pytest.approx(float(flat.detach()), rel=1e-4, abs=1e-5)
    mine = policy.hf_tensors({name: p.grad for name, p in policy.parameters.items()})
    for name, parameter in twin.named_parameters():
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        assert (mine[name].cpu() - expected).norm() <= 1e-4 * expected.norm() + 1e-6, name


def test_pieces_on_the_gpu_train_like_the_whole(pair, monkeypatch):
    policy, _ = pair
    executions = random_micro_step(9, 1, segments=6, longest=200).executions
    whole, gradient = trained(policy, executions), policy.gradient.clone()
    monkeypatch.setattr(policy, "piece_tokens", 64)
    assert trained(policy, executions) == pytest.approx(whole, rel=1e-5)
    assert (policy.gradient - gradient).norm() <= 1e-5 * gradient.norm() + 1e-7


def test_steps_lower_the_loss_and_weights_come_back(pair):
    policy, twin = pair
    executions = random_micro_step(4, 2).executions
    optimizer = AdamW(policy, TrainerConfig())
    first = trained(policy, executions)
    for _ in range(5):
        trained(policy, executions)
        optimizer.step(1e-3)
    assert trained(policy, executions) < first
    policy.load(dict(twin.state_dict()))
    assert all(torch.equal(tensor.cpu(), twin.state_dict()[name]) for name, tensor in policy.hf_tensors().items())


@pytest.mark.parametrize(
    ("seed", "longest", "ranks"), [(0, 40, 1), (1, 300, 1), (2, 1500, 1), (3, 300, 2), (4, 1500, 4)]
)
def test_compiled_flex_attention_and_its_gradient_equal_the_attention_of_a_cpu(seed, longest, ranks):
    """Of all tokens, and of the part that a rank has of them."""
    whole = tree.plan(random_micro_step(seed, 3, segments=9, longest=longest).executions)
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(len(whole), heads, 32, generator=generator) for heads in (4, 2, 2))
    for plan in (context.part(whole, rank, ranks) for rank in range(ranks)):
        inputs = [x.detach().clone().requires_grad_() for x in (query[plan.index_T], key, value)]
        upstream = torch.randn(len(plan), 4, 32, generator=generator)
        expected = tree.attend(*inputs, plan)
        wanted = torch.autograd.grad(expected, inputs, upstream)
        moved = [x.detach().cuda().requires_grad_() for x in inputs]
        mixed = flex.attend(*moved, plan.to(torch.device("cuda")).on_gpu)
        torch.testing.assert_close(mixed.cpu(), expected, rtol=1e-4, atol=1e-5)
        for mine, theirs in zip(torch.autograd.grad(mixed, moved, upstream.cuda()), wanted, strict=True):
            torch.testing.assert_close(mine.cpu(), theirs, rtol=1e-3, atol=1e-4)


@pytest.fixture
def sglang(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """(base URL, model) of an engine as a cell starts it."""
    python = os.environ.get("GYRE_SGLANG_CUDA_PYTHON")
    if not python:
        pytest.skip("GYRE_SGLANG_CUDA_PYTHON names no interpreter that has SGLang for CUDA")
    config = TinyConfig(vocab_size=320, hidden_size=256, intermediate_size=384, num_attention_heads=4, head_dim=64)
    save(TinyQwen3(config).initialise(1), tmp_path / "model")
    settings = launch.SGLangSettings(
        model=tmp_path / "model",
        host="127.0.0.1",
        port=launch.free_port("127.0.0.1"),
        served_name="tiny",
        weight_version="0.0",
        extra={"dtype": "float32", "mem-fraction-static": 0.3, "attention-backend": "triton"},
    )
    settings.write(tmp_path / "engine.yaml")
    words, environment = launch.command(python, tmp_path / "engine.yaml"), settings.environment(os.environ)
    with open(tmp_path / "engine0.log", "wb") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log, env=environment, start_new_session=True)
    try:
        url = f"http://127.0.0.1:{settings.port}"
        wait_answering(process, url, tmp_path)
        yield url, tmp_path / "model"
    finally:
        end_group(process)


async def test_sglang_on_the_gpu_serves_what_the_model_says(sglang: tuple[str, Path]):
    """Its logprobs are those of a plain forward pass."""
    url, model = sglang
    ids = list(range(10, 90))
    async with Caller(url) as caller:
        answer = await caller.generate(ids, temperature=1.0, max_new_tokens=40, cache_salt="0.0")
    assert worst(load(model).eval(), ids, answer) <= 1e-3
