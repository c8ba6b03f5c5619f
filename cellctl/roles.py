"""The one table of role transitions. An illegal one carries the cell's story: the last things that happened to it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from gyre_base.vocabulary import Role

MAY_BECOME: dict[Role, frozenset[Role]] = {
    Role.STARTING: frozenset({Role.ROLLOUT, Role.DOWN}),
    Role.ROLLOUT: frozenset({Role.TO_TRAIN, Role.TO_ROLLOUT, Role.DOWN, Role.STARTING}),
    Role.TO_TRAIN: frozenset({Role.TRAIN, Role.ROLLOUT, Role.DOWN, Role.STARTING}),  # rollout: its agent refused
    Role.TRAIN: frozenset({Role.TO_ROLLOUT, Role.DOWN, Role.STARTING}),
    Role.TO_ROLLOUT: frozenset({Role.ROLLOUT, Role.DOWN, Role.STARTING}),
    Role.DOWN: frozenset({Role.STARTING}),
}
STORY_LENGTH = 12


class IllegalTransition(RuntimeError):
    """A bug upstream, with the story that led to it."""


@dataclass
class Cell:
    """One cell as the scheduler sees it. `epoch` fences old commands; `reason` is the last decision in words."""

    name: str
    order: int
    slots: int
    standalone: bool = False
    refused: str = ""  # why its agent can't train; it serves until another agent comes
    role: Role = Role.STARTING
    epoch: int = 0
    version: str = ""
    url: str = ""
    since: float = 0.0
    reason: str = "waiting for its agent"
    undrained: set[int] = field(default_factory=set)  # shards of proxyd that may still have calls there
    moved: int = 0
    switches: int = 0
    phases_s: dict[str, float] = field(default_factory=dict)
    story: deque[str] = field(default_factory=lambda: deque(maxlen=STORY_LENGTH))

    @property
    def only_serves(self) -> bool:
        return self.standalone or bool(self.refused)

    @property
    def serves(self) -> bool:
        return self.role is Role.ROLLOUT

    @property
    def draining(self) -> bool:
        return bool(self.undrained)

    def become(self, role: Role, now: float, why: str) -> None:
        """Change role by the table. Raises IllegalTransition."""
        self.story.append(f"{now:.3f} {self.role.value} -> {role.value} (epoch {self.epoch}): {why}")
        if role not in MAY_BECOME[self.role]:
            raise IllegalTransition(f"cell {self.name}: {self.role.value} -> {role.value}\n" + "\n".join(self.story))
        self.role, self.since, self.reason = role, now, why
