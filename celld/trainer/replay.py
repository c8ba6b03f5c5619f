"""Routing that is given: tokens of a mixture of experts go to the experts that the engine sent them to (R3).

Owns what of a packed sequence is given, and the choice that follows. Never owns a weight. The weights of the experts
come from the present router's scores at the given ones, and gradients flow through them; only the choice is fixed. A
token without a row is routed by the router. Invariant: rows that say what the router would choose change no bit.

megatron has a replay of its own (`RouterReplay`); it wants a row of every token, whole layers, and passes in the order
of their recomputation, while a pass here may be in pieces. So only its place in the router is used.

Shapes: W packed tokens, T of a rank, P of a piece, R given rows, L layers, K experts per token, X experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gyre_base.microstep import PackedExecution, PackError


def rows_of(executions: Sequence[PackedExecution]) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Of executions packed one after another: (row_W: each token's row in the other or -1, experts_RLK).

    Raises PackError if they are of different models.
    """
    given = [packed.routing.experts for packed in executions if packed.routing is not None]
    if not any(map(len, given)):
        return None, None
    if len({experts.shape[1:] for experts in given}) > 1:
        raise PackError("the routing of these executions is of different models")
    row_W = np.full(sum(map(len, executions)), -1, dtype=np.int64)
    offset = found = 0
    for packed in executions:
        if packed.routing is not None:
            at = packed.routing.at
            row_W[offset + at] = np.arange(found, found + len(at))
            found += len(at)
        offset += len(packed)
    experts_RLK = np.concatenate([e if e.dtype == np.uint8 else e.astype(np.int32) for e in given])  # as torch likes it
    return torch.from_numpy(row_W), torch.from_numpy(experts_RLK)


def check(experts_RLK: Tensor, layers: int, chosen: int, experts: int) -> None:
    """Raises PackError unless these are rows of such a model."""
    shape = tuple(experts_RLK.shape[1:])
    if shape != (layers, chosen):
        raise PackError(f"routing of {shape[0]} layers and {shape[1]} experts each, the model has {layers}, {chosen}")
    if experts_RLK.numel() and int(experts_RLK.max()) >= experts:
        raise PackError(f"routing to expert {int(experts_RLK.max())}, the model has {experts}")


def limited(scores_PX: Tensor, row_P: Tensor, experts_RK: Tensor) -> Tensor:
    """The scores, -inf for experts that a given row leaves out: then the best are the given ones."""
    given_P1 = (row_P >= 0)[:, None]
    experts_PK = experts_RK[row_P.clamp(min=0)].long()
    left_out_PX = given_P1.expand_as(scores_PX).scatter(1, experts_PK, False)
    return scores_PX.masked_fill(left_out_PX, -torch.inf)
