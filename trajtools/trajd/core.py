"""trajd's core: closed groups are packed, claims are answered from the ledger. Pure: `handle(event, now) -> commands`.

Payloads are not here: a lease goes out with its id, the shell puts the packed arrays in.
"""

from __future__ import annotations

from typing import Any

from gyre_base.daemon import Answer, PeerLost, Send
from gyre_base.messages import (
    BatchApplied,
    BatchesRetired,
    ClaimMicroStep,
    ContributionLost,
    Done,
    Goodbye,
    GroupClosed,
    GroupPacked,
    Hello,
    LeaseReturned,
    MicroStepComputed,
)
from trajtools.trajd.events import Free, Holder, LedgerFrom, Pack, Packed, Reported, Restarted
from trajtools.trajd.ledger import MicroStepLedger
from trajtools.trajd.lots import Group

CELLCTL = "cellctl:cellctl"


class Unexpected(TypeError):
    """An event that trajd does not know."""


class TrajdCore:
    """The ledger with the group's way into it. `ledger` is read by `view.py`; only `handle` changes it."""

    def __init__(
        self, groups_per_batch: int, *, streaming: bool = True, order: str = "arrival", reserve_groups: int = 0
    ) -> None:
        self.ledger = MicroStepLedger(groups_per_batch, streaming=streaming, order=order, reserve_groups=reserve_groups)

    def handle(self, event: Any, now: float) -> list[Any]:
        ledger = self.ledger
        match event:
            case GroupClosed():
                return self._closed(event)
            case Packed():
                ledger.pack(event)
                return self._report(ledger.lots.groups[event.group])
            case ClaimMicroStep():
                return [Answer(ledger.claim(event))]
            case MicroStepComputed():
                return [Answer(ledger.compute(event))]
            case LeaseReturned():
                return [Answer(ledger.return_lease(event))]
            case ContributionLost():
                return [Answer(ledger.lose_contribution(event))]
            case BatchApplied():
                return [Answer(ledger.apply(event))]
            case BatchesRetired(below=below):
                return [Answer(Done()), *_free(ledger.retire(below))]
            case LedgerFrom():
                answer, missing = ledger.restore(event)
                return [Answer(answer), *(Pack(group=name) for name in missing)]
            case Hello(name=cell, life=life):
                ledger.admit(Holder(cell, life))
                return []
            case Goodbye(name=cell, life=life):
                ledger.leave(Holder(cell, life))
                return []
            case PeerLost(name=name):
                ledger.lose(name)
                return []
            case Reported(group=name):
                ledger.reported(name)
                return []
            case Restarted():
                return self._restarted()
        raise Unexpected(f"trajd: {event!r}")

    def _closed(self, closed: GroupClosed) -> list[Any]:
        """New: pack it. Known and packed: cellctl did not hear of it. Being packed: the answer comes."""
        if self.ledger.close(closed):
            return [Pack(group=closed.group)]
        return self._answer_group(self.ledger.lots.groups[closed.group])

    def _report(self, group: Group) -> list[Any]:
        return [] if group.reported else self._answer_group(group)

    def _answer_group(self, group: Group) -> list[Any]:
        if group.packed is None:
            return []
        packed = group.packed
        message = GroupPacked(
            group=group.name,
            enough=packed.enough,
            counted=packed.counted,
            micro_steps=len(packed.steps),
            owned_tokens=packed.owned_tokens,
            summary=packed.summary,
        )
        return [Send(CELLCTL, message)]

    def _restarted(self) -> list[Any]:
        missing = self.ledger.unload()
        unheard = [g for g in self.ledger.lots.groups.values() if g.packed and not g.reported and g.name not in missing]
        return [Pack(group=name) for name in missing] + [c for group in unheard for c in self._answer_group(group)]


def _free(groups: list[str]) -> list[Any]:
    return [Free(groups=tuple(groups))] if groups else []
