"""The bench compares like with like: its flattened rows ask for the same loss and gradient as the forest."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from bench.celld_rig import trees
from celld.trainer import loss, tree
from tests.trainer.forests import random_execution


def loss_and_gradient(policy, executions) -> tuple[float, torch.Tensor]:
    trees.forward_backward(policy, executions)
    goal = loss.targets(executions, 0)
    logp, _ = policy.logprobs(tree.plan(executions), goal.rows_N, goal.tokens_N, 1.0)
    return float(loss.loss_sum(logp, goal, loss.LossOptions())[0].detach()), policy.gradient.clone()


@pytest.mark.parametrize("seed", range(4))
def test_flattened_rows_train_what_the_forest_trains(policy, seed):
    forest = random_execution(np.random.default_rng(seed), "e", segments=8)
    rows = trees.flattened(forest)
    for row in rows:
        row.check()
    forest = dataclasses.replace(forest, advantage=1.0)
    (ours, gradient), (theirs, flat) = loss_and_gradient(policy, [forest]), loss_and_gradient(policy, rows)
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert float(flat.norm()) > 0 and float((gradient - flat).norm()) <= 1e-5 * float(flat.norm())
    assert len(rows) == len(forest.paths)


def test_a_pair_is_a_token_and_one_that_it_sees():
    forest = random_execution(np.random.default_rng(5), "e", segments=8)
    tokens, pairs = trees.tokens_and_pairs([forest, trees.plain_row(100)])
    assert tokens == len(forest) + 100
    assert pairs == sum(len(_path_to(forest, i)) for i in range(len(forest))) + 100 * 101 / 2


def _path_to(forest, index: int) -> list[int]:
    path = [index]
    while (before := int(forest.predecessor[path[-1]])) >= 0:
        path.append(before)
    return path
