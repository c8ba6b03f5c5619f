"""Whether a model can be split as the configuration says; known before anything starts. Pure, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gyre_base.config import ConfigError, TrainerConfig

SPLIT_BY_TENSOR = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
SPLIT_BY_PIPELINE = ("num_hidden_layers",)


def check_layout(trainer: TrainerConfig, model: Mapping[str, Any]) -> None:
    """`model` is its config.json; entries that it lacks are missed later, when it is loaded. Raises ConfigError."""
    size = trainer.tensor_parallel
    if size > 1 and model.get("model_type") == "qwen3_moe":
        raise ConfigError(
            f"trainer.tensor_parallel = {size} can't split a mixture of experts: megatron's needs Transformer Engine "
            "then; set 1"
        )
    _divides("trainer.tensor_parallel", size, SPLIT_BY_TENSOR, model)
    _shares_experts(trainer, model)
    _divides("trainer.pipeline_parallel", trainer.pipeline_parallel, SPLIT_BY_PIPELINE, model)


def _shares_experts(trainer: TrainerConfig, model: Mapping[str, Any]) -> None:
    size, ranks = trainer.expert_parallel, trainer.context_parallel
    if size == 1:
        return
    experts = model.get("num_experts") or model.get("num_local_experts")
    if model.get("model_type") != "qwen3_moe" or not experts:
        raise ConfigError(f"trainer.expert_parallel = {size} needs a mixture of experts, this model is dense; set 1")
    if ranks % size or experts % size:
        sizes = [str(n) for n in range(1, ranks + 1) if ranks % n == 0 and experts % n == 0]
        raise ConfigError(
            f"trainer.expert_parallel = {size} must divide trainer.context_parallel ({ranks}), whose ranks hold "
            f"different tokens of one micro-step, and the model's experts ({experts}); it can be {', '.join(sizes)}"
        )


def _divides(key: str, size: int, entries: tuple[str, ...], model: Mapping[str, Any]) -> None:
    counts = {entry: int(model[entry]) for entry in entries if model.get(entry)}
    for entry, count in counts.items():
        if count % size:
            sizes = [str(n) for n in range(1, min(counts.values()) + 1) if not any(c % n for c in counts.values())]
            raise ConfigError(f"{key} = {size} must divide the model's {entry} ({count}); it can be {', '.join(sizes)}")
