"""bf16 on a GPU against fp32 on the CPU: `make test-gpu`."""

from __future__ import annotations

import pytest
import torch

from celld.tiny.model import TinyQwen3
from celld.trainer import cpu
from celld.trainer.model import Policy
from celld.trainer.optimizer import AdamW
from gyre_base.config import TrainerConfig
from tests.gpu.test_gpu import OPTIONS, WIDE_HEADS, trained
from tests.trainer.conftest import unlike_norms
from tests.trainer.forests import random_micro_step
from tests.trainer.test_bf16 import BF16, U, far, rounded
from tests.trainer.test_tree_and_loss import flattened_loss

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU here"),
    pytest.mark.timeout(540),
]


@pytest.fixture(scope="module")
def pair() -> tuple[Policy, TinyQwen3]:
    """A bf16 policy on the GPU and its fp32 twin of the same weights on the CPU."""
    cpu.start_parallel()
    twin = unlike_norms(TinyQwen3(WIDE_HEADS).initialise(3))
    twin.load_state_dict(rounded(dict(twin.state_dict())))
    policy = Policy(WIDE_HEADS.to_hf(), dtype=BF16)
    policy.load(dict(twin.state_dict()))
    return policy, twin


@pytest.mark.parametrize("seed", range(3))
def test_a_forest_in_bf16_trains_like_flattened_rows_in_fp32_up_to_roundings(pair, seed):
    """The bound is that of tests/trainer/test_bf16.py."""
    policy, twin = pair
    executions = random_micro_step(seed, 3, segments=9, longest=60).executions
    twin.zero_grad()
    flat = flattened_loss(twin, executions, OPTIONS)
    flat.backward()
    assert trained(policy, executions) == pytest.approx(float(flat.detach()), rel=25 * U)
    assert policy.gradient.dtype == torch.float32
    mine = policy.hf_tensors({name: p.grad for name, p in policy.parameters.items()})
    wanted = {name: p.grad for name, p in twin.named_parameters() if p.grad is not None}
    assert far(*(torch.cat([of[n].flatten().cpu() for n in wanted]) for of in (mine, wanted))) < 25 * U


def test_pieces_in_bf16_train_like_the_whole(pair, monkeypatch):
    policy, _ = pair
    executions = random_micro_step(9, 1, segments=6, longest=200).executions
    whole, gradient = trained(policy, executions), policy.gradient.clone()
    monkeypatch.setattr(policy, "piece_tokens", 64)
    assert trained(policy, executions) == pytest.approx(whole, rel=5 * U)
    assert far(policy.gradient, gradient) < 5 * U


def test_bf16_weights_follow_their_fp32_masters(pair):
    policy, twin = pair
    optimizer = AdamW(policy, TrainerConfig(grad_clip=0.0))
    before = {name: tensor.cpu().clone() for name, tensor in policy.hf_tensors().items()}
    for _ in range(100):
        policy.gradient.fill_(1.0)
        optimizer.step(3e-5)
    after = {name: tensor.cpu() for name, tensor in policy.hf_tensors().items()}
    for name, master in optimizer.masters().items():
        assert torch.equal(torch.from_numpy(master).to(BF16), after[name])
        assert (after[name] != before[name])[before[name].abs() < 0.25].all(), name
    policy.load(dict(twin.state_dict()))
    assert all(torch.equal(t.cpu().float(), twin.state_dict()[name]) for name, t in policy.hf_tensors().items())
