"""verifiers and prime-rl: saved results, trajectories with tokens, and the message graphs (traces) of verifiers v1.

Owns those three shapes. Ids are used where they exist, never made up: a trace saved by an evaluation has messages
only and is text level. Rollouts of one example, or traces of one task, are a group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from gyre_base.runblocks import Blocks
from gyre_base.runfile import Agent, Call, ExecEnd, ExecStart, Ids, Logprobs, Note, Record, Reward
from trajtools.readers.common import Talk, chat, ids, message_blocks, usage_of

FAILED = "model calls that failed"


def is_verifiers(first: Any) -> bool:
    if not isinstance(first, Mapping):
        return False
    return _is_trace(first) or (
        "completion" in first and "prompt" in first and ("reward" in first or "example_id" in first)
    )


def _is_trace(obj: Mapping[str, Any]) -> bool:
    return isinstance(obj.get("nodes"), list)


def verifiers_records(objects: Sequence[Any], name: str, blocks: Blocks) -> Iterator[Record]:
    """One execution per rollout or trace."""
    seen: Counter[str] = Counter()
    bad = 0
    for number, obj in enumerate(objects):
        if not is_verifiers(obj):
            bad += 1
            continue
        example = _example(obj, number)
        execution = f"example{example}-{seen[example]}"
        seen[example] += 1
        began, ended = _span(obj)
        yield ExecStart(exec=execution, task=example, group=f"example{example}", started=began)
        calls = list(_Trace(obj, execution, blocks).calls() if _is_trace(obj) else _rollout(obj, execution, blocks))
        yield from calls
        yield _reward(obj, execution)
        failed = sum(1 for call in obj.get("calls") or () if isinstance(call, Mapping) and call.get("error"))
        if failed:
            yield Note(exec=execution, text=f"{failed} {FAILED}", extra={"left_out": {FAILED: failed}})
        status = str(obj.get("stop_condition") or ("error" if _error(obj) else "finished"))
        yield ExecEnd(exec=execution, status=status, calls=len(calls), ended=ended)
    if bad:
        yield Note(text=f"{bad} lines were no rollout", extra={"left_out": {"lines that are no rollout": bad}})


def _example(obj: Mapping[str, Any], number: int) -> str:
    """What a rollout is of. The `id` of a trace is its own; older results call the example so."""
    task = obj.get("task")
    if _is_trace(obj):
        about = task if isinstance(task, Mapping) else {}
        data = about.get("data") if isinstance(about.get("data"), Mapping) else {}
        found = about.get("key") or about.get("hash") or (data or {}).get("id") or obj.get("example_id")
        return str(found if found is not None else obj.get("id", number))
    return str(obj.get("example_id", obj.get("id", number)))


def _span(obj: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """(start, end) in seconds; results know a duration only."""
    timing = obj.get("timing") if isinstance(obj.get("timing"), Mapping) else {}
    assert isinstance(timing, Mapping)
    agent = timing.get("agent")
    if isinstance(agent, Mapping) and agent.get("end"):
        return float(timing.get("start") or agent.get("start") or agent["end"]), float(agent["end"])
    took_ms = timing.get("total_ms", obj.get("total_ms"))
    return (0.0, float(took_ms) / 1000) if isinstance(took_ms, (int, float)) and took_ms > 0 else (None, None)


def _error(obj: Mapping[str, Any]) -> str | None:
    """An error in words: a text, an error chain of results, the last of a trace that did not end well."""
    found = obj.get("error")
    errors = obj.get("errors")
    if not found and isinstance(errors, list) and errors and not obj.get("ok"):
        found = errors[-1]
    if isinstance(found, Mapping):
        kind, text = found.get("type") or found.get("error"), found.get("message") or found.get("error_chain_str")
        return ": ".join(str(x) for x in (kind, text) if x)
    return str(found) if found else None


def _reward(obj: Mapping[str, Any], execution: str) -> Reward:
    """A trace names its rewards with weights; null there means that nobody scored, which is no 0."""
    value, metrics, rewards = obj.get("reward"), obj.get("metrics"), obj.get("rewards")
    parts = {k: float(v) for k, v in metrics.items() if _is_number(v)} if isinstance(metrics, Mapping) else {}
    if isinstance(rewards, Mapping):
        given = {k: r for k, r in rewards.items() if isinstance(r, Mapping) and _is_number(r.get("score"))}
        parts |= {k: float(r["score"]) for k, r in given.items()}
        scored = len(given) == len(rewards) > 0
        value = sum(float(r["score"]) * float(r.get("weight", 1.0)) for r in given.values()) if scored else None
    if (error := _error(obj)) is not None:
        return Reward(exec=execution, status="infra_failed", parts=parts, error=error)
    if _is_number(value):
        return Reward(exec=execution, status="scored", value=float(value), parts=parts)
    return Reward(exec=execution, status="unscored", parts=parts)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


# ---- results and trajectories ----------------------------------------------------------------------------------------


def _rollout(obj: Mapping[str, Any], execution: str, blocks: Blocks) -> Iterator[Call]:
    steps = obj.get("trajectory")
    if isinstance(steps, list) and steps and all(isinstance(s, Mapping) and _tokens(s) for s in steps):
        for number, step in enumerate(steps):
            yield _step(step["tokens"], execution, number)
        return
    talk = Talk(execution, blocks, prefix=f"{execution}-")
    prompt, completion = obj.get("prompt"), obj.get("completion")
    asked = prompt if isinstance(prompt, list) else [prompt]
    said = completion if isinstance(completion, list) else [{"role": "assistant", "content": completion}]
    repeats = len(said) >= len(asked) and all(map(_same, said, asked))  # some environments say the prompt again
    for message in asked:
        talk.hear(message_blocks(message))
    yield from chat(talk, said[len(asked) if repeats and asked else 0 :])


def _same(a: Any, b: Any) -> bool:
    return isinstance(a, Mapping) and isinstance(b, Mapping) and all(a.get(k) == b.get(k) for k in ("role", "content"))


def _tokens(step: Mapping[str, Any]) -> bool:
    tokens = step.get("tokens")
    return isinstance(tokens, Mapping) and bool(tokens.get("prompt_ids")) and "completion_ids" in tokens


def _step(tokens: Mapping[str, Any], execution: str, number: int) -> Call:
    sampled = _ids(tokens["completion_ids"])
    values = _logprobs(tokens.get("completion_logprobs"), len(sampled))
    mask = tokens.get("completion_mask")
    if values is not None and isinstance(mask, list) and len(mask) == len(values):
        values[~np.array(mask, np.bool_)] = np.nan
    at = float(number)
    return Call(
        exec=execution, call=f"{execution}-{number}", seq=number, t0=at, t1=at, label="main",
        prompt_ids=_ids(tokens["prompt_ids"]), completion_ids=sampled, logprobs=values,
    )  # fmt: skip


# ---- traces ----------------------------------------------------------------------------------------------------------


class _Trace:
    """A message graph. A node holds what its message adds to the path: tokens where known, else the message."""

    def __init__(self, obj: Mapping[str, Any], execution: str, blocks: Blocks) -> None:
        self._execution, self._blocks = execution, blocks
        self._nodes: list[Mapping[str, Any]] = [n if isinstance(n, Mapping) else {} for n in obj["nodes"]]
        self._about = {
            c["node"]: c for c in obj.get("calls") or () if isinstance(c, Mapping) and c.get("node") is not None
        }
        agent = obj.get("agent") if isinstance(obj.get("agent"), Mapping) else {}
        assert isinstance(agent, Mapping)
        self._trainable = agent.get("trainable", True) is not False
        self._token_level = any(node.get("token_ids") for node in self._nodes)

    def calls(self) -> Iterator[Call]:
        paths: list[Ids | None] = []
        made = 0
        for number, node in enumerate(self._nodes):
            parent = node.get("parent")
            before = paths[parent] if isinstance(parent, int) and parent < number else ids([])
            own = self._own(node)
            paths.append(np.concatenate([before, own]) if before is not None and own is not None else None)
            if not node.get("sampled") or before is None or own is None:
                continue
            found = self._tokens(node, before, own) if self._token_level else (before, own, None)
            if found is not None:
                yield self._call(number, made, node, *found)
                made += 1

    def _own(self, node: Mapping[str, Any]) -> Ids | None:
        """None: not known, and nothing behind it either."""
        if not self._token_level:
            return self._blocks.numbers(message_blocks(node.get("message")))
        given = node.get("token_ids")
        return _ids(given) if isinstance(given, list) and given else None

    @staticmethod
    def _tokens(node: Mapping[str, Any], before: Ids, own: Ids) -> tuple[Ids, Ids, Logprobs | None] | None:
        """(prompt, completion, logprobs): what the mask marks was sampled, what stands before it is the template's."""
        mask: NDArray[np.bool_] = np.array(node.get("mask") or [False] * len(own), np.bool_)
        if len(mask) != len(own) or not mask.any():
            return None
        first, last = int(mask.argmax()), len(mask) - int(mask[::-1].argmax())
        sampled = mask[first:last]
        given = node.get("logprobs")
        values = None
        if isinstance(given, list) and len(given) == int(sampled.sum()):  # one per sampled token
            values = np.full(last - first, np.nan, np.float32)
            values[sampled] = np.array(given, np.float64).astype(np.float32)
        elif isinstance(given, list) and len(given) == len(own):
            values = np.array(given, np.float64).astype(np.float32)[first:last]
            values[~sampled] = np.nan
        return np.concatenate([before, own[:first]]), own[first:last], values

    def _call(
        self, number: int, made: int, node: Mapping[str, Any], prompt: Ids, completion: Ids, logprobs: Logprobs | None
    ) -> Call:
        about = self._about.get(number, {})
        time = about.get("time") if isinstance(about.get("time"), Mapping) else {}
        began, ended = (time or {}).get("start"), (time or {}).get("end")
        links = [x.get("type") for x in node.get("semantic_parents") or () if isinstance(x, Mapping)]
        summary = "compaction_attempt" in links
        usage = usage_of(about.get("usage"))
        return Call(
            exec=self._execution,
            call=f"{self._execution}-{number}",
            seq=made,
            t0=float(began or number),
            t1=float(ended or began or number),
            agent=Agent(),
            purpose="summary" if summary else "turn",
            label="side" if not self._trainable else "main-summary" if summary else "main",
            finish=about.get("finish_reason") or node.get("finish_reason"),
            level="token" if self._token_level else "text",
            prompt_ids=prompt,
            completion_ids=completion,
            logprobs=logprobs,
            extra={"usage": usage} if usage else {},
        )


def _ids(values: Sequence[int]) -> Ids:
    return np.array(values, np.int64).astype(np.int32)


def _logprobs(values: Any, n: int) -> Logprobs | None:
    return np.array(values, np.float64).astype(np.float32) if isinstance(values, list) and len(values) == n else None
