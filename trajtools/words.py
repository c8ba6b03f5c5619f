"""What a person sees of tokens and blocks: text where it is known, ids where it is not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from gyre_base.runblocks import Blocks

Say: TypeAlias = Callable[[Sequence[int]], str]
CLIP = 60


def speaker(blocks: Blocks) -> Say:
    """The text of blocks."""

    def say(numbers: Sequence[int]) -> str:
        return "\n".join(
            f"{b['role']} {b.get('name') or b['kind']}: {b['text']}" for b in map(blocks.__getitem__, numbers)
        )

    return say


def clipped(text: str, width: int = CLIP) -> str:
    """One line, quoted, cut at `width`."""
    flat = text.replace("\n", "\\n").replace("\t", "\\t")
    return repr(flat if len(flat) <= width else flat[: width - 1] + "…").replace("\\\\", "\\")


def plain_ids(ids: Sequence[int], shown: int = 12) -> str:
    """The first and last ids of a row."""
    if len(ids) <= 2 * shown:
        return " ".join(map(str, ids))
    return f"{' '.join(map(str, ids[:shown]))} … {' '.join(map(str, ids[-shown:]))}"


def short(name: str) -> str:
    """A name as it fits in a table: long ones (random ids) lose their middle. `named` finds them again."""
    return name if len(name) <= 24 else f"{name[:8]}…{name[-4:]}"


def named(given: str, names: Iterable[str]) -> list[str]:
    """The names that a person can mean: the very one, else those with this short form, else with this beginning."""
    names = list(names)
    for fits in (lambda n: n == given, lambda n: short(n) == given, lambda n: n.startswith(given)):
        if found := [n for n in names if fits(n)]:
            return found
    return []


def counted(count: int, one: str, many: str | None = None) -> str:
    """1 call, 2 calls, 3 leaves."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def sizes(executions: int, calls: int) -> str:
    return f"{counted(executions, 'execution')}, {counted(calls, 'call')}"
