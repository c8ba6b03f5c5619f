"""SGLang's JSON shapes of a generation, as far as gyre uses them: a body in, checked; chunks out. Pure.

A parameter that only says how to sample is checked and then has no effect: nothing is sampled here.
"""

from __future__ import annotations

import math
import time
import uuid
from dataclasses import dataclass
from typing import Any

from celld.emulate.engine import LOGPROB, Request

DEFAULT_NEW_TOKENS = 128
AT_ONCE = 1 << 30  # tokens per chunk where nobody says
NUMBERS: dict[str, tuple[float, float]] = {  # sampling parameters and their bounds
    "max_new_tokens": (0, 1 << 30),
    "temperature": (0.0, math.inf),
    "top_p": (1e-9, 1.0),
    "top_k": (-1, 1 << 30),
    "stream_interval": (1, 1 << 30),
    "sampling_seed": (-(2**63), 2**63 - 1),
}
OTHERS = ("ignore_eos", "stop_token_ids", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "n")


class BadRequest(ValueError):
    """Becomes a 400 with this message."""


@dataclass(frozen=True)
class Limits:
    """What a request is checked against."""

    vocab_size: int  # 0: unknown, any id will do
    context_length: int


def parse(body: Any, limits: Limits) -> Request:
    """A /generate body. Raises BadRequest."""
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    if body.get("text") is not None:
        raise BadRequest("text is not supported by the emulated engine: send input_ids")
    ids, rid = _input_ids(body.get("input_ids"), limits), body.get("rid") or uuid.uuid4().hex
    if not isinstance(rid, str):
        raise BadRequest("rid must be a string")
    params = body.get("sampling_params") or {}
    if not isinstance(params, dict):
        raise BadRequest("sampling_params must be an object")
    _check(params)
    wanted = params.get("max_new_tokens")
    wanted = min(DEFAULT_NEW_TOKENS, limits.context_length - len(ids)) if wanted is None else wanted
    if len(ids) + wanted > limits.context_length:
        most = limits.context_length
        raise BadRequest(f"Requested token count exceeds the model's maximum context length of {most} tokens.")
    return Request(rid=rid, prompt=ids, wanted=wanted, every=params.get("stream_interval") or AT_ONCE)


def _input_ids(ids: Any, limits: Limits) -> list[int]:
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise BadRequest("input_ids must be a non-empty list of token ids")
    if min(ids) < 0 or (limits.vocab_size and max(ids) >= limits.vocab_size):
        raise BadRequest(f"input_ids must be in [0, {limits.vocab_size - 1}]")
    if len(ids) >= limits.context_length:
        raise BadRequest(
            f"The input ({len(ids)} tokens) is longer than the model's context length ({limits.context_length} tokens)."
        )
    return ids


def _check(params: dict[str, Any]) -> None:
    for name, value in params.items():
        if name not in NUMBERS and name not in OTHERS:
            raise BadRequest(f"unknown sampling parameter: {name}")
        if name in NUMBERS and value is not None:
            low, high = NUMBERS[name]
            if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
                raise BadRequest(f"{name} must be in [{low:g}, {high:g}], got {value!r}")
    if params.get("top_k") == 0:
        raise BadRequest("top_k must be -1 (disable) or at least 1, got 0.")


def chunk(request: Request, version: str, logprobs: bool) -> dict[str, Any]:
    """Ids and logprobs since the last chunk; counts are totals."""
    start, stop = request.sent, request.tokens
    request.sent = stop
    ids = request.ids(start, stop)
    meta: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": request.finish,
        "prompt_tokens": len(request.prompt),
        "completion_tokens": stop,
        "cached_tokens": 0,
        "num_retractions": request.retractions,
        "weight_version": version,
    }
    if logprobs:
        meta["output_token_logprobs"] = [[LOGPROB, token, None] for token in ids]
        meta["output_token_logprobs_length"] = stop
    if request.finish is not None:
        meta["weight_versions"] = request.versions()
        meta["e2e_latency"] = time.monotonic() - request.began
    return {"output_ids": ids, "meta_info": meta}
