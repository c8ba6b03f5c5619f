"""ATIF 1.0 to 1.8 (Agent Trajectory Interchange Format). Token level where every model step has its ids, else text.

Copied steps are context, never targets; at token level so is a step that stands for several model calls. Embedded
sub-agents, sub-agents in files and continuations in files are followed. Cannot tell: retries, interleaving, versions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from gyre_base.runblocks import Blocks
from gyre_base.runfile import Agent, Call, ExecEnd, ExecStart, Note, Record, Reward
from trajtools.readers.common import Block, Talk, block, part_block, seconds, usage_of

HIGHEST = (1, 8)


def is_atif(first: Mapping[str, Any]) -> bool:
    return str(first.get("schema_version", "")).upper().startswith("ATIF") and isinstance(first.get("steps"), list)


def records(objects: Sequence[Any], name: str, blocks: Blocks, path: Path | None) -> Iterator[Record]:
    folder = path.parent if path is not None else None
    used: Counter[str] = Counter()
    for number, document in enumerate(objects):
        if not (isinstance(document, Mapping) and is_atif(document)):
            yield Note(text=f"document {number} is no ATIF", extra={"left_out": {"documents that are no ATIF": 1}})
            continue
        known = document.get("session_id") or document.get("trajectory_id") or f"{Path(name).stem}-{number}"
        used[str(known)] += 1
        execution = str(known) if used[str(known)] == 1 else f"{known}-{used[str(known)]}"
        yield from _Document(execution, blocks, folder).records(document)


@dataclass(eq=False)
class _Document:
    """One document with its continuations and sub-agents: one execution."""

    execution: str
    blocks: Blocks
    folder: Path | None
    left_out: Counter[str] = field(default_factory=Counter)
    made: int = 0
    seen: set[str] = field(default_factory=set)

    def records(self, document: Mapping[str, Any]) -> Iterator[Record]:
        gyre = _gyre(document)
        group = str(gyre.get("group", ""))
        yield ExecStart(exec=self.execution, task=str(gyre.get("task") or self.execution), group=group)
        version = str(document.get("schema_version"))
        if _version(version) > HIGHEST:
            yield Note(exec=self.execution, text=f"{version} is newer than what is known here")
        tree = list(self._tree(document, Agent(), 0))
        tokens = bool(tree) and all(_has_ids(step) for part, _ in tree for step in _own_steps(part))
        for part, agent in tree:
            yield from self._tokens(part, agent) if tokens else self._text(part, agent)
        if isinstance(given := gyre.get("reward"), Mapping):
            yield Reward(exec=self.execution, status=str(given.get("status", "unscored")), value=given.get("value"))
        if self.left_out:
            yield Note(exec=self.execution, text="steps left out", extra={"left_out": dict(self.left_out)})
        yield ExecEnd(exec=self.execution, status="recorded", calls=self.made)

    def _tree(self, document: Mapping[str, Any], agent: Agent, depth: int) -> Iterator[tuple[Mapping[str, Any], Agent]]:
        """The document, its sub-agents, its continuations; files that are not there are counted."""
        if depth > 32:
            return
        yield document, agent
        for sub in document.get("subagent_trajectories") or ():
            if isinstance(sub, Mapping):
                name = str(sub.get("trajectory_id") or sub.get("session_id") or f"sub-{depth}")
                yield from self._tree(sub, Agent(id=name, role="sub-agent", parent=agent.id), depth + 1)
        for step in document.get("steps") or ():
            for ref in _references(step):
                if (found := self._file(ref)) is not None:
                    name = str(found.get("trajectory_id") or found.get("session_id") or ref)
                    yield from self._tree(found, Agent(id=name, role="sub-agent", parent=agent.id), depth + 1)
        after = document.get("continued_trajectory_ref")
        if isinstance(after, str) and (found := self._file(after)) is not None:
            yield from self._tree(found, agent, depth + 1)

    def _file(self, reference: str) -> Mapping[str, Any] | None:
        """A document in the same folder or below; nothing else is opened."""
        if self.folder is None or reference in self.seen:
            return None
        self.seen.add(reference)
        path = (self.folder / reference).resolve()
        if not path.is_relative_to(self.folder.resolve()) or not path.is_file():
            self.left_out["files referred to that are not here"] += 1
            return None
        try:
            found = orjson.loads(path.read_bytes())
        except orjson.JSONDecodeError:
            found = None
        return found if isinstance(found, Mapping) and is_atif(found) else None

    def _tokens(self, document: Mapping[str, Any], agent: Agent) -> Iterator[Call]:
        talk = Talk(self.execution, self.blocks, agent)
        for step in _own_steps(document):
            metrics = step["metrics"]
            prompt, completion = (np.array(metrics[f"{k}_token_ids"], np.int64) for k in ("prompt", "completion"))
            logprobs, about = metrics.get("logprobs"), self._about(step, talk)
            single = step.get("llm_call_count") in (None, 1)
            fits = single and isinstance(logprobs, list) and len(logprobs) == len(completion)
            if not fits:
                self.left_out["steps without a logprob per token (context only)"] += 1
            yield Call(
                exec=self.execution, label=_label(agent), agent=agent, **about,
                prompt_ids=prompt.astype(np.int32), completion_ids=completion.astype(np.int32),
                logprobs=np.array(logprobs, np.float64).astype(np.float32) if fits else None,
            )  # fmt: skip

    def _text(self, document: Mapping[str, Any], agent: Agent) -> Iterator[Call]:
        talk = Talk(self.execution, self.blocks, agent)
        for step in document["steps"]:
            if not isinstance(step, Mapping):
                self.left_out["steps that are no object"] += 1
                continue
            said = _step_blocks(step)
            if step.get("source") == "agent" and not step.get("is_copied_context") and step.get("llm_call_count") != 0:
                about = self._about(step, talk)
                yield talk.answer(said, name=about.pop("call"), label=_label(agent), **about)
            else:
                talk.hear(said)
            talk.hear(_results(step))

    def _about(self, step: Mapping[str, Any], talk: Talk) -> dict[str, Any]:
        at = seconds(step.get("timestamp"))
        talk.clock += 1.0
        gyre = _gyre(step)
        name = str(gyre.get("call") or f"{talk.agent.id}-{step.get('step_id', self.made)}-{self.made}")
        several = step.get("llm_call_count") if step.get("llm_call_count") not in (None, 1) else None
        extra = {"usage": usage_of(step.get("metrics")), "model": step.get("model_name"), "llm_call_count": several}
        seq, self.made = self.made, self.made + 1
        t1 = at if at is not None else talk.clock
        return {"call": name, "seq": seq, "t0": t1, "t1": t1, "extra": {k: v for k, v in extra.items() if v}}


def _label(agent: Agent) -> str:
    return "main" if agent.role == "main" else "sub-agent"


def _gyre(given: Mapping[str, Any]) -> Mapping[str, Any]:
    extra = given.get("extra")
    found = extra.get("gyre") if isinstance(extra, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _version(text: str) -> tuple[int, ...]:
    digits = text.lower().removeprefix("atif-v").removeprefix("atif").strip("-v ")
    return tuple(int(x) for x in digits.split(".") if x.isdigit())[:2]


def _own_steps(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Model steps that were made here, not copied."""
    return [
        s
        for s in document["steps"]
        if isinstance(s, Mapping) and s.get("source") == "agent"
        and not s.get("is_copied_context") and s.get("llm_call_count") != 0
    ]  # fmt: skip


def _has_ids(step: Mapping[str, Any]) -> bool:
    metrics = step.get("metrics")
    if not isinstance(metrics, Mapping):
        return False
    return all(isinstance(metrics.get(k), list) and metrics[k] for k in ("prompt_token_ids", "completion_token_ids"))


def _step_blocks(step: Mapping[str, Any]) -> list[Block]:
    role = {"agent": "assistant"}.get(str(step.get("source")), str(step.get("source") or "user"))
    out = [block(role, "reasoning", step["reasoning_content"])] if step.get("reasoning_content") else []
    message = step.get("message")
    if isinstance(message, list):
        out.extend(part_block(role, part) for part in message)
    elif message:
        out.append(block(role, "text", message))
    for call in step.get("tool_calls") or ():
        if isinstance(call, Mapping):
            out.append(block(role, "tool_call", call.get("arguments"), call.get("function_name")))
    return out


def _results(step: Mapping[str, Any]) -> list[Block]:
    observation = step.get("observation")
    results = observation.get("results") if isinstance(observation, Mapping) else None
    return [block("tool", "tool_result", r.get("content")) for r in results or () if isinstance(r, Mapping)]


def _references(step: Any) -> Iterator[str]:
    """Paths of sub-agents that live in files."""
    observation = step.get("observation") if isinstance(step, Mapping) else None
    for result in (observation.get("results") or ()) if isinstance(observation, Mapping) else ():
        refs = result.get("subagent_trajectory_ref") if isinstance(result, Mapping) else None
        for ref in refs if isinstance(refs, list) else [refs]:
            path = ref.get("trajectory_path") if isinstance(ref, Mapping) else ref
            if isinstance(path, str):
                yield path
