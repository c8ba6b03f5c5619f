"""The order of groups in a burst: nothing is lost, nothing waits for ever, the same sequence gives the same places."""

from __future__ import annotations

from statistics import pvariance

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre_base.reserve import ORDERS, Reserve


def let_out(reserve: Reserve[int], seconds: list[float]) -> list[int]:
    return [i for n, s in enumerate(seconds) for i in reserve.add(n, s, len(seconds) - n - 1)]


@given(
    order=st.sampled_from(ORDERS),
    size=st.integers(0, 9),
    batch=st.integers(1, 5),
    seconds=st.lists(st.floats(1.0, 9.0), max_size=40),
)
def test_every_group_comes_out_once_and_the_last_one_empties_the_reserve(order, size, batch, seconds):
    reserve: Reserve[int] = Reserve(order, size, batch)
    out = let_out(reserve, seconds)
    assert sorted(out) == list(range(len(seconds)))
    assert len(reserve) == 0
    assert out == let_out(Reserve(order, size, batch), seconds)


@given(order=st.sampled_from(ORDERS[1:]), size=st.integers(0, 9), seconds=st.lists(st.floats(1.0, 9.0), max_size=40))
def test_no_more_than_the_reserve_holds_is_kept_back(order, size, seconds):
    reserve: Reserve[int] = Reserve(order, size, 4)
    for n, s in enumerate(seconds):
        list(reserve.add(n, s, 99))
        assert len(reserve) == min(size, n + 1)


def test_groups_in_order_of_arrival_go_straight_through():
    reserve: Reserve[int] = Reserve("arrival", 5, 4)
    assert list(reserve.add(7, 1.0, 99)) == [7]


def test_strata_bring_batches_nearer_to_each_other_in_duration():
    seconds = [float(s) for s in range(32)]

    def between(order: str) -> float:
        out = let_out(Reserve(order, 16, 8), seconds)
        return pvariance([sum(seconds[i] for i in out[b : b + 8]) for b in range(0, 32, 8)])

    assert between("stratified") < 0.6 * between("arrival")
    assert between("shuffle") < 0.9 * between("arrival")


def test_a_group_that_is_not_trained_still_tells_how_many_are_to_come():
    reserve: Reserve[int] = Reserve("shuffle", 4, 1)
    assert not list(reserve.add(0, 1.0, 5))
    assert list(reserve.settle(0)) == [0]


def test_an_unknown_order_is_named():
    with pytest.raises(ValueError, match="arrival, shuffle, stratified"):
        Reserve("alphabetical")
