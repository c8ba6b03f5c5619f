"""Who keeps what of the optimizer's numbers: each number is one rank's, and all have equally many."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from celld.trainer.shards import cut


@given(sizes=st.lists(st.integers(1, 200), min_size=1, max_size=12), ranks=st.integers(1, 9))
def test_every_number_is_one_ranks_in_their_order_and_shares_are_equal(sizes, ranks):
    named = {f"p{number}": size for number, size in enumerate(sizes)}
    cuts, kept = cut(named, ranks), [0] * ranks
    assert cuts.keys() == named.keys()
    for name, size in named.items():
        assert (cuts[name][0][1], cuts[name][-1][2]) == (0, size)
        assert all(first[0] < second[0] and first[2] == second[1] for first, second in pairwise(cuts[name]))
        for rank, start, end in cuts[name]:
            assert start < end
            kept[rank] += end - start
    assert max(kept) - min(kept) <= 1
    assert ranks > 1 or all(each == ((0, 0, named[name]),) for name, each in cuts.items())
