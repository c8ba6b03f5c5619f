"""Identifiers. All are plain strings on the wire; the aliases say which is meant."""

from __future__ import annotations

import re
from typing import NamedTuple, TypeAlias

CellId: TypeAlias = str
ExecutionId: TypeAlias = str
GroupId: TypeAlias = str
TaskId: TypeAlias = str
CallId: TypeAlias = str
MicroStepId: TypeAlias = str

_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class PolicyVersion(NamedTuple):
    """(lineage, step). A resume from a checkpoint starts a new lineage, so two different weights never share a
    version.
    """

    lineage: int
    step: int

    def __str__(self) -> str:
        return f"{self.lineage}.{self.step}"

    @classmethod
    def parse(cls, text: str) -> PolicyVersion:
        """Read "lineage.step". Raises ValueError on anything else."""
        lineage, _, step = text.partition(".")
        if not (lineage.isdigit() and step.isdigit()):
            raise ValueError(f"not a policy version: {text!r} (expected lineage.step, such as 0.12)")
        return cls(int(lineage), int(step))


def is_safe_name(text: str) -> bool:
    """Whether `text` may become a file name or a part of a URL path: ids from outside are checked before use."""
    return _SAFE.fullmatch(text) is not None
