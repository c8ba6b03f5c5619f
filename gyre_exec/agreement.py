"""Two rulers over the same states: do they agree, does one favour length, does the difference drift with the steps.

Pure. A pair counts where both gave a valid score. Every figure says how many pairs it is made of; one that can't be
computed (fewer than two pairs, no spread) is None, never 0.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean
from typing import Any

COUNTS = ("scored", "partial", "no_artifact")
BUCKETS = 4
DRIFT_BUCKETS = 8
SAME = 1e-9  # scores closer than this are equal
PAIRS_PER_GROUP = 5_000


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One state under both rulers. `old` and `new` are None where the outcome carries no score."""

    execution: str
    group: str
    old_outcome: str
    new_outcome: str
    old: float | None
    new: float | None
    duration_s: float | None = None
    tokens: int | None = None
    step: int | None = None

    @property
    def both(self) -> bool:
        return self.old is not None and self.new is not None

    @property
    def difference(self) -> float:
        assert self.old is not None and self.new is not None
        return self.new - self.old


def compare(pairs: Iterable[Pair]) -> list[dict[str, Any]]:
    """Rows by `kind`: agreement (one), outcomes, length and drift."""
    everything = list(pairs)
    valid = [p for p in everything if p.both]
    rows: list[dict[str, Any]] = [agreement(everything, valid)]
    changes = Counter((p.old_outcome, p.new_outcome) for p in everything)
    rows += [{"kind": "outcomes", "old": a, "new": b, "states": n} for (a, b), n in sorted(changes.items())]
    rows += length_rows(valid, "duration_s", lambda p: p.duration_s)
    rows += length_rows(valid, "tokens", lambda p: p.tokens)
    rows += drift_rows(valid)
    return rows


def agreement(everything: Sequence[Pair], valid: Sequence[Pair]) -> dict[str, Any]:
    old, new = [p.old for p in valid if p.old is not None], [p.new for p in valid if p.new is not None]
    same, ordered = order_in_groups(valid)
    return {
        "kind": "agreement",
        "states": len(everything),
        "compared": len(valid),
        "old_mean": _mean(old),
        "new_mean": _mean(new),
        "difference_mean": _mean([p.difference for p in valid]),
        "difference_abs_mean": _mean([abs(p.difference) for p in valid]),
        "equal_share": _mean([float(abs(p.difference) < SAME) for p in valid]),
        "pearson": correlation(old, new),
        "spearman": correlation(ranks(old), ranks(new)),
        "same_order_in_group": same / ordered if ordered else None,
        "ordered_pairs_in_groups": ordered,
        "length_bias_duration": bias(valid, lambda p: p.duration_s),
        "length_bias_tokens": bias(valid, lambda p: p.tokens),
        **drift(valid),
    }


def order_in_groups(valid: Sequence[Pair]) -> tuple[int, int]:
    """(pairs of one group that both rulers order alike, pairs that the old one orders): what advantages are made of."""
    groups: dict[str, list[Pair]] = defaultdict(list)
    for pair in valid:
        groups[pair.group].append(pair)
    same = ordered = 0
    for members in groups.values():
        for seen, (a, b) in enumerate(combinations(members, 2)):
            if seen >= PAIRS_PER_GROUP:
                break
            assert a.old is not None and b.old is not None and a.new is not None and b.new is not None
            if abs(a.old - b.old) >= SAME:
                ordered += 1
                same += (a.old - b.old) * (a.new - b.new) > 0
    return same, ordered


def bias(valid: Sequence[Pair], length: Callable[[Pair], float | None]) -> float | None:
    """Rank correlation of (new - old) with length: above 0, the new ruler favours long executions more."""
    known = [(size, p.difference) for p in valid if (size := length(p)) is not None]
    return correlation(ranks([a for a, _ in known]), ranks([b for _, b in known]))


def drift(valid: Sequence[Pair]) -> dict[str, float | None]:
    """Slope of (new - old) per optimizer step, and its standard error: far from 0, one of the rulers is being gamed."""
    points = [(float(p.step), p.difference) for p in valid if p.step is not None]
    slope, error = line_through(points)
    return {"drift_per_step": slope, "drift_error": error}


def length_rows(valid: Sequence[Pair], name: str, length: Callable[[Pair], float | None]) -> list[dict[str, Any]]:
    known = sorted((size, p.execution, p) for p in valid if (size := length(p)) is not None)
    parts = _buckets(known, BUCKETS)
    return [
        {"kind": "length", "by": name, "from": part[0][0], "to": part[-1][0], **_means([p for _, _, p in part])}
        for part in parts
    ]


def drift_rows(valid: Sequence[Pair]) -> list[dict[str, Any]]:
    steps = sorted({p.step for p in valid if p.step is not None})
    rows = []
    for part in _buckets(steps, DRIFT_BUCKETS):
        some = [p for p in valid if p.step in part]
        rows.append({"kind": "drift", "by": "step", "from": part[0], "to": part[-1], **_means(some)})
    return rows


def _buckets(items: Sequence[Any], most: int) -> Iterator[Sequence[Any]]:
    """At most `most` parts of nearly equal size, none empty."""
    count = min(most, len(items))
    for place in range(count):
        yield items[len(items) * place // count : len(items) * (place + 1) // count]


def _means(pairs: Sequence[Pair]) -> dict[str, Any]:
    old, new = _mean([p.old for p in pairs if p.old is not None]), _mean([p.new for p in pairs if p.new is not None])
    return {
        "compared": len(pairs),
        "old_mean": old,
        "new_mean": new,
        "difference": _mean([p.difference for p in pairs]),
    }


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


# ---- statistics ---------------------------------------------------------------------------------------------------


def ranks(values: Sequence[float]) -> list[float]:
    """Mean ranks; equal values share theirs."""
    order = sorted(range(len(values)), key=values.__getitem__)
    out = [0.0] * len(values)
    start = 0
    while start < len(order):
        end = start
        while end < len(order) and values[order[end]] == values[order[start]]:
            end += 1
        for place in order[start:end]:
            out[place] = (start + end - 1) / 2
        start = end
    return out


def correlation(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Pearson's r, or None where one of them does not vary."""
    if len(x) < 2:
        return None
    mean_x, mean_y = fmean(x), fmean(y)
    sxx = math.fsum((a - mean_x) ** 2 for a in x)
    syy = math.fsum((b - mean_y) ** 2 for b in y)
    scale = math.sqrt(sxx) * math.sqrt(syy)
    if scale < 1e-12:
        return None
    r = math.fsum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / scale
    return max(-1.0, min(1.0, r))


def line_through(points: Sequence[tuple[float, float]]) -> tuple[float | None, float | None]:
    """(slope, its standard error) by least squares."""
    if len(points) < 3:
        return None, None
    mean_x, mean_y = fmean(x for x, _ in points), fmean(y for _, y in points)
    sxx = math.fsum((x - mean_x) ** 2 for x, _ in points)
    if sxx == 0:
        return None, None
    slope = math.fsum((x - mean_x) * (y - mean_y) for x, y in points) / sxx
    rest = math.fsum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in points)
    return slope, math.sqrt(rest / (len(points) - 2) / sxx)
