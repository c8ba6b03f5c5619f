"""Whether a model can be split as the configuration says; known before anything starts. Pure, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gyre_base.config import ConfigError, TrainerConfig

ONE = {  # of the layout, what is not built
    "expert_parallel": "a rank holds all experts",
    "context_parallel": "a long trajectory is computed in pieces of trainer.piece_tokens, by each rank",
}
SPLIT_BY_TENSOR = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")


def check_layout(trainer: TrainerConfig, model: Mapping[str, Any]) -> None:
    """`model` is its config.json; entries that it lacks are missed later, when it is loaded. Raises ConfigError."""
    for name, instead in ONE.items():
        if (size := getattr(trainer, name)) > 1:
            raise ConfigError(
                f"trainer.{name} = {size} is not built: {instead}; set 1 (docs/adr/0017-long-micro-steps.md)"
            )
    size = trainer.tensor_parallel
    if size > 1 and model.get("model_type") == "qwen3_moe":
        raise ConfigError(
            f"trainer.tensor_parallel = {size} can't split a mixture of experts: megatron's needs Transformer Engine "
            "then; set 1"
        )
    for entry in SPLIT_BY_TENSOR:
        if (count := model.get(entry)) and count % size:
            raise ConfigError(
                f"trainer.tensor_parallel = {size} must divide the model's {entry} ({count}); "
                f"it can be {_options([int(model[e]) for e in SPLIT_BY_TENSOR if model.get(e)])}"
            )


def _options(counts: list[int]) -> str:
    """Every size that divides all of them."""
    sizes = [size for size in range(1, min(counts) + 1) if not any(count % size for count in counts)]
    return ", ".join(map(str, sizes))
