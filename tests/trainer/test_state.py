"""What a rank keeps and gives away: sums, snapshots, checkpoints, the optimizer's state."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from celld import weights
from celld.tiny import model as tiny
from celld.trainer import checkpoint, gradients
from celld.trainer.gradients import BatchSum, Computed, ContributionDamaged
from celld.trainer.optimizer import AdamW, learning_rate
from gyre_base.config import TrainerConfig
from gyre_base.ids import PolicyVersion
from gyre_base.messages import PullWeights, Refused
from tests.trainer.conftest import SMALL


def snapshot(reference, version="0.3"):
    return weights.Snapshot.of(version, {n: t.numpy() for n, t in reference.state_dict().items()})


def test_a_snapshot_written_for_an_engine_loads_with_the_same_bits(tmp_path, reference):
    directory = snapshot(reference).write_hf(tmp_path / "0.3", SMALL.to_hf())
    loaded = tiny.load(directory).state_dict()
    assert all(torch.equal(loaded[n], t) for n, t in reference.state_dict().items())
    assert [p.name for p in tmp_path.iterdir()] == ["0.3"]


def test_any_flipped_part_of_a_snapshot_shows(reference):
    published = weights.Published()
    published.publish(snapshot(reference))
    good = published.answer(PullWeights())
    assert weights.Snapshot.received(good).tensors().keys() == reference.state_dict().keys()
    payload = bytearray(good.payload)
    payload[100] ^= 1
    layout = (("renamed", *good.layout[0][1:]), *good.layout[1:])
    for change in (
        {"payload": bytes(payload)},
        {"payload": good.payload[:-4]},
        {"version": "0.4"},
        {"layout": layout},
        {"layout": good.layout[:-1]},
    ):
        assert weights.Snapshot.received(dataclasses.replace(good, **change)) is None
    assert weights.Snapshot.received(good, chunks=(1,)) is None  # other chunks than those that were published


def test_a_puller_that_has_the_version_gets_no_bytes(reference):
    published = weights.Published()
    assert isinstance(published.answer(PullWeights()), Refused)
    published.snapshot = snapshot(reference)
    assert published.answer(PullWeights(have="0.3")).payload == b""
    assert published.answer(PullWeights(have="0.2")).payload == published.snapshot.payload


def computed(*values: float) -> Computed:
    return Computed(torch.tensor(values), 1.0, {"loss": 2.0})


def test_a_sum_counts_each_micro_step_once():
    held = BatchSum.empty(4, "0.1", 2)
    held.add(["a"], computed(1.0, 2.0))
    held.add(["b"], computed(0.5, 0.5))
    with pytest.raises(ValueError, match="twice"):
        held.add(["a"], computed(1.0, 2.0))
    assert held.flat.tolist() == [1.5, 2.5] and held.weight_sum == 2.0 and held.stats["loss"] == 4.0


def test_a_sum_with_other_ids_or_damaged_bytes_is_refused():
    held = BatchSum.empty(4, "0.1", 2)
    held.add(["a"], computed(1.0, 2.0))
    message = held.message()
    assert gradients.received(message, 4, ["a"], 2).gradient.tolist() == [1.0, 2.0]
    bad = type(message)(**{**message.__dict__, "payload": b"\0" * 8})
    for wrong in ((message, 5, ["a"], 2), (message, 4, ["a", "b"], 2), (message, 4, ["a"], 3), (bad, 4, ["a"], 2)):
        with pytest.raises(ContributionDamaged):
            gradients.received(*wrong)


def test_learning_rate_is_constant_then_linear_to_the_end():
    config = TrainerConfig(lr=1.0, lr_final=0.0)
    rates = [learning_rate(step, 10, config) for step in range(10)]
    assert rates[:6] == [1.0] * 6 and rates[-1] == 0.0
    assert np.allclose(np.diff(rates[5:]), -0.25)


def train(policy, optimizer, seed, steps):
    for step in range(steps):
        generator = torch.Generator().manual_seed(seed + step)
        policy.gradient.copy_(torch.randn(policy.gradient.shape, generator=generator))
        optimizer.step(1e-2)


def test_a_resumed_optimizer_continues_bit_for_bit(tmp_path, policy, reference):
    config = TrainerConfig(weight_decay=0.1)
    optimizer = AdamW(policy, config)
    train(policy, optimizer, 1, 3)
    state = checkpoint.Checkpoint(
        version=PolicyVersion(0, 3),
        next_batch=3,
        applied=("a", "b"),
        optimizer_steps=optimizer.steps,
        config=policy.config,
        weights=policy.hf_arrays(),
        moments=optimizer.hf_arrays(),
    )
    checkpoint.save(tmp_path, state, keep=2)
    drawn = torch.rand(5)
    train(policy, optimizer, 4, 2)
    expected = policy.hf_tensors()

    back = checkpoint.newest(tmp_path)
    assert back is not None and (back.version, back.next_batch, back.applied) == (PolicyVersion(0, 3), 3, ("a", "b"))
    checkpoint.set_rng_state(back.rng)
    assert torch.equal(torch.rand(5), drawn)
    policy.load_arrays(back.weights)
    fresh = AdamW(policy, config)
    fresh.load(back.moments, back.optimizer_steps)
    train(policy, fresh, 4, 2)
    assert all(torch.equal(expected[n], t) for n, t in policy.hf_tensors().items())
    policy.load(dict(reference.state_dict()))


def test_the_optimizer_is_torchs_with_a_clipped_gradient(policy, reference):
    optimizer = AdamW(policy, TrainerConfig(grad_clip=1.0))
    theirs = {n: p.detach().clone().requires_grad_() for n, p in policy.parameters.items()}
    adam = torch.optim.AdamW(theirs.values(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0)
    policy.gradient.copy_(torch.randn(policy.gradient.shape, generator=torch.Generator().manual_seed(0)))
    for name, parameter in theirs.items():
        parameter.grad = policy.parameters[name].grad.clone()
    torch.nn.utils.clip_grad_norm_(theirs.values(), 1.0)
    adam.step()
    norm = optimizer.step(1e-2)
    assert norm == pytest.approx(policy.gradient.numel() ** 0.5, rel=0.05)
    for name, parameter in theirs.items():
        torch.testing.assert_close(policy.parameters[name].detach(), parameter.detach(), rtol=1e-5, atol=1e-6)
    policy.load(dict(reference.state_dict()))


def test_a_gradient_that_is_not_finite_leaves_the_weights(policy, reference):
    optimizer = AdamW(policy, TrainerConfig())
    policy.gradient.fill_(float("nan"))
    assert np.isnan(optimizer.step(1e-2))
    assert all(torch.equal(policy.hf_tensors()[n], t) for n, t in reference.state_dict().items())
    policy.zero_gradient()
