"""Which recorded history a request continues, and the exact token ids of its prompt.

Owns the tree of one execution's calls. A request is walked message by message; an assistant message that is an answer
of ours (by the ids and marks that we issued, then by content) stands for that answer's own ids, so sampled tokens are
never encoded again. The longest recorded call on the walk is the base: its prompt and completion are reused as they
are and only what follows is rendered. A real difference is a branch. Pure: no IO, no clock.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from gyre_base.runfile import Agent, Attempt, Ids
from proxyd.chat import ChatModel, Piece
from proxyd.conversation import (
    NO_HINTS,
    Conversation,
    Hints,
    Message,
    Spoken,
    ToolCall,
    digest,
    exact_key,
    loose_key,
    mark_of,
    message_key,
    same_reasoning,
    text_bytes,
)
from proxyd.echo import same_calls
from proxyd.labels import Labels, Relabel, Root, forked_by
from proxyd.patterns import worded_as_summary

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
    reasoning_tokens: int = 0
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
    purpose: str = "turn"
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
        return b",".join([p.json for p in self._pieces() if p.json])

    def prompt_ids(self) -> Ids:
        return np.frombuffer(b"".join([piece.ids for piece in self._pieces()]), np.int32)

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
        self._foreign: set[tuple[bytes, bytes]] = set()  # as in `_here`: seen before an answer of ours said the same
        self._starts: dict[bytes, tuple[str, int]] = {}  # request digest -> (first call, how many)

    # ---- a request ------------------------------------------------------------------------------------------------

    def plan(self, call: str, conversation: Conversation, hints: Hints = NO_HINTS) -> Plan:
        """The exact prompt of a request. Counts it as an attempt; tells new roots from continued histories."""
        return self._planned(call, conversation, self._walk(conversation, digest(b"root", conversation.tools)), hints)

    def go_on(self, call: str, since: bytes, conversation: Conversation, hints: Hints = NO_HINTS) -> Plan | None:
        """As `plan`, of a request of which only the messages after a known one are given: `since` is that one's start.

        None, and nothing counted, if an answer of ours is not among them: then the whole request must be read.
        """
        new = Conversation(conversation.messages[conversation.head :], conversation.tools)
        walk = self._walk(new, since)
        return self._planned(call, new, walk, hints) if walk.base is not None else None

    def _planned(self, call: str, conversation: Conversation, walk: _Walk, hints: Hints) -> Plan:
        new = conversation.messages[walk.base_at :]
        results = [m.call_id for m in new if m.role == "tool"]
        plan = Plan(
            base=walk.base,
            tail=_join(self._tail(conversation, walk)),
            start=walk.start,
            agent=walk.base.agent if walk.base is not None else Agent(),
            root=None,
            asked=walk.base is not None and _asks(new),
            attempt=self._attempt(walk.start, call),
            purpose="summary" if hints.purpose == "summary" else "turn",
            spliced=len([place for place in walk.ours if place >= walk.base_at]) if walk.ours else 0,
        )
        if walk.base is None:
            forked = forked_by(conversation.messages, self._said) if self.calls else ()
            plan.agent, plan.root, plan.relabels = self.labels.root(conversation, hints, forked)
            plan.asked = not conversation.tools
        else:
            plan.agent = self.labels.continued(walk.base.agent, results, hints)
            if plan.purpose == "turn" and plan.asked and worded_as_summary(hints.tool, new[-1].last_text):
                plan.purpose = "summary"
        self.labels.closed(results)
        return plan

    def _walk(self, conversation: Conversation, start: bytes) -> _Walk:
        walk = _Walk(start)
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
        node = self._issued.get(message.calls[0].id) if message.calls else None
        node = node or (self._issued.get(message.mark) if message.mark else None)
        if node is not None and _echoes(message, node.spoken):
            return node, text_bytes(node.call)
        key = exact_key(message)
        alike = self._here.get((start, key))
        if alike is None and not message.calls:
            alike = self._here.get((start, loose_key(message)))
        if alike is not None and same_reasoning(message, alike.newest.spoken):
            return alike.newest, key if (start, key) in self._foreign else text_bytes(alike.first.call)
        self._foreign.add((start, key))
        return self._anywhere.get(key), key

    def _said(self, call: str) -> ToolCall | None:
        """A tool call of ours by its id."""
        node = self._issued.get(call)
        return next((c for c in node.spoken.calls if c.id == call), None) if node is not None else None

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
            out += [*chat.units(run), chat.opening, node.completion, chat.filler(node.completion.ids)]
            run = []
        return [*out, *chat.units(run), chat.opening]

    def _attempt(self, start: bytes, call: str) -> Attempt:
        first, count = self._starts.get(start, (call, 0))
        if len(self._starts) < REMEMBERED_STARTS:
            self._starts[start] = (first, count + 1)
        return Attempt(of=first, n=count) if count else Attempt()

    def measure(self, conversation: Conversation) -> int:
        """Prompt tokens of a request, with what of it is recorded. Counts nothing."""
        walk = self._walk(conversation, digest(b"root", conversation.tools))
        tail = sum(len(piece.ids) for piece in self._tail(conversation, walk))
        return tail + (walk.base.tokens if walk.base is not None else 0)

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
        reasoning_tokens: int = 0,
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
            reasoning_tokens=reasoning_tokens,
        )
        self._add(node, plan.root, plan.purpose)
        return node

    def restored(self, node: Node, root: Root | None, attempt: Attempt, purpose: str = "turn") -> None:
        """A call of an earlier life, from the log."""
        first = attempt.of or node.call
        self._starts[node.start] = (first, max(attempt.n + 1, self._starts.get(node.start, ("", 0))[1]))
        self._add(node, root, purpose)

    def _add(self, node: Node, root: Root | None, purpose: str = "turn") -> None:
        if node.call in self.calls:
            raise ValueError(f"call {node.call} is already recorded")
        self.calls[node.call] = node
        self._issued[mark_of(node.call)] = node
        for made in node.spoken.calls:
            self._issued[made.id] = node
        key = exact_key(node.spoken)
        self._anywhere[key] = node
        alike = self._here.setdefault((node.start, key), _Alike(node, node))
        alike.newest = node
        if node.spoken.reasoning:
            bare = exact_key(node.spoken, reasoning=False)
            self._anywhere[bare] = node
            self._here.setdefault((node.start, bare), _Alike(node, node)).newest = node
        if not node.spoken.calls:
            self._here.setdefault((node.start, loose_key(node.spoken)), alike)
        self.labels.answered(node.call, node.agent, node.spoken, asked=node.asked, root=root, purpose=purpose)


def _asks(new: Sequence[Message]) -> bool:
    """Whether a history is continued by exactly one user message, after the results of tools that were still open."""
    return bool(new) and new[-1].role == "user" and all(m.role == "tool" for m in new[:-1])


def _echoes(message: Message, spoken: Spoken) -> bool:
    """Whether a message that bears our ids is what we sent. Most are to the letter, and then nothing is parsed."""
    if not same_reasoning(message, spoken) or [c.id for c in message.calls] != [c.id for c in spoken.calls]:
        return False
    if message.text == spoken.text and message.calls == spoken.calls:
        return True
    return message.text.strip() == spoken.text.strip() and same_calls(message.calls, spoken.calls)


def _join(pieces: Iterable[Piece]) -> Piece:
    ids, texts = array("i"), []
    for piece in pieces:
        if piece.ids:
            ids.extend(piece.ids)
            texts.append(piece.json)
    return Piece(ids, b",".join(texts))
