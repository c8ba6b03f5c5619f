"""The packed computation is the flattened one: the sentence of DESIGN 8, on random forests."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from celld.trainer import flex, tree
from celld.trainer import loss as losses
from celld.trainer.mapping import ModelError, Shape, to_hf
from gyre_base.microstep import PackError
from tests.trainer.conftest import SMALL
from tests.trainer.forests import path_indices, random_micro_step


def flattened_loss(reference, executions, options):
    """DESIGN 8 in the plainest words: one row per trajectory, no packing, no shared prefix."""
    total = torch.zeros(())
    for packed in executions:
        for path in packed.paths:
            index = path_indices(packed, path)
            tokens = torch.from_numpy(packed.tokens[index]).long()
            logp = reference(tokens[None])[0].log_softmax(-1)[:-1].gather(-1, tokens[1:, None])[:, 0]
            behaviour = torch.from_numpy(packed.logprob[index][1:]).nan_to_num()  # never owned where NaN
            trainable = torch.from_numpy(packed.trainable[index][1:])
            own = {i for start, end in path.owned for i in range(start, end)}
            owned = torch.tensor([i in own for i in index[1:]])
            gap = (logp - behaviour).detach()
            correction = torch.ones_like(gap)
            if options.reading == "proximal":
                correction, gap = gap.exp().clamp(max=options.ratio_cap), torch.zeros_like(gap)
            over = owned if options.owned_only else trainable
            s = gap.clamp(max=math.log(options.ratio_cap))[over].mean().exp() if over.any() else torch.ones(())
            ratio = s * (logp - logp.detach()).exp()
            gain = torch.minimum(
                ratio * packed.advantage, ratio.clamp(options.clip_low, options.clip_high) * packed.advantage
            )
            total = total - (gain * correction)[owned].sum() / packed.total_owned
    return total


def packed_loss(policy, executions, options):
    plan = tree.plan(executions)
    goal = losses.targets(executions, base_step=0)
    logp, _ = policy.logprobs(plan, goal.rows_N, goal.tokens_N, 1.0)
    return losses.loss_sum(logp, goal, options)


def assert_same_gradient(policy, reference):
    mine = {hf: grad for name, p in policy.parameters.items() for hf, grad in to_hf(name, p.grad, policy.shape)}
    whole = torch.cat([mine[name].flatten() for name, _ in reference.named_parameters()])
    expected = torch.cat(
        [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in reference.parameters()]
    )
    assert (whole - expected).norm() <= 1e-5 * expected.norm() + 1e-7


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    executions=st.integers(1, 5),
    segments=st.integers(1, 9),
    longest=st.sampled_from([1, 3, 20]),
    reading=st.sampled_from(losses.READINGS),
    wide=st.booleans(),
    owned_only=st.booleans(),
)
def test_packed_loss_and_gradients_equal_the_flattened_form(
    policy, reference, seed, executions, segments, longest, reading, wide, owned_only
):
    steps = random_micro_step(seed, executions, segments=segments, longest=longest).executions
    bounds = {"clip_low": 0.2, "clip_high": 4.0} if wide else {}
    options = losses.LossOptions(reading=reading, owned_only=owned_only, **bounds)
    policy.zero_gradient()
    reference.zero_grad()
    packed, _ = packed_loss(policy, steps, options)
    packed.backward()
    flat = flattened_loss(reference, steps, options)
    flat.backward()
    torch.testing.assert_close(packed.detach(), flat.detach(), rtol=1e-5, atol=1e-5)
    assert_same_gradient(policy, reference)


def projections(seed, total, size=8):
    rng = torch.Generator().manual_seed(seed)
    return [torch.randn(total, heads, size, generator=rng, requires_grad=True) for heads in (4, 2, 2)]


@given(seed=st.integers(0, 10**6), segments=st.integers(1, 12), again=st.booleans())
@settings(max_examples=30, deadline=None)
def test_long_runs_are_cut_without_changing_attention_or_its_gradient(seed, segments, again):
    steps = random_micro_step(seed, 3, segments=segments, longest=30).executions
    inputs = projections(seed, sum(map(len, steps)))
    whole = tree.attend(*inputs, tree.plan(steps))
    upstream = torch.randn(whole.shape, generator=torch.Generator().manual_seed(seed))
    expected = torch.autograd.grad(whole, inputs, upstream)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree, "MAX_QUERIES", 7)
        patch.setattr(tree, "FEWEST_QUERIES", 3)
        patch.setattr(tree, "MASK_ELEMENTS", 100)
        cut = tree.plan(steps)
        mixed = tree.attend(*inputs, cut, again=again)
        torch.testing.assert_close(mixed, whole, rtol=1e-5, atol=1e-5)
        for mine, theirs in zip(torch.autograd.grad(mixed, inputs, upstream), expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
        assert all(row.end - row.start <= max(3, min(7, 100 // row.key_count)) for row in cut.rows)


def dense_mask(plan):
    """What the plan means, token by token: [T, T], true where the query may see the key."""
    index = torch.arange(len(plan))
    return (index[None] <= index[:, None]) & (index[:, None] < plan.end_W[None])


@given(seed=st.integers(0, 10**6), executions=st.integers(1, 4), segments=st.integers(1, 12))
@settings(max_examples=30, deadline=None)
def test_a_token_sees_exactly_its_ancestors_and_itself(seed, executions, segments):
    steps = random_micro_step(seed, executions, segments=segments, longest=20).executions
    expected = torch.zeros(sum(map(len, steps)), sum(map(len, steps)), dtype=torch.bool)
    offset = 0
    for packed in steps:
        for token in range(len(packed)):
            at = token
            while at >= 0:
                expected[offset + token, offset + at] = True
                at = int(packed.predecessor[at])
        offset += len(packed)
    assert torch.equal(dense_mask(tree.plan(steps)), expected)


def blocks_of(mask_QK, block_mask):
    """Which blocks of a mask hold something and which are full, with all of their queries; what `block_mask` says."""
    rows, columns = (-(-count // flex.BLOCK) for count in mask_QK.shape)
    dense = torch.zeros(rows * flex.BLOCK, columns * flex.BLOCK, dtype=torch.bool)
    dense[: mask_QK.shape[0], : mask_QK.shape[1]] = mask_QK
    tiles = dense.view(rows, flex.BLOCK, columns, flex.BLOCK).transpose(1, 2).flatten(2)
    called_full = torch.zeros(rows, columns, dtype=torch.bool)
    for row in range(rows):
        count = int(block_mask.full_kv_num_blocks[0, 0, row])
        called_full[row, block_mask.full_kv_indices[0, 0, row, :count].long()] = True
    return tiles.any(2), tiles.all(2), block_mask.to_dense()[0, 0].bool(), called_full


@pytest.mark.parametrize(("seed", "longest"), [(0, 20), (1, 60), (2, 300), (3, 300)])
def test_flex_attention_equals_the_attention_of_a_cpu_and_its_blocks_are_exact(seed, longest):
    plan = tree.plan(random_micro_step(seed, 2, segments=9, longest=longest).executions)
    inputs = [x.detach() for x in projections(seed, len(plan), size=16)]
    mine, theirs = flex.attend(*inputs, plan.on_gpu), tree.attend(*inputs, plan)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    some, full, called_some, called_full = blocks_of(dense_mask(plan), plan.on_gpu)
    assert torch.equal(called_some, some) and torch.equal(called_full, full)


def test_segments_out_of_depth_first_order_are_refused():
    (packed,) = random_micro_step(0, 1, segments=1, longest=12).executions
    wrong = np.array([[0, 2, -1], [2, 3, 0], [3, 4, 0], [4, len(packed), 1]], dtype=np.int32)
    with pytest.raises(PackError, match="depth-first"):
        tree.plan([dataclasses.replace(packed, segments=wrong)])


def test_sixteen_executions_cost_a_handful_of_attention_calls():
    steps = random_micro_step(1, 16, segments=6, longest=60).executions
    assert len(tree.plan(steps).on_cpu[0]) <= 24
    assert sum(len(p.paths) for p in steps) > 30


def test_logits_equal_those_of_the_plain_torch_model(policy, reference):
    steps = random_micro_step(5, 1, segments=1, longest=60).executions
    plan = tree.plan(steps)
    with torch.no_grad():
        mine = policy.logits(plan, torch.arange(len(plan)))
        theirs = reference(plan.tokens_T[None])[0]
    torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=2e-6 * float(theirs.abs().max()))


def test_weights_come_back_bit_for_bit(policy, reference):
    back = policy.hf_tensors()
    theirs = dict(reference.state_dict())
    assert list(back) == sorted(theirs)
    assert all(torch.equal(back[name], theirs[name]) for name in theirs)


def test_log_softmax_and_entropy_equal_torchs(policy, reference):
    steps = random_micro_step(6, 2).executions
    plan, goal = tree.plan(steps), losses.targets(steps, base_step=0)
    with torch.no_grad():
        logp, entropy = policy.logprobs(plan, goal.rows_N, goal.tokens_N, 0.7)
        full = (policy.logits(plan, goal.rows_N) / 0.7).log_softmax(-1)
    torch.testing.assert_close(logp, full.gather(-1, goal.tokens_N[:, None])[:, 0])
    torch.testing.assert_close(entropy, -(full.exp() * full).sum(-1))


def test_a_clipped_path_adds_no_gradient_and_is_counted_by_staleness():
    steps = random_micro_step(8, 6).executions
    goal = losses.targets(steps, base_step=0)
    logp = (goal.behaviour_N + 0.5 * goal.advantage_K[goal.owner_N].sign()).requires_grad_()
    total, stats = losses.loss_sum(logp, goal, losses.LossOptions(clip_low=0.99, clip_high=1.01, owned_only=True))
    total.backward()
    owned = goal.owned_N
    assert torch.all(logp.grad == 0)
    assert stats["clipped"] == stats["computed_tokens"] == float(owned.sum())
    fresh = (goal.staleness_K == 0)[goal.owner_N[owned]]
    assert 0 < stats["clipped_d0"] == stats["computed_tokens_d0"] == float(fresh.sum()) < stats["clipped"]


def test_at_the_sampling_weights_the_gradient_is_the_policy_gradient_with_weight_one_over_T():
    steps = random_micro_step(9, 4).executions
    goal = losses.targets(steps, base_step=0)
    logp = goal.behaviour_N.clone().requires_grad_()
    total, stats = losses.loss_sum(logp, goal, losses.LossOptions())
    total.backward()
    expected = torch.where(goal.owned_N, -goal.advantage_K[goal.owner_N] * goal.weight_N, torch.zeros(()))
    torch.testing.assert_close(logp.grad, expected)
    assert stats["clipped"] == 0 and stats["logprob_gap"] == 0
    assert losses.weight_sum(steps) == 4.0
    assert float(goal.weight_N.sum()) == pytest.approx(4.0, abs=1e-5)


def test_the_kl_estimate_is_that_of_the_samples_and_zero_at_the_sampling_weights():
    behaviour, policy = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.3, 0.5]]).log()
    draws = torch.multinomial(behaviour.exp(), 4000, replacement=True, generator=torch.Generator().manual_seed(0))
    (packed,) = random_micro_step(10, 1, segments=1, longest=12).executions
    goal = losses.targets([packed], base_step=0)
    count = int(goal.owned_N.sum())
    _, at_rest = losses.loss_sum(goal.behaviour_N.clone(), goal, losses.LossOptions())
    assert at_rest["kl"] == 0
    estimates = []
    for tokens in draws.split(count)[:-1]:
        drawn = dataclasses.replace(goal, behaviour_N=goal.behaviour_N.clone())
        drawn.behaviour_N[goal.owned_N] = behaviour[tokens]
        logp = drawn.behaviour_N.clone()
        logp[goal.owned_N] = policy[tokens]
        estimates.append(losses.loss_sum(logp, drawn, losses.LossOptions())[1]["kl"] / count)
    exact = float((behaviour.exp() * (behaviour - policy)).sum())
    assert sum(estimates) / len(estimates) == pytest.approx(exact, rel=0.1)


def test_one_token_adds_at_most_the_cap_to_the_sequence_ratio():
    steps = random_micro_step(10, 1, segments=1, longest=8).executions
    goal = losses.targets(steps, base_step=0)
    logp = goal.behaviour_N.clone()
    logp[0] += 50.0  # alone it would make s about e^(50 / N)
    _, stats = losses.loss_sum(logp, goal, losses.LossOptions(ratio_cap=5.0))
    expected = 5.0 ** (1 / len(logp))
    assert stats["sequence_ratio"] / stats["computed_tokens"] == pytest.approx(expected, rel=1e-5)


def test_a_model_that_cannot_be_trained_exactly_is_refused():
    config = SMALL.to_hf()
    with pytest.raises(ModelError, match="model_type"):
        Shape.from_hf({**config, "model_type": "llama"})
    with pytest.raises(ModelError, match="attention_bias"):
        Shape.from_hf({**config, "attention_bias": True})
    del config["head_dim"]
    with pytest.raises(ModelError, match="head_dim"):
        Shape.from_hf(config)


def test_missing_or_misshapen_weights_are_named(policy, reference):
    tensors = dict(reference.state_dict())
    with pytest.raises(ModelError, match=r"model\.norm"):
        policy.load({k: v for k, v in tensors.items() if k != "model.norm.weight"})
    with pytest.raises(ModelError, match="final_layernorm"):
        policy.load({**tensors, "model.norm.weight": torch.ones(3)})
    policy.load(tensors)
    assert np.isfinite(float(policy.hf_tensors()["model.norm.weight"].sum()))
