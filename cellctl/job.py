"""What the scheduler knows of the Slurm job around the run: its end, cells that are out of it, how long a save takes.

Pure. The supervisor tells (`job`), the scheduler's view shows, `gyre_base.saving` says when to save and when to leave.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gyre_base import messages as m
from gyre_base import saving


@dataclass
class JobState:
    """`facts` are the supervisor's last word, None outside of a job. `leaving` says why nothing more is dispatched."""

    facts: m.JobFacts | None = None
    leaving: str = ""
    drained: set[str] = field(default_factory=set)  # by a person, so that their nodes may be given back
    save_s: float = 0.0  # the longest seen
    micro_step_s: float = 0.0
    saved_at: float = 0.0

    def out(self) -> set[str]:
        """Cells that nobody waits for."""
        return self.drained | set(self.facts.lost if self.facts else ())

    def plan(self, now: float) -> saving.SavePlan:
        facts = self.facts
        return saving.plan(
            save_s=self.save_s,
            micro_step_s=self.micro_step_s,
            ends_at=facts.ends_at if facts else 0.0,
            began_at=facts.began_at if facts else 0.0,
            now=now,
            window_s=facts.window_s if facts else 0.0,
        )

    def save_is_due(self, now: float) -> bool:
        """Only in a job: elsewhere the trainer's own cadence in steps is enough."""
        return bool(self.facts) and saving.is_due(self.plan(now), since_save_s=now - self.saved_at)

    def saved(self, event: m.CheckpointSaved, now: float) -> None:
        self.saved_at = now
        self.save_s = max(self.save_s, event.seconds)

    def row(self, now: float) -> dict[str, object]:
        """Columns of `status`. Seconds; None where nothing is known."""
        plan, facts = self.plan(now), self.facts
        return {
            "job": facts.job if facts else "",
            "job_restarts": facts.restarts if facts else None,
            "job_nodes": list(facts.nodes) if facts else [],
            "left_s": round(plan.left_s, 1) if plan.left_s is not None else None,
            "save_s": round(self.save_s, 3),
            "save_every_s": round(plan.every_s, 1),
            "save_window_s": round(plan.window_s, 1),
            "lost_cells": list(facts.lost) if facts else [],
            "drained_cells": sorted(self.drained),
            "leaving": self.leaving,
        }
