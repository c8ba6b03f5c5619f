"""Work of one kind that came in one turn of the event loop, done in a row.

Of many calls at once each step is taken for all before the next step begins: most of what a small call costs is code
that is not in the processor's cache, and in a row it is, for all but the first.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Generic, TypeVar

log = logging.getLogger(__name__)
T = TypeVar("T")


class Turns(Generic[T]):
    """`work` is called for what was added, in its order, once the loop has heard all that is there to hear."""

    def __init__(self, work: Callable[[T], None]) -> None:
        self._work = work
        self._loop = asyncio.get_running_loop()
        self._items: list[T] = []

    def add(self, item: T) -> None:
        if not self._items:
            self._loop.call_soon(self._run)
        self._items.append(item)

    def _run(self) -> None:
        items, self._items = self._items, []
        for item in items:
            try:
                self._work(item)
            except Exception:  # the others' work must be done all the same
                log.exception("work of one turn failed")
