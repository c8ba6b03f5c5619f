"""Live delivery: an answer goes out as it is sampled, and can go on in another life of proxyd.

Each piece of a live answer begins with a line for the relay: the tokens of which its events were made, with logprobs
and version, sealed with the run's key. The relay gives the lines back whenever it asks for the call again, so that
what a harness has seen is continued and never sampled anew, though this process or its node be gone. The end of an
answer is not among the pieces: it goes out when the call is on disk.
"""

from __future__ import annotations

import hashlib
import hmac
import math
from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from gyre_base.runfile import Span
from proxyd.chat import ChatModel
from proxyd.conversation import Reply
from proxyd.dialects import BadRequest, Events
from proxyd.parsers import OPEN
from proxyd.records import Progress

LINE = b": gyre-so-far "  # begins a piece
WAITED = b": gyre-waited "  # begins the end: seconds that the infrastructure held the call


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens that were sampled together."""

    ids: list[int]
    logprobs: list[float]
    version: str


class Seal:
    """Writes and reads the lines of one call."""

    def __init__(self, key: str, execution: str, call: str) -> None:
        self._key, self._of = key.encode()[:64], f"{execution}:{call}".encode()

    def line(self, chunk: Chunk, at: int, created: int) -> bytes:
        """`at`: how many tokens came before."""
        told = orjson.dumps([at, created, chunk.version, chunk.ids, chunk.logprobs])
        return self._mac(told) + b" " + told

    def read(self, lines: bytes) -> tuple[list[Chunk], int]:
        """(chunks in order, when the call was begun; 0 without any). Raises BadRequest for lines that are not ours."""
        out: list[Chunk] = []
        count = created = 0
        for line in lines.split(b"\n") if lines else []:
            mac, _, told = line.partition(b" ")
            if not hmac.compare_digest(mac, self._mac(told)):
                raise BadRequest("these are no tokens of this call")
            at, created, version, ids, logprobs = orjson.loads(told)
            if at != count:
                raise BadRequest("tokens of this call are missing")
            out.append(Chunk(ids, [math.nan if p is None else p for p in logprobs], version))
            count += len(ids)
        return out, created

    def _mac(self, told: bytes) -> bytes:
        return hashlib.blake2b(self._of + b"\0" + told, key=self._key, digest_size=16).hexdigest().encode()


def progress_of(chunks: Sequence[Chunk]) -> Progress:
    """What an unfinished call has, rebuilt. Neighbours of one version are one span."""
    out = Progress()
    for chunk in chunks:
        start = len(out.ids)
        if out.spans and out.spans[-1].policy == chunk.version:
            start = out.spans.pop().start
        out.ids += chunk.ids
        out.logprobs += chunk.logprobs
        out.spans.append(Span(chunk.version, start, len(out.ids)))
    return out


class Speech:
    """Tokens to as much of reasoning and text as no later token can change. Tool calls are left to the end."""

    def __init__(self, chat: ChatModel) -> None:
        self._chat = chat
        self._pending: list[int] = []
        self._text = ""
        self._at = 0  # where the part that is being told begins, once its beginning is known
        self._told = 0  # characters of that part
        self._part = "reasoning?" if chat.family.think is not None else "text"

    def take(self, ids: Sequence[int]) -> tuple[str, str]:
        """(more reasoning, more text)."""
        self._pending += ids
        decoded = self._chat.decode(self._pending)
        if decoded.endswith("\ufffd"):
            return "", ""  # perhaps the middle of a character
        self._pending.clear()
        self._text += decoded
        if self._part == "reasoning?":
            self._look_for_thinking()
        reasoning = self._thinking() if self._part == "reasoning" else ""
        return reasoning, self._content() if self._part == "text" else ""

    def _look_for_thinking(self) -> None:
        """As `split_reasoning` does it: blanks, the opening tag unless the prompt has it."""
        start, _ = self._chat.family.think or ("", "")
        body = self._text.lstrip()
        if not body or (len(body) < len(start) and start.startswith(body)):
            return
        tagged = body.startswith(start)
        if not tagged and not self._chat.thinks:
            self._part = "text"
            return
        self._part = "reasoning"
        self._at = len(self._text) - len(body) + (len(start) if tagged else 0)

    def _thinking(self) -> str:
        _, end = self._chat.family.think or ("", "")
        body = self._text[self._at :]
        thought, ended, rest = body.partition(end)
        if not ended:
            return self._more(_without_begun(thought, end).strip("\n"))
        out = self._more(thought.strip("\n"))
        self._at, self._told, self._part = len(self._text) - len(rest), 0, "text"
        return out

    def _content(self) -> str:
        body = self._text[self._at :]
        if self._chat.family.think is not None and self._at:
            body = body.lstrip("\n")
        before, called, _ = body.partition(OPEN)
        sure = before if called else _without_begun(before, OPEN)
        sure = sure.removesuffix("\n")
        return self._more(sure) if sure.strip() else ""

    def _more(self, sure: str) -> str:
        out = sure[self._told :]
        self._told = max(self._told, len(sure))
        return out


def _without_begun(text: str, tag: str) -> str:
    """Text without an end that may be the beginning of a tag."""
    for size in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:size]):
            return text[:-size]
    return text


class Telling:
    """One request's live answer: chunks in, pieces out, in the same way whoever tells them."""

    def __init__(self, chat: ChatModel, events: Events, seal: Seal, created: int) -> None:
        self._speech, self._events, self._seal, self._created = Speech(chat), events, seal, created
        self._reasoning = self._text = ""
        self.count = 0  # tokens told

    def take(self, chunk: Chunk) -> bytes:
        """The piece for these tokens."""
        line = self._seal.line(chunk, self.count, self._created)
        self.count += len(chunk.ids)
        reasoning, text = self._speech.take(chunk.ids)
        self._reasoning += reasoning
        self._text += text
        return LINE + line + b"\n\n" + self._events.more(reasoning, text)

    def end(self, reply: Reply, waited_s: float) -> bytes:
        """The rest. Raises ValueError if what was told is not how the answer begins."""
        if not (reply.reasoning.startswith(self._reasoning) and reply.text.startswith(self._text)):
            raise ValueError("a live answer does not begin with what was told of it")
        return WAITED + b"%.3f\n\n" % waited_s + self._events.end(reply)


def nothing_yet(call: str, created: int, model: str, prompt_tokens: int) -> Reply:
    """An answer of which nothing is known but its place."""
    return Reply(
        call=call,
        created=created,
        model=model,
        text="",
        calls=(),
        finish="stop",
        prompt_tokens=prompt_tokens,
        completion_tokens=0,
    )
