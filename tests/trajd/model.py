"""Ranks, a core rank and a network around a real trajd core, small enough for thousands of runs.

The network may lose, repeat and reorder. A rank believes only answers to its last question, as the bus sees to. What is
true is `CoreRank.weights`: the ids of each optimizer step that the present weights contain.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gyre_base.daemon import Answer, PeerLost
from gyre_base.messages import (
    BatchApplied,
    BatchComplete,
    BatchesRetired,
    ClaimMicroStep,
    ContributionLost,
    Done,
    MicroStepComputed,
    MicroStepLease,
    Refused,
    StaleWeights,
)
from tests.trajd.builders import closed, packed
from trajtools.trajd.core import TrajdCore
from trajtools.trajd.events import LedgerFrom, Pack, Restarted


@dataclass
class Question:
    """On the wire. `number` ties the answer to it."""

    rank: Rank
    number: int
    message: Any


@dataclass
class Rank:
    """A satellite. `sum` is its gradient: (batch, base version, ids)."""

    cell: str
    life: int = 1
    version: str = ""
    batch: int = -1
    sum: set[str] = field(default_factory=set)
    hand: str = ""
    unsaid: list[Any] = field(default_factory=list)  # to be repeated until it is answered
    asked: int = 0
    core: bool = False

    def next(self) -> Any:
        """What it says now: the oldest unanswered word, else a claim."""
        if self.unsaid:
            return self.unsaid[0]
        if self.hand:
            self.sum.add(self.hand)
            self.unsaid.append(MicroStepComputed(batch=self.batch, id=self.hand, cell=self.cell, life=self.life))
            self.hand = ""
            return self.unsaid[0]
        ids = tuple(sorted(self.sum))
        return ClaimMicroStep(
            cell=self.cell, life=self.life, version=self.version, core=self.core, batch=self.batch, ids=ids
        )

    def hear(self, answer: Any, core: CoreRank) -> None:
        match answer:
            case Done():
                self.unsaid.pop(0)
            case Refused():
                assert not isinstance(self.unsaid[0] if self.unsaid else None, BatchApplied | LedgerFrom), answer
                self.drop()
            case StaleWeights():
                self.drop()
                self.version = core.version
            case MicroStepLease():
                assert answer.id not in self.sum or answer.batch != self.batch
                assert answer.base_version == self.version
                if answer.batch != self.batch:
                    self.drop()
                    self.batch = answer.batch
                self.hand = answer.id

    def drop(self) -> None:
        self.sum, self.hand, self.batch = set(), "", -1
        self.unsaid = [m for m in self.unsaid if not isinstance(m, MicroStepComputed)]


@dataclass
class CoreRank(Rank):
    """Owns the weights. A checkpoint is a copy of them."""

    weights: list[frozenset[str]] = field(default_factory=list)
    saved: list[frozenset[str]] = field(default_factory=list)
    lineage: int = 0

    def start(self) -> None:
        self.version = f"{self.lineage}.{len(self.weights)}"
        ids = tuple(i for batch in self.weights for i in sorted(batch))
        source = f"rank:{self.cell}:{self.life}"
        word = LedgerFrom(source=source, next_batch=len(self.weights), version=self.version, applied=ids)
        self.drop()
        self.unsaid = [word]

    def restart(self) -> None:
        self.life, self.lineage = self.life + 1, self.lineage + 1
        self.weights = list(self.saved)
        self.start()

    def save(self) -> None:
        self.saved = list(self.weights)
        self.unsaid.append(BatchesRetired(below=len(self.saved), version=self.version))

    def step(self, complete: BatchComplete, ranks: dict[str, Rank], dead: set[str]) -> None:
        """Pull every sum; step only if each is exactly what the ledger believes."""
        assert complete.batch == len(self.weights) and complete.base_version == self.version
        for part in complete.contributions:
            rank = ranks[part.cell]
            alive = part.cell not in dead
            same = alive and (rank.life, rank.version, rank.batch) == (part.life, self.version, complete.batch)
            if not same or rank.sum != set(part.ids):
                self.unsaid.append(ContributionLost(batch=complete.batch, cell=part.cell, life=part.life))
        if self.unsaid:
            return
        ids = [i for part in complete.contributions for i in part.ids]
        self.weights.append(frozenset(ids))
        self.version = f"{self.lineage}.{len(self.weights)}"
        applied = BatchApplied(batch=complete.batch, ids=tuple(ids), version=self.version, weights_sum=1.0)
        self.drop()
        self.unsaid = [applied]


class World:
    """Everything, with the network's choices left to the caller."""

    def __init__(self, satellites: int = 2, groups_per_batch: int = 2) -> None:
        self.size = groups_per_batch
        self.trajd = TrajdCore(groups_per_batch)
        self.journal: list[Any] = []
        self.wire: list[Question] = []
        self.packing: list[str] = []
        self.closed: list[str] = []
        self.shape: dict[str, tuple[int, bool]] = {}
        self.dead: set[str] = set()  # never speak again; what they had sent may still arrive
        self.core = CoreRank("c0", core=True)
        self.core.start()
        self.ranks: dict[str, Rank] = {"c0": self.core, **{f"c{i + 1}": Rank(f"c{i + 1}") for i in range(satellites)}}

    def close_group(self, steps: int, enough: bool) -> None:
        name = f"g{len(self.closed)}"
        self.closed.append(name)
        self.shape[name] = (steps, enough)
        self.tell(closed(name))

    def tell(self, event: Any) -> Any:
        """One event through trajd; journalled as the shell does it. Returns the answer."""
        before = self.trajd.ledger.changes
        commands = self.trajd.handle(event, 0.0)
        if self.trajd.ledger.changes != before:
            self.journal.append(event)
        self.trajd.ledger.check()
        self.packing += [c.group for c in commands if isinstance(c, Pack) and c.group not in self.packing]
        return next((c.message for c in commands if isinstance(c, Answer)), None)

    def pack_one(self, index: int) -> None:
        if self.packing:
            name = self.packing.pop(index % len(self.packing))
            self.tell(packed(name, *self.shape[name]))

    def speak(self, cell: str) -> None:
        """The rank of this cell, or the core's if it is dead, asks what it has to ask."""
        rank = self.ranks["c0" if cell in self.dead else cell]
        rank.asked += 1
        self.wire.append(Question(rank, rank.asked, rank.next()))

    def deliver(self, index: int, *, keep: bool = False, lose_answer: bool = False) -> None:
        """One question from anywhere on the wire; `keep` leaves a copy to arrive again."""
        question = self.wire[index % len(self.wire)]
        if not keep:
            self.wire.remove(question)
        answer = self.tell(question.message)
        if lose_answer or question.number != question.rank.asked:
            return
        question.rank.asked += 1  # heard: a copy of this answer means nothing
        if isinstance(answer, BatchComplete):
            self.core.step(answer, self.ranks, self.dead)
        else:
            question.rank.hear(answer, self.core)

    def lose_question(self, index: int) -> None:
        self.wire.pop(index % len(self.wire))

    def silence(self, cell: str) -> None:
        self.tell(PeerLost(kind="rank", name=cell, why="silent"))

    def restart_rank(self, cell: str) -> None:
        rank = self.ranks[cell]
        rank.asked += 1
        if rank is self.core:
            self.core.restart()
        else:
            rank.life += 1
            rank.unsaid = []
            rank.drop()
            rank.version = ""

    def restart_trajd(self) -> None:
        """Killed: its memory and what it was packing are gone, the journal is not."""
        self.trajd, self.packing = TrajdCore(self.size), []
        for event in self.journal:
            self.trajd.handle(event, 0.0)
        self.trajd.ledger.check()
        self.tell(Restarted(life=2))

    def hold_and_die(self, cell: str) -> None:
        """A cell ends with a lease and, if it can be, a sum; more groups come, so that they are needed."""
        for _ in range(2 * self.size):
            self.close_group(2, True)
        while self.packing:
            self.pack_one(0)
        for _ in range(40):
            for speaker in ("c0", cell):
                self.speak(speaker)
                self.deliver(len(self.wire) - 1)
            if self.ranks[cell].hand:
                break
        self.dead.add(cell)

    def settle(self) -> None:
        """No more faults: everyone speaks in turn until all full batches are in the weights."""
        self.wire.clear()
        for cell in self.dead:
            self.silence(cell)
        for _ in range(4000):
            while self.packing:
                self.pack_one(0)
            if len(self.core.weights) == len(self.batches()) and not self.core.unsaid:
                return
            for cell in self.ranks.keys() - self.dead:
                self.speak(cell)
                self.deliver(0)
        raise AssertionError("the batches are never finished")

    def batches(self) -> list[frozenset[str]]:
        """What must have been trained in the end: lots of groups with enough, in the order of closing."""
        good = [name for name in self.closed if self.shape[name][1]]
        full = [good[i : i + self.size] for i in range(0, len(good) - self.size + 1, self.size)]
        return [frozenset(f"{g}.{i}" for g in lot for i in range(self.shape[g][0])) for lot in full]

    def check(self) -> None:
        trained = [i for batch in self.core.weights for i in batch]
        assert len(trained) == len(set(trained)), "a micro-step is twice in the weights"
        assert self.core.weights == self.batches()[: len(self.core.weights)]
        if not self.core.unsaid:  # whatever arrives late or twice: trajd stands where the core does
            ledger = self.trajd.ledger
            assert (ledger.open_batch, ledger.version) == (len(self.core.weights), self.core.version)
