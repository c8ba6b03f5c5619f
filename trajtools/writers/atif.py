"""Recordings as ATIF 1.7 documents: one per execution, kept sub-agents embedded, compactions as continuation files.

Owns the mapping. What ATIF has no word for (attempts, policy versions, finish, what was dropped) stands under
`extra.gyre`. A step that an earlier document has already is marked as copied context, so that no target appears twice.
Text is that of blocks, or of a tokenizer; without either a message is empty and its ids are there.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from trajtools.breaks import analyse
from trajtools.choose import DEFAULT, choose, class_of
from trajtools.forest import Mark
from trajtools.recording import Execution, Recording
from trajtools.words import Say

VERSIONS = ("1.7", "1.8")
Json = dict[str, Any]


def write_atif(
    recording: Recording,
    out: Path,
    *,
    version: str = "1.7",
    prompt_ids: bool = False,
    say: Say | None = None,
    left_out: Counter[str] | None = None,
) -> int:
    """One .json if there is one document, else a folder of them. Returns bytes. Raises CannotWrite."""
    from trajtools.conversion import CannotWrite  # it imports us

    documents: dict[str, Json] = {}
    for name in sorted(recording.executions):
        maker = _Maker(recording.executions[name], version, prompt_ids, say)
        documents.update(maker.documents())
        if left_out is not None:
            left_out.update(maker.left_out)
    if not documents:
        raise CannotWrite("there is no call to write")
    if out.suffix == ".json":
        if len(documents) > 1:
            raise CannotWrite(f"this makes {len(documents)} documents: name a folder, not a .json file")
        return _put(out, next(iter(documents.values())))
    out.mkdir(parents=True, exist_ok=True)
    return sum(_put(out / name, document) for name, document in documents.items())


def _put(path: Path, document: Json) -> int:
    part = path.with_name(path.name + ".part")
    size = part.write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY))
    part.replace(path)
    return size


@dataclass(eq=False)
class _Maker:
    """The documents of one execution."""

    execution: Execution
    version: str
    prompt_ids: bool
    say: Say | None
    left_out: Counter[str] = field(default_factory=Counter)
    _told: set[str] = field(default_factory=set)  # calls that stand in an earlier document

    def documents(self) -> dict[str, Json]:
        """By file name; each names the next."""
        leaves = self._leaves()
        mains = [m for m in leaves if m.call.agent.role == "main"] or leaves[:1]
        subs = [m for m in leaves if m not in mains]
        stem = re.sub(r"[^A-Za-z0-9._-]", "_", self.execution.id)
        names = [f"{stem}.json" if i == 0 else f"{stem}.cont-{i}.json" for i in range(len(mains))]
        out = {}
        for i, (name, leaf) in enumerate(zip(names, mains, strict=True)):
            document = self._document(leaf, f"{self.execution.id}" + (f"-cont-{i}" if i else ""))
            if i == 0:
                document["extra"] = {"gyre": self._about()}
                if subs:
                    document["subagent_trajectories"] = [
                        self._document(sub, f"{sub.call.agent.id}-{n}") for n, sub in enumerate(subs)
                    ]
            if i + 1 < len(names):
                document["continued_trajectory_ref"] = names[i + 1]
            out[name] = document
        told = len(self._told)
        if missing := len(self.execution.forest) - told:
            self.left_out["calls on no path that is told (retries, stubs, not chosen)"] += missing
        return out

    def _leaves(self) -> list[Mark]:
        """Where the told paths end, by time: the kept trajectories, or at text level every end of a history."""
        forest = self.execution.forest
        analysis = analyse(forest)
        kept = [t.leaf for t in choose(forest, DEFAULT, analysis).kept]
        if not kept:
            ends = [m for m in forest.marks() if m.id not in analysis.extended and m.id not in analysis.superseded]
            kept = ends or forest.marks()[-1:]
        return sorted(kept, key=lambda m: (m.call.t1, m.call.seq))

    def _about(self) -> Json:
        reward = self.execution.reward
        about: Json = {"level": self.execution.level, "group": self.execution.group}
        if reward is not None:
            about["reward"] = {"status": reward.status, "value": reward.value}
        return about

    def _document(self, leaf: Mark, name: str) -> Json:
        calls = [m for s in leaf.segment.path() for m in s.marks if m.end <= leaf.end]
        calls.sort(key=lambda m: (m.end, m.order))
        steps = list(self._steps(leaf, _nested(calls)))
        for number, step in enumerate(steps, 1):
            step["step_id"] = number
        models = [m.call.extra.get("model") for m in calls if m.call.extra.get("model")]
        agent = {"name": leaf.call.agent.id, "version": "unknown", **({"model_name": str(models[0])} if models else {})}
        return {
            "schema_version": f"ATIF-v{self.version}",
            "session_id": self.execution.id,
            "trajectory_id": name,
            "agent": agent,
            "steps": [{"step_id": s.pop("step_id"), **s} for s in steps],
            "final_metrics": {"total_steps": len(steps)},
            "extra": {"gyre": {"class": class_of(leaf), "leaf": leaf.id}},
        }

    def _steps(self, leaf: Mark, calls: Sequence[Mark]) -> Iterator[Json]:
        tokens = self.execution.forest.tokens(leaf)
        at = 0
        last: Json | None = None
        for mark in calls:
            copied = mark.id in self._told
            for step in self._context(tokens[at : mark.prompt_tokens], last):
                yield {**step, **({"is_copied_context": True} if copied else {})}
            last = self._answer(mark, tokens, copied)
            self._told.add(mark.id)
            yield last
            at = mark.end

    def _context(self, tokens: Any, last: Json | None) -> Iterator[Json]:
        if not len(tokens):
            return
        if self.execution.blocks is None:
            about = {"gyre": {"tokens": len(tokens)}}
            yield {"source": "user", "message": self.say(tokens.tolist()) if self.say else "", "extra": about}
            return
        for block in self.execution.blocks.many(tokens):
            if block["role"] == "tool" and last is not None:
                last.setdefault("observation", {"results": []})["results"].append({"content": block["text"]})
            else:
                source = block["role"] if block["role"] in ("system", "user") else "user"
                note = {} if source == block["role"] else {"extra": {"gyre": {"role": block["role"]}}}
                yield {"source": source, "message": block["text"], **note}

    def _answer(self, mark: Mark, tokens: Any, copied: bool) -> Json:
        call = mark.call
        step: Json = {"source": "agent", "message": ""}
        if call.t1 > 1e6:
            step["timestamp"] = datetime.fromtimestamp(call.t1, UTC).isoformat().replace("+00:00", "Z")
        completion = tokens[mark.prompt_tokens : mark.end]
        metrics: Json = {}
        if self.execution.blocks is not None:
            self._say_blocks(step, self.execution.blocks.many(completion))
            usage = call.extra.get("usage")
            names = ("prompt_tokens", "completion_tokens", "cached_tokens")
            metrics = {k: usage[k] for k in names if isinstance(usage, dict) and isinstance(usage.get(k), int)}
        else:
            step["message"] = self.say(completion.tolist()) if self.say else ""
            metrics = {"prompt_tokens": mark.prompt_tokens, "completion_tokens": mark.sampled}
            metrics["completion_token_ids"] = completion.tolist()
            if self.prompt_ids:
                metrics["prompt_token_ids"] = tokens[: mark.prompt_tokens].tolist()
            if mark.logprobs is not None and np.isfinite(mark.logprobs).all():
                metrics["logprobs"] = [float(x) for x in mark.logprobs]
            elif mark.logprobs is not None:
                self.left_out["calls with a token that has no finite logprob: their logprobs"] += 1
        if metrics:
            step["metrics"] = metrics
        if copied:
            step["is_copied_context"] = True
        about: Json = {"call": call.call, "label": call.label, "finish": call.finish, "delivered": call.delivered}
        about |= {"policy": [[s.policy, s.start, s.end] for s in call.spans], "attempt": call.attempt.n or None}
        step["extra"] = {"gyre": {k: v for k, v in about.items() if v not in (None, [])}}
        return step

    @staticmethod
    def _say_blocks(step: Json, blocks: Sequence[Json]) -> None:
        said = [b["text"] for b in blocks if b["kind"] not in ("reasoning", "tool_call")]
        step["message"] = "\n".join(said)
        if thoughts := [b["text"] for b in blocks if b["kind"] == "reasoning"]:
            step["reasoning_content"] = "\n".join(thoughts)
        calls = [b for b in blocks if b["kind"] == "tool_call"]
        if calls:
            step["tool_calls"] = [
                {
                    "tool_call_id": f"call_{i}",
                    "function_name": b.get("name", "unknown"),
                    "arguments": _arguments(b["text"]),
                }
                for i, b in enumerate(calls)
            ]


def _nested(calls: Sequence[Mark]) -> list[Mark]:
    """Calls of a path that follow one another: one whose prompt ends inside an earlier answer says the same again."""
    out: list[Mark] = []
    for mark in calls:
        if not out or mark.prompt_tokens >= out[-1].end:
            out.append(mark)
    return out


def _arguments(text: str) -> Json:
    try:
        given = orjson.loads(text)
    except orjson.JSONDecodeError:
        given = None
    return given if isinstance(given, dict) else {"text": text}
