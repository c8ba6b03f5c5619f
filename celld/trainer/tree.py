"""Ancestor-only attention over packed forests: every shared prefix is computed once.

Owns the plan (which rows of queries see which keys) and the attention that follows it. Never knows of losses,
advantages or megatron. Invariant: token i attends exactly to its ancestors and itself, so the result for a path is that
of the path alone as its own row; there is no N x N mask, the largest is [rows, queries, keys] of one bucket, bounded by
`MASK_ELEMENTS`.

A *run* is a maximal chain of segments that follow each other in depth-first order; a forest has as many runs as leaves.
A run's tokens are its queries, its keys are its ancestors and itself. Runs longer than `MAX_QUERIES` are cut. Runs of
about equal shape are padded into one bucket: many executions then cost a handful of attention calls.

Shapes: T packed tokens of all executions, R rows of a bucket, L queries, A keys, H query heads, K key/value heads, E
head size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from gyre_base.microstep import PackedExecution

MAX_QUERIES = 512  # longer runs are cut: bounds a mask to 512 x its keys
MASK_ELEMENTS = 1 << 22  # rows x queries x keys of one bucket; more is faster up to the cache, then only larger


@dataclass(frozen=True, eq=False)
class Bucket:
    """Rows padded to one shape. Padding queries and keys repeat a valid index; the mask hides padding keys."""

    queries_RL: Tensor
    keys_RA: Tensor
    mask_R1LA: Tensor


@dataclass(frozen=True, eq=False)
class TreePlan:
    """What the model needs to compute one packed sequence."""

    tokens_T: Tensor
    position_T: Tensor
    buckets: tuple[Bucket, ...]
    gather_T: Tensor  # where token t's output lies in the buckets' outputs, laid end to end

    def __len__(self) -> int:
        return len(self.tokens_T)

    def to(self, device: torch.device) -> TreePlan:
        moved = tuple(
            Bucket(b.queries_RL.to(device), b.keys_RA.to(device), b.mask_R1LA.to(device)) for b in self.buckets
        )
        return TreePlan(self.tokens_T.to(device), self.position_T.to(device), moved, self.gather_T.to(device))


@dataclass(frozen=True)
class _Row:
    """Queries [start, end) of the packed sequence; `keys` are ranges whose last one ends at `end`."""

    start: int
    end: int
    keys: tuple[tuple[int, int], ...]

    @property
    def key_count(self) -> int:
        return sum(end - start for start, end in self.keys)


def plan(executions: Sequence[PackedExecution]) -> TreePlan:
    """The plan of several executions, one after another in one sequence."""
    rows: list[_Row] = []
    offset = 0
    for packed in executions:
        rows.extend(_rows(packed.segments.reshape(-1, 3).tolist(), offset))
        offset += len(packed)
    shapes: dict[tuple[int, int], list[_Row]] = defaultdict(list)
    for row in rows:
        shapes[_round_up(row.end - row.start), _round_up(row.key_count)].append(row)
    gather = np.empty(offset, dtype=np.int64)
    buckets, at = [], 0
    for (queries, keys), members in sorted(shapes.items()):
        per_bucket = max(1, MASK_ELEMENTS // (queries * keys))
        for first in range(0, len(members), per_bucket):
            bucket = _bucket(members[first : first + per_bucket], gather, at)
            at += bucket.queries_RL.numel()
            buckets.append(bucket)
    return TreePlan(
        tokens_T=torch.from_numpy(np.concatenate([p.tokens for p in executions]).astype(np.int64)),
        position_T=torch.from_numpy(np.concatenate([p.position for p in executions]).astype(np.int64)),
        buckets=tuple(buckets),
        gather_T=torch.from_numpy(gather),
    )


def attend(q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor, plan: TreePlan) -> Tensor:
    """Mixed values [T, H, E]; query heads are grouped over key/value heads."""
    repeats = q_THE.shape[1] // k_TKE.shape[1]
    outputs = []
    for bucket in plan.buckets:
        q_RLHE, k_RAKE, v_RAKE = q_THE[bucket.queries_RL], k_TKE[bucket.keys_RA], v_TKE[bucket.keys_RA]
        k_RHAE = k_RAKE.repeat_interleave(repeats, dim=2).transpose(1, 2)
        v_RHAE = v_RAKE.repeat_interleave(repeats, dim=2).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(q_RLHE.transpose(1, 2), k_RHAE, v_RHAE, attn_mask=bucket.mask_R1LA)
        outputs.append(mixed.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)[plan.gather_T]


def _rows(segments: list[list[int]], offset: int) -> Iterator[_Row]:
    """One row per run, cut at MAX_QUERIES."""
    first = 0
    for index in range(1, len(segments) + 1):
        if index < len(segments) and segments[index][2] == index - 1:
            continue
        ancestors = _ancestors(segments, segments[first][2], offset)
        begin, stop = segments[first][0] + offset, segments[index - 1][1] + offset
        for start in range(begin, stop, MAX_QUERIES):
            end = min(start + MAX_QUERIES, stop)
            yield _Row(start, end, (*ancestors, (begin, end)))
        first = index


def _ancestors(segments: list[list[int]], parent: int, offset: int) -> list[tuple[int, int]]:
    ranges = []
    while parent >= 0:
        start, end, parent_of = segments[parent]
        ranges.append((start + offset, end + offset))
        parent = parent_of
    return ranges[::-1]


def _bucket(rows: list[_Row], gather: np.ndarray, at: int) -> Bucket:
    """Pad rows to their longest; note in `gather` where each query's output will lie, from `at` on."""
    length = max(row.end - row.start for row in rows)
    width = max(row.key_count for row in rows)
    queries = np.zeros((len(rows), length), dtype=np.int64)
    keys = np.zeros((len(rows), width), dtype=np.int64)
    last_key = np.zeros((len(rows), length), dtype=np.int64)  # the key column that is the query itself
    for number, row in enumerate(rows):
        count, seen = row.end - row.start, row.key_count
        queries[number] = row.start
        queries[number, :count] = np.arange(row.start, row.end)
        keys[number, :seen] = np.concatenate([np.arange(start, end) for start, end in row.keys])
        keys[number, seen:] = row.start
        last_key[number, :count] = np.arange(seen - count, seen)
        gather[row.start : row.end] = at + number * length + np.arange(count)
    mask = np.arange(width)[None, None, :] <= last_key[:, :, None]
    return Bucket(torch.from_numpy(queries), torch.from_numpy(keys), torch.from_numpy(mask[:, None]))


def _round_up(count: int) -> int:
    """The next of 8, 12, 16, 24, 32, 48, 64, ...: at most a third is padding."""
    size = 8
    while size < count:
        if size * 3 // 2 >= count:
            return size * 3 // 2
        size *= 2
    return size
