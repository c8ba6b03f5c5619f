"""A micro-step in pieces trains what the whole one trains, and keeps little for it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from celld.tiny.model import TinyQwen3
from celld.trainer import layers, model, tree
from celld.trainer import loss as losses
from tests.trainer import experts
from tests.trainer.conftest import SMALL, unlike_norms
from tests.trainer.forests import random_micro_step
from tests.trainer.test_tree_and_loss import packed_loss


@pytest.fixture(scope="module", params=["dense", "experts"])
def made(request, policy):
    if request.param == "dense":
        mine, twin = model.Policy(SMALL.to_hf()), unlike_norms(TinyQwen3(SMALL).initialise(3))
    else:
        mine, twin = model.Policy(experts.config_of()), experts.twin()
    mine.load(dict(twin.state_dict()))
    return mine


def trained(mine, steps) -> tuple[torch.Tensor, dict[str, float], torch.Tensor]:
    mine.zero_gradient()
    total, stats = packed_loss(mine, steps, losses.LossOptions(clip_low=0.2, clip_high=4.0))
    total.backward()
    return total.detach(), stats, mine.gradient.clone()


@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 10**6), segments=st.integers(1, 6), piece=st.sampled_from([5, 30]))
def test_pieces_give_the_loss_and_gradient_of_the_whole(made, seed, segments, piece):
    steps = random_micro_step(seed, 2, segments=segments, longest=60).executions
    total, stats, gradient = trained(made, steps)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(made, "piece_tokens", piece)
        patch.setattr(model, "LOGIT_ELEMENTS", 5 * SMALL.vocab_size)
        patch.setattr(tree, "MASK_ELEMENTS", 2000)
        pieced_total, pieced_stats, pieced = trained(made, steps)
    torch.testing.assert_close(pieced_total, total, rtol=1e-5, atol=1e-6)
    assert pieced_stats == pytest.approx(stats, rel=1e-4, abs=1e-4)
    assert (pieced - gradient).norm() <= 1e-5 * gradient.norm() + 1e-7


def test_a_step_within_the_bound_is_computed_at_once_and_a_longer_one_again(made, monkeypatch):
    runs = []
    real = layers.again
    monkeypatch.setattr(
        layers, "again", lambda forward, *a, **k: runs.append(forward.__name__) or real(forward, *a, **k)
    )
    steps = random_micro_step(3, 1, segments=1, longest=40).executions
    count = len(tree.plan(steps))
    depth = made.shape.num_hidden_layers
    monkeypatch.setattr(made, "piece_tokens", count)
    trained(made, steps)
    assert runs == []
    monkeypatch.setattr(made, "piece_tokens", -(-count // 2))
    trained(made, steps)
    assert sorted(runs) == sorted(depth * ["_forward_attention", "mlp_of", "mlp_of"])


def kept_floats(mine, length: int) -> int:
    """Numbers that the forward pass of one linear run keeps for the backward pass, outside what it computes again."""
    from bench.celld_rig.trees import plain_row

    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // 4
        return tensor

    row = plain_row(length, vocab=SMALL.vocab_size)
    plan, goal = tree.plan([row]), losses.targets([row], 0)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        logp, _ = mine.logprobs(plan, goal.rows_N, goal.tokens_N, 1.0)
    assert logp.requires_grad
    return sum(kept.values())


def test_what_is_kept_grows_with_the_tokens_and_not_with_their_square_or_the_vocabulary(made, monkeypatch):
    monkeypatch.setattr(model, "LOGIT_ELEMENTS", 16 * SMALL.vocab_size)
    monkeypatch.setattr(tree, "MASK_ELEMENTS", 1 << 12)
    whole = kept_floats(made, 512), kept_floats(made, 1024)
    monkeypatch.setattr(made, "piece_tokens", 64)
    pieces = kept_floats(made, 512), kept_floats(made, 1024)
    assert pieces[1] <= 2.1 * pieces[0]
    assert pieces[1] <= whole[1] / 5
