"""Logs of chat endpoints (OpenAI, LiteLLM) and verifiers results. Ids are used where they exist, never made up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gyre_base.runblocks import Blocks
from gyre_base.runfile import Call, ExecEnd, ExecStart, Ids, Logprobs, Note, Record, Reward
from trajtools.readers.common import Talk, chat, message_blocks, seconds, usage_of

# ---- requests and responses ----------------------------------------------------------------------------------------


def is_chat_log(first: Any) -> bool:
    if not isinstance(first, Mapping):
        return False
    request = first.get("request") if isinstance(first.get("request"), Mapping) else first
    assert isinstance(request, Mapping)
    return isinstance(request.get("messages"), list) or ("messages" in request and "response" in first)


def chat_log_records(objects: Sequence[Any], name: str, blocks: Blocks) -> Iterator[Record]:
    """One entry per request. Entries of one trace or session are one execution; without either, all of them are."""
    talks: dict[str, Talk] = {}
    left_out: Counter[str] = Counter()
    for number, entry in enumerate(objects):
        if not is_chat_log(entry):
            left_out["entries that are no request"] += 1
            continue
        execution = _trace(entry) or Path(name).stem
        if execution not in talks:
            talks[execution] = Talk(execution, blocks, prefix=f"{execution}-")
            yield ExecStart(exec=execution, task=execution)
        calls = list(_entry(entry, talks[execution], number))
        if not calls:
            left_out["requests without an answer"] += 1
        yield from calls
    for execution, talk in talks.items():
        yield ExecEnd(exec=execution, status="recorded", calls=talk.made)
    if left_out:
        yield Note(text="entries left out", extra={"left_out": dict(left_out)})


def _trace(entry: Mapping[str, Any]) -> str | None:
    metadata = entry.get("metadata") if isinstance(entry.get("metadata"), Mapping) else {}
    assert isinstance(metadata, Mapping)
    for key in ("session_id", "litellm_session_id", "trace_id", "litellm_trace_id"):
        if found := entry.get(key) or metadata.get(key):
            return str(found)
    return None


def _entry(entry: Mapping[str, Any], talk: Talk, number: int) -> Iterator[Call]:
    request = entry["request"] if isinstance(entry.get("request"), Mapping) else entry
    messages = request["messages"] if isinstance(request["messages"], list) else [request["messages"]]
    response = entry.get("response", entry if "choices" in entry else None)
    talk.forget()
    if response is None:  # a conversation without its requests: each assistant message was a call
        yield from chat(talk, messages)
        return
    answer, about = _answer(response)
    if answer is None or entry.get("status") == "failure":
        return
    for message in messages:
        talk.hear(message_blocks(message))
    about = {**about, "model": about.get("model") or entry.get("model")}
    finish = about.pop("finish", None)
    yield talk.answer(
        message_blocks(answer, "assistant"), keep=False, name=str(entry.get("id") or f"{talk.prefix}{number}"),
        t0=seconds(entry.get("startTime")), t1=seconds(entry.get("endTime")), finish=finish, extra=about,
    )  # fmt: skip


def _answer(response: Any) -> tuple[Any, dict[str, Any]]:
    """(the message, about it) of a whole response, of the pieces of a streamed one, or of a bare text."""
    if isinstance(response, str):
        return response or None, {}
    if isinstance(response, list):
        return _assembled([r for r in response if isinstance(r, Mapping)])
    if not isinstance(response, Mapping):
        return None, {}
    about: dict[str, Any] = {"usage": usage_of(response.get("usage")), "model": response.get("model")}
    choices = response.get("choices")
    if isinstance(choices, list) and choices and isinstance(choices[0], Mapping):
        about["finish"] = choices[0].get("finish_reason")
        return choices[0].get("message", choices[0].get("text")), about
    if response.get("role") == "assistant" or "content" in response:
        about["finish"] = response.get("stop_reason")
        return {"role": "assistant", "content": response.get("content")}, about
    return None, {}


def _assembled(chunks: Sequence[Mapping[str, Any]]) -> tuple[Any, dict[str, Any]]:
    """The message of a stream."""
    said: dict[str, str] = {"content": "", "reasoning_content": ""}
    tools: dict[int, dict[str, str]] = {}
    about: dict[str, Any] = {}
    for chunk in chunks:
        about |= {"usage": usage_of(chunk.get("usage"))} if chunk.get("usage") else {}
        about["model"] = chunk.get("model") or about.get("model")
        for choice in chunk.get("choices") or ():
            about["finish"] = choice.get("finish_reason") or about.get("finish")
            delta = choice.get("delta") or {}
            for key in said:
                said[key] += delta.get(key) or ""
            for call in delta.get("tool_calls") or ():
                tool = tools.setdefault(call.get("index", 0), {"name": "", "arguments": ""})
                function = call.get("function") or {}
                tool["name"] += function.get("name") or ""
                tool["arguments"] += function.get("arguments") or ""
    calls = [{"function": tool} for _, tool in sorted(tools.items())]
    return {"role": "assistant", **said, "tool_calls": calls}, about


# ---- verifiers, prime-rl -------------------------------------------------------------------------------------------


def is_verifiers(first: Any) -> bool:
    if not isinstance(first, Mapping):
        return False
    trace = isinstance(first.get("nodes"), list)
    return trace or ("completion" in first and "prompt" in first and ("reward" in first or "example_id" in first))


def verifiers_records(objects: Sequence[Any], name: str, blocks: Blocks) -> Iterator[Record]:
    """Rollouts of one example are a group. A trace's nodes or a trajectory's tokens give ids; messages alone do not."""
    seen: Counter[str] = Counter()
    bad = 0
    for number, obj in enumerate(objects):
        if not is_verifiers(obj):
            bad += 1
            continue
        example = str(obj.get("example_id", obj.get("id", number)))
        execution = f"example{example}-{seen[example]}"
        seen[example] += 1
        yield ExecStart(exec=execution, task=example, group=f"example{example}")
        calls = list(_rollout(obj, execution, blocks))
        yield from calls
        yield _reward(obj, execution)
        yield ExecEnd(exec=execution, status="error" if obj.get("error") else "finished", calls=len(calls))
    if bad:
        yield Note(text=f"{bad} lines were no rollout", extra={"left_out": {"lines that are no rollout": bad}})


def _reward(obj: Mapping[str, Any], execution: str) -> Reward:
    value, metrics = obj.get("reward"), obj.get("metrics")
    parts = (
        {k: float(v) for k, v in metrics.items() if isinstance(v, (int, float))} if isinstance(metrics, Mapping) else {}
    )
    if obj.get("error"):
        return Reward(exec=execution, status="infra_failed", parts=parts, error=str(obj["error"]))
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return Reward(exec=execution, status="scored", value=float(value), parts=parts)
    return Reward(exec=execution, status="unscored", parts=parts)


def _rollout(obj: Mapping[str, Any], execution: str, blocks: Blocks) -> Iterator[Call]:
    if isinstance(obj.get("nodes"), list):
        yield from _nodes(obj["nodes"], execution)
        return
    steps = obj.get("trajectory")
    if isinstance(steps, list) and steps and all(isinstance(s, Mapping) and _tokens(s) for s in steps):
        for number, step in enumerate(steps):
            tokens = step["tokens"]
            sampled = _ids(tokens["completion_ids"])
            logprobs = _logprobs(tokens.get("completion_logprobs"), len(sampled))
            yield _call(execution, number, _ids(tokens["prompt_ids"]), sampled, logprobs)
        return
    talk = Talk(execution, blocks, prefix=f"{execution}-")
    prompt, completion = obj.get("prompt"), obj.get("completion")
    for message in prompt if isinstance(prompt, list) else [prompt]:
        talk.hear(message_blocks(message))
    said = completion if isinstance(completion, list) else [{"role": "assistant", "content": completion}]
    yield from chat(talk, said)


def _tokens(step: Mapping[str, Any]) -> bool:
    tokens = step.get("tokens")
    return isinstance(tokens, Mapping) and bool(tokens.get("prompt_ids")) and "completion_ids" in tokens


def _nodes(nodes: Sequence[Mapping[str, Any]], execution: str) -> Iterator[Call]:
    """A node holds the tokens its message adds; the masked ones of a sampled node were generated."""
    paths: list[Ids | None] = []
    for number, node in enumerate(nodes):
        parent = node.get("parent")
        before: Ids | None = paths[parent] if parent is not None else _ids([])
        given = node.get("token_ids")
        if before is None or not isinstance(given, list):
            paths.append(None)  # without ids nothing behind it is known
            continue
        own = _ids(given)
        paths.append(np.concatenate([before, own]))
        mask = np.array(node.get("mask") or [False] * len(own), np.bool_)
        if not node.get("sampled") or not mask.any():
            continue
        places = np.flatnonzero(mask)
        first, last = int(places[0]), int(places[-1]) + 1
        logprobs = node.get("logprobs")
        if isinstance(logprobs, list) and len(logprobs) == len(own):
            logprobs = logprobs[first:last]
        values = _logprobs(logprobs, last - first)
        if values is not None:
            values[~mask[first:last]] = np.nan
        yield _call(execution, number, np.concatenate([before, own[:first]]), own[first:last], values)


def _call(execution: str, number: int, prompt: Ids, completion: Ids, logprobs: Logprobs | None) -> Call:
    return Call(
        exec=execution, call=f"{execution}-{number}", seq=number, t0=float(number), t1=float(number), label="main",
        prompt_ids=prompt, completion_ids=completion, logprobs=logprobs,
    )  # fmt: skip


def _ids(values: Sequence[int]) -> Ids:
    return np.array(values, np.int64).astype(np.int32)


def _logprobs(values: Any, n: int) -> Logprobs | None:
    return np.array(values, np.float64).astype(np.float32) if isinstance(values, list) and len(values) == n else None
