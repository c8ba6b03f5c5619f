"""Ranks of a cell that share the tokens of one micro-step: which are whose, and what goes between them.

Owns the split, and the two exchanges that it needs: keys and values of all tokens for each rank's queries, and
log-probabilities of all targets for the loss. Never owns a weight or a loss. Invariant: every token is some rank's,
exactly one's; each rank's gradient is the part that its own tokens add, so the sum over the ranks is the gradient.

**Split.** The packed sequence is cut into `CHUNKS` chunks per rank, of one length. They are dealt out in rounds, the
largest of a round to the rank that has fewest pairs of query and key so far: so all ranks have equally many tokens and
about equally many pairs, on a single run (where a late token has many keys) as on a forest. All ranks need one shape:
a rank that is short of a few tokens repeats its last one, and nothing reads what comes of the repeats.

Shapes: W tokens of the whole packed sequence, T of a rank, N targets, X anything.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from numpy.typing import NDArray
from torch import Tensor

from celld.trainer.tree import Row, TreePlan

Indices = NDArray[np.integer[Any]]
CHUNKS = 8  # of each rank: more balances better, fewer leaves longer rows to attention


# ---- the split; pure -------------------------------------------------------------------------------------------------


def part(whole: TreePlan, rank: int, ranks: int) -> TreePlan:
    """What `rank` of `ranks` computes of a plan: its tokens, which see the keys of all."""
    if ranks == 1:
        return whole
    own = shares(whole.position_T.numpy(), ranks)
    length = max(map(len, own))
    places_W = np.empty(len(whole), dtype=np.int64)
    for number, each in enumerate(own):
        places_W[each] = number * length + np.arange(len(each))
    mine = own[rank] if len(own[rank]) else np.zeros(1, dtype=np.int64)  # fewer tokens than ranks: one is repeated
    index_T = torch.from_numpy(np.pad(mine, (0, length - len(mine)), mode="edge"))
    return dataclasses.replace(
        whole,
        tokens_T=whole.tokens_T[index_T],
        position_T=whole.position_T[index_T],
        rows=tuple(_cut(whole.rows, mine)),
        index_T=index_T,
        places_W=torch.from_numpy(places_W),
        ranks=ranks,
    )


def shares(position_W: Indices, ranks: int) -> list[Indices]:
    """The packed indices of each rank's tokens, ascending."""
    count = len(position_W)
    chunks = ranks * min(CHUNKS, -(-count // ranks))
    bounds = np.minimum(np.arange(chunks + 1) * -(-count // chunks), count)
    pairs = np.diff(np.concatenate([[0], np.cumsum(position_W + 1)])[bounds])
    held: list[list[int]] = [[] for _ in range(ranks)]
    load = np.zeros(ranks, dtype=np.int64)
    by_size = np.argsort(-pairs, kind="stable")
    for first in range(0, chunks, ranks):
        for rank, chunk in zip(np.argsort(load, kind="stable"), by_size[first : first + ranks], strict=True):
            held[rank].append(int(chunk))
            load[rank] += pairs[chunk]
    return [np.concatenate([np.arange(bounds[c], bounds[c + 1]) for c in sorted(chunks)]) for chunks in held]


def _cut(rows: Sequence[Row], index: Indices) -> Iterator[Row]:
    """What of each row has its queries in `index`, which is ascending."""
    starts = [row.start for row in rows]
    for span in np.split(np.arange(len(index)), np.flatnonzero(np.diff(index) != 1) + 1):
        first, last, at = int(index[span[0]]), int(index[span[-1]]) + 1, int(span[0])
        for row in rows[bisect_right(starts, first) - 1 :]:
            if row.start >= last:
                break
            start, end = max(row.start, first), min(row.end, last)
            keys = (*row.keys[:-1], (row.keys[-1][0], end))
            yield Row(start, end, keys, at=at + start - first)


# ---- between the ranks -----------------------------------------------------------------------------------------------


def of_all(key_TKE: Tensor, value_TKE: Tensor, plan: TreePlan) -> tuple[Tensor, Tensor]:
    """Keys and values [W, K, E] in packed order, from every rank's own."""
    if plan.ranks == 1:
        return key_TKE, value_TKE
    both = gathered(torch.cat((key_TKE, value_TKE), dim=-1), mpu.get_context_parallel_group())
    key_WKE, value_WKE = both.index_select(0, plan.places_W).chunk(2, dim=-1)
    return key_WKE, value_WKE


def own_rows(rows_N: Tensor, plan: TreePlan, rank: int) -> tuple[Tensor, Tensor]:
    """(which of the packed indices are this rank's [N], where those lie among its tokens)."""
    at_N = plan.places_W[rows_N] - rank * len(plan)
    is_own_N = (at_N >= 0) & (at_N < len(plan))
    return is_own_N, at_N[is_own_N]


def whole(own_X: Tensor, is_own_N: Tensor) -> Tensor:
    """[N] on every rank, from what each has where `is_own_N`. All make the same of it, so backwards each takes the
    gradient of its own, once."""
    every_N: Tensor = _Whole.apply(own_X, is_own_N, mpu.get_context_parallel_group())  # type: ignore[no-untyped-call]
    return every_N


def gathered(own_TX: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Every rank's [T, X], laid end to end. Backwards: `scattered`."""
    every_X: Tensor = _Gathered.apply(own_TX, group)  # type: ignore[no-untyped-call]
    return every_X


def scattered(every_X: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of what all ranks have, to each its own [T, X] of it. Backwards: `gathered`."""
    own_TX: Tensor = _Scattered.apply(every_X, group)  # type: ignore[no-untyped-call]
    return own_TX


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own_TX: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gather(own_TX, group)

    @staticmethod
    def backward(ctx: Any, grad_X: Tensor) -> tuple[Tensor, None]:
        return _scatter(grad_X, ctx.group), None


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, every_X: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _scatter(every_X, group)

    @staticmethod
    def backward(ctx: Any, grad_TX: Tensor) -> tuple[Tensor, None]:
        return _gather(grad_TX, ctx.group), None


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own_X: Tensor, is_own_N: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(is_own_N)
        every_N = own_X.new_zeros(len(is_own_N))
        every_N[is_own_N] = own_X
        dist.all_reduce(every_N, group=group)  # all others add zero: the bits are those of the rank that has it
        return every_N

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, None, None]:
        (is_own_N,) = ctx.saved_tensors
        return grad_N[is_own_N], None, None


def _gather(own_TX: Tensor, group: dist.ProcessGroup) -> Tensor:
    ranks = dist.get_world_size(group)
    every_X = own_TX.new_empty(ranks * own_TX.shape[0], *own_TX.shape[1:])
    dist.all_gather_single(every_X, own_TX.contiguous(), group=group)
    return every_X


def _scatter(every_X: Tensor, group: dist.ProcessGroup) -> Tensor:
    ranks = dist.get_world_size(group)
    own_TX = every_X.new_empty(every_X.shape[0] // ranks, *every_X.shape[1:])
    dist.reduce_scatter_single(own_TX, every_X.contiguous(), group=group)
    return own_TX
