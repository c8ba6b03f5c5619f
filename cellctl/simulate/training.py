"""Batches, micro-steps, joins and optimizer steps as trajd and the ranks do them, in virtual time.

A batch is the next B packed groups in the order in which they were packed. Cells in training claim one micro-step at a time; a
satellite joins only while the batch has micro-steps left; the core steps when all are computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from cellctl.simulate.profile import Laws


class Timers(Protocol):
    """Virtual time."""

    now: float

    def at(self, delay_s: float, call: Callable[[], None]) -> None: ...


@dataclass
class Batch:
    """The open batch: groups taken so far, micro-steps not yet claimed, micro-steps being computed."""

    dispatched: list[int] = field(default_factory=list)  # step at which each group was dispatched
    unclaimed: int = 0
    computing: int = 0


@dataclass
class Rank:
    """A cell as a trainer. `busy_until` is the end of the micro-step in hand."""

    nodes: int
    joined: bool = False
    busy: bool = False
    busy_until: float = 0.0


class Training:
    """`stepped(mean staleness)` is told of each optimizer step."""

    def __init__(
        self,
        laws: Laws,
        nodes: dict[str, int],
        groups_per_batch: int,
        streaming: bool,
        timers: Timers,
        stepped: Callable[[float], None],
    ) -> None:
        self._laws, self._size, self._streaming, self._timers, self._stepped = laws, groups_per_batch, streaming, timers, stepped
        self._core = next(iter(nodes))
        self.ranks = {name: Rank(n) for name, n in nodes.items()}
        self._per_micro_step_s = laws.train_node_h * 3600.0 / (groups_per_batch * laws.micro_steps_per_group)
        self._ready: deque[int] = deque()
        self._batch = Batch()
        self._stepping = False
        self.step = 0
        self.busy_nodes = 0

    def packed(self, dispatched_step: int) -> None:
        self._ready.append(dispatched_step)
        self._pump()

    def join(self, cell: str) -> None:
        rank = self.ranks[cell]

        def joined() -> None:
            if rank.joined:
                self._pump()

        rank.joined = True
        self._timers.at(0.0 if cell == self._core else self._laws.join_s, joined)

    def leave(self, cell: str, now: float) -> float:
        """Claims no more. Returns seconds until the micro-step in hand is computed."""
        rank = self.ranks[cell]
        rank.joined = False
        return max(0.0, rank.busy_until - now) if rank.busy else 0.0

    def _pump(self) -> None:
        if self._stepping:
            return
        self._take()
        if self._batch.unclaimed:
            for rank in self.ranks.values():
                if rank.joined and not rank.busy and self._batch.unclaimed:
                    self._compute(rank)
        batch = self._batch
        closed = len(batch.dispatched) == self._size and not batch.unclaimed and not batch.computing
        if closed and self.ranks[self._core].joined:
            self._stepping = True
            self._timers.at(self._laws.step_s, self._finish)

    def _take(self) -> None:
        batch = self._batch
        if not (self._streaming or len(self._ready) >= self._size):
            return
        while self._ready and len(batch.dispatched) < self._size:
            batch.dispatched.append(self._ready.popleft())
            batch.unclaimed += self._laws.micro_steps_per_group

    def _compute(self, rank: Rank) -> None:
        seconds = self._per_micro_step_s / rank.nodes
        self._batch.unclaimed -= 1
        self._batch.computing += 1
        self.busy_nodes += rank.nodes
        rank.busy = True
        rank.busy_until = self._timers.now + seconds

        def computed() -> None:
            rank.busy = False
            self.busy_nodes -= rank.nodes
            self._batch.computing -= 1
            self._pump()

        self._timers.at(seconds, computed)

    def _finish(self) -> None:
        self._stepping = False
        staleness = sum(self.step - d for d in self._batch.dispatched) / len(self._batch.dispatched)
        self._batch = Batch()
        self.step += 1
        self._stepped(staleness)
        self._pump()
