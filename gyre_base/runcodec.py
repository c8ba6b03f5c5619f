"""Records to objects and lines and back, one at a time.

Owns the objects, and the bytes of a line (those of a frame: `runpacked`). Invariants: a call read back is the call
written, float32 logprobs bit for bit (non-finite ones become NaN, which never trains); unknown keys survive a round
trip. A call may lean on an earlier one (base, keep): `runreader` resolves that.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import re
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from gyre_base.runblocks import Blocks
from gyre_base.runrecords import (
    MAJOR,
    NO_IDS,
    SCHEMA,
    Agent,
    Attempt,
    Call,
    ExecEnd,
    ExecStart,
    Ids,
    Intent,
    Logprobs,
    Note,
    Record,
    Reward,
    RunHeader,
    Sampling,
    Span,
    chain_hash,
)


class RunFileError(ValueError):
    """A file that this version must not read (a higher major version)."""


class BadRecord(ValueError):
    """One record that can't be used; the text is the reason. The rest of the file is still good."""


_DUMP = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE
KINDS: dict[str, type] = {
    "run": RunHeader,
    "exec": ExecStart,
    "exec_end": ExecEnd,
    "intent": Intent,
    "call": Call,
    "reward": Reward,
    "note": Note,
}
_KIND_OF = {cls: kind for kind, cls in KINDS.items()}
_FIELDS = {cls: tuple(f.name for f in dataclasses.fields(cls) if f.name != "extra") for cls in KINDS.values()}
_NESTED: dict[str, Any] = {"agent": Agent, "attempt": Attempt, "sampling": Sampling}
_LINK = ("base", "keep", "h", "policy", "prompt", "completion")  # keys of a call line that are not fields of Call
_BULK = ("prompt_ids", "completion_ids", "logprobs", "arrays")
_PLAIN = frozenset(n for n in _FIELDS[Call] if n not in _NESTED and n not in _BULK and n != "spans")
_DTYPE = re.compile(r"[<|][iufb][1248]")
_KNOWN = frozenset(("k", *_FIELDS[Call], *_LINK))
_NESTED_NAMES = {cls: tuple(f.name for f in dataclasses.fields(cls)) for cls in _NESTED.values()}
_NESTED_FIELDS = {name: frozenset(f.name for f in dataclasses.fields(cls)) for name, cls in _NESTED.items()}


# ---- writing ------------------------------------------------------------------------------------------------------


def _clean(logprobs: Logprobs | None) -> Logprobs | None:
    """float32, contiguous, every non-finite value the one NaN that JSON null reads back as."""
    if logprobs is None:
        return None
    out = np.ascontiguousarray(logprobs, np.float32)
    finite = np.isfinite(out)
    return out if finite.all() else np.where(finite, out, np.float32(np.nan))


def to_line(obj: Mapping[str, Any]) -> bytes:
    """One line with its newline."""
    if "arrays" in obj and obj["k"] == "call":
        obj = {**obj, "arrays": {name: _spelled(array) for name, array in obj["arrays"].items()}}
    return orjson.dumps(obj, option=_DUMP)


def _spelled(array: NDArray[Any]) -> dict[str, Any]:
    """A named array in JSON. Its bytes are little-endian, the last axis runs fastest."""
    array = array.astype(array.dtype.newbyteorder("<"))
    return {"dtype": array.dtype.str, "shape": array.shape, "base64": base64.b64encode(array.tobytes()).decode()}


def encode(record: Record, form: Callable[[Mapping[str, Any]], bytes] = to_line) -> bytes:
    """One record in a form. A call comes out in full form; `CallWriter` makes the short one."""
    if isinstance(record, Call):
        return CallWriter(form=form).call(record)
    return form(to_object(record))


def to_object(record: Record) -> dict[str, Any]:
    """Any record but a call as the object of its line."""
    line: dict[str, Any] = {"k": _KIND_OF[type(record)]}
    for name in _FIELDS[type(record)]:
        value = getattr(record, name)
        if value is not None and value != {}:
            line[name] = value
    return {**line, **record.extra}


@dataclass(slots=True)
class _Written:
    """What the writer must know of a call to write the next one against it."""

    hash: bytes
    tokens: int
    deltas: int  # delta lines since the keyframe
    size: int  # their bytes


class CallWriter:
    """Builds calls in a form, lines or frames (`runpacked.record_frame`), short ones where the base is known.

    O(new tokens) per call apart from keyframes.

    A keyframe (full call) every `keyframe_calls` deltas or `keyframe_bytes` of them bounds what one bad record can
    orphan. A new writer knows no base, so after a restart each history begins with a full call: nothing to recover.
    """

    def __init__(
        self,
        *,
        form: Callable[[Mapping[str, Any]], bytes] = to_line,
        keyframe_calls: int = 32,
        keyframe_bytes: int = 8 << 20,
        blocks: Blocks | None = None,
    ) -> None:
        self._form = form
        self._blocks = blocks  # needed for text-level calls only
        self._keyframe_calls = keyframe_calls
        self._keyframe_bytes = keyframe_bytes
        self._written: dict[str, dict[str, _Written]] = {}

    def call(self, call: Call, base: str | None = None, keep: int = 0) -> bytes:
        """The line or frame of `object`, which see."""
        made = self._form(self.object(call, base, keep))
        written = self._written[call.exec][call.call]
        if written.deltas:
            written.size += len(made)
        return made

    def object(self, call: Call, base: str | None = None, keep: int = 0) -> dict[str, Any]:
        """The object of a finished call whose prompt begins with the first `keep` tokens of base's prompt + completion.

        The caller answers for `base` and `keep` (proxyd knows what it reused); they are not compared here.
        """
        if call.logprobs is not None and len(call.logprobs) != len(call.completion_ids):
            raise ValueError(f"call {call.call}: {len(call.logprobs)} logprobs for {len(call.completion_ids)} tokens")
        before = self._usable(call.exec, base, keep)
        if before is not None and keep > min(before.tokens, len(call.prompt_ids)):
            raise ValueError(f"call {call.call}: keep {keep} is longer than its base or its prompt")
        keep = keep if before else 0
        tail = np.ascontiguousarray(call.prompt_ids[keep:], np.int32)
        completion = np.ascontiguousarray(call.completion_ids, np.int32)
        logprobs = _clean(call.logprobs)
        hashed = (tail, completion) if call.level == "token" else self._text(call, tail, completion)
        digest = chain_hash(before.hash if before else b"", keep, *hashed, logprobs)
        line = _call_head(call)
        if before:
            line["base"], line["keep"] = base, keep
        line["h"] = digest.hex()
        if call.level == "text" and self._blocks is not None:
            line["prompt"], line["completion"] = self._blocks.many(tail), self._blocks.many(completion)
        else:
            line["prompt_ids"], line["completion_ids"], line["logprobs"] = tail, completion, logprobs
            if call.arrays:
                line["arrays"] = call.arrays
        deltas, size = (before.deltas + 1, before.size) if before else (0, 0)
        total = len(call.prompt_ids) + len(completion)
        self._written.setdefault(call.exec, {})[call.call] = _Written(digest, total, deltas, size)
        return line

    def _text(self, call: Call, tail: Ids, completion: Ids) -> tuple[Ids, Ids]:
        """What the chain hash of a text-level line runs over."""
        if self._blocks is None:
            raise ValueError(f"call {call.call} is at text level, and its blocks are not known here")
        return self._blocks.hashed(tail), self._blocks.hashed(completion)

    def forget(self, execution: str) -> None:
        """The execution is over: drop its state."""
        self._written.pop(execution, None)

    def _usable(self, execution: str, base: str | None, keep: int) -> _Written | None:
        """The base to write against, or None for a full line."""
        before = self._written.get(execution, {}).get(base) if base is not None else None
        if before is None or keep <= 0:
            return None
        due = before.deltas + 1 >= self._keyframe_calls or before.size >= self._keyframe_bytes
        return None if due else before


def _call_head(call: Call) -> dict[str, Any]:
    """Everything of a call before the link and the arrays, unknown keys of nested objects included.

    Spelled out field by field: it is most of what a short record costs.
    """
    line: dict[str, Any] = {
        "k": "call",
        "exec": call.exec,
        "call": call.call,
        "seq": call.seq,
        "t0": call.t0,
        "t1": call.t1,
        "agent": _said(call.agent),
        "purpose": call.purpose,
        "label": call.label,
    }
    if call.parent is not None:
        line["parent"] = call.parent
    line["attempt"] = _said(call.attempt)
    if call.delivered is not None:
        line["delivered"] = call.delivered
    if call.finish is not None:
        line["finish"] = call.finish
    if call.level == "text":
        line["level"] = "text"  # nobody recorded the others, and defaults must not look like facts
    else:
        line["policy"] = [[s.policy, s.start, s.end] for s in call.spans]
        line["sampling"] = _said(call.sampling)
        if call.context is not None:
            line["context"] = call.context
    for name, value in call.extra.items():
        if name not in _NESTED:
            line[name] = value
        elif name in line:
            line[name].update(value)
    return line


def _said(value: Any) -> dict[str, Any]:
    """An agent, attempt or sampling as an object; `dataclasses.asdict` copies deeply, which costs more."""
    return {name: said for name in _NESTED_NAMES[type(value)] if (said := getattr(value, name)) is not None}


# ---- parsing one object -------------------------------------------------------------------------------------------


def parse_object(line: bytes) -> dict[str, Any]:
    """The JSON object of one line. Raises BadRecord."""
    try:
        obj = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise BadRecord(f"not JSON: {error}") from None
    if not isinstance(obj, dict):
        raise BadRecord(f"not an object but {type(obj).__name__}")
    if not isinstance(obj.get("k"), str):
        raise BadRecord("no kind: the key k is missing")
    return obj


def decode(obj: dict[str, Any]) -> Record:
    """Any known kind but `call`, which needs its base (`runreader`). Raises BadRecord, RunFileError."""
    cls = KINDS[obj["k"]]
    if cls is RunHeader:
        _check_version(obj.get("schema"))
    known = {name: obj[name] for name in _FIELDS[cls] if obj.get(name) is not None}
    extra = {k: v for k, v in obj.items() if k != "k" and k not in _FIELDS[cls]}
    if not all(isinstance(known.get(name, ""), str) for name in ("exec", "call", "status", "group", "task")):
        raise BadRecord("an id or status is not a string")
    try:
        record: Record = cls(**known, extra=extra)
    except TypeError as error:
        raise BadRecord(str(error).replace("__init__() ", "")) from None
    return record


def call_fields(obj: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of `Call` from a call line, arrays and link aside. Raises BadRecord."""
    if not (isinstance(obj.get("exec"), str) and isinstance(obj.get("call"), str)):
        raise BadRecord("a call needs the strings exec and call")
    out: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    for name, value in obj.items():
        if name in _PLAIN:
            if value is not None:
                out[name] = value
        elif name not in _KNOWN:
            extra[name] = value
    if not all(isinstance(out.get(name, 0), (int, float)) for name in ("seq", "t0", "t1")):
        raise BadRecord("seq, t0 or t1 is not a number")
    try:
        for name in _NESTED:
            given = obj.get(name) or {}
            names = _NESTED_FIELDS[name]
            out[name] = _nested(name, tuple((k, v) for k, v in given.items() if k in names and v is not None))
            if unknown := {k: v for k, v in given.items() if k not in names}:
                extra[name] = unknown
        out["spans"] = tuple(Span(str(p), int(a), int(b)) for p, a, b in obj.get("policy") or ())
    except (TypeError, ValueError, AttributeError) as error:
        raise BadRecord(f"bad agent, attempt, sampling or policy: {error}") from None
    if obj.get("arrays"):
        out["arrays"] = named_arrays(obj["arrays"])
    return {**out, "extra": extra}


@functools.lru_cache(4096)
def _nested(name: str, given: tuple[tuple[str, Any], ...]) -> Any:
    """An agent, attempt or sampling: few different ones come again and again. Raises TypeError."""
    return _NESTED[name](**dict(given))


def ids_array(values: Any, key: str) -> Ids:
    """int32[n] from a JSON list. Raises BadRecord on anything that is not a list of ids (no silent rounding)."""
    if isinstance(values, np.ndarray):  # of a binary file, checked when it was framed
        return values
    if not isinstance(values, list):
        raise BadRecord(f"{key} is not a list")
    if not values:
        return NO_IDS
    try:
        made = array("i", values)  # several times faster than numpy's own conversion
    except (TypeError, OverflowError):
        made = None
    if made is None or set(map(type, values)) != {int}:
        raise BadRecord(f"{key} holds something that is not a token id")
    out: Ids = np.frombuffer(made, np.int32)
    if int(out.min()) < 0:
        raise BadRecord(f"{key} holds something that is not a token id")
    return out


def logprobs_array(values: Any) -> Logprobs | None:
    """float32[n]; JSON null inside the list is NaN; null instead of the list is None. Raises BadRecord."""
    if values is None or isinstance(values, np.ndarray):
        return values
    try:
        out: Logprobs = np.array(_floats(values), dtype=np.float64).astype(np.float32)
    except (TypeError, ValueError) as error:
        raise BadRecord(f"logprobs: {error}") from None
    if not isinstance(values, list) or out.ndim != 1:
        raise BadRecord("logprobs is not a list of numbers")
    return out


def named_arrays(values: Any) -> dict[str, NDArray[Any]]:
    """Arrays by name: as a record's frame gives them, as [dtype, shape, bytes], or as a line spells them. Raises
    BadRecord.
    """
    if not isinstance(values, dict):
        raise BadRecord("arrays is not an object")
    return {str(name): _named_array(name, value) for name, value in values.items()}


def _named_array(name: Any, value: Any) -> NDArray[Any]:
    if isinstance(value, np.ndarray):
        return value
    try:
        if isinstance(value, dict):
            value = value["dtype"], value["shape"], base64.b64decode(value["base64"], validate=True)
        dtype, shape, data = value
        if not _DTYPE.fullmatch(dtype):
            raise ValueError(f"a dtype of {dtype!r}")
        return np.frombuffer(data, dtype).reshape(shape)
    except (TypeError, ValueError, KeyError) as error:
        raise BadRecord(f"the array {name} can't be read: {error}") from None


def _floats(values: Any) -> Any:
    """A list of plain numbers as an array, quickly; anything else (nulls among them) as it is."""
    try:
        return array("d", values) if isinstance(values, list) else values
    except (TypeError, OverflowError):
        return values


def _check_version(schema: Any) -> None:
    name, _, version = str(schema or SCHEMA).partition("/")
    major = version.partition(".")[0]
    if name != "gyre.run" or not major.isdigit():
        raise BadRecord(f"not a gyre.run schema: {schema!r}")
    if int(major) > MAJOR:
        raise RunFileError(f"written as {schema}, this version reads gyre.run/{MAJOR}: update gyre")
