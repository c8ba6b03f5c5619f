"""megatron-core's GPTModel from a Hugging Face Qwen3 directory, computing log-probabilities over packed forests.

Owns construction, loading and saving, and the flat fp32 gradient buffer. Never steps an optimizer, never talks.
Invariant: `load` then `hf_tensors` gives the same bits; logits equal those of the same weights in transformers.
Construction stays behind `Policy`, since megatron may replace GPTModel by another class.

With bf16 the weights and the states between operations are bf16. In fp32 are the scores and all that follows from them
(log-probabilities, s, the loss), norms and attention inside, the choice of experts, and sums of a weight's gradients.

Shapes: T packed tokens of this rank, N targets of all, V vocabulary (V/tp per rank), D width.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from safetensors.torch import load_file
from torch import Tensor, nn

from celld.trainer import context, cpu, dtypes, layers, pipeline, replay, tree
from celld.trainer.embedding import Embedding
from celld.trainer.mapping import SPLIT, ModelError, Shape, from_hf, is_expert, of_rank, shard, to_hf, unshard
from celld.weights import Array

_LAYERS, _EMBEDDING, _OUTPUT = "decoder.layers.", "embedding.word_embeddings.weight", "output_layer.weight"
LOGIT_ELEMENTS = 1 << 25  # rows x vocabulary of scores in hand; more rows are computed in pieces, and again backwards


class Policy:
    """The trained network of one rank: its part of the weights, on its part of the tokens.

    A pass of more than `piece_tokens` packed tokens is computed in pieces (0: never), see `celld.trainer.layers`.
    """

    def __init__(self, config: dict[str, Any], *, piece_tokens: int = 0, dtype: torch.dtype = torch.float32) -> None:
        self.config, self.piece_tokens, self.dtype = config, piece_tokens, dtype
        self.shape = Shape.from_hf(config)
        self.tp, self.tp_rank = mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()
        self.stages, self.stage = mpu.get_pipeline_model_parallel_world_size(), mpu.get_pipeline_model_parallel_rank()
        self.cp, self.cp_rank = mpu.get_context_parallel_world_size(), mpu.get_context_parallel_rank()
        self.ep, self.ep_rank = mpu.get_expert_model_parallel_world_size(), mpu.get_expert_model_parallel_rank()
        self.is_first, self.is_last = self.stage == 0, self.stage == self.stages - 1
        self._copies_embedding = self.shape.tie_word_embeddings and self.is_last and not self.is_first
        self.module = _build(self.shape, self.tp, self.ep, self.stages, self.stage, dtype).to(cpu.device(), dtype)
        self._now = layers.share(self.module)
        named = sorted(self.module.named_parameters(), key=lambda item: is_expert(item[0]))  # those of experts last
        self.parameters: dict[str, nn.Parameter] = dict(named)
        self.gradient = torch.zeros(sum(p.numel() for p in self.parameters.values()), device=cpu.device())
        self._view_gradients()

    def logprobs(
        self, plan: tree.TreePlan, rows_N: Tensor, targets_N: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """(log-probability [N] of token `targets_N` after packed position `rows_N`, entropy [N] without gradient)."""
        return self.logprobs_of(self.hidden(plan), plan, rows_N, targets_N, temperature)

    def logprobs_of(
        self, hidden_TD: Tensor, plan: tree.TreePlan, rows_N: Tensor, targets_N: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """`logprobs` from final states: what the last stage of a pipeline does with its own."""
        if plan.ranks == 1:
            return self._logprobs(hidden_TD[rows_N], targets_N, temperature)
        is_own_N, rows = context.own_rows(rows_N, plan, self.cp_rank)
        logp, entropy = self._logprobs(hidden_TD[rows], targets_N[is_own_N], temperature)
        return context.whole(logp, is_own_N), context.whole(entropy, is_own_N)

    def _logprobs(self, hidden_ND: Tensor, targets_N: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        def of(hidden_ND: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
            return _log_softmax_at(self._scores(hidden_ND) / temperature, targets_N, self.tp_rank)

        rows = max(1, LOGIT_ELEMENTS * self.tp // self.shape.vocab_size)
        if len(targets_N) <= rows:
            return of(hidden_ND, targets_N)
        pieces = zip(torch.split(hidden_ND, rows), torch.split(targets_N, rows), strict=True)
        logp, entropy = zip(*(layers.again(of, h, t) for h, t in pieces), strict=True)
        return torch.cat(logp), torch.cat(entropy)

    def logits(self, plan: tree.TreePlan, rows_N: Tensor) -> Tensor:
        """This rank's vocabulary slice [N, V/tp] at its tokens `rows_N`; no other row meets the costly matrix."""
        return self._scores(self.hidden(plan)[rows_N])

    def hidden(self, plan: tree.TreePlan) -> Tensor:
        """Final states [T, D]."""
        return self.states(plan)[:, 0]

    def states(self, plan: tree.TreePlan, entering_T1D: Tensor | None = None) -> Tensor:
        """What leaves this stage [T, 1, D]; `entering_T1D` is what left the one before, none for the first."""
        self.begin(plan)
        self.module.set_input_tensor(entering_T1D)
        leaving_T1D: Tensor = self.module(
            input_ids=plan.tokens_T[None], position_ids=plan.position_T[None], attention_mask=None
        )
        return leaving_T1D

    def begin(self, plan: tree.TreePlan) -> None:
        """The layers compute `plan` from now on, in the backward pass as well."""
        if plan.experts_RLK is not None:
            shape = self.shape
            replay.check(plan.experts_RLK, shape.num_hidden_layers, shape.num_experts_per_tok, shape.num_experts)
        self._now.plan, self._now.start = plan, 0
        self._now.piece_tokens = self.piece_tokens if len(plan) > self.piece_tokens else 0
        self.module.rotary_pos_emb.position_T = plan.position_T

    def _scores(self, hidden_ND: Tensor) -> Tensor:
        """[N, V/tp] in fp32: 8 bits of a score of 20 would leave a log-probability uncertain by 0.06."""
        tied = self.shape.tie_word_embeddings and not self._copies_embedding
        layer = self.module.embedding.word_embeddings if tied else self.module.output_layer
        scores_N1V: Tensor = self.module.output_layer(hidden_ND.float()[:, None], weight=layer.weight.float())[0]
        return scores_N1V[:, 0]

    def finish_gradient(self) -> None:
        """Sum what ranks hold in part: those that share the tokens hold the part of their own (of experts the part of
        all with whom they share the experts), and the norms of queries and keys see only a tensor-parallel rank's own
        heads.

        Without this nothing fails and losses look right, but the ranks' copies of those weights drift apart. The last
        stage's copy of a tied embedding gets the first one's gradient, and the other way round.
        """
        if self.cp > 1:
            common = sum(p.numel() for name, p in self.parameters.items() if not is_expert(name))
            dist.all_reduce(self.gradient[:common], group=mpu.get_context_parallel_group())
            if common < len(self.gradient) and self.ep < self.cp:
                dist.all_reduce(self.gradient[common:], group=mpu.get_expert_data_parallel_group())
        if self.tp > 1:
            for name, parameter in self.parameters.items():
                if name.endswith(("q_layernorm.weight", "k_layernorm.weight")):
                    dist.all_reduce(parameter.grad, group=mpu.get_tensor_model_parallel_group())
        if self.stages > 1 and self.shape.tie_word_embeddings and (self.is_first or self.is_last):
            name = _OUTPUT if self.is_last else _EMBEDDING
            dist.all_reduce(self.parameters[name].grad, group=mpu.get_embedding_group())

    def gradient_norm(self) -> float:
        """Of the whole gradient: parts of other ranks count, copies count once."""
        if self.tp == 1 and self.stages == 1 and self.ep == 1:
            return float(self.gradient.norm())
        common, split, experts = torch.zeros(3, device=self.gradient.device)
        for name, parameter in self.parameters.items():
            if not self._is_copy(name) and parameter.grad is not None:
                part = experts if is_expert(name) else split if name.endswith(SPLIT) else common
                part += parameter.grad.square().sum()
        dist.all_reduce(split, group=mpu.get_tensor_model_parallel_group())
        dist.all_reduce(experts, group=mpu.get_expert_model_parallel_group())
        squares = common + split + experts
        dist.all_reduce(squares, group=mpu.get_pipeline_model_parallel_group())
        return float(squares.sqrt())

    def zero_gradient(self) -> None:
        self.gradient.zero_()

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take this rank's part of Hugging Face tensors. Raises ModelError if one is missing or misshapen."""
        parts = self.from_hf_tensors(tensors)
        for name, parameter in self.parameters.items():
            if parts[name].shape != parameter.shape:
                need, got = tuple(parameter.shape), tuple(parts[name].shape)
                raise ModelError(f"{name}: weights of shape {got}, need {need}")
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(parts[name])

    def hf_tensors(self, values: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """The weights (or `values` of the same names and shapes), whole, under Hugging Face names in a fixed order.

        Collective over the ranks of the cell.
        """
        held = self.parameters if values is None else values
        return dict(sorted(self.hf_each(held.items())))

    def hf_each(self, values: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """`hf_tensors` one by one, in the host's memory and in no order: who keeps none of them never holds a whole
        copy. To be taken to its end on every rank."""
        return pipeline.joined(self._stage_each(values))

    def _stage_each(self, values: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Of this stage of the pipeline."""
        for name, part in values:
            if self.ep > 1 and is_expert(name):
                for rank, expert in enumerate(_gathered(part, mpu.get_expert_model_parallel_group())):
                    yield from to_hf(self._global(name, rank), expert, self.shape)
            elif not self._is_copy(name):
                yield from to_hf(self._global(name), self._whole(name, part.detach()), self.shape)

    def from_hf_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Inverse of `hf_tensors`: this rank's parts by parameter name. Raises ModelError if one is missing."""
        return {name: self.part(name, tensors) for name in self.parameters}

    def part(self, name: str, tensors: Mapping[str, Tensor]) -> Tensor:
        """`from_hf_tensors` of one parameter."""
        try:
            whole = from_hf(self._global(name), tensors, self.shape)
        except KeyError as error:
            raise ModelError(f"the weights lack {error}") from None
        return shard(name, whole, self.tp, self.tp_rank)

    def load_arrays(self, arrays: Mapping[str, Array]) -> None:
        """`load` from read-only arrays (a snapshot, a checkpoint)."""
        self.load({name: dtypes.to_tensor(array) for name, array in arrays.items()})

    def hf_arrays(self, *, kept: bool = True) -> dict[str, Array]:
        """`hf_tensors` of the weights, for a snapshot or a checkpoint; a rank that only takes part keeps nothing."""
        return dtypes.to_arrays(self.hf_each(self.parameters.items()), kept=kept)

    def _whole(self, name: str, part: Tensor) -> Tensor:
        parts = [part]
        if self.tp > 1 and name.endswith(SPLIT):
            parts = _gathered(part, mpu.get_tensor_model_parallel_group())
        return unshard(name, parts)

    def _is_copy(self, name: str) -> bool:
        """Whether another stage has this parameter too, and counts and saves it."""
        return self._copies_embedding and name == _OUTPUT

    def _global(self, name: str, ep_rank: int | None = None) -> str:
        """The name that this parameter (of the rank `ep_rank` of those that share the experts) would have if there were
        one rank: megatron counts a stage's layers and a rank's experts from 0."""
        if self._is_copy(name):
            return _EMBEDDING
        name = of_rank(name, (self.ep_rank if ep_rank is None else ep_rank) * self.shape.num_experts // self.ep)
        if self.stage and name.startswith(_LAYERS):
            number, rest = name.removeprefix(_LAYERS).split(".", 1)
            return f"{_LAYERS}{int(number) + self.stage * self.shape.num_hidden_layers // self.stages}.{rest}"
        return name

    def _view_gradients(self) -> None:
        """Each part of a gradient is made fp32 before it is added to others, also within one backward pass."""
        at = 0
        for parameter in self.parameters.values():
            parameter.grad_dtype = torch.float32
            parameter.grad = self.gradient[at : at + parameter.numel()].view_as(parameter)
            at += parameter.numel()


def _gathered(part: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    """The part of every rank of a group."""
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, part.detach().contiguous(), group=group)
    return parts


def read_config(directory: str | Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((Path(directory) / "config.json").read_text())
    except FileNotFoundError:
        raise ModelError(f"no config.json in {directory}; set model.path to a Hugging Face model directory") from None
    return config


def read_tensors(directory: str | Path) -> dict[str, Tensor]:
    """All tensors of a Hugging Face directory, one file or several."""
    files = sorted(Path(directory).glob("model*.safetensors"))
    if not files:
        raise ModelError(f"no model.safetensors in {directory}")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def _build(shape: Shape, tp: int, ep: int, stages: int, stage: int, dtype: torch.dtype) -> GPTModel:
    config = TransformerConfig(
        num_layers=shape.num_hidden_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.intermediate_size,
        num_attention_heads=shape.num_attention_heads,
        num_query_groups=shape.num_key_value_heads,
        kv_channels=shape.head_dim,
        layernorm_epsilon=shape.rms_norm_eps,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=stages,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        qk_layernorm=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        perform_initialization=False,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        **_experts(shape, tp, ep),
        **cpu.config_flags(),
    )
    module = GPTModel(
        config,
        layers.block_spec(config),
        vocab_size=shape.vocab_size,
        max_sequence_length=shape.max_position_embeddings,
        parallel_output=True,
        pre_process=stage == 0,
        post_process=stage == stages - 1,
        share_embeddings_and_output_weights=shape.tie_word_embeddings and stages == 1,
        position_embedding_type="rope",
        rotary_base=shape.rope_theta,
    )
    module.rotary_pos_emb = cpu.DepthRotary(
        shape.head_dim, rotary_percent=1.0, rotary_base=shape.rope_theta, use_cpu_initialization=cpu.on_cpu()
    )
    if stage == 0:
        module.embedding.word_embeddings = Embedding.like(module.embedding.word_embeddings, config)
    module.post_process = False  # its forward ends with the states: only wanted rows meet the vocabulary, in `_scores`
    return module


def _experts(shape: Shape, tp: int, ep: int) -> dict[str, Any]:
    """TransformerConfig entries of a mixture of experts; transformers' numbers, so no auxiliary loss is added."""
    if not any(shape.sparse_layers):
        return {}
    if tp > 1:  # megatron asks for sequence parallelism then, whose norms need Transformer Engine
        raise ModelError("a mixture of experts is trained with tensor-parallel size 1")
    return {
        "num_moe_experts": shape.num_experts,
        "expert_model_parallel_size": ep,
        "moe_router_topk": shape.num_experts_per_tok,
        "moe_ffn_hidden_size": shape.moe_intermediate_size,
        "moe_layer_freq": shape.sparse_layers,
        "moe_router_dtype": "fp32",
        "moe_router_pre_softmax": not shape.norm_topk_prob,  # without: softmax over the chosen, which is to normalise
        "moe_router_load_balancing_type": "none",
        "moe_grouped_gemm": False,
        "moe_token_dispatcher_type": "allgather",  # `layers.Dispatcher`
    }


def _log_softmax_at(logits_NV: Tensor, targets_N: Tensor, tp_rank: int) -> tuple[Tensor, Tensor]:
    """log_softmax at the targets, and the entropy, over a vocabulary that may be split among ranks."""
    highest_N = logits_NV.detach().amax(-1)
    if dist.get_world_size(mpu.get_tensor_model_parallel_group()) > 1:
        dist.all_reduce(highest_N, op=dist.ReduceOp.MAX, group=mpu.get_tensor_model_parallel_group())
    shifted_NV = logits_NV - highest_N[:, None]
    weight_NV = shifted_NV.exp()
    total_N = reduce_from_tensor_model_parallel_region(weight_NV.sum(-1))
    local_N = targets_N - tp_rank * logits_NV.shape[-1]
    mine_N = (local_N >= 0) & (local_N < logits_NV.shape[-1])
    at_target_N = shifted_NV.gather(-1, (local_N * mine_N)[:, None])[:, 0] * mine_N
    logp_N = reduce_from_tensor_model_parallel_region(at_target_N) - total_N.log()
    with torch.no_grad():
        mean_N = reduce_from_tensor_model_parallel_region((weight_NV * shifted_NV).sum(-1)) / total_N
        return logp_N, total_N.log() - mean_N
