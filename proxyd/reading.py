"""Reading a request at the cost of what is new in it.

A harness sends its whole history with every call, and mostly to the letter. A request whose bytes begin with those of
an earlier one, up to the end of that one's message list, is read without them: the list is shortened to the messages
that follow, and the tree goes on from where the earlier request left it. Anything else is read whole. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np
import xxhash

from proxyd.conversation import Conversation, Request, digest, message_key
from proxyd.dialects import Dialect

KEPT = 8  # earlier requests per execution that a new one may continue: its agents take turns
WORTH_BYTES = 4096  # shorter lists are read whole
SIGHT_BYTES = 64  # compared before anything is hashed
_outer = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(frozen=True, slots=True)
class Place:
    """Where the message list stands in a body: offset of its bracket, and the end of its last message."""

    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Known:
    """An earlier request: its bytes up to `place.end` as a digest, and where the tree was after them."""

    field: str
    place: Place
    digest: bytes
    sight: bytes
    head: bytes
    start: bytes


@dataclass(slots=True)
class Asked:
    """A request, perhaps without the messages that a known one has already told (`since` is its start)."""

    request: Request
    since: bytes | None
    whole: Callable[[], Request]
    body: bytes
    field: str
    place: Place | None


class Memory:
    """The newest requests of one execution."""

    def __init__(self) -> None:
        self._known: deque[Known] = deque(maxlen=KEPT)

    def read(self, dialect: Dialect, body: bytes) -> Asked:
        """Raises BadRequest."""
        for known in reversed(self._known):
            asked = _continued(dialect, body, known) if _begins_with(body, known, dialect.field) else None
            if asked is not None:
                return asked
        request = dialect.read(body)
        place = place_of(body, dialect.field) if len(body) > WORTH_BYTES else None
        return Asked(request, None, lambda: request, body, dialect.field, place)

    def told(self, asked: Asked, start: bytes) -> None:
        """The tree is now at `start`, after all messages of this request."""
        place, body = asked.place, asked.body
        if place is None or place.end - place.begin < WORTH_BYTES:
            return
        known = Known(
            field=asked.field,
            place=place,
            digest=xxhash.xxh3_128_digest(memoryview(body)[: place.end]),
            sight=body[place.end - SIGHT_BYTES : place.end],
            head=_head(asked.request.conversation),
            start=start,
        )
        self._known = deque((k for k in self._known if k.start != start), maxlen=KEPT)
        self._known.append(known)


def _begins_with(body: bytes, known: Known, field: str) -> bool:
    end = known.place.end
    if len(body) <= end or known.field != field or body[end - SIGHT_BYTES : end] != known.sight:
        return False
    return body[end : end + 1] == b"," and xxhash.xxh3_128_digest(memoryview(body)[:end]) == known.digest


def _continued(dialect: Dialect, body: bytes, known: Known) -> Asked | None:
    """The request without what is known; None if its list is not where it was, or its other fields differ."""
    begin, end = known.place.begin, known.place.end
    short = b"".join((body[: begin + 1], memoryview(body)[end + 1 :]))
    place = place_of(short, known.field)
    if place is None or place.begin != begin:
        return None
    request = dialect.read(short)
    if _head(request.conversation) != known.head:
        return None
    left_out = end - begin
    whole = Place(begin, place.end + left_out)
    return Asked(request, known.start, lambda: dialect.read(body), body, known.field, whole)


def _head(conversation: Conversation) -> bytes:
    return digest(conversation.tools, *map(message_key, conversation.messages[: conversation.head]))


def place_of(body: bytes, field: str) -> Place | None:
    """None if the body has no list of that name with something in it."""
    try:
        found = _outer.decode(body).get(field)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if found is None:
        return None
    view = memoryview(found)
    if view[0] != ord("["):
        return None
    begin = _address(view) - _address(memoryview(body))
    end = begin + len(view) - 1
    while body[end - 1] in b" \t\r\n":
        end -= 1
    return Place(begin, end) if end > begin + 1 else None


def _address(view: memoryview) -> int:
    """Where a view's bytes are: msgspec's raw values are views into the body, and do not say at which offset."""
    return int(np.frombuffer(view, np.uint8).ctypes.data)
