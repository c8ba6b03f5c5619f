"""One micro-step through the stages of a pipeline: each rank holds some of the layers.

Owns the order of passes, the states and gradients between neighbours, and bringing the stages' tensors together. Never
owns a weight. Invariant: the gradient is that of the executions computed in one place.

Executions are independent of each other, so each is a pass of its own: while the next stage computes one, this one
computes another. All forward passes come first, then all backward passes, in one order on every stage: so two
neighbours never wait to send to each other at once. What is kept in between is what a single rank would keep of the
whole micro-step. Idle are stages - 1 of (executions + stages - 1) passes.

Shapes: T packed tokens of one execution, D width.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor

from celld.trainer import cpu, tree

if TYPE_CHECKING:
    from celld.trainer.model import Policy

LossOf = Callable[[int, Tensor], tuple[Tensor, dict[str, float]]]


def forward_backward(policy: Policy, plans: Sequence[tree.TreePlan], loss_of: LossOf) -> dict[str, float]:
    """Adds the gradient of one pass per plan. The last stage calls `loss_of(number, final states [T, D])` and returns
    the sums of its statistics; the others return none."""
    passes: list[tuple[Tensor | None, Tensor]] = []
    stats: Counter[str] = Counter()
    sent: list[tuple[dist.Work, Tensor]] = []
    for number, plan in enumerate(plans):
        entering = None
        if not policy.is_first:
            shape = (len(plan), 1, policy.shape.hidden_size)
            entering = _received(shape, policy.dtype, policy.stage - 1).requires_grad_()
        leaving = policy.states(plan, entering)
        if policy.is_last:
            leaving, found = loss_of(number, leaving[:, 0])
            stats.update(found)
        else:
            sent.append(_sent(leaving.detach(), policy.stage + 1))
        passes.append((entering, leaving))
    for plan, (entering, leaving) in zip(plans, passes, strict=True):
        policy.begin(plan)
        gradient = None if policy.is_last else _received(leaving.shape, policy.dtype, policy.stage + 1)
        torch.autograd.backward(leaving, gradient)
        if entering is not None:
            assert entering.grad is not None, "the loss does not depend on the states"
            sent.append(_sent(entering.grad, policy.stage - 1))
    for work, _ in sent:
        work.wait()
    return dict(stats)


def joined(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Those of every stage, on every stage, one by one in the host's memory. Collective. All are of one type."""
    host, group = torch.device("cpu"), mpu.get_pipeline_model_parallel_group()
    own = ((name, tensor.to(host)) for name, tensor in tensors)
    if dist.get_world_size(group) == 1:
        yield from own
        return
    held = dict(own)
    dtype = next(iter(held.values())).dtype
    for stage in range(dist.get_world_size(group)):
        mine = held if dist.get_rank(group) == stage else None
        source = dist.get_global_rank(group, stage)
        for name, shape in _layout(mine, source, group):
            part = torch.empty(shape, dtype=dtype) if mine is None else mine[name].contiguous()
            moved = part.to(cpu.device())
            dist.broadcast(moved, source, group=group)
            yield name, moved.to(host)


def _layout(tensors: dict[str, Tensor] | None, source: int, group: dist.ProcessGroup) -> list[tuple[str, list[int]]]:
    """Names and shapes of the tensors that `source` has, as bytes: nothing is unpickled."""
    content = b"" if tensors is None else msgspec.msgpack.encode([(n, list(t.shape)) for n, t in tensors.items()])
    size = torch.tensor([len(content)], device=cpu.device())
    dist.broadcast(size, source, group=group)
    words = torch.zeros(int(size), dtype=torch.uint8)
    if tensors is not None:
        words = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    words = words.to(cpu.device())
    dist.broadcast(words, source, group=group)
    return msgspec.msgpack.decode(words.cpu().numpy().tobytes(), type=list[tuple[str, list[int]]])


def _sent(states: Tensor, stage: int) -> tuple[dist.Work, Tensor]:
    """On its way; to be kept until it is there."""
    group, states = mpu.get_pipeline_model_parallel_group(), states.contiguous()
    work = dist.isend(states, dist.get_global_rank(group, stage), group=group)
    assert work is not None, "this rank is in the group"
    return work, states


def _received(shape: Sequence[int], dtype: torch.dtype, stage: int) -> Tensor:
    group = mpu.get_pipeline_model_parallel_group()
    states = torch.empty(tuple(shape), dtype=dtype, device=cpu.device())
    dist.recv(states, dist.get_global_rank(group, stage), group=group)
    return states
