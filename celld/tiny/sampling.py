"""Choosing tokens: vectorised over rows, with noise that depends on (key, position) and never on the batch.

Owns the sampling rule and what a logprob means: log_softmax(logits / T) of the chosen token in float32, before top-p
and top-k; a greedy row does not apply T. One uniform number per row goes through the inverse cumulative distribution,
which costs one pass over the vocabulary where Gumbel noise would need a random number per entry.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

_GOLDEN, _MIX1, _MIX2 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31, _S40 = (np.uint64(n) for n in (27, 30, 31, 40))


class Sampled(Protocol):
    """What sampling needs to know of a row."""

    temperature: float
    top_p: float
    top_k: int
    noise_key: int


def noise_key(engine_seed: int, rid: str, sampling_seed: int | None) -> int:
    """The 64-bit key of a request: from its own seed if it has one, else from the engine's seed and the request id."""
    text = f"seed:{sampling_seed}" if sampling_seed is not None else f"rid:{engine_seed}:{rid}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def uniforms(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One number in [0, 1 - 2^-24] per row for uint64 keys and positions: splitmix64 as a counter-based generator."""
    with np.errstate(over="ignore"):
        x = keys + positions * _GOLDEN
        x = (x ^ (x >> _S30)) * _MIX1
        x = (x ^ (x >> _S27)) * _MIX2
    mixed: np.ndarray = ((x ^ (x >> _S31)) >> _S40).astype(np.float32) * np.float32(2.0**-24)
    return mixed


class Sampler:
    """The sampling parameters of a fixed sequence of rows, as tensors; made anew only when the rows change."""

    def __init__(self, rows: Sequence[Sampled]) -> None:
        greedy = [row.temperature == 0 for row in rows]
        self.keys = np.array([row.noise_key for row in rows], dtype=np.uint64)
        scales = [1.0 if row.temperature == 0 else 1.0 / row.temperature for row in rows]
        self.scale = None if all(s == 1.0 for s in scales) else torch.tensor(scales)[:, None]
        self.all_greedy, self.any_greedy = all(greedy), any(greedy)
        self.greedy = torch.tensor(greedy)
        self.top_p = torch.tensor([row.top_p for row in rows])[:, None]
        self.top_k = torch.tensor([row.top_k if row.top_k > 0 else 1 << 30 for row in rows])[:, None]
        self.cuts = any(row.top_p < 1 or row.top_k > 0 for row in rows)

    def choose(self, logits_RV: Tensor, positions: Sequence[int]) -> tuple[list[int], list[float]]:
        """Token and logprob of each row; `positions` are the absolute positions of the tokens to be chosen."""
        if self.scale is not None:
            logits_RV = logits_RV * self.scale
        logp_RV = torch.log_softmax(logits_RV, dim=-1)
        if self.all_greedy:
            chosen = logp_RV.argmax(dim=-1, keepdim=True)
        else:
            chosen = self._sample(logp_RV, positions)
            if self.any_greedy:
                chosen = torch.where(self.greedy[:, None], logp_RV.argmax(dim=-1, keepdim=True), chosen)
        return chosen.view(-1).tolist(), logp_RV.gather(1, chosen).view(-1).tolist()

    def _sample(self, logp_RV: Tensor, positions: Sequence[int]) -> Tensor:
        noise_R1 = torch.from_numpy(uniforms(self.keys, np.array(positions, dtype=np.uint64)))[:, None]
        probs_RV = logp_RV.exp()
        if not self.cuts:
            return _invert(probs_RV, noise_R1)
        ordered, order = probs_RV.sort(dim=-1, descending=True)
        before = ordered.cumsum(dim=-1) - ordered
        rank = torch.arange(ordered.shape[1])
        ordered = ordered.masked_fill((before >= self.top_p) | (rank >= self.top_k), 0.0)
        return order.gather(1, _invert(ordered, noise_R1))


def _invert(probs_RV: Tensor, noise_R1: Tensor) -> Tensor:
    """The first index [R, 1] whose cumulative weight exceeds noise x total: an entry of weight 0 is never chosen."""
    cumulative = probs_RV.cumsum(dim=-1)
    last = probs_RV.shape[1] - 1
    return torch.searchsorted(cumulative, noise_R1 * cumulative[:, -1:], right=True).clamp_(max=last)
