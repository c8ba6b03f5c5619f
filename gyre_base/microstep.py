"""The wire form of a micro-step: what trajd packs and a trainer rank computes.

Owns the shape of packed executions, their bytes, and the check that a trained token's context is what the engine saw.
Never chooses, weighs or computes a loss. Invariant: from_wire(*to_wire(m)) equals m array for array, and whatever comes
out of `from_wire` has passed `check`, so a rank can index without fear.

Shapes: T tokens of one execution in depth-first order, every shared prefix once; S segments (runs without a branch).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

WIRE_FORM = 1
ROOT = -1  # predecessor of a first token, parent of a first segment
Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]
_ARRAYS: tuple[tuple[str, str], ...] = (
    ("tokens", "<i4"),
    ("position", "<i4"),
    ("predecessor", "<i4"),
    ("logprob", "<f4"),
    ("owned", "|b1"),
    ("trainable", "|b1"),
)


class PackError(ValueError):
    """A micro-step that contradicts itself. Nothing was computed."""


@dataclass(frozen=True, kw_only=True)
class PackedPath:
    """One kept trajectory: its segments from the root to the leaf, and the packed ranges [start, end) that it owns."""

    trajectory: str
    segments: tuple[int, ...]
    owned: tuple[tuple[int, int], ...]
    kind: str = ""  # main, main-summary, sub-agent, sub-agent-summary


@dataclass(frozen=True, kw_only=True)
class CallRange:
    """One owned completion, at packed indices [start, end). Its prompt is what stands on the path before `start`.

    `prompt_digest` is `ids_digest` of the prompt ids as the engine recorded them.
    """

    call: str
    start: int
    end: int
    prompt_length: int
    prompt_digest: str


@dataclass(frozen=True, kw_only=True)
class VersionSpan:
    """Packed range [start, end) sampled by one policy version."""

    start: int
    end: int
    version: str


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedRouting:
    """Where a mixture of experts is to send R of the tokens again, as the engine did.

    at[R] packed indices, ascending · experts[R, L, K] of every layer, uint8 or uint16; zeros in layers without experts.
    """

    at: Ints
    experts: npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedExecution:
    """All kept trajectories of one execution as one sequence.

    tokens[T] ids · position[T] depth, which is the rotary position · predecessor[T] packed index of the token before,
    ROOT at a root · logprob[T] behaviour logprob, NaN where there is none · trainable[T] may carry loss · owned[T]
    carries loss here · segments[S, 3] = start, end, parent segment (earlier in the list, or ROOT) · total_owned = T_e,
    the owned tokens of the whole execution.
    """

    execution: str
    group: str
    advantage: float
    total_owned: int
    dispatched_step: int
    tokens: Ints
    position: Ints
    predecessor: Ints
    logprob: Floats
    owned: Flags
    trainable: Flags
    segments: Ints
    paths: tuple[PackedPath, ...]
    calls: tuple[CallRange, ...] = ()
    versions: tuple[VersionSpan, ...] = ()
    routing: PackedRouting | None = None  # of tokens that are not in it the trainer decides

    def __len__(self) -> int:
        return len(self.tokens)

    def check(self) -> None:
        """Raises PackError on the first contradiction."""
        count = len(self.tokens)
        for name, _ in _ARRAYS:
            _require(getattr(self, name).shape == (count,), self, f"{name} has not one entry per token")
        self._check_segments(count)
        _require(not bool((self.owned & ~self.trainable).any()), self, "an owned token is not trainable")
        _require(bool(np.isfinite(self.logprob[self.trainable]).all()), self, "a trainable token has no logprob")
        _require(not bool((self.trainable & (self.predecessor < 0)).any()), self, "a first token can't be a target")
        _require(self.total_owned >= int(self.owned.sum()), self, "total_owned is below the owned tokens here")
        self._check_paths()
        for call in self.calls:
            _require(0 < call.start < call.end <= count, self, f"call {call.call} lies outside")
        if self.routing is not None:
            at, experts = self.routing.at, self.routing.experts
            ascending = bool((np.diff(at) > 0).all()) and (not len(at) or (at[0] >= 0 and at[-1] < count))
            _require(ascending, self, "routed tokens are not distinct tokens in order")
            _require(experts.ndim == 3 and len(experts) == len(at), self, "routing has not one entry per routed token")

    def replayed(self) -> Flags:
        """bool[T]: targets that are predicted by a token whose routing is known."""
        known = np.zeros(len(self), dtype=np.bool_)
        if self.routing is not None:
            known[self.routing.at] = True
        out: Flags = self.trainable & known[self.predecessor]
        return out

    def _check_segments(self, count: int) -> None:
        starts, ends, parents = self.segments.reshape(-1, 3).T
        whole = count == 0 or (len(starts) > 0 and starts[0] == 0 and ends[-1] == count)
        _require(whole and bool((starts[1:] == ends[:-1]).all()), self, "segments do not tile the tokens")
        _require(bool((ends > starts).all()), self, "an empty segment")
        _require(
            bool(((parents >= ROOT) & (parents < np.arange(len(parents)))).all()), self, "a parent after its child"
        )
        position, predecessor = chain(self.segments)
        _require(bool((position == self.position).all()), self, "position is not depth")
        _require(bool((predecessor == self.predecessor).all()), self, "predecessor contradicts the segments")

    def _check_paths(self) -> None:
        parents = self.segments.reshape(-1, 3)[:, 2]
        seen = np.zeros(len(self.tokens), dtype=np.int32)
        for path in self.paths:
            for before, segment in zip((ROOT, *path.segments), path.segments, strict=False):
                fits = 0 <= segment < len(parents) and parents[segment] == before
                _require(fits, self, f"path {path.trajectory} is no root-to-leaf path")
            for start, end in path.owned:
                _require(0 <= start < end <= len(seen), self, f"path {path.trajectory} owns tokens outside")
                seen[start:end] += 1
        _require(bool((seen == self.owned).all()), self, "the paths' owned ranges are not the owned tokens, each once")

    def prompt_before(self, index: int) -> Ints:
        """The ids from the root to just before packed index `index`: the context that token was computed in."""
        starts, ends, parents = self.segments.reshape(-1, 3).T
        segment = int(np.searchsorted(starts, index, side="right")) - 1
        parts = [self.tokens[starts[segment] : index]]
        while (segment := int(parents[segment])) != ROOT:
            parts.append(self.tokens[starts[segment] : ends[segment]])
        return np.concatenate(parts[::-1])


@dataclass(frozen=True, eq=False)
class MicroStep:
    """What one lease carries: whole executions, so that no trajectory spans micro-steps."""

    executions: tuple[PackedExecution, ...]

    def to_wire(self) -> tuple[dict[str, Any], bytes]:
        """(layout for msgpack, payload): the arrays of every execution one after another, little-endian."""
        metas = [_meta(packed) for packed in self.executions]
        parts = [part for packed in self.executions for part in _parts(packed)]
        return {"form": WIRE_FORM, "executions": metas}, b"".join(parts)

    @classmethod
    def from_wire(cls, layout: dict[str, Any], payload: bytes) -> MicroStep:
        """Inverse of `to_wire`, checked. Raises PackError. The arrays are read-only views into `payload`."""
        if layout.get("form") != WIRE_FORM:
            raise PackError(f"micro-step of wire form {layout.get('form')!r}, this build reads {WIRE_FORM}")
        offset, executions = 0, []
        try:
            for meta in layout["executions"]:
                packed, offset = _from_meta(meta, payload, offset)
                packed.check()
                executions.append(packed)
        except (KeyError, TypeError, IndexError) as error:
            raise PackError(f"not a micro-step layout: {error!r}") from None
        if offset != len(payload):
            raise PackError(f"payload has {len(payload)} bytes, its layout says {offset}")
        return cls(tuple(executions))

    def context_mismatches(self) -> int:
        return sum(context_mismatches(packed) for packed in self.executions)


def ids_digest(ids: Sequence[int] | Ints) -> str:
    """xxh3-128 (hex) of token ids as little-endian int32."""
    return xxhash.xxh3_128_hexdigest(np.asarray(ids, dtype="<i4").tobytes())


def context_mismatches(packed: PackedExecution) -> int:
    """Owned completions whose context, as packed, is not the prompt that the engine recorded. 0 in a sound run."""
    wrong = 0
    for call in packed.calls:
        prompt = packed.prompt_before(call.start)
        wrong += len(prompt) != call.prompt_length or ids_digest(prompt) != call.prompt_digest
    return wrong


def chain(segments: Ints) -> tuple[Ints, Ints]:
    """(position[T], predecessor[T]) that follow from segments[S, 3]."""
    rows = segments.reshape(-1, 3)
    count = int(rows[-1, 1]) if len(rows) else 0
    position, predecessor = np.empty(count, dtype=np.int32), np.arange(-1, count - 1, dtype=np.int32)
    for start, end, parent in rows.tolist():
        before = rows[parent, 1] - 1 if parent != ROOT else ROOT
        depth = position[before] + 1 if parent != ROOT else 0
        position[start:end] = np.arange(depth, depth + end - start, dtype=np.int32)
        predecessor[start] = before
    return position, predecessor


def _require(holds: bool | np.bool_, packed: PackedExecution, why: str) -> None:
    if not holds:
        raise PackError(f"execution {packed.execution}: {why}")


def _parts(packed: PackedExecution) -> Iterator[bytes]:
    for name, form in _ARRAYS:
        yield np.ascontiguousarray(getattr(packed, name), dtype=form).tobytes()
    if packed.routing is not None:
        yield np.ascontiguousarray(packed.routing.at, dtype="<i4").tobytes()
        yield np.ascontiguousarray(packed.routing.experts, dtype=_little(packed.routing)).tobytes()


def _little(routing: PackedRouting) -> str:
    return f"<u{routing.experts.dtype.itemsize}"


def _routing_meta(routing: PackedRouting | None) -> dict[str, Any]:
    return {} if routing is None else {"routing": [_little(routing), *routing.experts.shape]}


def _meta(packed: PackedExecution) -> dict[str, Any]:
    return {
        **_routing_meta(packed.routing),
        "execution": packed.execution,
        "group": packed.group,
        "advantage": float(packed.advantage),
        "total_owned": int(packed.total_owned),
        "dispatched_step": int(packed.dispatched_step),
        "count": len(packed.tokens),
        "segments": packed.segments.reshape(-1).tolist(),
        "paths": [[p.trajectory, p.kind, list(p.segments), [list(r) for r in p.owned]] for p in packed.paths],
        "calls": [[c.call, c.start, c.end, c.prompt_length, c.prompt_digest] for c in packed.calls],
        "versions": [[v.start, v.end, v.version] for v in packed.versions],
    }


def _from_meta(meta: dict[str, Any], payload: bytes, offset: int) -> tuple[PackedExecution, int]:
    count, arrays = int(meta["count"]), {}
    for name, form in _ARRAYS:
        arrays[name], offset = _array(meta, name, form, (count,), payload, offset)
    routing = None
    if "routing" in meta:
        form, *shape = meta["routing"]
        if form not in ("<u1", "<u2") or len(shape) != 3 or min(shape) < 0:
            raise PackError(f"execution {meta['execution']}: routing of form {meta['routing']}")
        at, offset = _array(meta, "routing", "<i4", shape[:1], payload, offset)
        experts, offset = _array(meta, "routing", form, shape, payload, offset)
        routing = PackedRouting(at=at, experts=experts)
    packed = PackedExecution(
        execution=meta["execution"],
        group=meta["group"],
        advantage=meta["advantage"],
        total_owned=meta["total_owned"],
        dispatched_step=meta["dispatched_step"],
        segments=np.asarray(meta["segments"], dtype=np.int32).reshape(-1, 3),
        paths=tuple(
            PackedPath(trajectory=t, kind=k, segments=tuple(s), owned=tuple((a, b) for a, b in r))
            for t, k, s, r in meta["paths"]
        ),
        calls=tuple(
            CallRange(call=c, start=a, end=b, prompt_length=n, prompt_digest=d) for c, a, b, n, d in meta["calls"]
        ),
        versions=tuple(VersionSpan(start=a, end=b, version=v) for a, b, v in meta["versions"]),
        routing=routing,
        **arrays,
    )
    return packed, offset


def _array(
    meta: dict[str, Any], name: str, form: str, shape: Sequence[int], payload: bytes, offset: int
) -> tuple[npt.NDArray[Any], int]:
    """(the array that begins at `offset`, where it ends). Raises PackError."""
    count = math.prod(shape)
    end = offset + count * np.dtype(form).itemsize
    if end > len(payload):
        raise PackError(f"execution {meta['execution']}: payload ends inside {name}")
    return np.frombuffer(payload, dtype=form, count=count, offset=offset).reshape(shape), end
