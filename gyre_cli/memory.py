"""What each role of a cell holds in memory, from the sizes in the model's own files. Pure but for reading headers.

Weights, gradient, its sum, moments and masters are exact for the trainer as it is; activations are an estimate and said
to be one. Bytes are per cell, copies in several of its ranks included: its GPUs have equal shares.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FP32, BF16 = 4, 2
MOMENTS = 2  # of AdamW
ACTIVATION_BYTES = 34  # per layer, token and hidden unit, kept in half precision without recomputation (Korthikanti)
STORED = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1}


@dataclass(frozen=True, kw_only=True)
class Model:
    """`stored_bytes` as the files hold the weights; `kv_bytes` of one token's keys and values over all layers."""

    parameters: int
    expert_parameters: int  # of them
    stored_bytes: int
    kv_bytes: int
    layers: int
    hidden: int


def read_model(folder: Path) -> Model | None:
    """From config.json and the headers of the safetensors files; None if they are not there or say too little."""
    files = sorted(folder.glob("*.safetensors"))
    try:
        tree = json.loads((folder / "config.json").read_text())
        tree = tree.get("text_config", tree)
        sizes = [tensor_sizes(path) for path in files]
        heads, hidden = tree["num_attention_heads"], tree["hidden_size"]
        head = tree.get("head_dim") or hidden // heads
        parameters, experts, stored = (sum(numbers) for numbers in zip(*sizes, strict=True))
        width = max(1, round(stored / parameters))
        kv_bytes = 2 * tree["num_hidden_layers"] * tree.get("num_key_value_heads", heads) * head * width
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError, struct.error):
        return None
    return Model(
        parameters=parameters,
        expert_parameters=experts,
        stored_bytes=stored,
        kv_bytes=kv_bytes,
        layers=tree["num_hidden_layers"],
        hidden=hidden,
    )


def tensor_sizes(path: Path) -> tuple[int, int, int]:
    """(numbers, those of experts, bytes) in one safetensors file, from its header alone."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header: dict[str, Any] = json.loads(file.read(length))
    counts = {name: math.prod(spec["shape"]) for name, spec in header.items() if name != "__metadata__"}
    experts = sum(count for name, count in counts.items() if ".experts." in name)
    return sum(counts.values()), experts, sum(n * STORED[header[name]["dtype"]] for name, n in counts.items())


def roles(
    model: Model,
    *,
    context_length: int,
    running: int,
    micro_step_tokens: int,
    copies: int = 1,
    expert_copies: int = 1,
    dtype: str = "fp32",
) -> list[dict[str, Any]]:
    """One row per role: GiB of a whole cell by what they are for. `least` is without what merely makes it faster:
    an engine needs the cache of one longest request, and asks for that of all that run at once. `copies`: of weights in
    the ranks of a cell, and of its experts'. `dtype`: of weights in the ranks; an engine serves bf16 if they are that,
    else the stored type.
    """
    experts = model.expert_parameters
    numbers = (model.parameters - experts) * copies + experts * expert_copies
    sums, served = numbers * FP32, model.stored_bytes if dtype == "fp32" else model.parameters * BF16
    activations = ACTIVATION_BYTES * model.layers * model.hidden * micro_step_tokens
    rollout = {"weights": served, "cache of one request": model.kv_bytes * context_length}
    trained = {
        "weights": sums if dtype == "fp32" else numbers * BF16,
        "gradient": sums,
        "gradient sum": sums,
        "activations (estimate)": activations,
    }
    once = model.parameters * FP32  # ranks that have copies of the weights share what the optimizer keeps
    stepped = {"moments": MOMENTS * once, "masters": 0 if dtype == "fp32" else once}
    return [
        {
            "role": "rollout",
            "least_gib": gib(sum(rollout.values())),
            "wanted_gib": gib(served + model.kv_bytes * context_length * running),
            "parts_gib": {key: gib(value) for key, value in rollout.items()},
        },
        train_row("train, satellite", trained),
        train_row("train, core", {**trained, **stepped}),
    ]


def train_row(role: str, parts: dict[str, int]) -> dict[str, Any]:
    total = gib(sum(parts.values()))
    return {
        "role": role,
        "least_gib": total,
        "wanted_gib": total,
        "parts_gib": {key: gib(value) for key, value in parts.items()},
    }


def gib(count: int) -> float:
    return round(count / 2**30, 4)
