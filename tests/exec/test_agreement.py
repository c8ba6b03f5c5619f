"""Two rulers compared: known answers, and properties over random pairs."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre_exec.agreement import Pair, compare, correlation, line_through, ranks

SCORES = st.floats(0, 1, allow_nan=False)


def pair(name: int, old: float | None, new: float | None, **more: Any) -> Pair:
    outcomes = {"old_outcome": "evaluator_failed" if old is None else "scored"}
    outcomes["new_outcome"] = "evaluator_failed" if new is None else "scored"
    return Pair(execution=f"e{name}", **{"group": "g", "old": old, "new": new, **outcomes, **more})


def rows(pairs: list[Pair]) -> dict[str, list[dict[str, Any]]]:
    out: dict[str, list[dict[str, Any]]] = {}
    for row in compare(pairs):
        out.setdefault(row["kind"], []).append(row)
    return out


def test_a_ruler_agrees_with_itself() -> None:
    facts = rows([pair(n, n / 9, n / 9) for n in range(10)])["agreement"][0]
    assert (facts["pearson"], facts["spearman"], facts["equal_share"]) == (pytest.approx(1), pytest.approx(1), 1)
    assert (facts["same_order_in_group"], facts["ordered_pairs_in_groups"], facts["difference_mean"]) == (1, 45, 0)


def test_a_ruler_that_likes_length_is_seen_and_one_that_does_not_is_not() -> None:
    pairs = [pair(n, 0.5, 0.4 + n / 100, duration_s=60.0 * n, tokens=1000 - n) for n in range(20)]
    table = rows(pairs)
    assert table["agreement"][0]["length_bias_duration"] == pytest.approx(1)
    assert table["agreement"][0]["length_bias_tokens"] == pytest.approx(-1)
    differences = [row["difference"] for row in table["length"] if row["by"] == "duration_s"]
    assert len(differences) == 4 and differences == sorted(differences) and differences[0] < 0 < differences[3]
    flat = rows([pair(n, n % 2, n % 2, duration_s=60.0 * n) for n in range(20)])
    assert flat["agreement"][0]["length_bias_duration"] is None  # no difference at all has no correlation


def test_drift_over_the_steps_has_a_slope_and_an_error() -> None:
    noise = [0.01, -0.01, 0.0, 0.01, -0.01, 0.0]
    pairs = [pair(n, 0.5, 0.5 + 0.02 * (n // 6) + noise[n % 6], step=n // 6) for n in range(60)]
    facts = rows(pairs)
    assert facts["agreement"][0]["drift_per_step"] == pytest.approx(0.02)
    assert 0 < facts["agreement"][0]["drift_error"] < 0.002
    assert [(r["from"], r["to"]) for r in facts["drift"]][:2] == [(0, 0), (1, 1)] and len(facts["drift"]) == 8


def test_what_one_of_them_could_not_measure_is_counted_and_left_out() -> None:
    table = rows([pair(1, None, 1.0), pair(2, 0.0, None), pair(3, 0.5, 0.5)])
    facts = table["agreement"][0]
    assert (facts["states"], facts["compared"], facts["old_mean"], facts["pearson"]) == (3, 1, 0.5, None)
    assert [(r["old"], r["new"], r["states"]) for r in table["outcomes"]] == [
        ("evaluator_failed", "scored", 1),
        ("scored", "evaluator_failed", 1),
        ("scored", "scored", 1),
    ]


def test_order_is_compared_within_groups_only() -> None:
    pairs = [pair(1, 0.0, 0.9, group="a"), pair(2, 1.0, 0.1, group="a"), pair(3, 0.0, 0.0, group="b")]
    facts = rows(pairs)["agreement"][0]
    assert (facts["same_order_in_group"], facts["ordered_pairs_in_groups"]) == (0.0, 1)


def test_equal_values_share_a_rank() -> None:
    assert ranks([3.0, 1.0, 3.0, 2.0]) == [2.5, 0.0, 2.5, 1.0]
    assert line_through([(0, 1), (1, 3), (2, 5)]) == (2.0, 0.0)
    assert line_through([(1, 1), (1, 3), (1, 5)]) == (None, None)


@given(points=st.lists(st.tuples(SCORES, SCORES), max_size=30))
def test_correlation_is_symmetric_and_bounded_or_not_measurable(points: list[tuple[float, float]]) -> None:
    x, y = [a for a, _ in points], [b for _, b in points]
    r = correlation(x, y)
    assert r is None or -1 <= r <= 1
    assert (r is None) == (correlation(y, x) is None)
    assert r is None or math.isclose(r, correlation(y, x) or 0.0, abs_tol=1e-9)


@given(
    points=st.lists(
        st.tuples(st.none() | SCORES, st.none() | SCORES, st.none() | st.floats(0, 1e6), st.none() | st.integers(0, 9)),
        max_size=40,
    )
)
def test_every_compared_pair_is_in_exactly_one_row_of_each_table(points: list[Any]) -> None:
    pairs = [pair(n, a, b, duration_s=d, step=s) for n, (a, b, d, s) in enumerate(points)]
    table = rows(pairs)
    valid = [p for p in pairs if p.both]
    assert table["agreement"][0]["compared"] == len(valid)
    assert sum(r["states"] for r in table.get("outcomes", [])) == len(pairs)
    by_duration = [r for r in table.get("length", []) if r["by"] == "duration_s"]
    assert sum(r["compared"] for r in by_duration) == sum(p.duration_s is not None for p in valid)
    assert sum(r["compared"] for r in table.get("drift", [])) == sum(p.step is not None for p in valid)
    assert all(r["compared"] > 0 for kind in ("length", "drift") for r in table.get(kind, []))
