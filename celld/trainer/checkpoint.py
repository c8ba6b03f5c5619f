"""Checkpoints of a core rank: weights, optimizer moments and the ledger of what they contain, in one atomic directory.

Owns `checkpoints/<version>/`: config.json and model.safetensors (an engine or transformers can load it),
optimizer.safetensors (`moment.name`, names as in Hugging Face, so that another tensor-parallel size can read it),
ledger.json with the digests of the others. Never decides when to save. Invariant: `newest` returns only what it has
verified; a directory without `.` in front is whole. megatron's dist_checkpointing (asynchronous, resharding for large
models) is to replace the tensor files later; the ledger and the directory rules stay.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from safetensors.numpy import load as load_bytes
from safetensors.numpy import save as save_bytes

from celld.weights import Array, hf_files, write_directory
from gyre_base.ids import PolicyVersion

log = logging.getLogger(__name__)
FORM = 1
LEDGER, OPTIMIZER, WEIGHTS = "ledger.json", "optimizer.safetensors", "model.safetensors"


class CheckpointError(RuntimeError):
    """There are checkpoints, and none can be read: going on from the start would train everything again."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint:
    """`next_batch`: every batch below it is in these weights. `applied`: micro-steps of the batches since the last
    save."""

    version: PolicyVersion
    next_batch: int
    applied: tuple[str, ...]
    optimizer_steps: int
    config: dict[str, Any]
    weights: Mapping[str, Array]
    moments: Mapping[str, Array]


def save(root: Path, state: Checkpoint, keep: int) -> Path:
    """Write it, then drop all but the `keep` newest. Returns its directory."""
    files = {
        **hf_files(state.weights, state.config),
        OPTIMIZER: save_bytes({name: np.ascontiguousarray(t) for name, t in state.moments.items()}),
    }
    ledger = {
        "form": FORM,
        "version": str(state.version),
        "next_batch": state.next_batch,
        "applied": list(state.applied),
        "optimizer_steps": state.optimizer_steps,
        "digests": {name: xxhash.xxh3_128_hexdigest(content) for name, content in files.items()},
    }
    target = root / str(state.version)
    write_directory(target, {**files, LEDGER: json.dumps(ledger, indent=2).encode()}, replace=True)
    for _, old in versions(root)[keep:]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def newest(root: Path) -> Checkpoint | None:
    """The newest that verifies, or None if there are none. Raises CheckpointError if there are but none is whole."""
    found = versions(root)
    for _, directory in found:
        try:
            return read(directory)
        except (OSError, ValueError, KeyError) as error:
            log.error("checkpoint %s can't be used: %s", directory, error)
    if found:
        raise CheckpointError(f"no checkpoint in {root} can be read; move them away to start from model.path")
    return None


def read(directory: Path) -> Checkpoint:
    """One checkpoint, verified. Raises OSError, ValueError or KeyError."""
    ledger = json.loads((directory / LEDGER).read_text())
    if ledger["form"] != FORM:
        raise ValueError(f"form {ledger['form']}, this build reads {FORM}")
    contents = {name: (directory / name).read_bytes() for name in ledger["digests"]}
    for name, expected in ledger["digests"].items():
        if xxhash.xxh3_128_hexdigest(contents[name]) != expected:
            raise ValueError(f"{name} is damaged")
    return Checkpoint(
        version=PolicyVersion.parse(ledger["version"]),
        next_batch=ledger["next_batch"],
        applied=tuple(ledger["applied"]),
        optimizer_steps=ledger["optimizer_steps"],
        config=json.loads(contents["config.json"]),
        weights=load_bytes(contents[WEIGHTS]),
        moments=load_bytes(contents[OPTIMIZER]),
    )


def versions(root: Path) -> list[tuple[PolicyVersion, Path]]:
    """Directories by version, newest first; other names are not ours."""
    found = []
    for directory in root.iterdir() if root.is_dir() else ():
        try:
            found.append((PolicyVersion.parse(directory.name), directory))
        except ValueError:
            continue
    return sorted(found, reverse=True)
