"""Who is silent, and who speaks but gets nothing done. Pure: heartbeats in, verdicts out.

A heartbeat proves that a process runs, not that it works: each carries what it has finished and what it has to do. With
work and without progress for `stall_s` a peer counts as stalled, once, until it moves again.
"""

from __future__ import annotations

from dataclasses import dataclass

HELD_BEATS = 4  # heartbeats in a row with another count of executions than ours before both sides compare lists


@dataclass
class Vital:
    """What is known of one peer. `moved` is when it last got something done, or had nothing to do."""

    seen: float
    moved: float
    progress: int = -1
    work: int = 0
    stalled: bool = False
    differs: tuple[int, int, int] = (0, 0, 0)  # theirs and ours of the last heartbeat, and how often in a row


@dataclass(frozen=True)
class Stall:
    """A peer that began to count as stalled."""

    peer: str
    work: int
    seconds: float


class Liveness:
    """Peers by `kind:name`."""

    def __init__(self, silent_s: float, stall_s: float) -> None:
        self._silent_s, self._stall_s = silent_s, stall_s
        self.peers: dict[str, Vital] = {}

    def heard(self, peer: str, now: float) -> None:
        """Any word of a peer, the first too."""
        self.peers.setdefault(peer, Vital(seen=now, moved=now)).seen = now

    def beat(self, peer: str, progress: int, work: int, now: float) -> bool:
        """A heartbeat. True if a stalled peer moves again."""
        self.heard(peer, now)
        vital = self.peers[peer]
        moves = progress != vital.progress or work == 0
        vital.progress, vital.work = progress, work
        if not moves:
            return False
        vital.moved = now
        recovered, vital.stalled = vital.stalled, False
        return recovered

    def disagrees(self, peer: str, theirs: int, ours: int) -> bool:
        """True if a peer's count of what it holds has not been ours for some heartbeats, while neither moved: then
        nothing is on its way, and a word was lost.
        """
        vital = self.peers[peer]
        *before, times = vital.differs
        times = (times + 1 if [theirs, ours] == before else 1) if theirs != ours else 0
        vital.differs = (theirs, ours, 0 if times == HELD_BEATS else times)
        return times == HELD_BEATS

    def forget(self, peer: str) -> None:
        self.peers.pop(peer, None)

    def we_stood_still(self, seconds: float, now: float) -> None:
        """Time in which we heard nobody is held against nobody."""
        for vital in self.peers.values():
            vital.seen = min(now, vital.seen + seconds)
            vital.moved = min(now, vital.moved + seconds)

    def silent(self, now: float) -> list[tuple[str, float]]:
        """(peer, seconds) of those not heard for too long; they are forgotten."""
        gone = [(peer, now - v.seen) for peer, v in self.peers.items() if now - v.seen > self._silent_s]
        for peer, _ in gone:
            del self.peers[peer]
        return gone

    def stalled(self, now: float) -> list[Stall]:
        """Those that have begun to count as stalled since the last call."""
        out: list[Stall] = []
        for peer, vital in self.peers.items():
            if vital.work and not vital.stalled and now - vital.moved > self._stall_s:
                vital.stalled = True
                out.append(Stall(peer, vital.work, now - vital.moved))
        return out
