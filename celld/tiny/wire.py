"""SGLang 0.5.23's JSON shapes, the part that gyre uses: request bodies in, response objects out. Pure.

Owns validation of what comes over the wire and the field names of what goes back. Never talks to the engine.
A parameter that this engine can't honour is refused, never ignored.
"""

from __future__ import annotations

import math
import uuid
from dataclasses import dataclass
from typing import Any

from celld.tiny.engine import Counters, Loads, Progress
from celld.tiny.sampling import noise_key
from celld.tiny.scheduler import Request

DEFAULT_NEW_TOKENS = 128
_INERT: dict[str, tuple[Any, ...]] = {  # sampling parameters without effect here, and the only values they may have
    "n": (1, None),
    "min_p": (0, 0.0, None),
    "min_new_tokens": (0, None),
    "frequency_penalty": (0, 0.0, None),
    "presence_penalty": (0, 0.0, None),
    "repetition_penalty": (1, 1.0, None),
    "stop": (None, [], ""),
    "stop_regex": (None, [], ""),
    "json_schema": (None,),
    "regex": (None,),
    "ebnf": (None,),
    "structural_tag": (None,),
    "logit_bias": (None, {}),
    "custom_params": (None, {}),
    "skip_special_tokens": (True, False),
    "spaces_between_special_tokens": (True, False),
    "no_stop_trim": (True, False),
}
_UNSUPPORTED = ("text", "input_embeds", "image_data", "audio_data", "video_data", "session_params", "lora_path")
_FALSY_ONLY = (
    "top_logprobs_num",
    "token_ids_logprob",
    "return_hidden_states",
    "return_routed_experts",
    "return_sampling_mask",
    "return_entropy",
)


class BadRequest(ValueError):
    """The body can't be honoured; becomes a 400 with this message."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request is checked against."""

    vocab_size: int
    context_length: int
    eos_ids: frozenset[int]
    stream_interval: int
    engine_seed: int


@dataclass(frozen=True, slots=True)
class Submission:
    """A parsed /generate body."""

    request: Request
    stream: bool
    return_logprob: bool
    return_prompt: bool


def parse_generate(body: Any, limits: Limits) -> Submission:
    """Check a /generate body and turn it into a request."""
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    for name in _UNSUPPORTED:
        if body.get(name) is not None:
            raise BadRequest(f"{name} is not supported by the tiny engine: send input_ids")
    for name in _FALSY_ONLY:
        if body.get(name):
            raise BadRequest(f"{name} is not supported by the tiny engine")
    if body.get("logprob_start_len", -1) not in (-1, None):
        raise BadRequest("logprob_start_len is not supported by the tiny engine: only output logprobs are returned")
    ids = _input_ids(body.get("input_ids"), limits)
    rid = body.get("rid")
    if rid is None:
        rid = uuid.uuid4().hex
    if not isinstance(rid, str) or not 0 < len(rid) <= 512:
        raise BadRequest("rid must be a string of 1 to 512 characters")
    stream = _boolean(body, "stream")
    request = _request(rid, ids, body.get("sampling_params") or {}, limits, stream)
    request.salt = "\x1f".join(_text(body, name) for name in ("cache_salt", "extra_key"))
    return Submission(request, stream, _boolean(body, "return_logprob"), _boolean(body, "return_prompt_token_ids"))


def _input_ids(ids: Any, limits: Limits) -> list[int]:
    if not isinstance(ids, list) or not ids:
        raise BadRequest("input_ids must be a non-empty list of token ids")
    if isinstance(ids[0], list):
        raise BadRequest("batched input_ids are not supported by the tiny engine: send one request each")
    if not all(type(token) is int for token in ids):
        raise BadRequest("input_ids must be integers")
    if min(ids) < 0 or max(ids) >= limits.vocab_size:
        raise BadRequest(f"input_ids must be in [0, {limits.vocab_size - 1}]")
    if len(ids) >= limits.context_length:
        raise BadRequest(
            f"The input ({len(ids)} tokens) is longer than the model's context length ({limits.context_length} tokens)."
        )
    return ids


def _request(rid: str, ids: list[int], params: Any, limits: Limits, stream: bool) -> Request:
    """Sampling parameters, checked; the prompt list is taken over."""
    if not isinstance(params, dict):
        raise BadRequest("sampling_params must be an object")
    params = {name: value for name, value in params.items() if value is not None}
    for name, allowed in _INERT.items():
        if params.pop(name, allowed[0]) not in allowed:
            raise BadRequest(f"sampling_params.{name} is not supported by the tiny engine")
    stops = params.pop("stop_token_ids", [])
    if not isinstance(stops, list) or not all(type(token) is int for token in stops):
        raise BadRequest("stop_token_ids must be a list of token ids")
    ignore_eos = _boolean(params, "ignore_eos")
    seed = _integer(params, "sampling_seed", None, -(2**63), 2**63 - 1)
    interval = _integer(params, "stream_interval", limits.stream_interval, 1, 1 << 20)
    request = Request(
        rid=rid,
        tokens=ids,
        max_new_tokens=_new_tokens(params, len(ids), limits),
        stop_ids=frozenset() if ignore_eos else frozenset(stops) | limits.eos_ids,
        temperature=_number(params, "temperature", 1.0, 0.0, math.inf),
        top_p=_number(params, "top_p", 1.0, 1e-9, 1.0),
        top_k=_integer(params, "top_k", -1, -1, 1 << 30) or 0,
        noise_key=noise_key(limits.engine_seed, rid, seed),
        stream_interval=(interval or 0) if stream else 0,
    )
    if request.top_k == 0:
        raise BadRequest("top_k must be -1 (disable) or at least 1, got 0.")
    for name in ("max_new_tokens", "temperature", "top_p", "top_k", "ignore_eos", "sampling_seed", "stream_interval"):
        params.pop(name, None)
    if params:
        raise BadRequest(f"unknown sampling parameter: {', '.join(sorted(params))}")
    return request


def _new_tokens(params: dict[str, Any], prompt: int, limits: Limits) -> int:
    wanted = _integer(params, "max_new_tokens", None, 0, 1 << 30)
    room = limits.context_length - prompt
    if wanted is None:
        return min(DEFAULT_NEW_TOKENS, room)
    if wanted > room:
        raise BadRequest(
            f"Requested token count exceeds the model's maximum context length of {limits.context_length} tokens. "
            f"You requested a total of {prompt + wanted} tokens: {prompt} tokens from the input messages and {wanted} "
            "tokens for the completion. Please reduce the number of tokens in the input messages or the completion to "
            "fit within the limit."
        )
    return wanted


def _number(source: dict[str, Any], name: str, default: float, low: float, high: float) -> float:
    value = source.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BadRequest(f"{name} must be a finite number, got {value!r}")
    if not low <= value <= high:
        raise BadRequest(f"{name} must be in [{low:g}, {high:g}], got {value}")
    return float(value)


def _integer(source: dict[str, Any], name: str, default: int | None, low: int, high: int) -> int | None:
    value = source.get(name, default)
    if value is None:
        return None
    if type(value) is not int:
        raise BadRequest(f"{name} must be an integer, got {value!r}")
    if not low <= value <= high:
        raise BadRequest(f"{name} must be in [{low}, {high}], got {value}.")
    return value


def _boolean(source: dict[str, Any], name: str) -> bool:
    value = source.get(name) or False
    if not isinstance(value, bool):
        raise BadRequest(f"{name} must be true or false")
    return value


def _text(source: dict[str, Any], name: str) -> str:
    value = source.get(name) or ""
    if not isinstance(value, str):
        raise BadRequest(f"{name} must be a string")
    return value


def merge(first: Progress, second: Progress) -> Progress:
    """Two pieces of news of one request as one chunk."""
    return Progress(first.request, first.start, second.stop, second.version, second.finish_reason, second.spans)


def generate_response(submission: Submission, progress: Progress, latency_s: float | None) -> dict[str, Any]:
    """A stream chunk, or the whole answer when `progress` spans all of it. Ids and logprobs are this chunk's; counts
    are totals."""
    request, start, stop = progress.request, progress.start, progress.stop
    ids = request.tokens[request.prompt_tokens + start : request.prompt_tokens + stop]
    meta: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": progress.finish_reason,
        "prompt_tokens": request.prompt_tokens,
        "weight_version": progress.version,
        "num_retractions": request.retractions,
        "completion_tokens": stop,
        "cached_tokens": max(request.cached_tokens, 0),
        "cached_tokens_details": {
            "device": max(request.cached_tokens, 0) - request.stored_tokens,
            "host": 0,
            "storage": request.stored_tokens,
        },
        "reasoning_tokens": 0,
        "dp_rank": None,
    }
    if submission.return_logprob:
        meta["input_token_logprobs"] = []
        meta["output_token_logprobs"] = [
            [logprob, token, None] for logprob, token in zip(request.logprobs[start:stop], ids, strict=True)
        ]
        meta["output_token_logprobs_length"] = stop
    if progress.spans is not None:
        meta["weight_versions"] = progress.spans
        meta["weight_version"] = progress.spans[-1]["version"]
    if latency_s is not None:
        meta["e2e_latency"] = latency_s
    response: dict[str, Any] = {"output_ids": ids, "meta_info": meta}
    if submission.return_prompt:
        response["prompt_token_ids"] = request.tokens[: request.prompt_tokens]
    return response


def loads_response(loads: Loads, counters: Counters, now_s: float) -> dict[str, Any]:
    """One entry of /v1/loads."""
    return {
        "timestamp": now_s,
        "dp_rank": 0,
        "num_running_reqs": loads.running,
        "num_waiting_reqs": loads.waiting,
        "num_total_reqs": loads.running + loads.waiting,
        "num_used_tokens": loads.used_tokens,
        "num_total_tokens": loads.used_tokens,
        "max_total_num_tokens": loads.pool_tokens,
        "max_running_requests": loads.rows,
        "token_usage": loads.used_tokens / loads.pool_tokens,
        "gen_throughput": loads.gen_throughput,
        "cache_hit_rate": counters.cached_tokens / max(counters.prompt_tokens, 1),
        "utilization": loads.running / loads.rows,
        "memory": {
            "weight_gb": loads.weights_bytes / 1e9,
            "kv_cache_gb": loads.kv_bytes / 1e9,
            "graph_gb": 0.0,
            "token_capacity": loads.pool_tokens,
        },
        "queues": {"waiting": loads.waiting, "grammar": 0, "paused": loads.waiting if loads.paused else 0},
    }


def metrics_text(loads: Loads, counters: Counters, model_name: str) -> str:
    """Prometheus text with the real engine's names."""
    gauges = {
        "num_running_reqs": loads.running,
        "num_queue_reqs": loads.waiting,
        "num_used_tokens": loads.used_tokens,
        "token_usage": loads.used_tokens / loads.pool_tokens,
        "gen_throughput": loads.gen_throughput,
        "cache_hit_rate": counters.cached_tokens / max(counters.prompt_tokens, 1),
        "max_total_num_tokens": loads.pool_tokens,
        "kv_cache_bytes": loads.kv_bytes,
        "weights_bytes": loads.weights_bytes,
        "is_paused": int(loads.paused),
    }
    totals = {
        "num_requests_total": counters.requests,
        "num_aborted_requests_total": counters.aborted,
        "prompt_tokens_total": counters.prompt_tokens,
        "cached_tokens_total": counters.cached_tokens,
        "stored_tokens_total": counters.stored_tokens,
        "generation_tokens_total": counters.generation_tokens,
        "num_retracted_requests_total": counters.retractions,
        "decode_steps_total": counters.steps,
        "busy_seconds_total": counters.busy_s,
    }
    label = model_name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    lines = []
    for kind, group in (("gauge", gauges), ("counter", totals)):
        for name, value in group.items():
            lines.append(f"# TYPE sglang:{name} {kind}")
            lines.append(f'sglang:{name}{{model_name="{label}"}} {value}')
    return "\n".join(lines) + "\n"
