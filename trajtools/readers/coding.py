"""Session files of coding agents: Claude Code, Codex. Text level: they keep no token ids.

Claude Code writes one line per content block (a message id comes several times), sub-agents inline or in files of their
own, and a tree of parents in which a rewind leaves a dead branch. Codex writes items and events of one history.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from gyre_base.runblocks import Blocks
from gyre_base.runfile import Agent, Call, ExecEnd, ExecStart, Note, Record
from trajtools.readers.common import Block, Talk, ids, message_blocks, part_block, seconds, usage_of

CLAUDE_TYPES = ("user", "assistant", "system", "summary", "attachment", "progress", "file-history-snapshot")
_ANSWERS = ("reasoning", "function_call", "custom_tool_call", "local_shell_call", "web_search_call")


def is_claude(first: Mapping[str, Any]) -> bool:
    typed = first.get("type") in CLAUDE_TYPES
    return typed and bool({"uuid", "sessionId", "leafUuid", "messageId"} & set(first))


def is_codex(first: Mapping[str, Any]) -> bool:
    return first.get("type") in ("session_meta", "turn_context", "response_item", "event_msg") and "payload" in first


# ---- Claude Code ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Line:
    """One line of a session; `at` its place over all files."""

    at: int
    obj: Mapping[str, Any]
    agent: str

    @property
    def id(self) -> str:
        return str(self.obj.get("uuid") or f"line{self.at}")

    @property
    def message(self) -> Mapping[str, Any]:
        found = self.obj.get("message")
        return found if isinstance(found, Mapping) else {}

    @property
    def parts(self) -> list[Any]:
        content = self.message.get("content")
        return content if isinstance(content, list) else []


def claude_records(objects: Sequence[Any], name: str, blocks: Blocks, path: Path | None) -> Iterator[Record]:
    session = next(
        (str(o["sessionId"]) for o in objects if isinstance(o, dict) and o.get("sessionId")), Path(name).stem
    )
    rows = [(obj, "") for obj in objects]
    for agent, more in _agent_files(path, session):
        rows.extend((obj, agent) for obj in more)
    yield from _Session(session, blocks).records(rows)


def _agent_files(path: Path | None, session: str) -> Iterator[tuple[str, list[Any]]]:
    """Sub-agents that have a file of their own: in subagents/ beside or below, or agent-*.jsonl of the same session."""
    if path is None or path.stem.startswith("agent-"):
        return
    folders = [path.with_suffix("") / "subagents", path.parent / "subagents"]
    found = [p for folder in folders for p in sorted(folder.glob("*.jsonl"))] + sorted(
        path.parent.glob("agent-*.jsonl")
    )
    for file in dict.fromkeys(found):
        objects = [_parsed(line) for line in file.read_bytes().splitlines() if line.strip()]
        if any(isinstance(o, dict) and o.get("sessionId") == session for o in objects):
            yield file.stem.removeprefix("agent-"), objects


def _parsed(line: bytes) -> Any:
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        return None


@dataclass(eq=False)
class _Session:
    """One session: its lines as a tree, its calls as paths."""

    name: str
    blocks: Blocks
    lines: dict[str, _Line] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)
    results: dict[str, _Line] = field(default_factory=dict)  # by tool use id

    def records(self, rows: Iterable[tuple[Any, str]]) -> Iterator[Record]:
        notes = self._take(rows)
        calls = list(self._calls())
        yield ExecStart(exec=self.name, task=self.name)
        yield from notes
        yield from calls
        if self.left_out:
            yield Note(exec=self.name, text="lines left out", extra={"left_out": dict(self.left_out)})
        yield ExecEnd(exec=self.name, status="recorded", calls=len(calls))

    def _take(self, rows: Iterable[tuple[Any, str]]) -> list[Note]:
        notes = []
        for at, (obj, of_file) in enumerate(rows):
            if not isinstance(obj, Mapping):
                self.left_out["lines that are no object"] += 1
                continue
            if obj.get("type") == "summary":
                notes.append(Note(exec=self.name, text=f"summary: {obj.get('summary', '')}"))
                continue
            agent = str(obj.get("agentId") or of_file or "")
            if obj.get("isSidechain") and not agent:
                parent = self.lines.get(str(obj.get("parentUuid")))
                agent = parent.agent if parent is not None and parent.agent else f"side-{at}"
            line = _Line(at, obj, agent)
            self.lines[line.id] = line
            for part in line.parts:
                if isinstance(part, Mapping) and part.get("type") == "tool_result":
                    self.results.setdefault(str(part.get("tool_use_id")), line)
        return notes

    def _calls(self) -> Iterator[Call]:
        groups: dict[tuple[str, str], list[_Line]] = defaultdict(list)
        for line in self.lines.values():
            if line.obj.get("type") == "assistant":
                groups[line.agent, str(line.message.get("id") or line.id)].append(line)
        linear = not any(line.obj.get("parentUuid") for line in self.lines.values())
        for seq, ((agent, message), lines) in enumerate(sorted(groups.items(), key=lambda g: g[1][0].at)):
            mine = {line.at for line in lines}
            before = self._before(lines[0], linear)
            path = [line for line in before if line.at not in mine]
            yield self._call(seq, agent, message, lines, path)

    def _before(self, line: _Line, linear: bool) -> list[_Line]:
        """The lines that the model saw, in order."""
        if linear:
            return [x for x in self.lines.values() if x.agent == line.agent and x.at < line.at]
        path, seen = [], {line.id}
        parent = self.lines.get(str(line.obj.get("parentUuid")))
        while parent is not None and parent.id not in seen:
            path.append(parent)
            seen.add(parent.id)
            parent = self.lines.get(str(parent.obj.get("parentUuid")))
        for tool in [
            p.get("id") for x in path for p in x.parts if isinstance(p, Mapping) and p.get("type") == "tool_use"
        ]:
            result = self.results.get(str(tool))  # results of parallel tools hang beside the path
            if result is not None and result.id not in seen and result.at < line.at:
                path.append(result)
                seen.add(result.id)
        return sorted(path, key=lambda x: x.at)

    def _call(self, seq: int, agent: str, message: str, lines: list[_Line], path: list[_Line]) -> Call:
        history: list[int] = []
        for line in path:
            history.extend(self.blocks.numbers(self._blocks(line)).tolist())
        last = lines[-1]
        usage = usage_of(last.message.get("usage"))  # the last line has the final count
        role = "sub-agent" if agent else "main"
        answer = [b for line in lines for b in self._blocks(line)]
        t1 = seconds(last.obj.get("timestamp")) or 0.0
        before = [t for line in path if (t := seconds(line.obj.get("timestamp"))) is not None]
        extra = {"usage": usage, "model": last.message.get("model")}
        return Call(
            exec=self.name, call=message, seq=seq, t0=min(before[-1] if before else t1, t1), t1=t1,
            agent=Agent(id=agent or "main", role=role, parent="main" if agent else None), label=role, level="text",
            finish=last.message.get("stop_reason"), prompt_ids=ids(history),
            completion_ids=self.blocks.numbers(answer), extra={k: v for k, v in extra.items() if v},
        )  # fmt: skip

    @staticmethod
    def _blocks(line: _Line) -> list[Block]:
        kind = line.obj.get("type")
        if kind in ("user", "assistant"):
            return message_blocks(line.message or line.obj.get("content"), str(kind))
        return []  # notices of the program, which the model does not see


# ---- Codex ---------------------------------------------------------------------------------------------------------


def codex_records(objects: Sequence[Any], name: str, blocks: Blocks) -> Iterator[Record]:
    lines = [o for o in objects if isinstance(o, Mapping) and isinstance(o.get("payload"), Mapping)]
    meta: Mapping[str, Any] = next((o["payload"] for o in lines if o.get("type") == "session_meta"), {})
    session = str(meta.get("id") or Path(name).stem)
    yield ExecStart(exec=session, task=session, started=seconds(meta.get("timestamp")))
    calls = _Codex(Talk(session, blocks, prefix="call-")).calls(lines)
    yield from calls
    ended = any(o["payload"].get("type") == "task_complete" for o in lines)
    yield ExecEnd(exec=session, status="finished" if ended else "recorded", calls=len(calls))
    if len(lines) < len(objects):
        n = len(objects) - len(lines)
        yield Note(exec=session, text="lines left out", extra={"left_out": {"lines that are no event": n}})


@dataclass(eq=False)
class _Codex:
    """An answer is a run of the model's items; the next context item, or the count of its tokens, ends it."""

    talk: Talk
    model: str = ""
    pending: list[Block] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    heard: float | None = None
    out: list[Call] = field(default_factory=list)

    def calls(self, lines: Iterable[Mapping[str, Any]]) -> list[Call]:
        for line in lines:
            self._line(str(line.get("type")), line["payload"], seconds(line.get("timestamp")))
        self._end({})
        return self.out

    def _line(self, kind: str, payload: Mapping[str, Any], at: float | None) -> None:
        if kind == "turn_context":
            self.model = str(payload.get("model") or self.model)
        elif kind == "compacted":
            self._end({})
            self.talk.forget()
            for item in payload.get("replacement_history") or [payload.get("message", "")]:
                self.talk.hear(message_blocks(item))
        elif kind == "event_msg" and payload.get("type") == "token_count":
            info = payload.get("info")
            self._end(usage_of(info.get("last_token_usage")) if isinstance(info, Mapping) else {})
        elif kind == "response_item":
            self._item(payload, at)

    def _item(self, item: Mapping[str, Any], at: float | None) -> None:
        kind = item.get("type")
        if kind in _ANSWERS or (kind == "message" and item.get("role") == "assistant"):
            self.pending.extend(message_blocks(item) if kind == "message" else [part_block("assistant", item)])
            self.times.extend([at] if at is not None else [])
            return
        self._end({})
        self.talk.hear(message_blocks(item) if kind == "message" else [part_block("tool", item)])
        self.heard = at if at is not None else self.heard

    def _end(self, usage: dict[str, int]) -> None:
        if not self.pending:
            return
        t1 = self.times[-1] if self.times else None
        t0 = self.heard if self.heard is not None else t1
        extra = {"usage": usage, "model": self.model}
        self.out.append(self.talk.answer(self.pending, t0=t0, t1=t1, extra=extra))
        self.pending, self.times = [], []
