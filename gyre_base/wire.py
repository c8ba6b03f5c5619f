"""Messages to frames and back: [header, body, raw...]. msgpack for structure, raw frames for bulk, never pickle.

header = [tag, correlation]; body = the fields; each `bytes` field is left out of the body and travels as its own
frame, in
field order. Invariant: decode(encode(m)) == m for every message type (a property test holds it).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import msgpack
import msgspec
import orjson

from gyre_base import messages


class WireError(ValueError):
    """A frame that is not a message of ours. The peer is wrong or of another version; nothing was done."""


_JSON = msgspec.json.Encoder()
_PLAIN = frozenset((str, int, float, bool, type(None)))  # as they are in JSON


@functools.cache
def _names(cls: Any) -> tuple[str, ...]:
    return tuple(f.name for f in dataclasses.fields(cls))


@functools.cache
def _bulk_fields(cls: Any) -> tuple[str, ...]:
    return tuple(f.name for f in dataclasses.fields(cls) if f.type in ("bytes", bytes))


@functools.cache
def _begin(cls: Any) -> bytes:
    """What the text of a message of a kind begins with; empty for those with bulk."""
    if _bulk_fields(cls):
        return b""
    return b'{"tag":"%b"%b' % (cls.TAG.encode(), b"," if _names(cls) else b"")


def encode(msg: Any, correlation: int = 0) -> list[bytes]:
    """Frames of one message. `correlation` ties an answer to its question; 0 = none."""
    cls: Any = type(msg)
    bulk = _bulk_fields(cls)
    body = {f.name: getattr(msg, f.name) for f in dataclasses.fields(cls) if f.name not in bulk}
    frames = [msgpack.packb([cls.TAG, correlation]), msgpack.packb(msgspec.to_builtins(body))]
    return [*frames, *(getattr(msg, name) for name in bulk)]


def decode(frames: list[bytes]) -> tuple[Any, int]:
    """(message, correlation). Raises WireError; never returns a half-valid message."""
    try:
        tag, correlation = msgspec.convert(msgpack.unpackb(frames[0]), type=tuple[str, int])
        cls = messages.BY_TAG[tag]
        body = msgspec.convert(msgpack.unpackb(frames[1]), type=dict[str, Any])
        bulk = _bulk_fields(cls)
        if len(frames) != 2 + len(bulk):
            raise WireError(f"message {tag}: {len(frames) - 2} raw frames, expected {len(bulk)}")
        body.update(zip(bulk, frames[2:], strict=True))
        return msgspec.convert(body, type=cls), correlation
    except KeyError as error:
        raise WireError(f"unknown message {error}") from None
    except (msgspec.MsgspecError, msgpack.UnpackException, ValueError, IndexError, TypeError) as error:
        raise WireError(f"not a message: {error}") from None


def to_json(msg: Any) -> dict[str, Any]:
    """{"tag": ..., fields} for journals and `--json`; bulk is replaced by its length."""
    cls: Any = type(msg)
    bulk = _bulk_fields(cls)
    out: dict[str, Any] = {"tag": cls.TAG}
    for name in _names(cls):
        value = getattr(msg, name)
        if type(value) not in _PLAIN:
            value = {"bytes": len(value)} if name in bulk else msgspec.to_builtins(value)
        out[name] = value
    return out


def to_text(msg: Any) -> bytes:
    """The JSON text of `to_json`, made in one go."""
    cls: Any = type(msg)
    begin = _begin(cls)
    return begin + _JSON.encode(msg)[1:] if begin else orjson.dumps(to_json(msg))


def from_json(obj: dict[str, Any]) -> Any:
    """Inverse of `to_json` for messages without bulk. Raises WireError."""
    fields = dict(obj)
    tag = fields.pop("tag", None)
    if tag not in messages.BY_TAG:
        raise WireError(f"unknown message {tag!r}")
    try:
        return msgspec.convert(fields, type=messages.BY_TAG[tag])
    except msgspec.MsgspecError as error:
        raise WireError(f"message {tag}: {error}") from None
