"""Which recorded history a request continues, and the exact token ids of its prompt.

Owns the tree of one execution's calls. A request is walked message by message; an assistant message that is an answer
of ours (by the tool-call ids that we issued, then by content) stands for that answer's own ids, so sampled tokens are
never encoded again. The longest recorded call on the walk is the base: its prompt and completion are reused as they
are and only what follows is rendered. A real difference is a branch. Pure: no IO, no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from gyre_base.runfile import Agent, Attempt, Ids
from proxyd.chat import ChatModel, Piece
from proxyd.conversation import (
    Conversation,
    Message,
    Spoken,
    digest,
    exact_key,
    loose_key,
    message_key,
    text_bytes,
)
from proxyd.labels import Labels, Relabel, Root

REMEMBERED_STARTS = 4096  # request digests per execution for counting attempts


@dataclass(slots=True, eq=False)
class Node:
    """A finished call. `tail` and `completion` are its own ids; what comes before is the base's."""

    call: str
    agent: Agent
    base: Node | None
    asked: bool
    start: bytes  # digest of the request: everything the prompt says
    tail: Piece
    completion: Piece
    spoken: Spoken
    finish: str
    tokens: int  # prompt and completion
    at: float = 0.0  # when it was finished, s since the epoch
    waited_s: float = 0.0

    @property
    def prompt_tokens(self) -> int:
        return self.tokens - len(self.completion.ids)


@dataclass(slots=True, eq=False)
class Plan:
    """What a request comes to: its base, the ids that are new, and who asks."""

    base: Node | None
    tail: Piece
    start: bytes
    agent: Agent
    root: Root | None
    asked: bool
    attempt: Attempt
    spliced: int = 0  # answers of ours that stand in a new context: their ids were reused all the same
    relabels: list[Relabel] = field(default_factory=list)

    @property
    def keep(self) -> int:
        return self.base.tokens if self.base is not None else 0

    @property
    def prompt_tokens(self) -> int:
        return self.keep + len(self.tail.ids)

    def prompt_json(self) -> bytes:
        """The prompt as JSON numbers without brackets: stored text joined, nothing encoded again."""
        return b",".join(p.json for p in self._pieces() if p.json)

    def prompt_ids(self) -> Ids:
        out = np.empty(self.prompt_tokens, np.int32)
        at = 0
        for piece in self._pieces():
            out[at : at + len(piece.ids)] = piece.ids
            at += len(piece.ids)
        return out

    def _pieces(self) -> list[Piece]:
        parts = [self.tail]
        node = self.base
        while node is not None:
            parts += [node.completion, node.tail]
            node = node.base
        return parts[::-1]


@dataclass(slots=True)
class _Alike:
    """Answers to one request that say the same. An echo without ids of ours can't tell them apart: the newest is meant,
    and the first one's name stands for all, so that what continued an older one is still found."""

    first: Node
    newest: Node


@dataclass(slots=True)
class _Walk:
    """A request seen against the tree."""

    start: bytes  # digest of the whole request
    base: Node | None = None
    base_at: int = 0  # messages up to here are the base's prompt and answer
    ours: dict[int, Node] = field(default_factory=dict)  # place -> the answer of ours that stands there


class Forest:
    """All finished calls of one execution."""

    def __init__(self, chat: ChatModel) -> None:
        self._chat = chat
        self.labels = Labels()
        self.calls: dict[str, Node] = {}
        self._issued: dict[str, Node] = {}  # tool-call id -> the answer that holds it
        self._here: dict[tuple[bytes, bytes], _Alike] = {}  # (request digest, answer key) -> the answers
        self._anywhere: dict[bytes, Node] = {}  # answer key -> the newest such answer
        self._starts: dict[bytes, tuple[str, int]] = {}  # request digest -> (first call, how many)

    # ---- a request ------------------------------------------------------------------------------------------------

    def plan(self, call: str, conversation: Conversation) -> Plan:
        """The exact prompt of a request. Counts it as an attempt; tells new roots from continued histories."""
        walk = self._walk(conversation)
        new = conversation.messages[walk.base_at :]
        self.labels.closed([m.call_id for m in new if m.role == "tool"])
        plan = Plan(
            base=walk.base,
            tail=_join(self._tail(conversation, walk)),
            start=walk.start,
            agent=walk.base.agent if walk.base is not None else Agent(),
            root=None,
            asked=walk.base is not None and _asks(new),
            attempt=self._attempt(walk.start, call),
            spliced=sum(1 for place in walk.ours if place >= walk.base_at),
        )
        if walk.base is None:
            plan.agent, plan.root, plan.relabels = self.labels.root(conversation)
        return plan

    def _walk(self, conversation: Conversation) -> _Walk:
        walk = _Walk(digest(b"root", conversation.tools))
        for place, message in enumerate(conversation.messages):
            if message.role != "assistant":
                walk.start = digest(walk.start, message_key(message))
                continue
            node, name = self._find(message, walk.start)
            if node is not None:
                walk.ours[place] = node
                if node.start == walk.start:
                    walk.base, walk.base_at = node, place + 1
            walk.start = digest(walk.start, b"answer", name)
        return walk

    def _find(self, message: Message, start: bytes) -> tuple[Node | None, bytes]:
        """The answer of ours that an assistant message echoes: by id, by content here, by content anywhere.

        Beside it the name under which the history goes on; it must never depend on answers that come later.
        """
        if message.calls and (node := self._issued.get(message.calls[0].id)) is not None:
            same_ids = [c.id for c in message.calls] == [c.id for c in node.spoken.calls]
            if same_ids and (_same(message, node.spoken) or loose_key(message) == loose_key(node.spoken)):
                return node, text_bytes(node.call)
        key = exact_key(message)
        alike = self._here.get((start, key))
        if alike is None and not message.calls:
            alike = self._here.get((start, loose_key(message)))
        if alike is not None:
            return alike.newest, text_bytes(alike.first.call)
        return self._anywhere.get(key), key

    def _tail(self, conversation: Conversation, walk: _Walk) -> list[Piece]:
        """The pieces after the base: filler or head, then units, with our own answers as they were sampled."""
        chat, messages, at = self._chat, conversation.messages, walk.base_at
        if walk.base is not None:
            out = [chat.filler(walk.base.completion.ids)]
        else:
            at = 1 if messages and messages[0].role == "system" else 0
            out = chat.pieces(messages[:at], conversation.tools)
        run: list[Message] = []
        for place in range(at, len(messages)):
            node = walk.ours.get(place)
            if node is None:
                run.append(messages[place])
                continue
            out += [*chat.units(run), chat.header, node.completion, chat.filler(node.completion.ids)]
            run = []
        return [*out, *chat.units(run), chat.opening]

    def _attempt(self, start: bytes, call: str) -> Attempt:
        first, count = self._starts.get(start, (call, 0))
        if len(self._starts) < REMEMBERED_STARTS:
            self._starts[start] = (first, count + 1)
        return Attempt(of=first, n=count) if count else Attempt()

    # ---- an answer ------------------------------------------------------------------------------------------------

    def finished(
        self,
        call: str,
        plan: Plan,
        completion: Piece,
        spoken: Spoken,
        finish: str,
        *,
        at: float = 0.0,
        waited_s: float = 0.0,
    ) -> Node:
        """Record an answer; from now on requests may continue it. Raises ValueError if the call is already there."""
        node = Node(
            call=call,
            agent=plan.agent,
            base=plan.base,
            asked=plan.asked,
            start=plan.start,
            tail=plan.tail,
            completion=completion,
            spoken=spoken,
            finish=finish,
            tokens=plan.prompt_tokens + len(completion.ids),
            at=at,
            waited_s=waited_s,
        )
        self._add(node, plan.root)
        return node

    def restored(self, node: Node, root: Root | None, attempt: Attempt) -> None:
        """A call of an earlier life, from the log."""
        first = attempt.of or node.call
        self._starts[node.start] = (first, max(attempt.n + 1, self._starts.get(node.start, ("", 0))[1]))
        self._add(node, root)

    def _add(self, node: Node, root: Root | None) -> None:
        if node.call in self.calls:
            raise ValueError(f"call {node.call} is already recorded")
        self.calls[node.call] = node
        for made in node.spoken.calls:
            self._issued[made.id] = node
        key = exact_key(node.spoken)
        self._anywhere[key] = node
        alike = self._here.setdefault((node.start, key), _Alike(node, node))
        alike.newest = node
        if not node.spoken.calls:
            self._here.setdefault((node.start, loose_key(node.spoken)), alike)
        self.labels.answered(node.call, node.agent, node.spoken, asked=node.asked, root=root)


def _asks(new: Sequence[Message]) -> bool:
    """Whether a history is continued by exactly one user message, after the results of tools that were still open."""
    return bool(new) and new[-1].role == "user" and all(m.role == "tool" for m in new[:-1])


def _same(message: Message, spoken: Spoken) -> bool:
    """Whether an echo is what we sent, arguments as JSON values. Most are to the letter, and then nothing is parsed."""
    if message.text == spoken.text and message.calls == spoken.calls:
        return True
    return exact_key(message) == exact_key(spoken)


def _join(pieces: Iterable[Piece]) -> Piece:
    kept = [p for p in pieces if p.ids]
    return Piece(tuple(i for p in kept for i in p.ids), b",".join(p.json for p in kept))
