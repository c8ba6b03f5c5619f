"""Recorded calls of agent executions: one forest each, what breaks it, what of it is trained, and how it is packed.

Owns the meaning of a call log. Pure: no network, no tokenizer, no clock; inputs are never changed. Imports gyre_base
only. Invariants: line order does not matter; every sampled token is owned once or counted as dropped for one reason.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trajtools.conversion import Converted


def convert(path: str | Path, out: str | Path) -> Converted:
    """Write another tool's record as a gyre.run/1 file; see `trajtools.readers`."""
    from trajtools.conversion import convert as run  # late: `import trajtools` stays cheap

    return run(Path(path), out)
