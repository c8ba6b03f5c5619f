"""The order in which groups enter batches: by arrival, shuffled within a bounded reserve, or stratified by duration.

Groups are trained as they close, so the short ones of a burst come first: its first batch is all short (easier) tasks
and its last all long ones. A reserve holds back up to `size` groups and lets out the one that the order wants. It never
holds back more groups than are still to come, so a burst's last group lets everything out and nothing waits for ever.
Pure, and the same for the same sequence of `add`: a restart that repeats the sequence gets the same places.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

ORDERS = ("arrival", "shuffle", "stratified")
T = TypeVar("T")


@dataclass
class Reserve(Generic[T]):
    """`add` and `settle` let out what may be trained now, in order. `batch`: groups of a batch, the strata's unit."""

    order: str = "arrival"
    size: int = 0
    batch: int = 1
    _held: list[tuple[float, T]] = field(default_factory=list)
    _place: int = 0  # in the open batch, of the next group let out
    _state: int = 1

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise ValueError(f"no order is called {self.order!r}: {', '.join(ORDERS)}")

    def __len__(self) -> int:
        return len(self._held)

    def add(self, item: T, seconds: float, to_come: int) -> Iterator[T]:
        """`seconds`: the group's duration, its longest member's. `to_come`: groups dispatched that have not closed."""
        self._held.append((seconds, item))
        return self.settle(to_come)

    def settle(self, to_come: int) -> Iterator[T]:
        """What may go out now that so many are to come: for a group that is not trained itself."""
        keep = 0 if self.order == "arrival" else min(self.size, max(0, to_come))
        while len(self._held) > keep:
            yield self._let_out()

    def _let_out(self) -> T:
        _, item = self._held.pop(self._pick())
        self._place = (self._place + 1) % self.batch
        return item

    def _pick(self) -> int:
        match self.order:
            case "shuffle":
                return self._chance(len(self._held))
            case "stratified":
                return self._stratum()
        return 0

    def _chance(self, below: int) -> int:
        """A linear congruential sequence: the same everywhere, no hidden random state."""
        self._state = (self._state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (self._state >> 33) % below

    def _stratum(self) -> int:
        """The k-th place of a batch goes to the k-th stratum of what is held: every batch spans the durations."""
        by_duration = sorted(range(len(self._held)), key=lambda i: self._held[i][0])
        return by_duration[int((self._place + 0.5) / self.batch * len(by_duration))]
