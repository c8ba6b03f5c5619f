"""What the routing core keeps of calls, executions and drains. Plain state; the rules are `core`'s."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import xxhash

from gyre_base.messages import CellDrained

STORY = 24  # lines kept per call


class State(StrEnum):
    """Where a call is."""

    HELD = "held"
    RUNNING = "running"
    ABORTING = "aborting"  # an abort is out; the call goes on elsewhere (or nowhere, if it is unwanted)


@dataclass(slots=True, eq=False)
class Call:
    """A call between arrival and answer."""

    id: str
    execution: str
    prompt_tokens: int
    budget: int
    arrived: float
    state: State = State.HELD
    number: int = 0  # submissions so far
    cell: str = ""
    url: str = ""
    sampled: int = 0
    held_since: float = 0.0
    waited_s: float = 0.0
    not_before: float = 0.0
    failures: int = 0
    refusals: int = 0
    moved: int = 0
    abort_by: float = 0.0
    unwanted: bool = False  # its waiters were told; only the engine's last word is outstanding
    story: list[str] = field(default_factory=list)

    def note(self, now: float, what: str) -> None:
        self.story.append(f"{now - self.arrived:.3f} {what}")
        del self.story[:-STORY]

    def rid(self, shard: int, life: int) -> str:
        """Our request id at the engine, one per submission: two digits for the shard, then 30.

        Always 32 in all: engines abort whatever begins with the id that they are told.
        """
        return f"{shard:02x}{xxhash.xxh3_128_hexdigest(f'{life}/{self.id}/{self.number}'.encode())[2:]}"


@dataclass(slots=True)
class Opened:
    """An execution whose calls are served."""

    temperature: float
    paused: bool = False
    home: str = ""


@dataclass(slots=True)
class Drain:
    """A cell that is leaving. `table` is the table number when the order came: only a newer one ends the block."""

    epoch: int
    table: int
    since: float
    moved: int = 0
    moved_mid: int = 0
    answer: CellDrained | None = None
    over: bool = False  # drained, and a newer table lets the cell serve again
