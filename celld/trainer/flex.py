"""The same ancestor-only attention as one FlexAttention kernel: what a GPU runs for `tree.attend`.

Owns the block mask and the choice of kernel. Never sees a forest: in depth-first order token i sees token j exactly if
j <= i < end[j], where end[j] is the end of j's subtree, so one number per token is the whole mask. Invariant: no N x N
mask is made; which blocks of 128 x 128 are empty, full or partial follows from the ends alone, (N / 128)^2 flags. Where
a block's queries are not neighbours (a rank that has a part of the sequence) one that is empty may be called partial.

FlexAttention: Dong et al., "Flex Attention: a programming model for generating optimized attention kernels" (2024).
Uncompiled (a CPU; tests) it computes all scores and has no backward pass.

Shapes: W packed tokens, T of this rank, H query heads, K key/value heads, E head size, Q blocks of queries, B of keys.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK = 128


def attend(q_THE: Tensor, k_WKE: Tensor, v_WKE: Tensor, mask: BlockMask) -> Tensor:
    """Mixed values [T, H, E]; query heads are grouped over key/value heads."""
    q_1HTE, k_1KWE, v_1KWE = (x.transpose(0, 1)[None] for x in (q_THE, k_WKE, v_WKE))
    kernel = _compiled() if q_THE.is_cuda else flex_attention
    mixed_1HTE: Tensor = kernel(q_1HTE, k_1KWE, v_1KWE, block_mask=mask, enable_gqa=True)
    return mixed_1HTE[0].transpose(0, 1)


def block_mask(end_W: Tensor, index_T: Tensor) -> BlockMask:
    """From the subtree ends of tokens in depth-first order, and which of them the queries are."""
    count, queries, device = len(end_W), len(index_T), end_W.device
    blocks, rows = -(-count // BLOCK), -(-queries // BLOCK)
    padded = F.pad(end_W, (0, blocks * BLOCK - count))  # 0: a key past the end is seen by nobody
    latest_B, earliest_B = padded.view(blocks, BLOCK).amax(1), padded.view(blocks, BLOCK).amin(1)
    index = torch.cat([index_T, index_T[-1:].expand(rows * BLOCK - queries)])
    first_Q, last_Q = index.view(rows, BLOCK).amin(1)[:, None], index.view(rows, BLOCK).amax(1)[:, None]
    complete_Q = (torch.arange(1, rows + 1, device=device) * BLOCK <= queries)[:, None]
    start_B = torch.arange(blocks, device=device) * BLOCK
    some_QB = (start_B <= last_Q) & (latest_B > first_Q)
    full_QB = complete_Q & (start_B + BLOCK - 1 <= first_Q) & (earliest_B > last_Q)

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= index[query]) & (index[query] < padded[key])

    return BlockMask.from_kv_blocks(
        *_listed(some_QB & ~full_QB), *_listed(full_QB), BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(queries, count)
    )


def _listed(flags_QB: Tensor) -> tuple[Tensor, Tensor]:
    """(number of set blocks per row, their columns first) with the two leading dimensions that BlockMask wants."""
    columns = flags_QB.int().argsort(dim=1, descending=True, stable=True)
    return flags_QB.sum(1, dtype=torch.int32)[None, None], columns.int()[None, None]


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention)
