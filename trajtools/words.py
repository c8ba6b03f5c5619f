"""What a person sees of tokens and blocks: text where it is known, ids where it is not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


def counted(count: int, one: str, many: str | None = None) -> str:
    """1 call, 2 calls, 3 leaves."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def sizes(executions: int, calls: int) -> str:
    return f"{counted(executions, 'execution')}, {counted(calls, 'call')}"
