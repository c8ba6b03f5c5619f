"""The frames of the stand-alone intake: what a client sends and is answered.

u32 head bytes, u32 raw bytes, u32 xxh32 of both, little-endian; head = msgpack map with `op`; raw = int32 prompt tail,
int32 completion, float32 logprobs. Answers are frames without raw, in the order of the questions.
"""

from __future__ import annotations

import struct
from typing import Any

import msgpack
import numpy as np
import orjson
import xxhash

from gyre_base.runcodec import encode
from gyre_base.runfile import NO_IDS, Call

HEAD = struct.Struct("<III")
MAX_HEAD = 1 << 20
MAX_RAW = 1 << 30


class BadFrame(ValueError):
    """Bytes that are no frame: the connection can't go on. Nothing was stored."""


def pack_frame(head: dict[str, Any], raw: bytes = b"") -> bytes:
    body: bytes = msgpack.packb(head)
    return HEAD.pack(len(body), len(raw), xxhash.xxh32_intdigest(body + raw)) + body + raw


def call_frame(call: Call, *, base: str | None = None, keep: int = 0) -> bytes:
    """The frame of a call; its prompt begins with the first `keep` tokens of base's prompt + completion."""
    tail = np.ascontiguousarray(call.prompt_ids[keep:], "<i4")
    completion = np.ascontiguousarray(call.completion_ids, "<i4")
    logprobs = np.zeros(0, "<f4") if call.logprobs is None else np.ascontiguousarray(call.logprobs, "<f4")
    head = orjson.loads(
        encode(Call(**{**call.__dict__, "prompt_ids": NO_IDS, "completion_ids": NO_IDS, "logprobs": None}))
    )
    about = {k: v for k, v in head.items() if k not in ("k", "h", "prompt_ids", "completion_ids", "logprobs")}
    sizes = [len(tail), len(completion), -1 if call.logprobs is None else len(logprobs)]
    link = {"base": base, "keep": keep} if base else {}
    raw = tail.tobytes() + completion.tobytes() + logprobs.tobytes()
    return pack_frame({"op": "call", "about": about, "sizes": sizes, **link}, raw)
