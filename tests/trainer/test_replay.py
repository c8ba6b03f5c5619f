"""Given experts: the router's own change no bit, others give what a computation by hand gives, also in pieces."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from celld.trainer import gradients, replay, tree
from celld.trainer import loss as losses
from gyre_base.microstep import MicroStep, PackedRouting, PackError
from tests.trainer import experts
from tests.trainer.forests import random_micro_step
from tests.trainer.test_tree_and_loss import assert_same_gradient, flattened_loss, packed_loss

OPTIONS = losses.LossOptions(clip_low=0.2, clip_high=4.0)
LAYERS, SPARSE = experts.SHAPE.num_hidden_layers, (0, 2)


def routed(packed, rows, at=None):
    """The execution with these rows [R, L, K] at these tokens (default: all)."""
    at = np.arange(len(packed)) if at is None else at
    return dataclasses.replace(packed, routing=PackedRouting(at=at.astype(np.int32), experts=rows.astype(np.uint8)))


def random_rows(seed, count):
    rng = np.random.default_rng(seed)
    rows = np.zeros((count, LAYERS, experts.CHOSEN), np.uint8)
    for layer in SPARSE:
        rows[:, layer] = rng.permuted(np.tile(np.arange(experts.COUNT), (count, 1)), axis=1)[:, : experts.CHOSEN]
    return rows


def own_rows(policy, executions):
    """What the routers of `policy` choose, [T, L, K], in the reverse of their order."""
    chosen = {}
    routers = {m.layer_number - 1: m for m in policy.module.modules() if hasattr(m, "router_replay")}

    def seen(layer, router):
        def hook(module, args, output):
            chosen[layer] = output[1].nonzero()[:, 1].reshape(-1, experts.CHOSEN).flip(1)

        return router.register_forward_hook(hook)

    hooks = [seen(layer, router) for layer, router in routers.items()]
    with torch.no_grad():
        policy.hidden(tree.plan(executions))
    for hook in hooks:
        hook.remove()
    count = sum(map(len, executions))
    rows = np.zeros((count, LAYERS, experts.CHOSEN), np.uint8)
    for layer, found in chosen.items():
        rows[:, layer] = found.numpy()
    return rows


def gradient_of(policy, executions):
    policy.zero_gradient()
    total, _ = packed_loss(policy, executions, OPTIONS)
    total.backward()
    return total.detach(), policy.gradient.clone()


@pytest.mark.parametrize("piece_tokens", [0, 7])
def test_replay_of_its_own_choice_changes_no_bit(mixture, piece_tokens):
    mine, _ = mixture
    steps = random_micro_step(3, 2, segments=5, longest=15).executions
    rows = own_rows(mine, steps)
    split = len(steps[0])
    again = [routed(steps[0], rows[:split]), routed(steps[1], rows[split::2], np.arange(0, len(steps[1]), 2))]
    mine.piece_tokens = piece_tokens
    try:
        plain, replayed = gradient_of(mine, steps), gradient_of(mine, again)
    finally:
        mine.piece_tokens = 0
    assert torch.equal(plain[0], replayed[0]) and torch.equal(plain[1], replayed[1])


class Forced(torch.nn.Module):
    """The twin's experts with a given choice: softmax over the given scores, or theirs of the softmax over all."""

    def __init__(self, mlp):
        super().__init__()
        self.mlp, self.chosen = mlp, None

    def forward(self, x):
        scores = self.mlp.gate(x)
        chosen = torch.where(self.chosen >= 0, self.chosen, scores.topk(experts.CHOSEN).indices)
        weight = scores.gather(-1, chosen).softmax(-1) if self.mlp.normalised else scores.softmax(-1).gather(-1, chosen)
        share = torch.zeros(*x.shape[:-1], experts.COUNT).scatter(-1, chosen, weight)
        return sum(share[..., n : n + 1] * expert(x) for n, expert in enumerate(self.mlp.experts))


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10**6), share=st.sampled_from([1.0, 0.5]), piece_tokens=st.sampled_from([0, 5]))
def test_a_given_choice_gives_what_a_plain_computation_of_it_gives(mixture, seed, share, piece_tokens):
    """One path, so that the twin computes the same tokens; some of them are routed by the router."""
    mine, twin = mixture
    (packed,) = random_micro_step(seed, 1, segments=1, longest=24).executions
    at = np.flatnonzero(np.random.default_rng(seed).random(len(packed)) < share)
    rows = random_rows(seed, len(at))
    forced = {n: Forced(twin.model.layers[n].mlp) for n in SPARSE}
    for n, mlp in forced.items():
        mlp.chosen = torch.full((1, len(packed), experts.CHOSEN), -1)
        mlp.chosen[0, at] = torch.from_numpy(rows[:, n].astype(np.int64))
    twin.zero_grad()
    mine.piece_tokens = piece_tokens
    try:
        total, _ = gradient_of(mine, [routed(packed, rows, at)])
        for n, mlp in forced.items():
            twin.model.layers[n].mlp = mlp
        flat = flattened_loss(twin, [packed], OPTIONS)
        flat.backward()
    finally:
        mine.piece_tokens = 0
        for n, mlp in forced.items():
            twin.model.layers[n].mlp = mlp.mlp
    torch.testing.assert_close(total, flat.detach(), rtol=1e-5, atol=1e-5)
    assert_same_gradient(mine, twin)


def test_another_choice_changes_the_gradient(mixture):
    mine, _ = mixture
    steps = random_micro_step(4, 1, segments=3, longest=15).executions
    other = [routed(steps[0], random_rows(1, len(steps[0])))]
    assert not torch.allclose(gradient_of(mine, steps)[1], gradient_of(mine, other)[1], atol=1e-4)


def test_pieces_replay_as_the_whole_does(mixture):
    mine, _ = mixture
    steps = random_micro_step(5, 3, segments=4, longest=12).executions
    steps = [routed(packed, random_rows(n, len(packed))) for n, packed in enumerate(steps)]
    whole = gradient_of(mine, steps)
    mine.piece_tokens = 11
    try:
        pieces = gradient_of(mine, steps)
    finally:
        mine.piece_tokens = 0
    torch.testing.assert_close(pieces[0], whole[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(pieces[1], whole[1], rtol=1e-4, atol=1e-6)


def test_rows_of_another_model_are_refused(mixture):
    mine, _ = mixture
    (packed,) = random_micro_step(6, 1, segments=1, longest=9).executions
    rows = random_rows(0, len(packed))
    for wrong in (rows[:, :2], rows[:, :, :1], rows + experts.COUNT):
        with pytest.raises(PackError, match="the model has"):
            mine.hidden(tree.plan([routed(packed, wrong)]))
    with pytest.raises(PackError, match="of different models"):
        replay.rows_of([routed(packed, rows), routed(packed, rows[:, :2])])


def test_what_was_replayed_is_counted_over_the_trained_tokens():
    step = random_micro_step(7, 2, segments=4, longest=12)
    first, second = step.executions
    at = np.unique(first.predecessor[first.owned])[::2]
    some = routed(first, np.zeros((len(at), LAYERS, experts.CHOSEN)), at)
    stats = gradients.counts(MicroStep((some, second)), [some, second], 0)
    owned = int(first.owned.sum() + second.owned.sum())
    assert stats["replayed"] == int(np.isin(first.predecessor[first.owned], at).sum()) > 0
    assert gradients.metrics(stats | {"computed_tokens": owned})["replayed_share"] == stats["replayed"] / owned
