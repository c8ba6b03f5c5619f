"""megatron-core's transformer layer with tree attention in it, computed whole or in pieces.

Owns what of a pass the layers need to know, and the pieces. Never owns a weight. Invariant: outputs and gradients are
those of the whole computation; a piece only decides what is kept and what is computed again.

**Pieces.** A micro-step that is longer than `piece_tokens` (one long trajectory; it never spans micro-steps) keeps for
the backward pass two states per token and layer: the layer's input and what attention made of it. The first pass is
thus free of gradients; from its log-probabilities follow s and the coefficients of the loss. The backward pass then
computes one layer at a time again, attention row by row, the rest of the layer (norm and MLP or experts) in pieces of
`piece_tokens`, and the log-probabilities in pieces of `LOGIT_ELEMENTS` (`celld.trainer.model`).

Bytes above weights and gradients, in fp32 (in bf16 half, but for masks and scores), for T tokens, width D, L layers,
Q = heads x head size, K the same of keys:
    4 T (2 L D  +  about 16 (D + Q + 2 K))    kept, and one layer's attention in hand (16: measured)
    + 4 P (D + 6 F)                           one piece of P tokens, F the width of its MLP
    + one mask and one row of scores (`celld.trainer.tree`), + four times 4 * LOGIT_ELEMENTS
    + 4 W 2 K, with gradients twice           one layer's keys and values of all W tokens, where ranks share them
So what is kept grows with T alone, never with T^2 or T V (docs/trainer.md has a measurement of the peak). Pieces with
keys and values kept across them (and their gradients summed from the last piece to the first) would need as much: 4 T L
4K, where 2K is D in Qwen3; this is the same memory with no gradient of our own. Time: about a third more, attention two
thirds and more.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from celld.trainer import context, replay, tree


@dataclass
class Pass:
    """One forward pass. All layers of a model share one object; the policy sets it before each pass."""

    plan: tree.TreePlan | None = None
    piece_tokens: int = 0  # 0: everything at once, and kept
    start: int = 0  # of the piece that goes through experts now, among this rank's tokens


class TreeAttention(MegatronModule):  # type: ignore[misc]  # megatron is untyped
    """megatron's place for attention, filled by `tree.attend`."""

    now: Pass

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config=config)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """[T, 1, heads, E] each -> [T, 1, H * E]."""
        assert self.now.plan is not None, "set the plan first"
        again = bool(self.now.piece_tokens)
        key_WKE, value_WKE = context.of_all(key[:, 0], value[:, 0], self.now.plan)
        mixed_THE = tree.attend(query[:, 0], key_WKE, value_WKE, self.now.plan, again=again)
        return mixed_THE.flatten(1)[:, None]


class Dispatcher(MoEAllGatherTokenDispatcher):  # type: ignore[misc]  # megatron is untyped
    """Ranks that share the experts: each computes its own for the tokens of all, and everybody's results are summed.

    megatron's way with our collectives, because its own take their memory from CUDA; its other dispatcher, all to all,
    needs a CUDA stream. That one moves a token once for each of its experts: with 8, as in Qwen3, and up to 8 ranks not
    less than this.
    """

    routing_map: Tensor
    local_probs: Tensor

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """[P, D], [P, experts] -> those of all ranks."""
        if self.ep_size == 1:
            return hidden_states, probs
        self.routing_map = context.gathered(self.routing_map, self.ep_group)
        return context.gathered(hidden_states, self.ep_group), context.gathered(probs, self.ep_group)

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """Parts of what becomes of all ranks' tokens -> what becomes of this rank's [P, D]."""
        if self.ep_size == 1:
            return hidden_states
        whole = context.scattered(hidden_states.to(self.local_probs.dtype), self.ep_group)
        return whole.to(hidden_states.dtype)


class Layer(TransformerLayer):  # type: ignore[misc]  # megatron is untyped
    """A layer whose two halves are computed again for the backward pass when the pass is in pieces."""

    now: Pass

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.is_moe_layer:
            own, groups = self.mlp.local_expert_indices, get_default_pg_collection()
            self.mlp.token_dispatcher = Dispatcher(len(own), own, config=self.config, pg_collection=groups)

    def _forward_attention(self, *args: Any, **kwargs: Any) -> Any:
        if not self.now.piece_tokens:
            return super()._forward_attention(*args, **kwargs)
        return again(super()._forward_attention, *args, **kwargs)

    def _forward_mlp(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Norm, MLP or experts and residual of [T, 1, D]: token by token, so any cut gives the same."""
        forward = super()._forward_mlp
        if not self.now.piece_tokens:
            whole: Tensor = forward(hidden_states, *args, **kwargs)
            return whole

        def mlp_of(start: int, piece: Tensor) -> Tensor:
            self.now.start = start  # also when it is computed again
            out: Tensor = forward(piece, *args, **kwargs)
            return out

        starts = range(0, len(hidden_states), self.now.piece_tokens)
        pieces = torch.split(hidden_states, self.now.piece_tokens)
        return torch.cat([again(mlp_of, start, piece) for start, piece in zip(starts, pieces, strict=True)])


class Router(TopKRouter):  # type: ignore[misc]  # megatron is untyped
    """Scores in fp32, whatever the states are in. megatron's own `gating` needs CUDA and Transformer Engine."""

    def gating(self, input: Tensor) -> Tensor:
        """[..., D] -> [..., experts]"""
        return F.linear(input.float(), self.weight.float())


class Given:
    """What megatron's router asks for its choice of experts: that of the plan where it has one, else the router's."""

    def __init__(self, now: Pass, layer: int) -> None:
        self._now, self._layer = now, layer

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: Any = None,
        group_topk: Any = None,
        default_compute_topk: Any = None,
    ) -> tuple[Tensor, Tensor]:
        """([P, K] of the scores, which experts). The name and the arguments are megatron's."""
        plan, start = self._now.plan, self._now.start
        if plan is not None and plan.routed_W is not None and plan.experts_RLK is not None:
            row_P = plan.routed_W[plan.index_T[start : start + len(scores)]]
            scores = replay.limited(scores, row_P, plan.experts_RLK[:, self._layer])
        best: tuple[Tensor, Tensor] = default_compute_topk(scores, topk, num_groups, group_topk)
        return best


def again(forward: Any, *args: Any, **kwargs: Any) -> Any:
    """`forward` now, and once more in the backward pass. Dropout is 0, so no random state is kept for it."""
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def block_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage, dense or with experts as `config.moe_layer_freq` says."""
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    for layer in spec.layer_specs:
        layer.module = Layer
        layer.submodules.self_attention.submodules.core_attention = TreeAttention
        inside = _submodules(layer.submodules.mlp)
        if hasattr(inside, "router"):
            inside.router = Router
    return spec


def _submodules(mlp: Any) -> Any:
    """Of an MLP's spec, which is a ModuleSpec in megatron 0.16 and a partial in 0.19."""
    return mlp.keywords.get("submodules") if isinstance(mlp, partial) else mlp.submodules


def share(model: torch.nn.Module) -> Pass:
    """One `Pass` for all layers of a model."""
    now = Pass()
    for module in model.modules():
        if isinstance(module, TreeAttention | Layer):
            module.now = now
        if isinstance(module, Router):
            module.router_replay = Given(now, module.layer_number - 1)
    return now
