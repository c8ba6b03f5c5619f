"""Who made a call and what for: by structure first, then by what headers and model names say (hints), then unlabelled.

- The first root of an execution is the main agent.
- A root whose system and first user text are those of a known agent belongs to it (a retry, or an edited history).
- A root of which a user text before the first answer is a text argument of an earlier tool call is that call's
  sub-agent.
- A root that goes on from a tool call of ours with its results and a user text which ends with the longest text
  argument of that call is a fork: an agent of its own that was given its caller's history.
- A root of an agent's system prompt that quotes a text-only answer to one appended user message continues that agent
  after a compaction; the quoted call was its summary. Where that is known only now, the earlier call is relabelled by
  a note. Some harnesses ask for summaries in a history of their own, without tools: those, too, are known when quoted.
- A call that continues a history has the agent of that history, unless it bears the id of another one (a fork).
- A hint names side calls, tells agents apart that structure can't (same prompt, launched in the background), and
  names a summary before its answer is quoted.

Pure. The note in the call log: `{"k":"note","text":"relabel","exec":...,"call":...,"purpose":"summary","label":...}`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from gyre_base.runfile import Agent
from proxyd.conversation import NO_HINTS, Conversation, Hints, Message, Spoken, ToolCall, digest, text_bytes

ASKED_KEPT = 8  # text-only answers per agent that may yet turn out to be summaries
SUMMARY_TAGS = ("summary", "state_snapshot")  # around what is kept of an answer that also thinks aloud
LOOKED_AT = 4  # messages at the beginning of a root in which a summary is looked for


@dataclass(frozen=True, slots=True)
class Root:
    """What is remembered of the beginning of a history, as digests: it is written to the call log."""

    system: str
    user: str
    user_length: int

    def to_json(self) -> list[Any]:
        return [self.system, self.user, self.user_length]


@dataclass(frozen=True, slots=True)
class Relabel:
    """An earlier call that turned out to be something else."""

    call: str
    purpose: str
    label: str


@dataclass(slots=True)
class _Asked:
    call: str
    text: str
    known: bool = False  # it is a summary, and its record or a note says so


@dataclass(slots=True)
class _Known:
    agent: Agent
    roots: list[Root]
    asked: deque[_Asked] = field(default_factory=lambda: deque(maxlen=ASKED_KEPT))
    named: str = ""  # the id under which headers speak of it


def root_of(conversation: Conversation) -> tuple[Root, list[str]]:
    """(digests, what users say before the first answer: each text and its last block) of a conversation."""
    system = ""
    users: list[Message] = []
    for place, message in enumerate(conversation.messages):
        if message.role == "assistant" or len(users) == LOOKED_AT:
            break
        if message.role == "user":
            users.append(message)
        elif message.role == "system" and not place:
            system = message.text
    text = users[0].text if users else ""
    return Root(_hex(system), _hex(text), len(text)), [t for m in users for t in (m.text, m.last_text) if t]


def forked_by(messages: Sequence[Message], said: Callable[[str], ToolCall | None]) -> list[str]:
    """Ids of tool calls of ours whose order ends what a history has of its caller's. `said`: a call of ours by its id.

    The order stands right behind the results, in a text that ends with it; the call itself may have lost its arguments.
    """
    place = next((n for n in range(len(messages) - 1, -1, -1) if any(said(c.id) for c in messages[n].calls)), None)
    after = next((m for m in messages[place + 1 :] if m.role != "tool"), None) if place is not None else None
    if place is None or after is None or after.role != "user":
        return []
    text, out = after.text.rstrip(), []
    for call in filter(None, (said(c.id) for c in messages[place].calls)):
        order = max(_texts(call.arguments), key=len, default="").strip()
        if order and text.endswith(order) and text[: -len(order)][-1:].isspace():
            out.append(call.id)
    return out


def _hex(text: str) -> str:
    return digest(text_bytes(text)).hex()


def label_of(agent: Agent, purpose: str) -> str:
    """The run file's label of a call."""
    if agent.role == "side":
        return "side"
    if agent.role not in ("main", "sub-agent"):
        return "unlabelled"
    return f"{agent.role}-summary" if purpose == "summary" else agent.role


class Labels:
    """The agents of one execution. `root` is asked for every new root, `answered` told of every finished call."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._arguments: dict[str, list[str]] = {}  # digest of a text argument -> open tool calls that gave it
        self._strays: deque[_Asked] = deque(maxlen=ASKED_KEPT)  # answers of roots without tools: summaries if quoted
        self._late: dict[str, list[str]] = {}  # ... and those already answered: a background agent may come later

    def root(
        self, conversation: Conversation, hints: Hints = NO_HINTS, forked: Sequence[str] = ()
    ) -> tuple[Agent, Root, list[Relabel]]:
        """The agent of a history that continues none of ours. `forked`: see `forked_by`."""
        root, texts = root_of(conversation)
        if hints.purpose == "side":
            return self._join(Agent(id="side", role="side"), root), root, []
        if not any(k.agent.role == "main" for k in self._known.values()) and hints.role != "sub-agent":
            return self._join(Agent(), root, hints), root, []
        if forked and not hints.role:
            call = next((c for c in forked if f"sub-{c}" not in self._known), forked[-1])
            return self._join(Agent(id=f"sub-{call}", role="sub-agent", parent=call), root), root, []
        for known in self._known.values():
            if root in known.roots and known.agent.role != "side" and not self._other(known, hints):
                return known.agent, root, []
        late = hints.role == "sub-agent" or (not hints.role and self._is_strange(root, conversation))
        agent = self._named(hints.agent) or self._started(texts, late)
        if agent is not None:
            found = self._compacted(root, conversation)
            return self._join(agent, root, hints), root, [found[1]] if found and found[1] else []
        found = self._compacted(root, conversation)
        if found is not None:
            return found[0].agent, root, [found[1]] if found[1] else []
        if hints.role == "sub-agent":
            return self._join(self._new(hints), root, hints), root, []
        if hints.role == "main":
            return self._join(Agent(), root), root, []
        return self._join(Agent(id=f"other-{len(self._known)}", role="unlabelled"), root), root, []

    def continued(self, agent: Agent, results: list[str], hints: Hints) -> Agent:
        """The agent of a call that continues `agent`'s history; `results` are the tool calls it answers."""
        known = self._known.get(agent.id)
        if hints.role != "sub-agent" or not hints.agent or known is None or known.named == hints.agent:
            return agent
        forked = self._named(hints.agent)
        if forked is None:
            forked = self._new(hints, parent=results[-1] if results else None)
            self._known.setdefault(forked.id, _Known(forked, [], named=hints.agent))
        return forked

    def _new(self, hints: Hints, parent: str | None = None) -> Agent:
        """A sub-agent of which no tool call is known, or only the one its history ends with (a fork)."""
        if parent is None and hints.parent:
            above = self._named(hints.parent)
            parent = above.id if above is not None else None
        name = hints.agent or str(len(self._known))
        return Agent(id=f"sub-{name}", role="sub-agent", parent=parent)

    def _named(self, name: str) -> Agent | None:
        return next((k.agent for k in self._known.values() if name and k.named == name), None)

    @staticmethod
    def _other(known: _Known, hints: Hints) -> bool:
        """Whether headers say that this is not the agent, however alike their prompts are."""
        return hints.role == "sub-agent" and bool(hints.agent) and known.named not in ("", hints.agent)

    def _is_strange(self, root: Root, conversation: Conversation) -> bool:
        """Whether it works (with tools) under a system prompt that the main agent never had: no history of that one's
        begins so. An agent in the background may send its first request after the result that says it was launched.
        """
        return bool(conversation.tools) and not any(
            r.system == root.system for k in self._known.values() if k.agent.role == "main" for r in k.roots
        )

    def _started(self, texts: list[str], late: bool) -> Agent | None:
        """The sub-agent of the tool call that gave one of these texts as an argument; `late`: also of answered ones."""
        for table in (self._arguments, self._late) if late else (self._arguments,):
            for text in texts:
                for call in table.get(_hex(text.strip()), ()):
                    if f"sub-{call}" not in self._known:
                        return Agent(id=f"sub-{call}", role="sub-agent", parent=call)
        return None

    def _join(self, agent: Agent, root: Root, hints: Hints = NO_HINTS) -> Agent:
        known = self._known.setdefault(agent.id, _Known(agent, []))
        known.named = known.named or hints.agent
        if root not in known.roots:
            known.roots.append(root)
        return agent

    def _compacted(self, root: Root, conversation: Conversation) -> tuple[_Known, Relabel | None] | None:
        """Whose compaction this root comes after, and what its summary call is to be called from now on."""
        head = conversation.messages[: LOOKED_AT + conversation.head]
        users = "\n".join(m.text for m in head if m.role == "user")
        answers = {m.text.strip() for m in head if m.role == "assistant"}
        for known in self._known.values():
            if known.agent.role not in ("main", "sub-agent") or root.system not in {r.system for r in known.roots}:
                continue
            for asked in (*reversed(known.asked), *reversed(self._strays)):
                quoted = _quotes(users, asked.text) or (asked.text.strip() and asked.text.strip() in answers)
                empty = not asked.known and not asked.text.strip() and self._extends(known, users)
                if quoted or empty:
                    news = None if asked.known else Relabel(asked.call, "summary", label_of(known.agent, "summary"))
                    asked.known = True
                    known.roots.append(root)
                    return known, news
        return None

    @staticmethod
    def _extends(known: _Known, text: str) -> bool:
        """Whether a first user text begins with that of an earlier root: an empty summary leaves no other trace."""
        return any(len(text) > r.user_length and _hex(text[: r.user_length]) == r.user for r in known.roots)

    def answered(
        self, call: str, agent: Agent, spoken: Spoken, *, asked: bool, root: Root | None, purpose: str = "turn"
    ) -> None:
        """`asked`: the request was a recorded history (and tool results) plus exactly one user message, or a root
        without tools.
        """
        known = self._known.setdefault(agent.id, _Known(agent, []))
        if root is not None and root not in known.roots:
            known.roots.append(root)
        if (asked or purpose == "summary") and not spoken.calls:
            kept = self._strays if agent.role == "unlabelled" else known.asked
            kept.append(_Asked(call, spoken.text, known=purpose == "summary"))
        for made in spoken.calls:
            for value in _texts(made.arguments):
                self._arguments.setdefault(_hex(value.strip()), []).append(made.id)

    def named(self, agent: Agent, name: str) -> None:
        """From the log of an earlier life: the id under which headers spoke of an agent. Side calls have none of their
        own: they go under the id of the agent beside which they are made.
        """
        if agent.role == "side":
            return
        known = self._known.setdefault(agent.id, _Known(agent, []))
        known.named = known.named or name

    def closed(self, call_ids: list[str]) -> None:
        """Tool calls whose results have arrived start no sub-agent any more, but those in the background."""
        gone = set(call_ids)
        for key, calls in list(self._arguments.items()) if gone else ():
            left = [c for c in calls if c not in gone]
            if len(left) == len(calls):
                continue
            self._late.setdefault(key, []).extend(c for c in calls if c in gone)
            if left:
                self._arguments[key] = left
            else:
                del self._arguments[key]

    def relabelled(self, call: str) -> None:
        """A note of an earlier life: this call is known to be a summary."""
        for known in self._known.values():
            for asked in (*known.asked, *self._strays):
                asked.known = asked.known or asked.call == call


def _quotes(text: str, answer: str) -> bool:
    """Whether a first user text holds an answer, or the part of it that is the summary."""
    parts = (answer.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0].strip() for tag in SUMMARY_TAGS)
    wanted = next((part for part in parts if part), answer.strip())
    return bool(wanted) and wanted in text


def _texts(arguments: str) -> list[str]:
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return []
    return [v for v in value.values() if isinstance(v, str) and v.strip()] if isinstance(value, dict) else []
