"""What passes between trajd's shell and its core; the words of other daemons are in gyre_base.messages."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, TypeAlias

from gyre_base.messages import message

OwnedRange: TypeAlias = tuple[str, str, int, int]  # execution, call, [start, stop) of the tokens it sampled


class Holder(NamedTuple):
    """Who holds a lease or a sum: one life of a cell."""

    cell: str
    life: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedStep:
    """One micro-step as packed. `weight` = sum over its owned tokens of 1/T_e, so the number of its executions."""

    id: str
    tokens: int
    weight: float
    owned: tuple[OwnedRange, ...]


@message("trajd.packed")
class Packed:
    """shell -> core: a group is packed. Packed again, up to the same extent, it has the same steps."""

    group: str
    enough: bool
    counted: int
    owned_tokens: int
    steps: tuple[PackedStep, ...]
    extent: tuple[tuple[str, int], ...] = ()  # how far the call log was read: what is appended later changes nothing
    summary: dict[str, Any] = dataclasses.field(default_factory=dict)


@message("trajd.restarted")
class Restarted:
    """shell -> core, after the journal was replayed: payloads are gone, ids are not."""

    life: int


@message("trajd.ledger")
class LedgerFrom:
    """shell -> core: `ledger` with the routing id it came from: a repeat differs from a new start of the core."""

    source: str
    next_batch: int
    version: str
    applied: tuple[str, ...]


@message("trajd.reported")
class Reported:
    """shell -> core: cellctl has taken `group.packed`."""

    group: str


@message("trajd.pack")
class Pack:
    """core -> shell: pack this closed group; its end is a `Packed`."""

    group: str


@message("trajd.free")
class Free:
    """core -> shell: these groups are in a durable checkpoint, their payloads may go."""

    groups: tuple[str, ...]
