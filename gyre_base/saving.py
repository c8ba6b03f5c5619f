"""When a run saves: how often while it runs, and how long before its job's end it begins to leave. Pure.

Both follow from how long a save was seen to take. A save costs training time, so saves may take `SHARE` of it; what is
trained since the last one is lost with the core. The window holds a save at twice the longest seen, the micro-step in
hand, and the ordered end of every daemon.
"""

from __future__ import annotations

from dataclasses import dataclass

SHARE = 0.02  # of the time, spent on saving: doubling it halves what a crash of the core costs
SHORTEST_S, LONGEST_S = 60.0, 1800.0  # between two saves
UNMEASURED_S = 30.0  # taken for a save before the first was seen
ENDING_S = 20.0  # every daemon ends in order
MARGIN = 2.0  # times the longest save seen: shared file systems are slow when everybody leaves


@dataclass(frozen=True, kw_only=True)
class SavePlan:
    """`window_s` before the job's end the run leaves; `every_s` between saves; `left_s` until the job ends."""

    window_s: float
    every_s: float
    left_s: float | None

    @property
    def must_leave(self) -> bool:
        return self.left_s is not None and self.left_s <= self.window_s


def plan(
    *, save_s: float, micro_step_s: float, ends_at: float, now: float, began_at: float = 0.0, window_s: float = 0.0
) -> SavePlan:
    """Times in s since the epoch. `save_s` and `micro_step_s` are the longest seen, 0 = none yet; `ends_at` 0 = no end
    is known; `window_s` > 0 is a person's own window. At least half of a job (from `began_at`) is worked in."""
    left_s = ends_at - now if ends_at else None
    measured = MARGIN * (save_s or UNMEASURED_S) + micro_step_s + ENDING_S
    window_s = window_s or measured
    if began_at and ends_at > began_at:
        window_s = min(window_s, (ends_at - began_at) / 2)
    every_s = min(max((save_s or UNMEASURED_S) / SHARE, SHORTEST_S), LONGEST_S)
    return SavePlan(window_s=window_s, every_s=every_s, left_s=left_s)


def is_due(plan: SavePlan, *, since_save_s: float) -> bool:
    """Whether to save now. Not when the save on leaving comes first anyway."""
    if plan.left_s is not None and plan.left_s <= plan.window_s + plan.every_s / 2:
        return False
    return since_save_s >= plan.every_s
