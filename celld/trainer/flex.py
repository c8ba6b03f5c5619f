"""The same ancestor-only attention as one FlexAttention kernel: what a GPU runs for `tree.attend`.

Owns the block mask and the choice of kernel. Never sees a forest: in depth-first order token i sees token j exactly if
j <= i < end[j], where end[j] is the end of j's subtree, so one number per token is the whole mask. Invariant: no N x N
mask is made; which blocks of 128 x 128 are empty, full or partial follows from the ends alone, (N / 128)^2 flags.

FlexAttention: Dong et al., "Flex Attention: a programming model for generating optimized attention kernels" (2024).
Uncompiled (a CPU; tests) it computes all scores and has no backward pass.

Shapes: T packed tokens, H query heads, K key/value heads, E head size, B blocks.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK = 128


def attend(q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor, mask: BlockMask) -> Tensor:
    """Mixed values [T, H, E]; query heads are grouped over key/value heads."""
    q_1HTE, k_1KTE, v_1KTE = (x.transpose(0, 1)[None] for x in (q_THE, k_TKE, v_TKE))
    kernel = _compiled() if q_THE.is_cuda else flex_attention
    mixed_1HTE: Tensor = kernel(q_1HTE, k_1KTE, v_1KTE, block_mask=mask, enable_gqa=True)
    return mixed_1HTE[0].transpose(0, 1)


def block_mask(end_T: Tensor) -> BlockMask:
    """From the subtree ends [T] of tokens in depth-first order."""
    count, device = len(end_T), end_T.device
    blocks = -(-count // BLOCK)
    padded = F.pad(end_T, (0, blocks * BLOCK - count))  # 0: a key past the end is seen by nobody
    latest_B, earliest_B = padded.view(blocks, BLOCK).amax(1), padded.view(blocks, BLOCK).amin(1)
    start_B = torch.arange(blocks, device=device) * BLOCK
    before_BB = torch.ones(blocks, blocks, dtype=torch.bool, device=device).tril_(-1)
    full_BB = before_BB & (earliest_B[None] >= start_B[:, None] + BLOCK)
    some_BB = (before_BB & (latest_B[None] > start_B[:, None])) | torch.eye(blocks, dtype=torch.bool, device=device)

    def sees(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < padded[key])

    return BlockMask.from_kv_blocks(
        *_listed(some_BB & ~full_BB), *_listed(full_BB), BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(count, count)
    )


def _listed(flags_BB: Tensor) -> tuple[Tensor, Tensor]:
    """(number of set blocks per row, their columns first) with the two leading dimensions that BlockMask wants."""
    columns = flags_BB.int().argsort(dim=1, descending=True, stable=True)
    return flags_BB.sum(1, dtype=torch.int32)[None, None], columns.int()[None, None]


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention)
