"""NeMo-Gym rollouts and NeMo-RL message logs, both with real ids where their agents kept them.

Owns those two shapes. A turn without ids ends what is known of a conversation: later prompts contain it, so they are
left out (counted in a note), not patched together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from gyre_base.runfile import Call, ExecEnd, ExecStart, Ids, Logprobs, Note, Record, Reward, Sampling

UNKNOWN_IDS = "turns without token ids"
BAD_LINES = "lines that are no rollout"


# ---- NeMo-Gym: one rollout per line, ids on the items of response.output --------------------------------------------


def is_gym(first: Any) -> bool:
    return isinstance(first, dict) and "responses_create_params" in first and isinstance(first.get("response"), dict)


def gym_records(rollouts: Sequence[Any]) -> Iterator[Record]:
    """Records of every rollout; lines that are none are counted in a note."""
    bad = 0
    for number, rollout in enumerate(rollouts):
        if is_gym(rollout):
            yield from _gym_rollout(rollout, number)
        elif rollout is not None:
            bad += 1
    if bad:
        yield Note(text=f"{bad} lines were no rollout", extra={"left_out": {BAD_LINES: bad}})


def _gym_rollout(rollout: Mapping[str, Any], number: int) -> Iterator[Record]:
    task = rollout.get("_ng_task_index", number)
    name = f"task{task}-rollout{rollout.get('_ng_rollout_index', 0)}"
    response = rollout["response"]
    began = response.get("created_at")
    t = float(began) if isinstance(began, (int, float)) else 0.0
    yield ExecStart(exec=name, task=str(task), group=f"task{task}", started=began)
    items = [item for item in response.get("output") or () if isinstance(item, dict)]
    calls, last = 0, None
    for item in items:
        key = (item.get("prompt_token_ids"), item.get("generation_token_ids"))
        if key[0] and key[1] and key != last:  # the items of one generation repeat its ids
            yield _gym_call(item, name, calls, t, response)
            calls, last = calls + 1, key
    without = sum(1 for item in items if item.get("role") == "assistant" and not item.get("generation_token_ids"))
    if without:
        yield Note(exec=name, text=f"{without} {UNKNOWN_IDS}", extra={"left_out": {UNKNOWN_IDS: without}})
    yield _gym_reward(rollout, name)
    yield ExecEnd(exec=name, status="finished", calls=calls)


def _gym_call(item: Mapping[str, Any], name: str, seq: int, t: float, response: Mapping[str, Any]) -> Call:
    completion = _ids(item["generation_token_ids"])
    return Call(
        exec=name,
        call=f"{name}-{seq}",
        seq=seq,
        t0=t,
        t1=t,
        label="main",
        finish=item.get("status"),
        sampling=_sampling(response),
        prompt_ids=_ids(item["prompt_token_ids"]),
        completion_ids=completion,
        logprobs=_logprobs(item.get("generation_log_probs"), len(completion)),
    )


def _gym_reward(rollout: Mapping[str, Any], name: str) -> Reward:
    """A failure kind or a mask keeps the number out of the loss; a missing reward is no zero."""
    errors = [f"{k}={v}" for k, v in rollout.items() if k.endswith("_error_kind") and v]
    value = rollout.get("reward")
    parts = {k: float(v) for k, v in rollout.items() if k.endswith("_score") and isinstance(v, (int, float))}
    if errors:
        return Reward(exec=name, status="evaluator_failed", parts=parts, error=", ".join(errors))
    if rollout.get("mask_sample") or not isinstance(value, (int, float)):
        return Reward(exec=name, status="unscored", parts=parts, error="mask_sample" if value is not None else None)
    return Reward(exec=name, status="scored", value=float(value), parts=parts)


# ---- NeMo-RL: message logs with ids per message ---------------------------------------------------------------------


def rl_rollouts(whole: Any) -> Sequence[Mapping[str, Any]] | None:
    """The rollouts of a NeMo-RL dump, None if it is none."""
    if isinstance(whole, dict):
        whole = next((whole[k] for k in ("expected_output", "output", "rollouts") if k in whole), [whole])
    fits = isinstance(whole, list) and whole and all(isinstance(r, dict) and "message_log" in r for r in whole)
    return whole if fits else None


def rl_records(rollouts: Sequence[Mapping[str, Any]]) -> Iterator[Record]:
    for number, rollout in enumerate(rollouts):
        name = f"rollout{number}"
        yield ExecStart(exec=name, task=str(number), group=f"task{number}")
        calls = 0
        for record in _rl_messages(rollout["message_log"], name):
            calls += isinstance(record, Call)
            yield record
        value = rollout.get("total_reward", rollout.get("reward"))
        scored = isinstance(value, (int, float))
        yield Reward(exec=name, status="scored" if scored else "unscored", value=float(value) if scored else None)
        yield ExecEnd(exec=name, status="finished", calls=calls)


def _rl_messages(log: Sequence[Mapping[str, Any]], name: str) -> Iterator[Record]:
    """An assistant message is a call, what stands before it is its prompt. Stops at the first message without ids."""
    prompt = np.zeros(0, np.int32)
    for at, message in enumerate(log):
        ids = _ids(message.get("token_ids") or [])
        if message.get("role") == "assistant":
            lps = _logprobs(message.get("generation_logprobs"), len(ids)) if len(ids) else None
            extra = {} if len(ids) else {"completion_ids_missing": True}
            yield Call(
                exec=name, call=f"{name}-{at}", seq=at, t0=float(at), t1=float(at), label="main",
                prompt_ids=prompt, completion_ids=ids, logprobs=lps, extra=extra,
            )  # fmt: skip
        if not len(ids):
            text = f"message {at} ({message.get('role')}) has no token ids: the turns from there on are not known"
            yield Note(exec=name, text=text, extra={"left_out": {UNKNOWN_IDS: len(log) - at}})
            return
        prompt = np.concatenate([prompt, ids])


# ---- values --------------------------------------------------------------------------------------------------------


def _ids(values: Sequence[int]) -> Ids:
    return np.array(values, np.int64).astype(np.int32)


def _logprobs(values: Any, n: int) -> Logprobs | None:
    """float32[n], or None if they are not one per token: then the call is context only."""
    return np.array(values, np.float64).astype(np.float32) if isinstance(values, list) and len(values) == n else None


def _sampling(response: Mapping[str, Any]) -> Sampling:
    known = {k: float(response[k]) for k in ("temperature", "top_p") if isinstance(response.get(k), (int, float))}
    return Sampling(temperature=known.get("temperature", 1.0), top_p=known.get("top_p", 1.0))
