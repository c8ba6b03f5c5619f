"""The records of a run file and what is true of their arrays. The bytes are `runcodec`'s, the file `runreader`'s.

Owns the vocabulary of `gyre.run/1`. Invariant: logprobs have the length of their completion or are None, never padded.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

SCHEMA = "gyre.run/1"
MAJOR = 1
LABELS = ("main", "main-summary", "sub-agent", "sub-agent-summary", "side", "retry", "unlabelled")
LOGPROB_MAX = 1e-4  # engines round log(1) up a little; anything above is not a logprob
LOGPROB_SENTINEL = -9000.0  # engines write -9999 and the like for "none"

Ids: TypeAlias = NDArray[np.int32]
Logprobs: TypeAlias = NDArray[np.float32]
NO_IDS: Ids = np.zeros(0, np.int32)
_BLOCK = 1 << 15  # tokens per compare: two int32 blocks and the bool block stay in the L2 cache


@dataclass(frozen=True, kw_only=True)
class Agent:
    """Who calls. `role` is "main" or "sub-agent"; `parent` is the agent or the call that started it, where known."""

    id: str = "main"
    role: str = "main"
    parent: str | None = None


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """`n` counts attempts from 0; `of` is the call that this one repeats."""

    of: str | None = None
    n: int = 0


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """What the engine sampled with. A recorded logprob is the behaviour logprob only if it is under these."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1


@dataclass(frozen=True)
class Span:
    """Completion tokens [start, end) were sampled by one policy version, "lineage.step"."""

    policy: str
    start: int
    end: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """One model request and its answer.

    `prompt_ids` int32[P], `completion_ids` int32[C], `logprobs` float32[C] or None (then the call is context only).
    `context` is the xxh3-128 of the prompt ids as the engine got them, if the writer kept it. Times are epoch seconds.
    `arrays`: further arrays of the call by name (numbers of any shape); nothing here looks into them.
    `level` "text": nobody recorded ids; the arrays hold numbers of `runblocks.Blocks` and there are no logprobs.
    """

    exec: str
    call: str
    seq: int = 0
    t0: float = 0.0
    t1: float = 0.0
    agent: Agent = Agent()
    purpose: str = "turn"  # turn | summary | aux
    label: str = "unlabelled"  # one of LABELS
    parent: str | None = None  # declared: the call whose history this one continues. A hint; tokens decide
    attempt: Attempt = Attempt()
    delivered: bool | None = None  # None: not known
    finish: str | None = None
    spans: tuple[Span, ...] = ()
    sampling: Sampling = Sampling()
    context: str | None = None
    level: str = "token"  # token | text
    prompt_ids: Ids = field(default_factory=lambda: NO_IDS)
    completion_ids: Ids = field(default_factory=lambda: NO_IDS)
    logprobs: Logprobs | None = None
    arrays: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RunHeader:
    """The first line of each writer. `tokenizer` = {name, digest, vocab}."""

    run: str = ""
    schema: str = SCHEMA
    tokenizer: Mapping[str, Any] = field(default_factory=dict)
    writer: str = ""
    created: float | str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ExecStart:
    """An execution begins."""

    exec: str
    task: str = ""
    group: str = ""
    started: float | str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ExecEnd:
    """An execution ended; `calls` is how many its writer logged, so that a loss is seen."""

    exec: str
    status: str = ""
    calls: int | None = None
    artifact: str | None = None
    ended: float | str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Intent:
    """Written before dispatch. An intent without its call is a lost call."""

    exec: str
    call: str
    t0: float = 0.0
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Reward:
    """An outcome. `status` is a name of `vocabulary.Outcome`; `value` None is "no score", never 0."""

    exec: str
    status: str
    value: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    evaluator: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Note:
    """Free text or data beside the record."""

    text: str = ""
    exec: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


Record: TypeAlias = RunHeader | ExecStart | ExecEnd | Intent | Call | Reward | Note
# ---- arrays -------------------------------------------------------------------------------------------------------


def common_prefix(a: NDArray[Any], b: NDArray[Any]) -> int:
    """How many leading tokens (or bytes) are equal. Block compares: memory speed, stops at the first difference."""
    n = min(len(a), len(b))
    start, size = 0, 2048  # most mismatches come early; then blocks grow
    while start < n:
        end = min(start + size, n)
        differs = a[start:end] != b[start:end]
        first = int(differs.argmax())
        if differs[first]:
            return start + first
        start, size = end, _BLOCK
    return n


def trainable_mask(logprobs: Logprobs) -> NDArray[np.bool_]:
    """bool[C]: which tokens have a logprob that may stand in a loss (finite, no sentinel, not above log 1)."""
    return np.isfinite(logprobs) & (logprobs > LOGPROB_SENTINEL) & (logprobs <= LOGPROB_MAX)


def context_digest(prompt_ids: Ids) -> str:
    """xxh3-128, hex, of the ids as little-endian int32."""
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(prompt_ids, "<i4").data)


def chain_hash(parent: bytes, keep: int, tail: Ids, completion: Ids, logprobs: Logprobs | None) -> bytes:
    """16 bytes over what a call line says and its base's hash (b"" for a full line): finds flipped digits."""
    state = xxhash.xxh3_128(parent)
    state.update(struct.pack("<qqqq", keep, len(tail), len(completion), -1 if logprobs is None else len(logprobs)))
    state.update(np.ascontiguousarray(tail, "<i4").data)
    state.update(np.ascontiguousarray(completion, "<i4").data)
    if logprobs is not None:
        state.update(np.ascontiguousarray(logprobs, "<f4").data)
    return state.digest()
