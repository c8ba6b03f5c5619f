"""Where the GPU time goes. Node-seconds by what they do, integrated between changes; the shares add up to one."""

from __future__ import annotations

from dataclasses import dataclass, field

KINDS = ("serving", "serving_spare", "training", "training_idle", "turning")


@dataclass
class Meter:
    """`serving` counts nodes in proportion to the slots in use; `serving_spare` the rest of the cells that serve."""

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
