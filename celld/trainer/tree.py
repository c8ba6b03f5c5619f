"""Ancestor-only attention over packed forests: every shared prefix is computed once.

Owns the plan (which queries see which keys) and the attention that follows it: here on a CPU, `celld.trainer.flex` on a
GPU; the plan is the same. Never knows of losses, advantages or megatron. Invariant: token i attends exactly to its
ancestors and itself, so the result for a path is that of the path alone as its own row; there is no N x N mask. A mask
exists only while its bucket or row is computed, and is [rows, queries, keys] of `MASK_ELEMENTS` at most; a row of more
than `MASK_ELEMENTS / FEWEST_QUERIES` keys has `FEWEST_QUERIES` times its keys.

A *run* is a maximal chain of segments that follow each other in depth-first order; a forest has as many runs as leaves.
A run's tokens are its queries, its keys are its ancestors and itself. Runs longer than `MAX_QUERIES` are cut. Runs of
about equal shape are padded into one bucket: many executions then cost a handful of attention calls. A row that would
fill a bucket alone is computed by itself, from slices, without an index per key.

Shapes: W packed tokens of all executions, T of them those of this rank (all, unless ranks share a sequence, see
`celld.trainer.context`), R rows of a bucket, L queries, A keys, H query heads, K key/value heads, E head size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.checkpoint import checkpoint

from celld.trainer import flex, replay
from gyre_base.microstep import PackedExecution, PackError

MAX_QUERIES = 512  # longer runs are cut: bounds a mask to 512 x its keys
FEWEST_QUERIES = 64  # of a piece of a run whose keys are very many: fewer would starve the matrix product
MASK_ELEMENTS = 1 << 22  # rows x queries x keys of one bucket; more is faster up to the cache, then only larger


@dataclass(frozen=True, eq=False)
class Bucket:
    """Rows padded to one shape. Padding queries and keys repeat a valid index; no query sees a padding key."""

    queries_RL: Tensor
    keys_RA: Tensor
    last_key_RL: Tensor  # the key column that is the query itself: it sees that one and those before

    def attend(self, q_THE: Tensor, k_WKE: Tensor, v_WKE: Tensor) -> Tensor:
        """[R * L, H, E]"""
        repeats = q_THE.shape[1] // k_WKE.shape[1]
        q_RLHE, k_RAKE, v_RAKE = q_THE[self.queries_RL], k_WKE[self.keys_RA], v_WKE[self.keys_RA]
        k_RHAE = k_RAKE.repeat_interleave(repeats, dim=2).transpose(1, 2)
        v_RHAE = v_RAKE.repeat_interleave(repeats, dim=2).transpose(1, 2)
        mask_R1LA = (torch.arange(self.keys_RA.shape[1]) <= self.last_key_RL[..., None])[:, None]
        mixed = F.scaled_dot_product_attention(q_RLHE.transpose(1, 2), k_RHAE, v_RHAE, attn_mask=mask_R1LA)
        return mixed.transpose(1, 2).flatten(0, 1)


@dataclass(frozen=True)
class Row:
    """Queries [start, end) of the packed sequence; `keys` are ranges whose last one ends at `end`. `at`: where the
    first query lies among the tokens of this rank."""

    start: int
    end: int
    keys: tuple[tuple[int, int], ...]
    at: int

    @property
    def key_count(self) -> int:
        return sum(end - start for start, end in self.keys)

    def attend(self, q_THE: Tensor, k_WKE: Tensor, v_WKE: Tensor) -> Tensor:
        """[L, H, E]. Key heads are the batch and their query heads the heads, so that no key is copied per head."""
        heads_K, repeats = k_WKE.shape[1], q_THE.shape[1] // k_WKE.shape[1]
        queries, keys = self.end - self.start, self.key_count
        q_KGLE = q_THE[self.at : self.at + queries].reshape(queries, heads_K, repeats, -1).permute(1, 2, 0, 3)
        k_KGAE = self._slices(k_WKE).transpose(0, 1)[:, None].expand(-1, repeats, -1, -1)
        v_KGAE = self._slices(v_WKE).transpose(0, 1)[:, None].expand(-1, repeats, -1, -1)
        mask_LA = torch.ones(queries, keys, dtype=torch.bool).tril_(keys - queries)
        mixed = F.scaled_dot_product_attention(q_KGLE, k_KGAE, v_KGAE, attn_mask=mask_LA)
        return mixed.permute(2, 0, 1, 3).flatten(1, 2)

    def _slices(self, of_W: Tensor) -> Tensor:
        parts = [of_W[start:end] for start, end in self.keys]
        return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass(frozen=True, eq=False)
class TreePlan:
    """What a rank needs to compute its tokens of one packed sequence. Tokens that a rank has only to be as many as the
    others are at its end and in no row."""

    tokens_T: Tensor
    position_T: Tensor
    index_T: Tensor  # of each token in the packed sequence
    end_W: Tensor  # where the subtree of a token ends
    places_W: Tensor  # of each packed token in the tokens of all ranks, laid end to end
    rows: tuple[Row, ...]  # in the order of their queries
    ranks: int = 1  # that share the sequence
    routed_W: Tensor | None = None  # of each packed token its row of given experts, -1: the router decides
    experts_RLK: Tensor | None = None  # the given ones (`celld.trainer.replay`)

    def __len__(self) -> int:
        return len(self.tokens_T)

    def to(self, device: torch.device) -> TreePlan:
        held = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {name: x.to(device) for name, x in held.items() if isinstance(x, Tensor)}
        return replace(self, **moved)

    @cached_property
    def on_cpu(self) -> tuple[tuple[Bucket | Row, ...], Tensor]:
        """(parts, gather [T]): where token t's output lies in the parts' outputs, laid end to end."""
        shapes: dict[tuple[int, int], list[Row]] = defaultdict(list)
        parts: list[Bucket | Row] = []
        gather, at = np.empty(len(self), dtype=np.int64), 0
        for row in self.rows:
            queries, keys = _round_up(row.end - row.start), _round_up(row.key_count)
            if 2 * queries * keys > MASK_ELEMENTS:
                gather[row.at : row.at + row.end - row.start] = np.arange(at, at + row.end - row.start)
                at += row.end - row.start
                parts.append(row)
            else:
                shapes[queries, keys].append(row)
        for (queries, keys), members in sorted(shapes.items()):
            per_bucket = MASK_ELEMENTS // (queries * keys)
            for first in range(0, len(members), per_bucket):
                bucket = _bucket(members[first : first + per_bucket], gather, at)
                at += bucket.queries_RL.numel()
                parts.append(bucket)
        covered = sum(row.end - row.start for row in self.rows)
        gather[covered:] = gather[covered - 1]
        return tuple(parts), torch.from_numpy(gather)

    @cached_property
    def on_gpu(self) -> BlockMask:
        return flex.block_mask(self.end_W, self.index_T)


def plan(executions: Sequence[PackedExecution]) -> TreePlan:
    """Of several executions, one after another in one sequence, for a rank that has all of it.

    Raises PackError if one isn't depth-first.
    """
    rows: list[Row] = []
    ends: list[np.ndarray] = []
    offset = 0
    for packed in executions:
        segments = packed.segments.reshape(-1, 3).tolist()
        rows.extend(_rows(segments, offset))
        ends.append(_subtree_ends(segments, packed.execution) + offset)
        offset += len(packed)
    every_W = torch.arange(offset)
    routed_W, experts_RLK = replay.rows_of(executions)
    return TreePlan(
        tokens_T=torch.from_numpy(np.concatenate([p.tokens for p in executions]).astype(np.int64)),
        position_T=torch.from_numpy(np.concatenate([p.position for p in executions]).astype(np.int64)),
        index_T=every_W,
        end_W=torch.from_numpy(np.concatenate(ends)),
        places_W=every_W,
        rows=tuple(rows),
        routed_W=routed_W,
        experts_RLK=experts_RLK,
    )


def attend(q_THE: Tensor, k_WKE: Tensor, v_WKE: Tensor, plan: TreePlan, *, again: bool = False) -> Tensor:
    """Mixed values [T, H, E]; query heads are grouped over key/value heads.

    `again`: keep nothing of a part for the backward pass but compute it a second time then. On a GPU the kernel does so
    always. Whatever the inputs, scores and sums are in fp32, as they are inside that kernel.
    """
    if q_THE.is_cuda:
        return flex.attend(q_THE, k_WKE, v_WKE, plan.on_gpu)
    parts, gather_T = plan.on_cpu
    narrow = q_THE.dtype
    q_THE, k_WKE, v_WKE = q_THE.float(), k_WKE.float(), v_WKE.float()
    if again:
        mixed = [
            checkpoint(p.attend, q_THE, k_WKE, v_WKE, use_reentrant=False, preserve_rng_state=False) for p in parts
        ]
    else:
        mixed = [p.attend(q_THE, k_WKE, v_WKE) for p in parts]
    return torch.cat(mixed)[gather_T].to(narrow)


def _rows(segments: list[list[int]], offset: int) -> Iterator[Row]:
    """One row per run, cut into pieces of MAX_QUERIES, of fewer where the keys are very many."""
    first = 0
    for index in range(1, len(segments) + 1):
        if index < len(segments) and segments[index][2] == index - 1:
            continue
        ancestors = _ancestors(segments, segments[first][2], offset)
        begin, stop = segments[first][0] + offset, segments[index - 1][1] + offset
        start, before = begin, sum(end - start for start, end in ancestors)
        while start < stop:
            most = MASK_ELEMENTS // (before + start - begin + MAX_QUERIES)
            end = min(start + max(min(most, MAX_QUERIES), min(FEWEST_QUERIES, MAX_QUERIES)), stop)
            yield Row(start, end, (*ancestors, (begin, end)), at=start)
            start = end
        first = index


def _ancestors(segments: list[list[int]], parent: int, offset: int) -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []
    while parent >= 0:
        start, end, parent_of = segments[parent]
        ranges.append((start + offset, end + offset))
        parent = parent_of
    return ranges[::-1]


def _subtree_ends(segments: list[list[int]], execution: str) -> np.ndarray:
    """Per token, where the last descendant of its segment ends: token i sees j <= i exactly if i < end[j]."""
    ends = [end for _, end, _ in segments]
    branch: list[int] = []
    for index, (start, _, parent) in enumerate(segments):
        while branch and branch[-1] != parent:
            ends[branch.pop()] = start
        if not branch and parent >= 0:
            raise PackError(f"execution {execution}: its segments are not in depth-first order")
        branch.append(index)
    for index in branch:
        ends[index] = segments[-1][1]
    return np.repeat(np.array(ends, dtype=np.int64), [end - start for start, end, _ in segments])


def _bucket(rows: list[Row], gather: np.ndarray, at: int) -> Bucket:
    """Pad rows to their longest; note in `gather` where each query's output will lie, from `at` on."""
    length = max(row.end - row.start for row in rows)
    width = max(row.key_count for row in rows)
    queries = np.zeros((len(rows), length), dtype=np.int64)
    keys = np.zeros((len(rows), width), dtype=np.int64)
    last_key = np.zeros((len(rows), length), dtype=np.int64)
    for number, row in enumerate(rows):
        count, seen = row.end - row.start, row.key_count
        queries[number] = row.at
        queries[number, :count] = np.arange(row.at, row.at + count)
        keys[number, :seen] = np.concatenate([np.arange(start, end) for start, end in row.keys])
        keys[number, seen:] = row.start
        last_key[number, :count] = np.arange(seen - count, seen)
        gather[row.at : row.at + count] = at + number * length + np.arange(count)
    return Bucket(torch.from_numpy(queries), torch.from_numpy(keys), torch.from_numpy(last_key))


def _round_up(count: int) -> int:
    """The next of 8, 12, 16, 24, 32, 48, 64, ...: at most a third is padding."""
    size = 8
    while size < count:
        if size * 3 // 2 >= count:
            return size * 3 // 2
        size *= 2
    return size
