"""What is measured: where the GPU time goes, and how long executions really took under the load that they met."""

from __future__ import annotations

from dataclasses import dataclass, field

KINDS = ("serving", "serving_spare", "training", "training_idle", "turning")


@dataclass
class Meter:
    """Node-seconds by what they do, integrated between changes; the shares add up to one.

    `serving` counts nodes in proportion to the slots in use; `serving_spare` the rest of the cells that serve."""

    now: float = 0.0
    totals: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))

    def advance(self, now: float, serving: float, load: float, training: float, busy: float, turning: float) -> None:
        """Add the time since the last call with the nodes as they were: that serve, train, compute, turn."""
        passed = now - self.now
        if passed <= 0.0:
            return
        self.now = now
        used = serving * min(1.0, load)
        totals = self.totals
        totals["serving"] += passed * used
        totals["serving_spare"] += passed * (serving - used)
        totals["training"] += passed * busy
        totals["training_idle"] += passed * max(0.0, training - busy)
        totals["turning"] += passed * turning

    def idle_share(self) -> float:
        """Node time that neither carries an execution nor computes a micro-step nor turns."""
        total = sum(self.totals.values())
        return (self.totals["serving_spare"] + self.totals["training_idle"]) / total if total else 0.0


@dataclass
class Observed:
    """Hours of executions, and of groups (queries): the longest member's. Sums over what has ended."""

    executions: int = 0
    hours: float = 0.0
    timed_out: int = 0
    groups: int = 0
    longest_hours: float = 0.0
    from_4h: int = 0
    groups_timed_out: int = 0

    def add(self, hours: list[float], limit_h: float) -> None:
        """One group."""
        longest = max(hours)
        self.executions += len(hours)
        self.hours += sum(hours)
        self.timed_out += sum(h >= limit_h for h in hours)
        self.groups += 1
        self.longest_hours += longest
        self.from_4h += longest >= min(4.0, limit_h)
        self.groups_timed_out += longest >= limit_h

    def statistics(self) -> dict[str, float]:
        """As the paper gives them; hours and shares."""
        executions, groups = max(1, self.executions), max(1, self.groups)
        return {
            "mean_h": self.hours / executions,
            "query_mean_h": self.longest_hours / groups,
            "queries_from_4h": self.from_4h / groups,
            "timed_out": self.timed_out / executions,
            "queries_timed_out": self.groups_timed_out / groups,
        }
