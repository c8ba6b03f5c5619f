"""`score`: outcomes attached to a recording later. Calls are copied byte for byte, never touched; rewards are appended.

Owns the rules of DESIGN section 7 for what is given: a known status, a number or nothing, and nothing is never 0.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import orjson

from gyre_base.runcodec import to_line
from gyre_base.runfile import Reward, encode, record_frame, repair_tail
from gyre_base.runframes import is_framed
from gyre_base.vocabulary import Outcome
from trajtools.load import load
from trajtools.mend import in_blocks


class BadReward(ValueError):
    """A reward that can't be meant; the text says which line and why."""


@dataclass(frozen=True)
class Scored:
    """What was attached."""

    attached: int
    replaced: int
    unscored: int  # executions without a reward, now
    unknown: tuple[str, ...]  # rewards for executions that are not in the recording
    out: str

    @property
    def ok(self) -> bool:
        return not self.unknown

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def lines(self) -> list[str]:
        out = [f"{self.attached:,} rewards written to {self.out} ({self.replaced:,} replace an earlier one)"]
        if self.unscored:
            out.append(f"  {self.unscored:,} executions have no reward: they reach neither the loss nor the baseline")
        if self.unknown:
            out.append(f"  not in the recording: {', '.join(self.unknown[:8])}{', …' if len(self.unknown) > 8 else ''}")
        return out


def read_rewards(lines: Iterable[bytes]) -> Iterator[Reward]:
    """JSON lines {exec, value, status?, error?, evaluator?, parts?}. Raises BadReward."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            given = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise BadReward(f"line {number} of the rewards is not JSON: {error}") from None
        if not isinstance(given, dict) or not isinstance(given.get("exec"), str):
            raise BadReward(f"line {number} of the rewards has no exec")
        yield reward(given, f"line {number}")


def reward(given: Mapping[str, Any], where: str) -> Reward:
    value = given.get("value", given.get("reward"))
    if isinstance(value, bool) or not isinstance(value, (int, float, type(None))):
        raise BadReward(f"{where}: {value!r} is not a number")
    if value is not None and not isfinite(value):
        raise BadReward(f"{where}: {value!r} is not a finite number")
    status = str(given.get("status") or ("unscored" if value is None else "scored"))
    known = {o.value for o in Outcome}
    if status not in known:
        raise BadReward(f"{where}: no outcome {status!r}; there are {', '.join(sorted(known))}")
    if status in ("scored", "partial") and value is None:
        raise BadReward(f"{where}: {status} without a value (null is no score, never 0)")
    parts, evaluator = given.get("parts") or {}, given.get("evaluator") or {}
    evaluator = evaluator if isinstance(evaluator, dict) else {"name": str(evaluator)}
    return Reward(
        exec=str(given["exec"]), status=status, value=None if value is None else float(value), parts=parts,
        evaluator=evaluator, error=given.get("error"),
    )  # fmt: skip


def attach(source: Path, rewards: Iterable[Reward], out: Path) -> Scored:
    """Copy a run file, lines or a call log, and append the rewards. Raises BadReward for what can't be appended to."""
    if source.is_dir() or in_blocks(source):
        raise BadReward(f"{source.name} can't be appended to: `trajtools convert` it to a .jsonl run file first")
    recording = load(source)
    if recording.format != "gyre.run":
        raise BadReward(f"{source.name} is a {recording.format} record: `trajtools convert` it to a run file first")
    given = list(rewards)
    known = [r for r in given if r.exec in recording.executions]
    part = out.with_name(out.name + ".part")
    shutil.copyfile(source, part)
    repair_tail(part)
    with part.open("rb+") as file:
        form = record_frame if is_framed(file) else to_line
        file.seek(0, 2)
        for one in known:
            file.write(encode(one, form))
    part.replace(out)
    had = {name for name, e in recording.executions.items() if e.reward is not None}
    now = had | {r.exec for r in known}
    return Scored(
        attached=len(known),
        replaced=len({r.exec for r in known} & had),
        unscored=len(recording.executions) - len(now),
        unknown=tuple(sorted({r.exec for r in given} - set(recording.executions))),
        out=str(out),
    )
