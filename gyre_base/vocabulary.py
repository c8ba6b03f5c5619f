"""Enumerations of DESIGN's words."""

from __future__ import annotations

from enum import Enum


class Role(str, Enum):
    """What a cell does. The two middle states hold while it turns."""

    ROLLOUT = "rollout"
    TO_TRAIN = "to-train"
    TRAIN = "train"
    TO_ROLLOUT = "to-rollout"
    STARTING = "starting"
    DOWN = "down"


class Outcome(str, Enum):
    """How an execution ended. Never a bare float: a failure of ours is not a zero of the agent's."""

    SCORED = "scored"
    PARTIAL = "partial"
    NO_ARTIFACT = "no_artifact"
    EVALUATOR_FAILED = "evaluator_failed"
    INFRA_FAILED = "infra_failed"
    CANCELLED = "cancelled"
    UNSCORED = "unscored"

    @property
    def counts(self) -> bool:
        """Whether the execution reaches the loss *and* the statistics of its group."""
        return self in (Outcome.SCORED, Outcome.PARTIAL, Outcome.NO_ARTIFACT)


class Purpose(str, Enum):
    """Why an execution runs. Only `train` reaches trainers; the others are measured."""

    TRAIN = "train"
    EVAL_SAMPLED = "eval-sampled"
    EVAL_GREEDY = "eval-greedy"
