"""The ledger of micro-steps: who computes what, what was applied. Pure; no IO, no clock.

Only the first batch not yet applied is open; it trains from `version`. Every id is in exactly one of pool, leased,
computed, applied: leases and sums are kept only for the open batch, the pool is the rest of it and all later ones.

What the ledger says of a sum is a belief: the core rank compares the ids of each sum that it pulls and answers with
`batch.lost` when they differ. `batch.applied` is a fact, whatever the ledger believed before.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

from gyre_base.ids import PolicyVersion
from gyre_base.messages import (
    BatchApplied,
    BatchComplete,
    ClaimMicroStep,
    Contribution,
    ContributionLost,
    Done,
    GroupClosed,
    LeaseReturned,
    MicroStepComputed,
    MicroStepLease,
    NoMicroStep,
    Refused,
    StaleWeights,
)
from trajtools.trajd.events import Holder, LedgerFrom, Packed
from trajtools.trajd.lots import LedgerBroken, Lots
from trajtools.trajd.trained import TrainedRanges

WAIT_FOR_GROUPS_S = 0.2  # nothing packed yet: an execution has to end first
WAIT_FOR_OTHERS_S = 0.05  # others compute or the core steps: the end of a batch is the critical path

Answer: TypeAlias = MicroStepLease | NoMicroStep | StaleWeights | BatchComplete | Refused


@dataclass(frozen=True)
class AppliedBatch:
    """One optimizer step as the core reported it. `weights_sum` is None when only a checkpoint's ledger told of it."""

    batch: int
    base_version: str
    version: str
    ids: frozenset[str]
    executions: int
    owned_tokens: int
    weights_sum: float | None
    staleness: dict[str, Any] = field(default_factory=dict)


class MicroStepLedger:
    """See the module. Methods answer with the message to send; a repeat of a message gets the same answer."""

    def __init__(
        self, groups_per_batch: int, *, streaming: bool = True, order: str = "arrival", reserve_groups: int = 0
    ) -> None:
        self.lots = Lots(groups_per_batch, order, reserve_groups)
        self._streaming = streaming  # off: the baseline that trains a batch only when all of its groups are there
        self.version = ""  # V, the base of the open batch; "" until the core has spoken
        self.applied: list[AppliedBatch] = []
        self.trained = TrainedRanges()
        self.retired_below = 0
        self.leased: dict[str, Holder] = {}
        self.computed: dict[str, Holder] = {}
        self.changes = 0  # counts mutations: the shell journals an event only if it changed something
        self._lives: dict[str, int] = {}
        self._joined: set[Holder] = set()  # have claimed with `version` since it is the base
        self._restored_from: tuple[str, int, str] | None = None  # the core's ledger taken last

    # ---- groups -----------------------------------------------------------------------------------------------------

    def close(self, closed: GroupClosed) -> bool:
        """False if it was known."""
        new = self.lots.close(closed)
        self.changes += new
        return new

    def pack(self, packed: Packed) -> None:
        self.lots.pack(packed)
        self.changes += 1

    def reported(self, group: str) -> None:
        """cellctl has heard what became of this group."""
        self.changes += not self.lots.groups[group].reported
        self.lots.groups[group].reported = True

    def unload(self) -> list[str]:
        """After a restart: no payload is here. Returns the groups to pack again at once (those not yet applied)."""
        for group in self.lots.groups.values():
            group.loaded = False
        self.changes += 1
        return self.lots.not_loaded(self.open_batch)

    # ---- views ------------------------------------------------------------------------------------------------------

    @property
    def open_batch(self) -> int:
        return len(self.applied)

    @property
    def open_ids(self) -> list[str]:
        return self.lots.ids(self.open_batch)

    def is_complete(self) -> bool:
        """Whether the open batch has all its groups and all its micro-steps are computed."""
        return self.lots.is_full(self.open_batch) and len(self.computed) == len(self.open_ids)

    def pool(self) -> list[str]:
        """Ids of the open batch that nobody holds, in recorded order."""
        return [i for i in self.open_ids if i not in self.leased and i not in self.computed]

    def holder(self, id: str) -> Holder | None:
        """Who has an id of the open batch, leased or computed."""
        return self.leased.get(id) or self.computed.get(id)

    # ---- leases -----------------------------------------------------------------------------------------------------

    def claim(self, claim: ClaimMicroStep) -> Answer:
        """One micro-step to compute, or why there is none. A claim repeated without a result gets the same lease."""
        holder = Holder(claim.cell, claim.life)
        if not self.admit(holder):
            return self._too_old(holder)
        if not self.version:
            return NoMicroStep(why="the core has not said which weights it has", wait_s=WAIT_FOR_GROUPS_S)
        if claim.version != self.version:
            return self._other_version(claim.version)
        if holder not in self._joined:
            self._joined.add(holder)
            self.changes += 1
        have = frozenset(claim.ids) if claim.batch == self.open_batch else frozenset()
        if why := self._reconcile(holder, have):
            self._give_back(holder)
            return Refused(why=why)
        if self.is_complete():
            return self._complete() if claim.core else NoMicroStep(why="the core steps", wait_s=WAIT_FOR_OTHERS_S)
        return self._lease(holder)

    def admit(self, holder: Holder) -> bool:
        """False for an older life. A newer one gives back what the older held: its memory is gone."""
        known = self._lives.get(holder.cell, -1)
        if holder.life > known:
            self._lives[holder.cell] = holder.life
            self.changes += 1
            self.lose(holder.cell)
        return holder.life >= known

    def _too_old(self, holder: Holder) -> Refused:
        return Refused(why=f"{holder.cell} lives its life {self._lives[holder.cell]}, not {holder.life}")

    def _other_version(self, version: str) -> StaleWeights | NoMicroStep:
        theirs, base = _parse(version), _parse(self.version)
        if theirs and base and theirs > base:  # pulled between the step and our note of it
            return NoMicroStep(why=f"the step to {version} is not in the ledger yet", wait_s=WAIT_FOR_OTHERS_S)
        return StaleWeights(version=self.version)

    def _reconcile(self, holder: Holder, have: frozenset[str]) -> str:
        """Believe what a rank says of its own sum; "" or why the sum can't be used."""
        believed = {i for i, h in self.computed.items() if h == holder}
        for i in believed - have:
            self._drop(i)
        open_ids = set(self.open_ids)
        for i in sorted(have - believed):
            if i not in open_ids:
                return f"{i} is not in batch {self.open_batch}"
            if (other := self.holder(i)) not in (None, holder):
                return f"{i} was given to {other}"
        for i in have - believed:
            self._set_computed(i, holder)
        return ""

    def _lease(self, holder: Holder) -> MicroStepLease | NoMicroStep:
        held = [i for i, h in self.leased.items() if h == holder]
        may_begin = self._streaming or self.lots.is_full(self.open_batch)
        free = held or [i for i in self.pool() if may_begin and self.lots.group_of[i].loaded]
        if not free:
            waits = bool(self.pool()) or not self.lots.is_full(self.open_batch)
            why = f"batch {self.open_batch} waits for " + ("groups" if waits else "other cells")
            return NoMicroStep(why=why, wait_s=WAIT_FOR_GROUPS_S if waits else WAIT_FOR_OTHERS_S)
        if not held:
            self.leased[free[0]] = holder
            self.changes += 1
        return MicroStepLease(batch=self.open_batch, id=free[0], base_version=self.version, layout={}, payload=b"")

    def _complete(self) -> BatchComplete:
        by: dict[Holder, list[str]] = {}
        for i, holder in self.computed.items():
            by.setdefault(holder, []).append(i)
        return BatchComplete(
            batch=self.open_batch,
            base_version=self.version,
            executions=self.lots.executions(self.open_batch),
            contributions=tuple(Contribution(cell=h.cell, life=h.life, ids=tuple(sorted(by[h]))) for h in sorted(by)),
            staleness=self.lots.staleness(self.open_batch, self.version),
        )

    def compute(self, computed: MicroStepComputed) -> Done | Refused:
        """An id is in a cell's sum. Refused means: drop the sum; what it held is free again."""
        holder = Holder(computed.cell, computed.life)
        if not self.admit(holder):
            return self._too_old(holder)
        if computed.batch < self.open_batch and computed.id in self.applied[computed.batch].ids:
            return Done(note="applied")
        if computed.batch != self.open_batch or computed.id not in self.open_ids:
            return Refused(why=f"{computed.id} is not in batch {self.open_batch}, which is open")
        other = self.holder(computed.id)
        if other not in (None, holder) or holder not in self._joined:
            self._give_back(holder)
            return Refused(why=f"{computed.id} was given to {other}" if other else "its sum is from other weights")
        self._set_computed(computed.id, holder)
        return Done()

    def _set_computed(self, id: str, holder: Holder) -> None:
        if self.computed.get(id) != holder:
            self.leased.pop(id, None)
            self.computed[id] = holder
            self.changes += 1

    def _drop(self, id: str) -> None:
        self.leased.pop(id, None)
        self.computed.pop(id, None)
        self.changes += 1

    def _give_back(self, holder: Holder) -> None:
        for i in [i for held in (self.leased, self.computed) for i, h in held.items() if h == holder]:
            self._drop(i)

    def return_lease(self, returned: LeaseReturned) -> Done:
        """Its holder stopped and never learnt of it: nobody else would finish the batch."""
        for i in [i for i, h in self.leased.items() if h == Holder(returned.cell, returned.life)]:
            self._drop(i)
        return Done()

    def knows(self, holder: Holder) -> bool:
        """Whether this is the life of its cell that we have heard of last."""
        return self._lives.get(holder.cell) == holder.life

    def lose(self, cell: str) -> None:
        """A cell is gone, in any life: its lease and its sum go back to the pool."""
        for holder in {h for held in (self.leased, self.computed) for h in held.values() if h.cell == cell}:
            self._give_back(holder)

    def leave(self, holder: Holder) -> None:
        """A clean end of one life. Late words of an older one change nothing."""
        self._give_back(holder)

    def lose_contribution(self, lost: ContributionLost) -> Done:
        """The core can't have this sum: its ids are to be computed again."""
        if lost.batch == self.open_batch:
            for i in [i for i, h in self.computed.items() if h == Holder(lost.cell, lost.life)]:
                self._drop(i)
        return Done()

    # ---- batches ----------------------------------------------------------------------------------------------------

    def apply(self, applied: BatchApplied) -> Done | Refused:
        """The optimizer stepped. Accepted whatever we believe of sums: the core had pulled them before."""
        ids = frozenset(applied.ids)
        if applied.batch < self.open_batch:
            same = self.applied[applied.batch].ids == ids and self.applied[applied.batch].version == applied.version
            return Done(note="again") if same else Refused(why=f"batch {applied.batch} was applied otherwise")
        if applied.batch > self.open_batch or not self.lots.is_full(applied.batch):
            return Refused(why=f"batch {applied.batch} is not complete; batch {self.open_batch} is open")
        if ids != frozenset(self.open_ids) or len(applied.ids) != len(ids):
            return Refused(why=f"these are not the micro-steps of batch {applied.batch}")
        if _parse(applied.version) != self._next_version():  # a late word of a core that is gone
            return Refused(why=f"{applied.version} is not the step after {self.version}")
        self._note_applied(applied.version, applied.weights_sum)
        return Done()

    def _next_version(self) -> PolicyVersion | None:
        base = _parse(self.version)
        return base and PolicyVersion(base.lineage, base.step + 1)

    def _note_applied(self, version: str, weights_sum: float | None) -> None:
        batch = self.open_batch
        self.applied.append(
            AppliedBatch(
                batch=batch,
                base_version=self.version,
                version=version,
                ids=frozenset(self.lots.ids(batch)),
                executions=self.lots.executions(batch),
                owned_tokens=self.lots.owned_tokens(batch),
                weights_sum=weights_sum,
                staleness=self.lots.staleness(batch, self.version or version),
            )
        )
        self._train(batch)
        self._rebase(version)

    def _train(self, batch: int) -> None:
        for group in self.lots.lot(batch):
            for step in group.steps:
                self.trained.add(step.owned)

    def _rebase(self, version: str) -> None:
        """Other weights: every lease and every sum made from the old ones is worth nothing."""
        self.version = version
        self.leased.clear()
        self.computed.clear()
        self._joined.clear()
        self.changes += 1

    def retire(self, below: int) -> list[str]:
        """Batches below `below` are in a durable checkpoint. Returns the groups whose payloads may go."""
        first, self.retired_below = self.retired_below, max(self.retired_below, min(below, self.open_batch))
        groups = [g for batch in range(first, self.retired_below) for g in self.lots.lot(batch) if g.loaded]
        for group in groups:
            group.loaded = False
        self.changes += self.retired_below > first
        return [group.name for group in groups]

    def restore(self, ledger: LedgerFrom) -> tuple[Done | Refused, list[str]]:
        """A core's word at its start wins over memory. Returns the answer and the groups to pack again."""
        word = (ledger.source, ledger.next_batch, ledger.version)
        if word == self._restored_from:  # late repeats must not roll back what was applied since
            return Done(note="again"), []
        if why := self._contradicts(ledger):
            return Refused(why=why), []
        self._restored_from = word
        while self.open_batch < ledger.next_batch:
            self._note_applied(ledger.version, None)
        if self.open_batch > ledger.next_batch:
            self._unapply(ledger.next_batch, ledger.version)
        elif self.version != ledger.version:
            self._rebase(ledger.version)
        self.changes += 1
        return Done(), self.lots.not_loaded(self.open_batch)

    def _contradicts(self, ledger: LedgerFrom) -> str:
        """Why the core's word can't be taken, or ""."""
        theirs, base = _parse(ledger.version), _parse(self.version)
        if theirs is None:
            return f"{ledger.version!r} is no policy version"
        if base and theirs.lineage < base.lineage:
            return f"{self.version} is of a newer lineage than {ledger.version}"
        if any(not self.lots.is_full(batch) for batch in range(self.open_batch, ledger.next_batch)):
            return f"batch {ledger.next_batch - 1} is trained, but its groups are not in the journal of trajd"
        ours = {i for batch in range(ledger.next_batch) for i in self.lots.ids(batch)}
        if strange := sorted(set(ledger.applied) - ours):
            return f"{strange[0]} is trained, but is in no batch below {ledger.next_batch}"
        return ""

    def _unapply(self, next_batch: int, version: str) -> None:
        """Weights that held these batches are lost: they are offered again, and their ranges are no longer trained."""
        del self.applied[next_batch:]
        self.retired_below = min(self.retired_below, next_batch)
        self.trained = TrainedRanges()
        for applied in self.applied:
            self._train(applied.batch)
        self._rebase(version)

    # ---- invariants -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises LedgerBroken unless every id is in exactly one of pool, leased, computed, applied."""
        applied = [i for batch in self.applied for i in batch.ids]
        later = [i for batch in range(self.open_batch + 1, self.lots.started) for i in self.lots.ids(batch)]
        seen = [*self.pool(), *self.leased, *self.computed, *applied, *later]
        placed = [i for batch in range(self.lots.started) for i in self.lots.ids(batch)]
        held = [*self.leased.values(), *self.computed.values()]
        _must(len(seen) == len(set(seen)), "an id is in two places")
        _must(sorted(seen) == sorted(placed), "an id is in no place, or in one that it has not")
        _must({*self.leased, *self.computed} <= set(self.open_ids), "a lease or a sum outside the open batch")
        _must(all(b.ids == frozenset(self.lots.ids(b.batch)) for b in self.applied), "a batch changed after its step")
        _must(self.retired_below <= self.open_batch, "a batch retired before it was applied")
        _must(all(self._lives[holder.cell] == holder.life for holder in held), "an old life holds something")
        _must(len(set(self.leased.values())) == len(self.leased), "a cell holds two leases")
        _must(self.trained.twice == 0, "a token was trained twice")


def _parse(version: str) -> PolicyVersion | None:
    """None for what is no version: a peer's mistake must not end this daemon."""
    try:
        return PolicyVersion.parse(version)
    except ValueError:
        return None


def _must(holds: bool, what: str) -> None:
    if not holds:
        raise LedgerBroken(what)
