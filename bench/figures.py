"""The one form in which benches print: {"name", "value", "unit", "target", "holds", "n", "spread"}."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One measured number. `target` is in words, such as ">= 0.20"; `holds` is None where there is no target."""

    name: str
    value: float
    unit: str
    target: str
    holds: bool | None
    n: int
    spread: float


def figure(
    name: str, values: Sequence[float], unit: str, target: str = "", holds: Callable[[float], bool] | None = None
) -> Figure:
    """The median of `values` with their range as spread. Raises ValueError for no values: absent, never guessed."""
    if not values:
        raise ValueError(f"{name} was not measured")
    middle = median(values)
    return Figure(
        name=name,
        value=middle,
        unit=unit,
        target=target,
        holds=holds(middle) if holds else None,
        n=len(values),
        spread=max(values) - min(values),
    )


def show(figures: Sequence[Figure], *, as_json: bool) -> int:
    """Print them on stdout; 1 if a target is missed, else 0."""
    for one in figures:
        if as_json:
            print(json.dumps(asdict(one)), flush=True)
        else:
            verdict = {None: "", True: "holds", False: "MISSED"}[one.holds]
            print(
                f"{one.name:<44} {one.value:10.4f} {one.unit:<10} {one.target:<12} {verdict:<7} "
                f"n={one.n} spread={one.spread:.4f}"
            )
    sys.stdout.flush()
    return 1 if any(one.holds is False for one in figures) else 0
