"""The frames of the stand-alone intake: what a client sends and is answered.

u32 head bytes, u32 raw bytes, u32 xxh32 of both, little-endian; head = msgpack map with `op`; raw = int32 prompt tail,
int32 completion, float32 logprobs. Answers are frames without raw, in the order of the questions.
"""

from __future__ import annotations

import os
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
MAX_UNIX_PATH = 107  # of sockaddr_un, without its NUL


class BadFrame(ValueError):
    """Bytes that are no frame: the connection can't go on. Nothing was stored."""


def check_address(text: str) -> None:
    """unix:PATH or tcp:HOST:PORT. Raises ValueError with what is wrong."""
    kind, _, where = text.partition(":")
    if kind not in ("unix", "tcp") or not where:
        raise ValueError(f"{text}: an address is unix:PATH or tcp:HOST:PORT")
    host, _, port = where.rpartition(":")
    if kind == "tcp" and not (host and port.isdecimal() and int(port) < 1 << 16):
        raise ValueError(f"{text}: a port is a number up to 65535 behind a host: tcp:HOST:PORT")
    if kind == "unix" and len(os.fsencode(where)) > MAX_UNIX_PATH:
        raise ValueError(f"{text}: a socket's path has at most {MAX_UNIX_PATH} bytes; name a shorter one")


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
