"""The prefix index against the definition: compare with every string."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from celld.tiny.prefix import PrefixIndex, common_length

strings = st.lists(st.integers(0, 2), max_size=8)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), st.sampled_from("ab"), strings),
        st.tuples(st.just("remove"), st.integers(0, 30), st.none()),
    ),
    max_size=30,
)


@settings(max_examples=300, deadline=None)
@given(operations=operations, salt=st.sampled_from("ab"), query=strings)
def test_the_longest_match_is_what_comparing_with_every_string_gives(operations, salt, query):
    index, held = PrefixIndex(), {}
    for number, (what, first, second) in enumerate(operations):
        if what == "insert":
            index.insert(number, first, second)
            held[number] = (first, second)
        elif held:
            victim = sorted(held)[first % len(held)]
            index.remove(victim)
            del held[victim]
    matches = {h: common_length(string, query) for h, (s, string) in held.items() if s == salt}
    holder, length = index.longest(salt, query)
    assert length == max(matches.values(), default=0)
    assert (holder is None) == (length == 0)
    if holder is not None:
        assert matches[holder] == length
    whole = [h for h, (s, string) in held.items() if s == salt and string and string == query[: len(string)]]
    assert sorted(index.contained_in(salt, query)) == sorted(whole)
    assert len(index) == len(held)
    for holder in list(held):
        index.remove(holder)
    assert index._roots == {}  # nothing is left behind


def test_the_newest_of_equal_holders_is_named():
    index = PrefixIndex()
    index.insert(1, "", [5, 6, 7])
    index.insert(2, "", [5, 6, 8])
    assert index.longest("", [5, 6, 9]) == (2, 2)
    assert index.longest("", [5, 6, 7, 1]) == (1, 3)


def test_a_holder_can_not_be_inserted_twice():
    index = PrefixIndex()
    index.insert(1, "", [1])
    with pytest.raises(ValueError, match="already"):
        index.insert(1, "x", [2])
