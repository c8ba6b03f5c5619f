"""Ranks with copies of the same weights: which of them keeps what of the optimizer's numbers, and what goes between.

Owns the cut and its two exchanges. Never steps. All ranks that share the tokens have the same weights, of experts those
that do not share them (ADR 20): the parameters of such a group, laid end to end, are cut into equal ranges, one per
rank, wherever that falls; AdamW is elementwise, so no bit depends on it. One rank has all, and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from torch import Tensor

from celld.trainer import cpu
from celld.trainer.mapping import is_expert

Cut = tuple[tuple[int, int, int], ...]  # (rank, start, end) of the numbers of one flat parameter, none empty


def cut(sizes: Mapping[str, int], ranks: int) -> dict[str, Cut]:
    """Who keeps what of parameters of `sizes` numbers. Pure; shares differ by one number at most."""
    total, at, cuts = sum(sizes.values()), 0, {}
    bounds = [(rank, total * rank // ranks, total * (rank + 1) // ranks) for rank in range(ranks)]
    for name, size in sizes.items():
        within = [(rank, max(0, start - at), min(size, end - at)) for rank, start, end in bounds]
        cuts[name] = tuple(each for each in within if each[1] < each[2])
        at += size
    return cuts


class Shards:
    """Of the parameters of one rank; the same cut on all that have copies of them."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._sizes, self._groups, self._cuts = sizes, {name: _group(name) for name in sizes}, dict[str, Cut]()
        for kind in (False, True):
            alike = {name: size for name, size in sizes.items() if is_expert(name) is kind}
            if alike:
                self._cuts |= cut(alike, dist.get_world_size(_group(next(iter(alike)))))
        mine = ((name, at) for name, group in self._groups.items() for at in self._cuts[name] if _is_mine(at, group))
        self.own = {name: slice(start, end) for name, (_, start, end) in mine}  # of the flat parameters that it steps

    def complete(self, name: str, flat: Tensor) -> None:
        """`flat` has this rank's own numbers before, everyone's after. Collective over the ranks that have copies."""
        group = self._groups[name]
        if dist.get_world_size(group) > 1:
            for rank, start, end in self._cuts[name]:
                dist.broadcast(flat[start:end], dist.get_global_rank(group, rank), group=group)

    def whole(self, name: str, own: Tensor | None) -> Tensor:
        """Everyone's numbers, fp32, from the `own` of each. Collective like `complete`; where one has all, its own."""
        if own is not None and len(own) == self._sizes[name]:
            flat = own
        else:
            flat = torch.empty(self._sizes[name], device=cpu.device())
            if own is not None:
                flat[self.own[name]] = own
        self.complete(name, flat)
        return flat


def _group(name: str) -> dist.ProcessGroup:
    """The ranks that have copies of this parameter."""
    group: dist.ProcessGroup = (
        mpu.get_expert_data_parallel_group() if is_expert(name) else mpu.get_context_parallel_group()
    )
    return group


def _is_mine(at: tuple[int, int, int], group: dist.ProcessGroup) -> bool:
    return at[0] == dist.get_rank(group)
