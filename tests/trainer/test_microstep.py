"""The wire form of a micro-step: equal after the trip, refused when it contradicts itself, honest about contexts."""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre_base.microstep import MicroStep, PackError, chain, context_mismatches
from tests.trainer.forests import path_indices, random_micro_step, random_segments

ARRAYS = ("tokens", "position", "predecessor", "logprob", "owned", "trainable", "segments")


@given(seed=st.integers(0, 10**6), executions=st.integers(0, 4), segments=st.integers(1, 8))
def test_a_micro_step_is_equal_after_the_wire(seed, executions, segments):
    step = random_micro_step(seed, executions, segments=segments)
    layout, payload = step.to_wire()
    back = MicroStep.from_wire(msgspec.msgpack.decode(msgspec.msgpack.encode(layout)), payload)
    for mine, theirs in zip(step.executions, back.executions, strict=True):
        for field in dataclasses.fields(mine):
            a, b = getattr(mine, field.name), getattr(theirs, field.name)
            assert np.array_equal(a, b, equal_nan=field.name == "logprob") if field.name in ARRAYS else a == b
    assert back.context_mismatches() == 0


@given(seed=st.integers(0, 10**6), segments=st.integers(1, 10))
def test_position_is_depth_and_predecessor_the_token_before_on_every_path(seed, segments):
    shape = random_segments(np.random.default_rng(seed), segments, 5)
    position, predecessor = chain(shape)
    (packed,) = random_micro_step(seed, 1, segments=segments).executions
    for path in packed.paths:
        index = path_indices(packed, path)
        assert packed.position[index].tolist() == list(range(len(index)))
        assert packed.predecessor[index].tolist() == [-1, *index[:-1]]
    assert (position[predecessor < 0] == 0).all() and len(position) == shape[-1, 1]


def test_a_context_that_differs_in_one_token_is_a_mismatch():
    (packed,) = random_micro_step(3, 1, segments=1).executions
    (call,) = packed.calls
    assert context_mismatches(packed) == 0
    tokens = packed.tokens.copy()
    tokens[call.start - 1] += 1
    assert context_mismatches(dataclasses.replace(packed, tokens=tokens)) == 1
    longer = dataclasses.replace(call, prompt_length=call.prompt_length + 1)
    assert context_mismatches(dataclasses.replace(packed, calls=(longer,))) == 1


def test_what_contradicts_itself_is_refused():
    step = random_micro_step(4, 1, segments=5)
    (packed,) = step.executions
    layout, payload = step.to_wire()
    with pytest.raises(PackError, match="bytes"):
        MicroStep.from_wire(layout, payload + b"x")
    with pytest.raises(PackError, match="ends inside"):
        MicroStep.from_wire(layout, payload[:-1])
    with pytest.raises(PackError, match="form"):
        MicroStep.from_wire({"form": 99}, b"")
    with pytest.raises(PackError, match="not a micro-step"):
        MicroStep.from_wire({"form": 1, "executions": [{}]}, b"")
    for change, why in (
        ({"position": packed.position + 1}, "depth"),
        ({"owned": ~packed.owned}, "trainable"),
        ({"logprob": np.full(len(packed), np.nan, np.float32)}, "logprob"),
        ({"paths": ()}, "each once"),
        ({"total_owned": 0}, "total_owned"),
        ({"paths": (*packed.paths, packed.paths[0])}, "each once"),
    ):
        with pytest.raises(PackError, match=why):
            dataclasses.replace(packed, **change).check()
