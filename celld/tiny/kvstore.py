"""Keys and values that engines give each other: what one has computed, another reads instead of computing it again.

`Giver` puts the pages of a string on its shelf and says so in a small file that all engines of a run see; `Taker` finds
the longest page-wise prefix of a prompt among those files and reads it (plain sockets or Mooncake, `celld.transfer`).
Never decides what runs. Invariants: only whole pages of strings with a salt are given, and a salt names one set of
weights; what is taken has the digests in the file, which lies in the run directory that only its owner can write;
whatever goes wrong, nothing is taken and the prompt is computed. The files hold digests of pages, never tokens.

Bytes of a page: [token, layer, key or value, head, dimension] in float32: a prefix of pages is a prefix of bytes.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from celld.tiny.prefix import PrefixIndex
from celld.transfer.engine import Engine, TransferFailed
from celld.transfer.reader import Reader
from celld.transfer.shelf import Shelf
from gyre_base.messages import RemoteSlot

log = logging.getLogger(__name__)
PAGE_TOKENS = 16  # as the real engine's: at most 15 tokens and the last one are computed again
SUFFIX = ".kv"


@dataclass(frozen=True)
class Shape:
    """Of one token's keys and values."""

    layers: int
    heads: int
    dimension: int

    @property
    def token_bytes(self) -> int:
        return 4 * self.layers * 2 * self.heads * self.dimension


@dataclass(frozen=True)
class Entry:
    """One string's pages on some engine's shelf: the chained digest of each page, and where the bytes are."""

    kind: str  # of transfer engine
    shape: Shape
    pages: tuple[int, ...]
    slot: RemoteSlot


@dataclass(frozen=True)
class Found:
    """What another engine had of a prompt: `values` float32 [tokens, layers, 2, heads, dimension]."""

    tokens: int
    values: npt.NDArray[np.float32]


def page_digests(salt: str, tokens: Sequence[int]) -> tuple[int, ...]:
    """One 64-bit number per whole page, each over the salt and everything up to that page's end."""
    whole = np.asarray(tokens[: len(tokens) // PAGE_TOKENS * PAGE_TOKENS], dtype="<i4").reshape(-1, PAGE_TOKENS)
    chain, out = blake2b(salt.encode(), digest_size=16), []
    for page in whole:
        chain.update(page.tobytes())
        out.append(int.from_bytes(chain.digest()[:8], "little"))
    return tuple(out)


class Giver:
    """This engine's side: the newest strings within `budget_bytes`. `name` begins its files; one engine per name."""

    def __init__(self, folder: Path, name: str, engine: Engine, shape: Shape, budget_bytes: int) -> None:
        self._folder, self._name, self._engine, self._shape = folder, name, engine, shape
        self._budget_bytes, self._shelf = budget_bytes, Shelf(engine)
        self._held: OrderedDict[int, int] = OrderedDict()  # number -> bytes, oldest first
        self._index = PrefixIndex()
        self._numbers = 0
        for left in folder.glob(f"{name}-*{SUFFIX}"):  # by an earlier life
            left.unlink(missing_ok=True)

    @property
    def held_bytes(self) -> int:
        return sum(self._held.values())

    def give(self, salt: str, tokens: Sequence[int], read: Callable[[int], npt.NDArray[np.float32]]) -> None:
        """Offer the whole pages of a string; `read(n)` gives its first n tokens. Raises OSError, TransferFailed."""
        pages = page_digests(salt, tokens) if salt else ()
        size = len(pages) * PAGE_TOKENS * self._shape.token_bytes
        if not pages or size > self._budget_bytes or self._index.longest("", pages)[1] == len(pages):
            return
        for number in self._index.contained_in("", pages):  # the longer string has all of theirs
            self._drop(number)
        while self.held_bytes + size > self._budget_bytes:
            self._drop(next(iter(self._held)))
        self._numbers += 1
        name = str(self._numbers)
        self._shelf.put(name, read(len(pages) * PAGE_TOKENS).reshape(-1).view(np.uint8).data)
        self._held[self._numbers] = size
        self._index.insert(self._numbers, "", pages)
        entry = Entry(self._engine.kind, self._shape, pages, self._shelf.offer(name))
        temporary = self._folder / f".{self._name}-{name}"
        temporary.write_bytes(msgspec.msgpack.encode(entry))
        os.replace(temporary, self._path(self._numbers))

    def clear(self) -> None:
        """Nothing more is offered, and its memory is free."""
        for number in list(self._held):
            self._drop(number)

    def _drop(self, number: int) -> None:
        self._path(number).unlink(missing_ok=True)
        self._index.remove(number)
        self._shelf.drop(str(number))
        del self._held[number]

    def _path(self, number: int) -> Path:
        return self._folder / f"{self._name}-{number}{SUFFIX}"


class Taker:
    """The side that reads what other engines offer. `look` answers from a thread of its own."""

    def __init__(self, folder: Path, name: str, engine: Engine, shape: Shape) -> None:
        self._folder, self._own, self._engine, self._shape = folder, f"{name}-", engine, shape
        self._reader = Reader(engine)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv")
        self._index = PrefixIndex()
        self._known: dict[str, int] = {}  # file -> number
        self._entries: dict[int, Entry] = {}
        self._numbers = 0
        self._bad_peers: set[str] = set()

    def look(self, salt: str, tokens: Sequence[int], have: int, answer: Callable[[Found | None], None]) -> None:
        """Call `answer` once, from another thread; None if nobody has at least a page more than the `have` tokens that
        are here."""
        prompt = tuple(tokens)
        self._thread.submit(lambda: answer(self._found(salt, prompt, have)))

    def _found(self, salt: str, tokens: Sequence[int], have: int) -> Found | None:
        try:
            return self._take(salt, tokens, have)
        except Exception:  # whatever it is: the prompt can be computed
            log.exception("the shared store of keys and values can't be read")
            return None

    def _take(self, salt: str, tokens: Sequence[int], have: int) -> Found | None:
        self._refresh()
        number, pages = self._index.longest("", page_digests(salt, tokens))
        if number is None or pages * PAGE_TOKENS < have + PAGE_TOKENS:
            return None
        entry = self._entries[number]
        try:
            payload = self._reader.fetch(entry.slot, tries=1)
        except TransferFailed as error:
            log.warning("%s; the prompt is computed", error)
            if entry.slot.peer not in self._bad_peers and not self._still_offered(number):
                return None  # it was taken back in the meantime: no fault of the peer
            self._bad_peers.add(entry.slot.peer)
            return None
        shape = (-1, self._shape.layers, 2, self._shape.heads, self._shape.dimension)
        return Found(pages * PAGE_TOKENS, np.frombuffer(payload, dtype="<f4").reshape(shape)[: pages * PAGE_TOKENS])

    def _still_offered(self, number: int) -> bool:
        name = next(name for name, known in self._known.items() if known == number)
        return (self._folder / name).exists()

    def _refresh(self) -> None:
        """The index becomes what the folder holds."""
        there = {path.name for path in self._folder.glob(f"[!.]*{SUFFIX}") if not path.name.startswith(self._own)}
        for name in self._known.keys() - there:
            number = self._known.pop(name)
            if self._entries.pop(number, None):
                self._index.remove(number)
        for name in there - self._known.keys():
            entry = self._read(self._folder / name)
            self._numbers += 1
            self._known[name] = self._numbers
            if entry is not None:
                self._entries[self._numbers] = entry
                self._index.insert(self._numbers, "", entry.pages)
        for number, entry in list(self._entries.items()):
            if entry.slot.peer in self._bad_peers:
                self._index.remove(number)
                del self._entries[number]

    def _read(self, path: Path) -> Entry | None:
        """None for what is of no use here: another network, another way, no pages, gone."""
        try:
            entry = msgspec.msgpack.decode(path.read_bytes(), type=Entry)
        except (OSError, msgspec.DecodeError):
            return None
        size = len(entry.pages) * PAGE_TOKENS * self._shape.token_bytes
        fits = (entry.kind, entry.shape, entry.slot.size) == (self._engine.kind, self._shape, size)
        return entry if fits and entry.pages and entry.slot.peer not in self._bad_peers else None

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
