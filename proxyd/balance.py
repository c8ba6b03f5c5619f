"""Which engine a call goes to: homes, load, caps and the pace of re-sends. Pure; the router asks, this answers.

An execution has a home, where its prefix is cached. A call leaves it only for an engine that is far less busy, or
because the home can't be used. An engine's own count of its work (`/v1/loads`) adds what others sent there.

Shards do not talk. Each keeps to its share of what an engine takes, and what it can't see of the others' work it takes
to be like its own: executions are spread over shards by a hash.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import xxhash

from gyre_base.messages import Engine

FAR = 0.5  # of an engine's slots: a difference in load that is worth a cold prefix
REPORT_S = 10.0  # an engine's own word on its load counts for so long
PARSE_S_PER_TOKEN, PARSE_S = 4e-7, 2e-4  # what an engine's front end spends on a prompt it is sent
AHEAD_S = 0.05  # re-sends that an engine may have before it at once


def share(cap: int, shard: int, shards: int) -> int:
    """Of `cap` calls in flight at an engine, how many are this shard's: the shares add up to it. 0 for no bound."""
    return cap // shards + (shard < cap % shards)


class Balance:
    """One shard's. `homes`: cell -> executions at home there. `cap`: its calls in flight per engine, 0 for no bound."""

    def __init__(self, cap: int = 0, shards: int = 1) -> None:
        self.cap, self.shards = cap, shards
        self.homes: dict[str, int] = {}
        self._foreign: dict[str, tuple[int, float]] = {}  # engine url -> (work that is not ours, counts until)
        self._busy: dict[str, float] = {}  # cell -> its front end has re-sends to parse until then

    def moved_home(self, old: str, new: str) -> None:
        """Empty names are no home."""
        if old:
            self.homes[old] -= 1
        if new:
            self.homes[new] = self.homes.get(new, 0) + 1

    def reported(self, url: str, work: int, ours: int, now: float) -> None:
        """An engine's own count of running and waiting requests, while `ours` of them were ours."""
        self._foreign[url] = (max(0, work - ours), now + REPORT_S)

    def load(self, engine: Engine, in_flight: Mapping[str, Collection[str]], now: float) -> float:
        """Executions at home there, or work there, whichever is more, per slot. Of all shards, as far as this one can
        tell.
        """
        foreign, until = self._foreign.get(engine.url, (0, 0.0))
        mine = len(in_flight.get(engine.cell, ()))
        work = mine + foreign if now < until else mine * self.shards
        return max(self.homes.get(engine.cell, 0) * self.shards, work) / max(1, engine.slots)

    def full(self, engine: Engine, in_flight: Mapping[str, Collection[str]]) -> bool:
        return 0 < self.cap <= len(in_flight.get(engine.cell, ()))

    def choose(
        self,
        execution: str,
        home: str,
        usable: Sequence[Engine],
        in_flight: Mapping[str, Collection[str]],
        now: float,
        *,
        leaving: bool,
    ) -> tuple[Engine | None, bool]:
        """(the engine, whether it becomes the home). None: wait for room.

        `leaving`: the home is about to turn, so by preference to a cell that stays longest, while it has room.
        """
        room = [e for e in usable if not self.full(e, in_flight)]
        if not room:
            return None, False
        at_home = next((e for e in usable if e.cell == home), None) if home else None
        if at_home is None and len(room) == 1:
            return room[0], True
        if at_home is not None and at_home in room and self.load(at_home, in_flight, now) <= FAR:
            return at_home, False  # no other can be far less busy
        loads = {e.cell: self.load(e, in_flight, now) for e in usable}
        if leaving:
            best = min(room, key=lambda e: (loads[e.cell] >= 1.0, -e.order if loads[e.cell] < 1.0 else loads[e.cell]))
        else:
            best = min(room, key=lambda e: (loads[e.cell], _draw(execution, e.cell)))
        if at_home is None:
            return best, True
        if loads[home] - loads[best.cell] <= FAR:
            return (None, False) if self.full(at_home, in_flight) else (at_home, False)
        return best, not self.full(at_home, in_flight)  # a full home is left for this call only

    def hold_until(self, cell: str, tokens: int, now: float) -> float:
        """When a re-send of so many tokens may go to a cell: `now` (and it is booked), or a later time to ask again."""
        busy = max(now, self._busy.get(cell, 0.0))
        if busy - now > AHEAD_S:
            return busy - AHEAD_S
        self._busy[cell] = busy + (PARSE_S + tokens * PARSE_S_PER_TOKEN) * self.shards  # each re-sends at its share
        return now


def _draw(execution: str, cell: str) -> int:
    """Rendezvous: of equals, each execution has its own favourite, and keeps it when others come and go."""
    return -xxhash.xxh64_intdigest(f"{execution}/{cell}".encode("utf-8", "surrogatepass"))
