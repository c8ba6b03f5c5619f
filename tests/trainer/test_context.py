"""The tokens of a micro-step, dealt out to ranks: each is somebody's, and each rank's queries see what they saw."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from celld.trainer import context, flex, tree
from tests.trainer.forests import random_micro_step
from tests.trainer.test_tree_and_loss import blocks_of, dense_mask, projections

FORESTS = {
    "seed": st.integers(0, 10**6),
    "executions": st.integers(1, 3),
    "segments": st.integers(1, 9),
    "longest": st.sampled_from([1, 3, 40]),
    "ranks": st.integers(2, 5),
}


def parts_of(seed, executions, segments, longest, ranks) -> tuple[tree.TreePlan, list[tree.TreePlan]]:
    whole = tree.plan(random_micro_step(seed, executions, segments=segments, longest=longest).executions)
    return whole, [context.part(whole, rank, ranks) for rank in range(ranks)]


@given(**FORESTS)
def test_every_token_is_one_ranks_and_all_have_equally_many(seed, executions, segments, longest, ranks):
    whole, parts = parts_of(seed, executions, segments, longest, ranks)
    assert {len(part) for part in parts} == {len(parts[0])}
    assert len(parts[0]) * ranks < len(whole) + ranks * context.CHUNKS + ranks
    assert torch.equal(torch.cat([part.index_T for part in parts])[parts[0].places_W], whole.index_T)
    owned = [context.own_rows(whole.index_T, part, rank)[0] for rank, part in enumerate(parts)]
    assert torch.equal(torch.stack(owned).sum(0), torch.ones(len(whole), dtype=torch.int64))
    for rank, part in enumerate(parts):
        assert torch.equal(part.places_W, parts[0].places_W)
        assert torch.equal(part.tokens_T, whole.tokens_T[part.index_T])
        assert torch.equal(part.position_T, whole.position_T[part.index_T])
        is_own, rows = context.own_rows(whole.index_T, part, rank)
        assert torch.equal(part.index_T[rows], whole.index_T[is_own])


@given(**FORESTS, again=st.booleans())
@settings(max_examples=40)
def test_a_ranks_attention_is_that_of_its_tokens_in_the_whole(seed, executions, segments, longest, ranks, again):
    whole, parts = parts_of(seed, executions, segments, longest, ranks)
    query, key, value = projections(seed, len(whole))
    upstream = torch.randn(query.shape, generator=torch.Generator().manual_seed(seed))
    expected = tree.attend(query, key, value, whole)
    gradients = torch.autograd.grad(expected, (query, key, value), upstream)
    found = [torch.zeros_like(gradient) for gradient in gradients]
    for rank, part in enumerate(parts):
        mixed = tree.attend(query[part.index_T], key, value, part, again=again)
        torch.testing.assert_close(mixed, expected[part.index_T], rtol=1e-5, atol=1e-5)
        is_own, rows = context.own_rows(whole.index_T, part, rank)
        own = torch.zeros_like(mixed)
        own[rows] = upstream[is_own]
        for total, gradient in zip(found, torch.autograd.grad(mixed, (query, key, value), own), strict=True):
            total += gradient
    for mine, theirs in zip(found, gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("seed", "longest", "ranks"), [(0, 20, 2), (1, 60, 3), (2, 300, 2), (3, 300, 4), (4, 900, 4)])
def test_the_kernel_of_a_gpu_gets_the_same_from_the_same_plan(seed, longest, ranks):
    whole, parts = parts_of(seed, 2, 9, longest, ranks)
    query, key, value = (x.detach() for x in projections(seed, len(whole), size=16))
    for part in parts:
        own = query[part.index_T]
        torch.testing.assert_close(
            flex.attend(own, key, value, part.on_gpu), tree.attend(own, key, value, part), rtol=1e-5, atol=1e-5
        )
        some, full, called_some, called_full = blocks_of(dense_mask(whole)[part.index_T], part.on_gpu)
        assert torch.all(called_some >= some) and torch.equal(called_full, full)
        assert int((called_some & ~some).sum()) <= 0.1 * some.numel()  # only where a block's queries are no neighbours


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_pairs_of_a_single_run_and_of_a_wide_forest_are_dealt_out_evenly(ranks):
    rng = np.random.default_rng(ranks)
    forest = np.concatenate([np.arange(20_000) + rng.integers(0, 60_000) for _ in range(9)])
    for position in (np.arange(100_000), forest):
        shares = context.shares(position, ranks)
        pairs = np.array([(position[share] + 1).sum() for share in shares])
        assert pairs.max() <= 1.05 * pairs.mean()
        assert max(map(len, shares)) <= 1.01 * min(map(len, shares))
