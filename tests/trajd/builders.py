"""Short makers of the events that the tests of trajd need."""

from __future__ import annotations

from gyre_base.messages import (
    BatchApplied,
    ClaimMicroStep,
    ContributionLost,
    FinalExecution,
    GroupClosed,
    MicroStepComputed,
)
from gyre_base.vocabulary import Outcome
from trajtools.trajd.events import LedgerFrom, Packed, PackedStep
from trajtools.trajd.ledger import MicroStepLedger


def closed(name: str, serial: int = 0, dispatched: str = "0.0", members: int = 2) -> GroupClosed:
    executions = tuple(
        FinalExecution(execution=f"{name}-{i}", outcome=Outcome.SCORED, score=float(i)) for i in range(members)
    )
    return GroupClosed(group=name, task="t", serial=serial, dispatched_version=dispatched, executions=executions)


def packed(name: str, steps: int = 2, enough: bool = True) -> Packed:
    """One execution of five owned tokens per step."""
    made = tuple(
        PackedStep(id=f"{name}.{i}", tokens=9, weight=1.0, owned=((f"{name}-{i}", "c0", 0, 5),)) for i in range(steps)
    )
    made = made if enough else ()
    return Packed(group=name, enough=enough, counted=len(made), owned_tokens=5 * len(made), steps=made)


def claim(
    cell: str, ids: tuple[str, ...] = (), *, life: int = 1, version: str = "0.0", batch: int = 0, core: bool = False
) -> ClaimMicroStep:
    return ClaimMicroStep(cell=cell, life=life, version=version, core=core, batch=batch, ids=ids)


def computed(cell: str, id: str, *, life: int = 1, batch: int = 0) -> MicroStepComputed:
    return MicroStepComputed(batch=batch, id=id, cell=cell, life=life)


def lost(cell: str, *, life: int = 1, batch: int = 0) -> ContributionLost:
    return ContributionLost(batch=batch, cell=cell, life=life)


def applied(*ids: str, version: str, batch: int = 0) -> BatchApplied:
    return BatchApplied(batch=batch, ids=ids, version=version, weights_sum=1.0)


def word(next_batch: int, version: str, ids: tuple[str, ...] = (), source: str = "rank:c0:1") -> LedgerFrom:
    return LedgerFrom(source=source, next_batch=next_batch, version=version, applied=ids)


def ledger(*groups: str, size: int = 2, version: str = "0.0") -> MicroStepLedger:
    """A ledger whose core has spoken, with these groups packed into two steps each."""
    made = MicroStepLedger(size)
    made.restore(word(0, version))
    for name in groups:
        made.close(closed(name))
        made.pack(packed(name))
    return made
