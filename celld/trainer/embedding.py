"""megatron's table of embeddings with gradients that add up in fp32.

A common token of a micro-step occurs thousands of times. torch adds the gradients of its occurrences in the table's own
type on a CPU: in bf16 the sum stops growing at 256 times what is added (seen: 2000 ones make 256). Everything else that
a micro-step adds up is added in fp32 inside matrix products, or by autograd (`Policy._view_gradients`).

Shapes: T tokens, V rows of this rank, D width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class Embedding(VocabParallelEmbedding):  # type: ignore[misc]  # megatron is untyped
    """Takes megatron's place."""

    @classmethod
    def like(cls, other: VocabParallelEmbedding, config: TransformerConfig) -> Embedding:
        """One of the size of `other`."""
        return cls(other.num_embeddings, other.embedding_dim, init_method=config.init_method, config=config)

    def forward(self, ids: Tensor) -> Tensor:
        """[...] -> [..., D]; of the ids that other ranks have, theirs."""
        at = ids - self.vocab_start_index
        mine = (at >= 0) & (at < self.num_embeddings_per_partition)
        rows: Tensor = _Lookup.apply(self.weight, at * mine)  # type: ignore[no-untyped-call]
        whole: Tensor = reduce_from_tensor_model_parallel_region(rows * mine[..., None])
        return whole


class _Lookup(torch.autograd.Function):
    """F.embedding, whose gradient is fp32 whatever the table is in."""

    @staticmethod
    def forward(ctx: Any, weight_VD: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.rows = weight_VD.shape[0]
        return F.embedding(ids, weight_VD)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (ids,) = ctx.saved_tensors
        return torch.ops.aten.embedding_dense_backward(gradient.float(), ids, ctx.rows, -1, False), None
