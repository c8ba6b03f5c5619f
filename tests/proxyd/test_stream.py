"""Whatever an engine repeats, ids and logprobs come out once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre_base.runfile import Span
from proxyd.stream import BadStream, Sampled, join_spans


def chunk(ids: list[int], total: int, scored: list[int] | None = None, **meta: Any) -> dict[str, Any]:
    entries = [[-i / 100, i, None] for i in (ids if scored is None else scored)]
    return {
        "output_ids": ids,
        "meta_info": {"completion_tokens": total, "output_token_logprobs": entries, "finish_reason": None, **meta},
    }


ABORT = {"type": "abort", "message": "aborted"}


@given(data=st.data(), whole=st.lists(st.integers(0, 50), max_size=20), cumulative=st.booleans(), repeats=st.booleans())
def test_any_chunking_gives_the_same_tokens_once(
    data: st.DataObject, whole: list[int], cumulative: bool, repeats: bool
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=5)))
    sampled, at = Sampled("0.0"), 0
    for end in [*cuts, len(whole)]:
        sampled.take(chunk(whole[:end] if cumulative else whole[at:end], end))
        at = end
    if repeats:  # SGLang's last chunk of an aborted request: the last id again, all logprobs
        sampled.take(chunk(whole[-1:], len(whole), scored=whole, finish_reason=ABORT))
    else:
        sampled.take(chunk([], len(whole), finish_reason=ABORT))
    assert sampled.ids == whole
    assert sampled.logprobs == [-i / 100 for i in whole]
    assert sampled.finish == "abort"


def test_an_abort_chunk_may_bring_new_tokens_beside_old_logprobs() -> None:
    sampled = Sampled("0.0")
    sampled.take(chunk([5, 6], 2))
    sampled.take(chunk([7], 3, scored=[5, 6, 7], finish_reason=ABORT))
    assert sampled.ids == [5, 6, 7] and sampled.logprobs == [-0.05, -0.06, -0.07]


@pytest.mark.parametrize(
    "bad",
    [
        chunk([1], 3),  # a gap
        chunk([1], 1, scored=[2]),  # logprobs of another token
        chunk([1], 1, scored=[]),  # none
        {"output_ids": [1]},
        {"output_ids": [1], "meta_info": None},
    ],
)
def test_what_cannot_be_a_continuation_is_an_error_and_keeps_what_was_good(bad: dict[str, Any]) -> None:
    sampled = Sampled("0.0")
    with pytest.raises(BadStream):
        sampled.take(bad)
    assert sampled.ids == []
    sampled.take(chunk([9], 1))
    with pytest.raises(BadStream):
        sampled.take(chunk([], 0))
    assert sampled.ids == [9]


def test_spans_cover_the_tokens_whatever_the_engine_said() -> None:
    sampled = Sampled("0.1")
    sampled.take(chunk([1, 2, 3], 3, weight_version="0.2"))
    assert sampled.versions() == [Span("0.2", 0, 3)], (
        "a broken stream has no spans: the last word on the version counts"
    )
    sampled.take(chunk([4], 4, finish_reason=ABORT, weight_versions=[{"version": "0.1", "start": 0, "end": 3}]))
    assert sampled.versions() == [Span("0.1", 0, 3), Span("0.2", 3, 4)]
    assert join_spans([Span("0.0", 0, 2)], sampled.versions(), 2) == [
        Span("0.0", 0, 2),
        Span("0.1", 2, 5),
        Span("0.2", 5, 6),
    ]


def test_an_aborted_stream_that_had_ended_by_itself_is_finished() -> None:
    sampled = Sampled("0.0")
    sampled.take(chunk([1, 99], 2, finish_reason=ABORT))
    assert sampled.verdict(10, frozenset({99})) == "stop"
    assert sampled.verdict(2, frozenset()) == "length"
    assert sampled.verdict(10, frozenset()) == ""
