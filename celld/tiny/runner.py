"""Carries out the scheduler's plans with torch: weights, key/value pool, one forward pass and one sampling per step.

Owns the tensors and lets go of them on demand. Never decides what runs. To be called from one thread.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file
from torch import Tensor

from celld.tiny.model import TinyConfig, TinyQwen3
from celld.tiny.network import Batch, Network, Pool, PrefillRow
from celld.tiny.sampling import Sampler
from celld.tiny.scheduler import Copy, Plan, Request

SOLO_OVERHEAD = 400  # key positions of one row that cost as much as one more attention call


class WeightsError(ValueError):
    """A directory that can't become this engine's weights; nothing was changed."""


@dataclass(frozen=True, slots=True)
class Weights:
    """What is served: the fused network, where it came from, and a digest per tensor of the file."""

    network: Network
    path: Path
    checksums: dict[str, str]


def read_config(path: Path) -> TinyConfig:
    """The config.json of a model directory."""
    try:
        return TinyConfig.from_hf(json.loads((path / "config.json").read_text()))
    except (OSError, ValueError) as error:
        raise WeightsError(f"no usable config.json in {path}: {error}") from error


def read_weights(path: Path, config: TinyConfig, context_length: int) -> Weights:
    """Load model.safetensors; a config.json beside it must describe the same network. Raises WeightsError."""
    if (path / "config.json").exists() and (found := read_config(path)) != config:
        raise WeightsError(f"{path} holds another network than the one served: {found}")
    try:
        tensors = load_file(path / "model.safetensors")
    except Exception as error:  # safetensors raises types of its own for missing and torn files
        raise WeightsError(f"no usable model.safetensors in {path}: {error}") from error
    tensors.pop("lm_head.weight", None)  # some writers store the tied matrix twice
    tensors = {name: tensor.float() for name, tensor in tensors.items()}
    bad = [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]
    if bad:
        raise WeightsError(f"{path}: values that are not finite in {', '.join(sorted(bad)[:3])}")
    model = TinyQwen3(config)
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        raise WeightsError(f"{path} does not fit the network: {' '.join(str(error).split())}") from error
    return Weights(Network(model, context_length), path, {name: _digest(t) for name, t in sorted(tensors.items())})


def _digest(tensor: Tensor) -> str:
    return hashlib.blake2b(tensor.contiguous().numpy().tobytes(), digest_size=16).hexdigest()


class Runner:
    """One engine's tensors. `ready` says whether a step can be run."""

    def __init__(self, path: Path, *, slots: int, context_length: int) -> None:
        self.config = read_config(path)
        self.slots, self.context_length = slots, context_length
        self.weights: Weights | None = None
        self.pool: Pool | None = None
        self._last_read: tuple[Path, dict[str, str]] | None = None
        self.load(path)
        self.resume_pool()
        self._sampler: tuple[list[Request], Sampler] = ([], Sampler([]))

    @property
    def ready(self) -> bool:
        return self.weights is not None and self.pool is not None

    @property
    def pool_bytes(self) -> int:
        return self.pool.bytes if self.pool else 0

    @property
    def weights_bytes(self) -> int:
        return self.weights.network.bytes if self.weights else 0

    # -- memory -------------------------------------------------------------------------------------------------

    def load(self, path: Path) -> None:
        """Replace the weights by those of a directory, or raise WeightsError and keep the old ones."""
        self.weights = read_weights(path, self.config, self.context_length)
        self._last_read = (self.weights.path, self.weights.checksums)

    def release_weights(self) -> None:
        """Drop the parameters and give the pages back."""
        self.weights = None
        _trim()

    def resume_weights(self) -> bool:
        """Read the last weights again; False when the file has changed or gone, and then an update must bring them."""
        if self.weights is None and self._last_read is not None:
            path, checksums = self._last_read
            try:
                weights = read_weights(path, self.config, self.context_length)
            except WeightsError:
                return False
            if weights.checksums == checksums:
                self.weights = weights
        return self.weights is not None

    def release_pool(self) -> None:
        """Drop the key/value pool; its memory is unmapped at once."""
        self.pool = None
        _trim()

    def resume_pool(self) -> None:
        """Map a fresh pool unless there is one."""
        if self.pool is None:
            self.pool = Pool(self.config, self.slots, self.context_length)

    # -- keys and values by slot: [tokens, layers, 2, K, E] float32 --------------------------------------------------

    def copy(self, copies: list[Copy]) -> None:
        """Make a plan's copies, or those of one that is to come."""
        assert self.pool is not None, "copies without a pool"
        for copy in copies:
            self.pool.copy(copy.source, copy.target, copy.length)

    def read_kv(self, slot: int, length: int) -> npt.NDArray[np.float32]:
        """The first `length` positions of a slot."""
        assert self.pool is not None, "a slot is read without a pool"
        found: npt.NDArray[np.float32] = (
            self.pool.all[:, :, slot, :, :length].permute(3, 0, 1, 2, 4).contiguous().numpy()
        )
        return found

    def write_kv(self, slot: int, values: npt.NDArray[np.float32]) -> None:
        """Inverse of `read_kv`."""
        assert self.pool is not None, "a slot is written without a pool"
        part = torch.from_numpy(values.copy()).permute(1, 2, 3, 0, 4)
        self.pool.all[:, :, slot, :, : len(values)].copy_(part)

    # -- a step -------------------------------------------------------------------------------------------------

    def step(self, plan: Plan) -> tuple[list[int], list[float]]:
        """Tokens and logprobs of `plan.sampled`."""
        if self.weights is None or self.pool is None:
            raise RuntimeError("a step was planned without weights or pool")
        with torch.inference_mode():
            self.copy(plan.copies)
            network = self.weights.network
            hidden = network.hidden(_batch(plan), self.pool)
            sampled = plan.sampled
            if not sampled:
                return [], []
            if plan.prefill:
                hidden = hidden[_last_tokens(plan)]
            return self._sampler_for(sampled).choose(network.logits(hidden), [len(r.tokens) for r in sampled])

    def _sampler_for(self, rows: list[Request]) -> Sampler:
        """The sampler of the last step is kept while the rows stay the same."""
        if self._sampler[0] != rows:  # requests compare by identity
            self._sampler = (list(rows), Sampler(rows))
        return self._sampler[1]


def _batch(plan: Plan) -> Batch:
    """Pack a plan's new tokens: one per decode row, then each prefill chunk."""
    ids = [request.tokens[-1] for request in plan.decode]
    positions = [request.filled for request in plan.decode]
    rows = list(range(len(plan.decode)))
    alone, longest = solo_rows([position + 1 for position in positions])
    solo = [PrefillRow(row, row, row + 1, positions[row]) for row in alone]
    prefill = []
    for chunk in plan.prefill:
        begin = len(ids)
        ids += chunk.request.tokens[chunk.start : chunk.stop]
        positions += range(chunk.start, chunk.stop)
        rows += [chunk.request.row] * (chunk.stop - chunk.start)
        prefill.append(PrefillRow(chunk.request.row, begin, len(ids), chunk.start))
    return Batch(
        torch.tensor(ids), torch.tensor(positions), torch.tensor(rows), len(plan.decode), longest, solo, prefill
    )


def solo_rows(lengths: list[int]) -> tuple[list[int], int]:
    """Which decode rows had better attend alone, and the longest of the others.

    Rows that attend together all cost as much as the longest of them; one that attends alone costs its own length and
    an operation's overhead, here in key positions.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    best, solo, apart = len(lengths) * max(lengths, default=0), 0, 0
    for count, row in enumerate(order[:-1], 1):
        apart += SOLO_OVERHEAD + lengths[row]
        if apart >= best:
            break
        if (cost := apart + len(lengths) * lengths[order[count]]) < best:
            best, solo = cost, count
    return order[:solo], lengths[order[solo]] if lengths else 0


def _last_tokens(plan: Plan) -> Tensor:
    """Indices into the packed tokens whose states choose the next token, in the order of `plan.sampled`."""
    indices = list(range(len(plan.decode)))
    end = len(indices)
    for chunk in plan.prefill:
        end += chunk.stop - chunk.start
        if chunk.completes:
            indices.append(end - 1)
    return torch.tensor(indices)


def _trim() -> None:
    """Give free heap pages back to the system (glibc; elsewhere nothing to do)."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        pass
