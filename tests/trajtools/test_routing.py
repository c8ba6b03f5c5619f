"""Recorded routing: what an engine says is checked, and each row is packed at the token that it is of."""

from __future__ import annotations

import base64
import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trajbuild import Story, forest_of, random_execution

from gyre_base.config import ConfigError
from gyre_base.microstep import MicroStep, PackError
from gyre_base.routing import NAME, BadRouting, RoutingShape, known, rows_of
from trajtools.choose import Rules, choose
from trajtools.pack import pack

SHAPE = RoutingShape(sparse=(True, False, True), chosen=2, experts=9)
QWEN = {"model_type": "qwen3_moe", "num_hidden_layers": 4, "num_experts_per_tok": 8, "num_experts": 128}
seeds = st.integers(0, 2**32)


def row_of(context):
    """A row that only this token in this context has."""
    rng = np.random.default_rng([len(context), *(t + 1 for t in context)])
    return np.stack([rng.permutation(SHAPE.experts)[: SHAPE.chosen] for _ in SHAPE.sparse]).astype(np.uint8)


def recorded(call, rng, lost=0.2):
    """The call with a row for each sampled token, of the token before; some were lost."""
    text = [*call.prompt_ids.tolist(), *call.completion_ids.tolist()]
    rows = SHAPE.unknown(len(call.completion_ids))
    for t in range(len(rows)):
        if rng.random() >= lost:
            rows[t] = row_of(text[: len(call.prompt_ids) + t])
    return dataclasses.replace(call, arrays={NAME: rows})


def context_of(packed, at):
    return [*packed.prompt_before(at).tolist(), int(packed.tokens[at])]


@settings(max_examples=120, deadline=None)
@given(seed=seeds, jmax=st.sampled_from([1, 5, None]))
def test_every_row_is_packed_at_the_token_it_was_recorded_of(seed, jmax):
    rng = np.random.default_rng(seed)
    calls = [recorded(call, rng) for call in random_execution(rng)]
    choice = choose(forest_of(*calls), Rules(jmax=jmax))
    packed = pack(choice)
    packed.check()
    routed = dict(zip(packed.routing.at.tolist(), packed.routing.experts, strict=True)) if packed.routing else {}
    for at, experts in routed.items():
        assert np.array_equal(experts, row_of(context_of(packed, at)))
    rows = {call.call: call.arrays[NAME] for call in calls}
    wanted = sum(int(known(rows[name][start:end]).sum()) for name, start, end in choice.owned_ranges)
    assert wanted <= int(packed.replayed().sum()) <= choice.owned  # more where another call knows the same token's


@settings(max_examples=40, deadline=None)
@given(seed=seeds)
def test_routing_comes_over_the_wire_bit_for_bit(seed):
    rng = np.random.default_rng(seed)
    calls = [recorded(call, rng) for call in random_execution(rng)]
    plain = pack(choose(forest_of(*random_execution(rng, execution="f"))))
    packed = pack(choose(forest_of(*calls)))
    back = MicroStep.from_wire(*MicroStep((packed, plain)).to_wire()).executions
    assert back[1].routing is None
    assert (back[0].routing is None) == (packed.routing is None)
    if packed.routing is not None:
        assert np.array_equal(back[0].routing.at, packed.routing.at)
        assert np.array_equal(back[0].routing.experts, packed.routing.experts)


def test_routing_of_tokens_out_of_order_is_refused():
    told = Story()
    told.say([1, 2, 3], [4, 5, 6])
    packed = pack(choose(forest_of(recorded(told.calls[0], np.random.default_rng(0), lost=0.0))))
    assert packed.routing.at.tolist() == [2, 3, 4]
    for at in ([3, 2, 4], [2, 2, 3], [2, 3, 6]):
        routing = dataclasses.replace(packed.routing, at=np.array(at, np.int32))
        with pytest.raises(PackError, match="routed tokens"):
            dataclasses.replace(packed, routing=routing).check()


def test_where_two_calls_follow_one_token_the_earlier_one_decides():
    told = Story()
    told.say([1, 2, 3], [4, 5])
    told.say([1, 2, 3], [6, 7], agent="s1")
    first, second = (np.full((2, 3, 2), n, np.uint8) for n in (1, 2))
    calls = [dataclasses.replace(c, arrays={NAME: r}) for c, r in zip(told.calls, (first, second), strict=True)]
    packed = pack(choose(forest_of(*calls)))
    assert packed.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert packed.routing.at.tolist() == [2, 3, 5]
    assert packed.routing.experts[:, 0, 0].tolist() == [1, 1, 2]
    assert int(packed.replayed().sum()) == 4


def test_rows_of_another_length_are_no_rows_of_the_call():
    rows = SHAPE.unknown(3)
    assert rows_of({NAME: rows}, 3) is rows
    assert rows_of({NAME: rows}, 2) is None and rows_of({}, 3) is None
    assert rows_of({NAME: rows.astype(np.int64)}, 3) is None


# ---- what an engine says -------------------------------------------------------------------------------------------


def said(rows):
    return base64.b64encode(np.asarray(rows, "<i4").tobytes()).decode()


GOOD = np.stack([row_of([n]) for n in range(4)]).astype(np.int32)


def test_reported_rows_are_kept_and_those_of_dense_layers_are_zero():
    given_rows = GOOD.copy()
    given_rows[:, 1] = -1
    rows = SHAPE.reported(said(given_rows), 4)
    assert rows.dtype == np.uint8 and rows.shape == (4, 3, 2)
    assert np.array_equal(rows[:, [0, 2]], GOOD[:, [0, 2]]) and not rows[:, 1].any()
    assert known(rows).all()


@pytest.mark.parametrize(
    "text",
    [said(GOOD[:3]), said(np.concatenate([GOOD, GOOD])), "no base64 %", said(GOOD + 1), said(GOOD - 9), said(GOOD * 0)],
)
def test_what_can_not_be_the_routing_of_these_tokens_is_refused(text):
    with pytest.raises(BadRouting):
        SHAPE.reported(text, 4)


def test_submissions_are_spliced_and_what_none_reported_stays_unknown():
    rows, wrong = SHAPE.spliced(9, [(0, 4, said(GOOD)), (4, 2, ""), (6, 4, said(GOOD[::-1]))])
    assert wrong == []
    assert known(rows).tolist() == [True] * 4 + [False] * 2 + [True] * 3
    assert np.array_equal(rows[:4, [0, 2]], GOOD[:, [0, 2]])
    assert np.array_equal(rows[6:, [0, 2]], GOOD[::-1][:3, [0, 2]])
    rows, wrong = SHAPE.spliced(5, [(0, 5, said(GOOD))])
    assert not known(rows).any() and "for 5 tokens" in wrong[0]


def test_the_shape_follows_the_model_and_a_dense_one_is_refused():
    shape = RoutingShape.of(QWEN | {"decoder_sparse_step": 2, "mlp_only_layers": [3]})
    assert shape.sparse == (False, True, False, False) and (shape.chosen, shape.experts) == (8, 128)
    assert RoutingShape.of(QWEN | {"num_experts": 256}).form.itemsize == 2
    assert RoutingShape.of(QWEN | {"num_experts": 255}).form.itemsize == 1
    with pytest.raises(ConfigError, match="qwen3\\) has no experts"):
        RoutingShape.of({"model_type": "qwen3", "num_hidden_layers": 2})
