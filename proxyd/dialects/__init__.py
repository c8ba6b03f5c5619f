"""How harnesses speak. Each dialect reads a body into a Request and words replies and failures; all are pure.

A dialect never refuses a field it does not know.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from proxyd.conversation import Reply, Request


class BadRequest(ValueError):
    """A body that is no request: the text is what the harness is told (400)."""


def load_json(body: bytes) -> Any:
    """The value of a body. Lone surrogates, which JavaScript clients may send, become question marks. Raises
    ValueError.
    """
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        again = json.dumps(json.loads(body), ensure_ascii=False, allow_nan=False)
        return orjson.loads(again.encode("utf-8", "replace"))


@dataclass(frozen=True, slots=True)
class Failure:
    """Why there is no answer. `kind` picks the wording; the numbers go into it."""

    kind: str  # unauthorized, bad_request, not_found, overflow, forbidden, unavailable, internal
    why: str = ""
    limit: int = 0
    tokens: int = 0


@dataclass(slots=True)
class Written:
    """A whole HTTP answer."""

    status: int
    content_type: str
    body: bytes


@dataclass(slots=True)
class Told:
    """How many characters of an answer's reasoning and text have gone into events."""

    reasoning: int = 0
    text: int = 0

    def add(self, reasoning: str, text: str) -> None:
        self.reasoning += len(reasoning)
        self.text += len(text)

    def rest(self, reply: Reply) -> tuple[str, str]:
        """What of the whole answer is still to be told."""
        return reply.reasoning[self.reasoning :], reply.text[self.text :]


class Events(Protocol):
    """One answer as a stream of events, told in as many steps as there are; reasoning always comes before text."""

    def more(self, reasoning: str, text: str) -> bytes:
        """The next events for this much more of an answer."""

    def end(self, reply: Reply) -> bytes:
        """All that is still to be told of the finished answer, to the final event."""


class Dialect(Protocol):
    """One wire form. `field` names the list that holds the history."""

    field: str

    def read(self, body: bytes) -> Request: ...

    def write(self, reply: Reply, request: Request) -> Written: ...

    def stream(self, reply: Reply, request: Request) -> Events:
        """Events of an answer of which id, model and prompt length are known."""

    def fail(self, failure: Failure, *, stream: bool = False) -> Written: ...
