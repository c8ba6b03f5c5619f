"""Runner, network and sampling without HTTP: numbers against the model, noise against its promise."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from celld.tiny.model import TinyConfig, TinyQwen3, save
from celld.tiny.runner import Runner, WeightsError, solo_rows
from celld.tiny.sampling import Sampler, _invert, noise_key, uniforms
from celld.tiny.scheduler import Request, Scheduler

CONFIG = TinyConfig(vocab_size=128, hidden_size=32, intermediate_size=48, num_attention_heads=4, head_dim=8)


@dataclass
class Row:
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    noise_key: int = 0


@pytest.fixture
def model(tmp_path: Path) -> tuple[Path, TinyQwen3]:
    network = TinyQwen3(CONFIG).initialise(3)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            parameter.mul_(6.0 if parameter.dim() > 1 else 1.0)
            if "norm" in name:  # unit norms would hide a norm in the wrong place
                parameter.add_(torch.linspace(-0.5, 0.7, len(parameter)))
    save(network, tmp_path / "model")
    return tmp_path / "model", network


def test_logprobs_of_uneven_rows_are_those_of_the_whole_model(model: tuple[Path, TinyQwen3]):
    path, network = model
    runner, chance = Runner(path, slots=24, context_length=1024), random.Random(1)
    scheduler = Scheduler(rows=12, cache_slots=12, prefill_tokens=300)
    requests = [
        Request(
            rid=str(i),
            tokens=[chance.randrange(128) for _ in range(900 if i % 9 == 0 else chance.randrange(1, 60))],
            max_new_tokens=chance.randrange(1, 40),
            temperature=(0.0, 0.8, 1.0)[i % 3],
            noise_key=i,
        )
        for i in range(30)
    ]
    for request in requests:
        scheduler.submit(request)
    for step in range(10_000):
        plan = scheduler.plan()
        if plan is None:
            break
        scheduler.commit(plan, *runner.step(plan))
        if step == 15:
            scheduler.retract()
    with torch.no_grad():
        for request in requests:
            logits = network(torch.tensor([request.tokens]))[0, request.prompt_tokens - 1 : -1]
            chosen = torch.tensor(request.tokens[request.prompt_tokens :])[:, None]
            expected = torch.log_softmax(logits / (request.temperature or 1.0), dim=-1).gather(1, chosen)[:, 0]
            assert float((expected - torch.tensor(request.logprobs)).abs().max()) <= 1e-4
            if request.temperature == 0:
                assert (logits.argmax(-1) == chosen[:, 0]).all()


def test_long_rows_attend_alone_only_where_that_is_cheaper():
    assert solo_rows([]) == ([], 0)
    assert solo_rows([300]) == ([], 300)
    assert solo_rows([200] * 32) == ([], 200)
    assert solo_rows([200] * 16 + [1500] + [200] * 15) == ([16], 200)
    rows, longest = solo_rows([1500] * 20 + [200] * 4)
    assert (rows, longest) == ([], 1500)


def test_noise_is_uniform_and_depends_on_key_and_position_alone():
    keys = np.array([noise_key(0, f"rid{i}", None) for i in range(400)], dtype=np.uint64)
    table = np.stack([uniforms(keys, np.full(400, p, dtype=np.uint64)) for p in range(100)])
    assert 0 <= table.min() < 1e-3
    assert 1 - 1e-3 < table.max() < 1
    assert abs(table.mean() - 0.5) < 0.005
    assert abs(np.corrcoef(table[:-1].ravel(), table[1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(table[:, :-1].ravel(), table[:, 1:].ravel())[0, 1]) < 0.02
    alone = uniforms(keys[7:8], np.array([42], dtype=np.uint64))
    assert alone[0] == table[42, 7]
    assert noise_key(0, "a", 5) == noise_key(9, "b", 5) != noise_key(0, "a", None)


def sample(row: Row, logits: torch.Tensor, count: int = 20_000) -> torch.Tensor:
    """How often each token is chosen."""
    rows = [Row(row.temperature, row.top_p, row.top_k, noise_key(1, str(i), None)) for i in range(count)]
    tokens, _ = Sampler(rows).choose(logits.expand(count, -1), [3] * count)
    return torch.bincount(torch.tensor(tokens), minlength=len(logits)) / count


def test_tokens_come_with_their_probability_and_impossible_ones_never():
    logits = torch.tensor([1.0, 0.0, -200.0, 2.0, -1.0])
    assert torch.allclose(sample(Row(), logits), torch.softmax(logits, 0), atol=0.015)
    assert torch.allclose(sample(Row(temperature=2.0), logits), torch.softmax(logits / 2, 0), atol=0.015)
    assert sample(Row(), logits)[2] == 0
    edges = torch.tensor([[0.0], [0.25], [0.75], [1.0]])
    assert _invert(torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25]]).expand(4, -1), edges).view(-1).tolist() == [1, 3, 4, 4]


def test_top_k_and_top_p_cut_the_tail_but_not_the_logprob():
    logits = torch.tensor([1.0, 0.0, 3.0, 2.0, -1.0])
    assert torch.allclose(sample(Row(top_k=2), logits), _kept(logits, [2, 3]), atol=0.015)
    assert torch.allclose(sample(Row(top_p=0.8), logits), _kept(logits, [2, 3]), atol=0.015)  # 0.64, then 0.24
    tokens, logprobs = Sampler([Row(top_k=1)]).choose(logits[None], [0])
    assert (tokens, logprobs) == ([2], [pytest.approx(float(torch.log_softmax(logits, 0)[2]))])


def _kept(logits: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    kept = torch.zeros(len(logits))
    kept[tokens] = torch.softmax(logits, 0)[tokens]
    return kept / kept.sum()


def test_weights_that_can_not_be_served_are_refused_and_the_old_ones_stay(
    model: tuple[Path, TinyQwen3], tmp_path: Path
):
    path, _ = model
    runner = Runner(path, slots=2, context_length=64)
    served = runner.weights
    tensors = load_file(path / "model.safetensors")
    cases = {
        "missing": {name: t for name, t in tensors.items() if "q_proj" not in name},
        "shape": {**tensors, "model.norm.weight": torch.ones(7)},
        "nan": {**tensors, "model.norm.weight": torch.full((32,), torch.nan)},
    }
    for name, case in cases.items():
        (tmp_path / name).mkdir()
        save_file(case, tmp_path / name / "model.safetensors")
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes()[:5000])
    save(TinyQwen3(TinyConfig(vocab_size=64)).initialise(0), tmp_path / "another")
    for name in (*cases, "torn", "another", "absent"):
        with pytest.raises(WeightsError):
            runner.load(tmp_path / name)
    assert runner.weights is served


def test_released_weights_come_back_only_if_their_file_is_the_same(model: tuple[Path, TinyQwen3]):
    path, network = model
    runner = Runner(path, slots=2, context_length=64)
    runner.release_weights()
    assert not runner.ready
    assert runner.resume_weights()
    runner.release_weights()
    save(network.initialise(4), path)
    assert not runner.resume_weights()
    runner.load(path)
    assert runner.ready
