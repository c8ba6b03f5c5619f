"""Who made a call and what for, by structure alone: no header, no wording, no tool name.

- The first root of an execution is the main agent.
- A root whose system and first user text are those of a known agent belongs to it (a retry, or an edited history).
- A root whose first user text is a text argument of an earlier tool call is that call's sub-agent.
- A root of an agent's system prompt that quotes a text-only answer to one appended user message continues that agent
  after a compaction; the quoted call was its summary. That is known only now, so the earlier call is relabelled by a
  note.
- Anything else is unlabelled. A call that continues a history has the agent of that history.

Pure. The note in the call log: `{"k":"note","text":"relabel","exec":...,"call":...,"purpose":"summary","label":...}`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import orjson

from gyre_base.runfile import Agent
from proxyd.conversation import Conversation, Spoken, digest, text_bytes

ASKED_KEPT = 8  # text-only answers per agent that may yet turn out to be summaries


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


@dataclass(slots=True)
class _Known:
    agent: Agent
    roots: list[Root]
    asked: deque[_Asked] = field(default_factory=lambda: deque(maxlen=ASKED_KEPT))


def root_of(conversation: Conversation) -> tuple[Root, str, str]:
    """(digests, first user text, its last block) of a conversation."""
    system = "".join(m.text for m in conversation.messages[:1] if m.role == "system")
    user = next((m for m in conversation.messages if m.role == "user"), None)
    text = user.text if user else ""
    last = (user.last_text or text) if user else ""
    return Root(_hex(system), _hex(text), len(text)), text, last


def _hex(text: str) -> str:
    return digest(text_bytes(text)).hex()


def label_of(agent: Agent, purpose: str) -> str:
    """The run file's label of a call."""
    if agent.role not in ("main", "sub-agent"):
        return "unlabelled"
    return f"{agent.role}-summary" if purpose == "summary" else agent.role


class Labels:
    """The agents of one execution. `root` is asked for every new root, `answered` told of every finished call."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._arguments: dict[str, str] = {}  # digest of a text argument -> the tool call that gave it

    def root(self, conversation: Conversation) -> tuple[Agent, Root, list[Relabel]]:
        """The agent of a history that continues none of ours."""
        root, text, last = root_of(conversation)
        if not self._known:
            return self._join(Agent(), root), root, []
        for known in self._known.values():
            if root in known.roots:
                return known.agent, root, []
        for candidate in (text, last):
            parent = self._arguments.get(_hex(candidate.strip()))
            if parent is not None:
                return self._join(Agent(id=f"sub-{parent}", role="sub-agent", parent=parent), root), root, []
        found = self._compacted(root, text)
        if found is not None:
            return found[0].agent, root, [found[1]]
        return self._join(Agent(id=f"other-{len(self._known)}", role="unlabelled"), root), root, []

    def _join(self, agent: Agent, root: Root) -> Agent:
        known = self._known.setdefault(agent.id, _Known(agent, []))
        if root not in known.roots:
            known.roots.append(root)
        return agent

    def _compacted(self, root: Root, text: str) -> tuple[_Known, Relabel] | None:
        for known in self._known.values():
            if known.agent.role == "unlabelled" or root.system not in {r.system for r in known.roots}:
                continue
            for asked in reversed(known.asked):
                if _quotes(text, asked.text) or (not asked.text.strip() and self._extends(known, text)):
                    known.asked.remove(asked)
                    known.roots.append(root)
                    return known, Relabel(asked.call, "summary", label_of(known.agent, "summary"))
        return None

    @staticmethod
    def _extends(known: _Known, text: str) -> bool:
        """Whether a first user text begins with that of an earlier root: an empty summary leaves no other trace."""
        return any(len(text) > r.user_length and _hex(text[: r.user_length]) == r.user for r in known.roots)

    def answered(self, call: str, agent: Agent, spoken: Spoken, *, asked: bool, root: Root | None) -> None:
        """`asked`: the request was a recorded history (and tool results) plus exactly one user message."""
        known = self._known.setdefault(agent.id, _Known(agent, []))
        if root is not None and root not in known.roots:
            known.roots.append(root)
        if asked and not spoken.calls:
            known.asked.append(_Asked(call, spoken.text))
        for made in spoken.calls:
            for value in _texts(made.arguments):
                self._arguments[_hex(value.strip())] = made.id

    def closed(self, call_ids: list[str]) -> None:
        """Tool calls whose results have arrived start no sub-agent any more."""
        gone = set(call_ids)
        if gone and any(c in gone for c in self._arguments.values()):
            self._arguments = {k: c for k, c in self._arguments.items() if c not in gone}

    def relabelled(self, call: str) -> None:
        """A note of an earlier life: this call is taken."""
        for known in self._known.values():
            known.asked = deque((a for a in known.asked if a.call != call), maxlen=ASKED_KEPT)


def _quotes(text: str, answer: str) -> bool:
    """Whether a first user text holds an answer, or the `<summary>` part of it."""
    inner = answer.partition("<summary>")[2].partition("</summary>")[0].strip()
    wanted = inner or answer.strip()
    return bool(wanted) and wanted in text


def _texts(arguments: str) -> list[str]:
    try:
        value = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return []
    return [v for v in value.values() if isinstance(v, str) and v.strip()] if isinstance(value, dict) else []
