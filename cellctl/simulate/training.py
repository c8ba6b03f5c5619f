"""Batches, micro-steps, joins and optimizer steps as trajd and the ranks do them, in virtual time.

A batch is the next B packed groups in the order in which the reserve lets them out: as they were packed, unless an
arm asks otherwise. Cells in training claim one micro-step at
a time; a satellite joins only while the batch has micro-steps left; the core steps when all are computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from cellctl.simulate.profile import Laws
from gyre_base.reserve import Reserve


class Timers(Protocol):
    """Virtual time."""

    now: float

    def at(self, delay_s: float, call: Callable[[], None]) -> None: ...


@dataclass
class Waiting:
    """A packed group: the step at its dispatch, the node-seconds of its micro-steps, its hours."""

    dispatched: int
    micro_steps: list[float]
    hours: float


@dataclass
class Batch:
    """The open batch: groups taken so far, micro-steps not yet claimed, micro-steps being computed."""

    groups: list[Waiting] = field(default_factory=list)
    unclaimed: deque[float] = field(default_factory=deque)  # node-seconds of each micro-step
    computing: int = 0


@dataclass
class Rank:
    """A cell as a trainer. `busy_until` is the end of the last micro-step in hand."""

    replica_nodes: float
    free: int  # replicas without a micro-step
    joined: bool = False
    busy_until: float = 0.0


def _rank(nodes: int, replica_nodes: int) -> Rank:
    replicas = max(1, nodes // replica_nodes)
    return Rank(replica_nodes=nodes / replicas, free=replicas)


class Training:
    """`stepped(groups of the batch)` is told of each optimizer step."""

    def __init__(
        self,
        laws: Laws,
        nodes: dict[str, int],
        streaming: bool,
        reserve: Reserve[Waiting],
        timers: Timers,
        stepped: Callable[[list[Waiting]], None],
    ) -> None:
        self._laws, self._streaming, self._timers, self._stepped = laws, streaming, timers, stepped
        self._reserve, self._size = reserve, reserve.batch
        self._core = next(iter(nodes))
        self.ranks = {name: _rank(n, laws.replica_nodes) for name, n in nodes.items()}
        self._ready: deque[Waiting] = deque()
        self._batch = Batch()
        self._stepping = False
        self.step = 0
        self.busy_nodes = 0.0

    def packed(self, group: Waiting, to_come: int) -> None:
        """A group can be trained; `to_come` others are under way."""
        self._ready.extend(self._reserve.add(group, group.hours, to_come))
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
        return max(0.0, rank.busy_until - now)

    def _pump(self) -> None:
        if self._stepping:
            return
        self._take()
        if self._batch.unclaimed:
            for rank in self.ranks.values():
                while rank.joined and rank.free and self._batch.unclaimed:
                    self._compute(rank)
        batch = self._batch
        closed = len(batch.groups) == self._size and not batch.unclaimed and not batch.computing
        if closed and self.ranks[self._core].joined:
            self._stepping = True
            self._timers.at(self._laws.step_s, self._finish)

    def _take(self) -> None:
        batch = self._batch
        if not (self._streaming or len(self._ready) >= self._size):
            return
        while self._ready and len(batch.groups) < self._size:
            group = self._ready.popleft()
            batch.groups.append(group)
            batch.unclaimed.extend(group.micro_steps)

    def _compute(self, rank: Rank) -> None:
        seconds = self._batch.unclaimed.popleft() / rank.replica_nodes
        self._batch.computing += 1
        self.busy_nodes += rank.replica_nodes
        rank.free -= 1
        rank.busy_until = max(rank.busy_until, self._timers.now + seconds)

        def computed() -> None:
            rank.free += 1
            self.busy_nodes -= rank.replica_nodes
            self._batch.computing -= 1
            self._pump()

        self._timers.at(seconds, computed)

    def _finish(self) -> None:
        self._stepping = False
        groups, self._batch = self._batch.groups, Batch()
        self.step += 1
        self._stepped(groups)
        self._pump()
