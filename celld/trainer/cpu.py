"""What differs between a GPU and a CPU-only machine, in one module; with CUDA present every shim here is off.

Owns the choice of device, backend and megatron flags, and the places where megatron-core asks for CUDA by name: the
random-state tracker and the rotary frequencies. Never patches torch. Three more places, megatron's own attention, the
router's matrix product and the way to the experts, are no shims: `celld.trainer.layers` replaces them on every device.
"""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]

TIMEOUT_S = 600


def on_cpu() -> bool:
    return not torch.cuda.is_available()


def device() -> torch.device:
    return torch.device("cpu") if on_cpu() else torch.device("cuda", torch.cuda.current_device())


def use(device: torch.device) -> None:
    """For a thread that works on it: CUDA's present device is each thread's own."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def start_parallel(
    *,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    ep: int = 1,
    rank: int = 0,
    store: Store | None = None,
    timeout_s: float = TIMEOUT_S,
) -> None:
    """Join the process groups of one cell: `tp * pp * cp` ranks meet at `store` (one alone needs none).

    Of the `cp` that share the tokens `ep` share the experts too. Once per process. No collective waits longer than
    about `timeout_s`. On GPUs a rank takes the one of its number.
    """
    if not on_cpu():
        torch.cuda.set_device(rank % torch.cuda.device_count())
    if not dist.is_initialized():
        meeting = HashStore() if store is None else store
        backend = "gloo" if on_cpu() else "nccl"
        patience = timedelta(seconds=timeout_s)
        dist.init_process_group(backend, store=meeting, rank=rank, world_size=tp * pp * cp, timeout=patience)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            context_parallel_size=cp,
            expert_model_parallel_size=ep,
            distributed_timeout_minutes=max(1, math.ceil(timeout_s / 60)),
        )
        # The tracker reads the CUDA random state even to do nothing; as a no-op it is honest because dropout is 0.
        tensor_parallel.model_parallel_cuda_manual_seed(0, inference_rng_tracker=on_cpu())


def config_flags() -> dict[str, Any]:
    """TransformerConfig entries that choose plain torch kernels; the fused ones need CUDA."""
    fused = (
        "bias_dropout_fusion",
        "bias_activation_fusion",
        "masked_softmax_fusion",
        "apply_rope_fusion",
        "gradient_accumulation_fusion",
        "persist_layer_norm",
    )
    return {"use_cpu_initialization": on_cpu(), **dict.fromkeys(fused, False)}


class DepthRotary(RotaryEmbedding):  # type: ignore[misc]  # megatron is untyped
    """Rotary angles of given depths instead of 0..T-1: in a packed forest a token's position is its depth.

    Also the shim for `get_emb`, which moves its frequencies to `torch.cuda.current_device()` whatever there is.
    """

    position_T: Tensor
    inv_freq: Tensor

    def forward(self, max_seq_len: int, *args: Any, **kwargs: Any) -> Tensor:
        assert len(self.position_T) == max_seq_len, "the plan of another sequence"
        self.inv_freq = self.inv_freq.to(self.position_T.device)
        angles = torch.outer(self.position_T.to(self.inv_freq.dtype), self.inv_freq)
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]
