"""What headers and model names say about a call, per harness. Pure; an unknown harness says nothing.

Claude Code: agent ids of sub-agents, and from 2.1.3xx on a request class. Codex: turn metadata as JSON. opencode:
session ids. For all: the model names that we choose for sub-agents and side calls (`*-sub`, `*-side`).
"""

from __future__ import annotations

from collections.abc import Mapping

import orjson

from proxyd.conversation import Hints

_CLASSES = {
    "main": ("main", "turn"),
    "subagent": ("sub-agent", "turn"),
    "compaction": ("", "summary"),
    "auxiliary": ("", "side"),
}


def hints_of(headers: Mapping[str, str], model: str) -> Hints:
    """`headers`: names in lower case; values are taken as they are and bounded here."""
    tool = headers.get("user-agent", "")[:200]
    side = "side" if model.endswith("-side") else ""
    role = "sub-agent" if model.endswith("-sub") else ""
    if "x-codex-turn-metadata" in headers:
        return _codex(headers, tool)
    if "x-session-id" in headers:
        return _opencode(headers, tool, side)
    agent = headers.get("x-claude-code-agent-id", "")[:100]
    said, purpose = _CLASSES.get(headers.get("x-claude-code-request-class", ""), ("", ""))
    role = "sub-agent" if agent else said or role
    parent = headers.get("x-claude-code-parent-agent-id", "")[:100]
    return Hints(agent=agent, parent=parent, role=role, purpose=purpose or side, tool=tool)


def _codex(headers: Mapping[str, str], tool: str) -> Hints:
    try:
        said = orjson.loads(headers["x-codex-turn-metadata"])
    except orjson.JSONDecodeError:
        said = {}
    said = said if isinstance(said, dict) else {}
    sub = "x-openai-subagent" in headers
    return Hints(
        agent=str(said.get("thread_id") or "")[:100],
        parent=headers.get("x-codex-parent-thread-id", "")[:100],
        role="sub-agent" if sub else "main",
        purpose="summary" if said.get("request_kind") == "compaction" else "",
        tool=tool,
    )


def _opencode(headers: Mapping[str, str], tool: str, side: str) -> Hints:
    parent = headers.get("x-parent-session-id", "")[:100]
    agent = headers["x-session-id"][:100]
    return Hints(agent=agent, parent=parent, role="sub-agent" if parent else "main", purpose=side, tool=tool)
