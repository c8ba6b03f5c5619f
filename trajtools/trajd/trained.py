"""Which tokens were trained: ranges per call, and how many tokens were trained more than once.

`twice` is computed from the ranges themselves, not from the ledger's own rules, so that it can convict them.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable

from trajtools.trajd.events import OwnedRange


class TrainedRanges:
    """Union of trained ranges by (execution, call)."""

    def __init__(self) -> None:
        self._union: dict[tuple[str, str], list[tuple[int, int]]] = {}
        self.tokens = 0  # with repeats
        self.twice = 0

    def add(self, owned: Iterable[OwnedRange]) -> None:
        for execution, call, start, stop in owned:
            self.tokens += stop - start
            self.twice += self._insert(self._union.setdefault((execution, call), []), start, stop)

    @staticmethod
    def _insert(union: list[tuple[int, int]], start: int, stop: int) -> int:
        """Merge [start, stop) into sorted, disjoint ranges; returns how many of its tokens were there already."""
        first = bisect.bisect_left(union, start, key=lambda r: r[1])
        last, overlap, low, high = first, 0, start, stop
        while last < len(union) and union[last][0] <= stop:
            a, b = union[last]
            overlap += max(0, min(b, stop) - max(a, start))
            low, high = min(low, a), max(high, b)
            last += 1
        union[first:last] = [(low, high)]
        return overlap
