"""The policy's forward pass over packed tokens and a key/value pool, arranged for few and large operations.

Owns the fused weights and the pool's memory. Never decides what to compute, never samples. Invariant: logits agree with
`TinyQwen3.forward` on the same tokens to 1e-4.

Unlike the model: query, key and value projections are one matrix, so are gate and up; the weights of the norms before
a matrix are multiplied into it; means of squares are matrix products (several times faster than rms_norm here); each
head's dimensions are reordered so that rotary pairs are neighbours and one complex product turns them (a reordering
that queries and keys share leaves their products unchanged).

Shapes: N packed tokens, R decode rows, S key positions, D hidden, H query heads, K key/value heads, E head dimension,
V vocabulary, C context length.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from celld.tiny.model import Layer, TinyConfig, TinyQwen3, rope_angles


class Pool:
    """Keys and values [layers, 2, slots, K, C, E] in float32, in anonymous memory of their own.

    Pages are committed when first written, read as zeros before (so masked garbage is finite), and go back to the
    system at once when the pool is dropped.
    """

    def __init__(self, config: TinyConfig, slots: int, context_length: int) -> None:
        shape = (config.num_hidden_layers, 2, slots, config.num_key_value_heads, context_length, config.head_dim)
        self.bytes = 4 * torch.Size(shape).numel()
        self._memory = mmap.mmap(-1, self.bytes)
        self.all = torch.frombuffer(self._memory, dtype=torch.float32).view(shape)
        self.keys = [layer[0] for layer in self.all]
        self.values = [layer[1] for layer in self.all]
        self.flat_keys = [keys.view(-1, config.head_dim) for keys in self.keys]
        self.flat_values = [values.view(-1, config.head_dim) for values in self.values]

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of a slot, all layers at once."""
        self.all[:, :, target, :, :length].copy_(self.all[:, :, source, :, :length])


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """Tokens [begin, end) of the packed batch are positions [start, start + end - begin) of pool slot `row`."""

    row: int
    begin: int
    end: int
    start: int


@dataclass(frozen=True, slots=True)
class Batch:
    """One forward pass: the first `decode_rows` tokens are one each for slots 0.., the rest belongs to `prefill`.

    Decode rows attend together over `longest` key positions, except `solo`: few much longer ones that attend alone.
    """

    ids_N: Tensor
    positions_N: Tensor
    rows_N: Tensor
    decode_rows: int
    longest: int
    solo: list[PrefillRow]
    prefill: list[PrefillRow]


class FusedLayer:
    """One layer's weights, fused."""

    def __init__(self, layer: Layer, config: TinyConfig) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        order = torch.arange(config.head_dim).view(2, -1).t().reshape(-1)  # halves -> neighbouring pairs
        q = _reordered(attention.q_proj.weight, order)
        k = _reordered(attention.k_proj.weight, order)
        self.qkv = torch.cat((q, k, attention.v_proj.weight)).detach() * layer.input_layernorm.weight.detach()
        q_norm = attention.q_norm.weight[order].expand(config.num_attention_heads, -1)
        k_norm = attention.k_norm.weight[order].expand(config.num_key_value_heads, -1)
        self.qk_norm = torch.cat((q_norm, k_norm)).detach().contiguous()
        self.out_t = attention.o_proj.weight.detach().t().contiguous()
        gate_up = torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)).detach()
        self.gate_up = gate_up * layer.post_attention_layernorm.weight.detach()
        self.down_t = mlp.down_proj.weight.detach().t().contiguous()


def _reordered(weight: Tensor, order: Tensor) -> Tensor:
    """Rows of a projection [heads * E, D] with each head's E rows in the given order."""
    return weight.view(-1, len(order), weight.shape[1])[:, order].reshape(weight.shape)


class Network:
    """Fused weights of one model."""

    def __init__(self, model: TinyQwen3, context_length: int) -> None:
        self.config = config = model.config
        self.layers = [FusedLayer(layer, config) for layer in model.model.layers]  # type: ignore[arg-type]
        self.embedding = model.model.embed_tokens.weight.detach().clone()
        self.head = self.embedding * model.model.norm.weight.detach()
        cos, sin = rope_angles(torch.arange(context_length), config.head_dim, config.rope_theta)
        half = config.head_dim // 2
        self._mean_width = torch.full((config.hidden_size, 1), 1.0 / config.hidden_size)
        self._mean_head = torch.full((config.head_dim, 1), 1.0 / config.head_dim)
        self._eps = torch.full((1, 1), config.rms_norm_eps)
        self.turns = torch.complex(cos[:, :half].contiguous(), sin[:, :half].contiguous())  # [C, E/2]

    @property
    def bytes(self) -> int:
        tensors = [self.embedding, self.head, *(t for layer in self.layers for t in vars(layer).values())]
        return sum(t.numel() * t.element_size() for t in tensors)

    def hidden(self, batch: Batch, pool: Pool) -> Tensor:
        """Final states [N, D] of root mean square 1; writes the tokens' keys and values into the pool."""
        turns = self.turns[batch.positions_N].unsqueeze(1)  # [N, 1, E/2]
        where = _flat_places(batch, pool)
        masks = Masks(batch)
        x = F.embedding(batch.ids_N, self.embedding)
        for index, layer in enumerate(self.layers):
            q = self._project(layer, self._unit(x, self._mean_width), turns, where, pool, index)
            mixed = self._attend(q, batch, masks, pool.keys[index], pool.values[index])
            x = torch.addmm(x, mixed, layer.out_t)
            gate, up = F.linear(self._unit(x, self._mean_width), layer.gate_up).chunk(2, dim=-1)
            x = torch.addmm(x, F.silu(gate).mul_(up), layer.down_t)
        return self._unit(x, self._mean_width)

    def logits(self, hidden: Tensor) -> Tensor:
        """Vocabulary scores [..., V] of states from `hidden`."""
        return F.linear(hidden, self.head)

    def _unit(self, x: Tensor, mean: Tensor) -> Tensor:
        """Rows [M, W] divided by their root mean square; `mean` is a column [W, 1] of 1/W."""
        return torch.addmm(self._eps, x * x, mean).rsqrt_() * x

    def _project(self, layer: FusedLayer, x: Tensor, turns: Tensor, where: Tensor, pool: Pool, index: int) -> Tensor:
        """Queries [N, H, E]; keys and values go to their places in the pool."""
        heads, kv_heads, size = (
            self.config.num_attention_heads,
            self.config.num_key_value_heads,
            self.config.head_dim,
        )
        qkv = F.linear(x, layer.qkv).view(len(x), heads + 2 * kv_heads, size)
        qk = self._unit(qkv[:, : heads + kv_heads].reshape(-1, size), self._mean_head)
        qk = qk.view(len(x), heads + kv_heads, size).mul_(layer.qk_norm)
        pairs = torch.view_as_complex(qk.view(len(x), heads + kv_heads, size // 2, 2))
        qk = torch.view_as_real(pairs.mul_(turns)).view(len(x), heads + kv_heads, size)
        pool.flat_keys[index].index_copy_(0, where, qk[:, heads:].reshape(-1, size))
        pool.flat_values[index].index_copy_(0, where, qkv[:, heads + kv_heads :].reshape(-1, size))
        return qk[:, :heads]

    def _attend(self, q: Tensor, batch: Batch, masks: Masks, keys: Tensor, values: Tensor) -> Tensor:
        """Mixed values [N, H * E] for queries [N, H, E]; keys and values are one layer's [slots, K, C, E]."""
        parts = []
        if batch.decode_rows:
            parts.append(self._attend_decode(q[: batch.decode_rows], batch, masks, keys, values))
        for row, mask in zip(batch.prefill, masks.prefill, strict=True):
            parts.append(self._attend_alone(q[row.begin : row.end], row, mask, keys, values))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend_decode(self, q: Tensor, batch: Batch, masks: Masks, keys: Tensor, values: Tensor) -> Tensor:
        """All decode rows at once; the query heads that share a key head are its query positions."""
        rows, kv_heads = batch.decode_rows, self.config.num_key_value_heads
        grouped = q.view(rows, kv_heads, -1, self.config.head_dim)
        k, v = keys[:rows, :, : batch.longest], values[:rows, :, : batch.longest]
        mixed = F.scaled_dot_product_attention(grouped, k, v, attn_mask=masks.decode).reshape(rows, -1)
        for row in batch.solo:
            mixed[row.row] = self._attend_alone(q[row.begin : row.end], row, None, keys, values)
        return mixed

    def _attend_alone(self, q: Tensor, row: PrefillRow, mask: Tensor | None, keys: Tensor, values: Tensor) -> Tensor:
        """One row's new tokens against its whole past: key heads are the batch, their query heads the heads."""
        tokens, kv_heads = row.end - row.begin, self.config.num_key_value_heads
        grouped = q.reshape(tokens, kv_heads, -1, self.config.head_dim).permute(1, 2, 0, 3)  # [K, H/K, T, E]
        upto = row.start + tokens
        k = keys[row.row, :, None, :upto].expand(-1, grouped.shape[1], -1, -1)
        v = values[row.row, :, None, :upto].expand(-1, grouped.shape[1], -1, -1)
        causal = mask is None and tokens > 1
        mixed = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask, is_causal=causal)
        return mixed.permute(2, 0, 1, 3).reshape(tokens, -1)


class Masks:
    """Attention masks of one batch, shared by its layers."""

    def __init__(self, batch: Batch) -> None:
        self.decode: Tensor | None = None
        rows = batch.decode_rows
        if rows:
            unseen = torch.arange(batch.longest) > batch.positions_N[:rows, None]  # solo rows: wrong and replaced
            self.decode = torch.zeros(rows, batch.longest).masked_fill_(unseen, -torch.inf)[:, None, None]
        self.prefill = [_prefill_mask(row) for row in batch.prefill]


def _prefill_mask(row: PrefillRow) -> Tensor | None:
    """True where a key may be seen, [T, S]; None where causality needs no mask (nothing before, or one token)."""
    tokens = row.end - row.begin
    if row.start == 0 or tokens == 1:
        return None
    return torch.ones(tokens, row.start + tokens, dtype=torch.bool).tril_(row.start)


def _flat_places(batch: Batch, pool: Pool) -> Tensor:
    """Row numbers [N * K] of a layer's flat keys: where each token's key heads go."""
    _, kv_heads, context, _ = pool.keys[0].shape
    first = batch.rows_N * (kv_heads * context) + batch.positions_N
    places: Tensor = (first[:, None] + torch.arange(kv_heads) * context).view(-1)
    return places
