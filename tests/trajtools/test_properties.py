"""Properties that hold over random executions, whole pipeline: from lines to loss."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trajbuild import forest_of, random_execution

from gyre_base.runfile import encode
from trajtools.choose import Rules, choose
from trajtools.load import load
from trajtools.pack import flatten, pack

seeds = st.integers(0, 2**32)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_hundred_shuffles_of_a_file_give_one_digest(seed):
    rng = np.random.default_rng(seed)
    lines = [encode(call) for call in random_execution(rng, calls=30)]
    digests = set()
    for _ in range(100):
        order = rng.permutation(len(lines))
        [execution] = load(io.BytesIO(b"".join(lines[i] for i in order))).executions.values()
        digests.add(execution.forest.digest())
    assert len(digests) == 1


def toy_states(tokens, predecessor):
    """A recurrent toy model: the state behind a token depends on the whole path to it and on nothing else."""
    rng = np.random.default_rng(0)
    embedding, mix = rng.normal(size=(64, 5)), rng.normal(size=(5, 5)) / 3
    states = np.zeros((len(tokens), 5))
    for i, (token, before) in enumerate(zip(tokens, predecessor, strict=True)):
        states[i] = np.tanh((states[before] @ mix if before >= 0 else 0.0) + embedding[token])
    return states, embedding


def toy_loss(tokens, predecessor, owned, weight):
    """Weighted negative log likelihood of the owned tokens."""
    states, embedding = toy_states(tokens, predecessor)
    total = 0.0
    for i in np.flatnonzero(owned):
        logits = embedding @ states[predecessor[i]]
        total -= weight * (logits[tokens[i]] - np.log(np.exp(logits).sum()))
    return total


@given(seed=seeds, stubs=st.sampled_from(["drop", "attach"]))
@settings(max_examples=40, deadline=None)
def test_the_loss_of_a_packed_tree_is_that_of_its_rows(seed, stubs):
    choice = choose(forest_of(*random_execution(np.random.default_rng(seed))), Rules(stubs=stubs))
    packed = pack(choice)
    if not packed.total_owned:
        return
    weight = 1.0 / packed.total_owned
    tree = toy_loss(packed.tokens, packed.predecessor, packed.owned, weight)
    rows = sum(toy_loss(r.tokens, np.arange(-1, len(r.tokens) - 1), r.owned, weight) for r in flatten(packed))
    assert tree == pytest.approx(rows, rel=1e-12)


@given(seed=seeds)
@settings(max_examples=60, deadline=None)
def test_every_owned_token_has_the_logprob_of_the_call_that_sampled_it(seed):
    calls = {c.call: c for c in random_execution(np.random.default_rng(seed))}
    choice = choose(forest_of(*calls.values()))
    for name, start, end in choice.owned_ranges:
        values = calls[name].logprobs[start:end]
        assert np.isfinite(values).all() and (values <= 1e-4).all() and (values > -9000).all()
    packed = pack(choice)
    recorded = sorted(float(x) for name, a, b in choice.owned_ranges for x in calls[name].logprobs[a:b])
    assert sorted(packed.logprob[packed.owned].tolist()) == recorded


@given(seed=seeds)
@settings(max_examples=30, deadline=None)
def test_inputs_are_not_changed_by_anything(seed):
    calls = random_execution(np.random.default_rng(seed))
    before = [encode(c) for c in calls]
    choice = choose(forest_of(*calls), Rules(stubs="attach"))
    flatten(pack(choice))
    assert [encode(c) for c in calls] == before
