"""Checkpoints of a core: weights, optimizer moments, random state and the ledger of what they contain, in one atomic
directory.

Owns `checkpoints/<version>/`: config.json and model.safetensors (an engine or transformers can load it),
optimizer.safetensors (`moment.name` and, beside bf16 weights, their fp32 masters as `master.name`; names as in Hugging
Face and tensors whole, so that any layout of ranks can read it), rng.safetensors, ledger.json with the digests of the
others. Never decides when to save. Invariants: `newest`
returns only what it has verified; a directory without `.` in front is whole, durable and was read back before it got
its name; the last ones stay until a newer one is. Why not megatron's dist_checkpointing: docs/adr/0018.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from celld.weights import Array, config_json, safetensors_arrays, safetensors_parts, sync_directory
from gyre_base.ids import PolicyVersion

log = logging.getLogger(__name__)
FORM = 2
CONFIG, LEDGER = "config.json", "ledger.json"
OPTIMIZER, RNG, WEIGHTS = "optimizer.safetensors", "rng.safetensors", "model.safetensors"
MASTER = "master."
READ_BYTES = 8 << 20


class CheckpointError(RuntimeError):
    """There are checkpoints, and none can be read: going on from the start would train everything again."""


class SaveFailed(OSError):
    """A checkpoint could not be written; those before it are as they were."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Checkpoint:
    """`next_batch`: every batch below it is in these weights. `applied`: micro-steps of the batches since the last
    save. `weights` are in the dtype of the run, `masters` their fp32 originals where those are others."""

    version: PolicyVersion
    next_batch: int
    applied: tuple[str, ...]
    optimizer_steps: int
    config: dict[str, Any]
    weights: Mapping[str, Array]
    moments: Mapping[str, Array]
    masters: Mapping[str, Array] = field(default_factory=dict)
    rng: Mapping[str, Any] = field(default_factory=lambda: rng_state())

    @property
    def exact(self) -> Mapping[str, Array]:
        """The weights to go on from."""
        return self.masters or self.weights

    @property
    def bytes(self) -> int:
        parts = (self.weights, self.moments, self.masters, self.rng)
        return sum(array.nbytes for part in parts for array in part.values())


class Writer:
    """Writes checkpoints beside the steps that follow them: one at a time, out of a copy in memory of its own."""

    def __init__(self, root: Path, keep: int) -> None:
        self._root, self._keep = root, keep
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._copies: dict[str, Array] = {}  # touching fresh memory for each would take longer than writing it
        self._busy = asyncio.Lock()

    async def idle(self) -> None:
        """Until nothing is being written: only then may another be started."""
        async with self._busy:
            pass

    async def start(self, state: Checkpoint) -> asyncio.Task[str]:
        """`state` is copied before this returns. The task ends with the durable checkpoint's path, or SaveFailed."""
        await self._busy.acquire()
        try:
            loop = asyncio.get_running_loop()
            copied = await loop.run_in_executor(self._thread, self._copied, state)
            task = loop.create_task(self._write(copied))
        except BaseException:
            self._busy.release()
            raise
        task.add_done_callback(lambda _: self._busy.release())
        return task

    async def _write(self, state: Checkpoint) -> str:
        done = asyncio.get_running_loop().run_in_executor(self._thread, save, self._root, state, self._keep)
        return str(await asyncio.shield(done))

    def _copied(self, state: Checkpoint) -> Checkpoint:
        def kept(kind: str, arrays: Mapping[str, Array]) -> dict[str, Array]:
            for name, array in arrays.items():
                np.copyto(self._copies.setdefault(f"{kind} {name}", np.empty_like(array)), array)
            return {name: self._copies[f"{kind} {name}"] for name in arrays}

        return replace(
            state,
            weights=kept("weight", state.weights),
            moments=kept("moment", state.moments),
            masters=kept("master", state.masters),
        )

    def close(self) -> None:
        """What is being written is finished first."""
        self._thread.shutdown(wait=True)


def save(root: Path, state: Checkpoint, keep: int) -> Path:
    """Write it and read it back, then drop all but the `keep` newest. Returns its directory. Raises SaveFailed."""
    root.mkdir(parents=True, exist_ok=True)
    for left in root.glob(".*"):  # by whoever died while writing; this run's core is the only writer
        shutil.rmtree(left, ignore_errors=True)
    free = shutil.disk_usage(root).free
    if free < state.bytes:
        raise SaveFailed(
            f"checkpoint {state.version} needs {state.bytes / 1e9:.2f} GB, {root} has {free / 1e9:.2f} left"
        )
    target, temporary = root / str(state.version), root / f".{state.version}.{secrets.token_hex(4)}"
    try:
        temporary.mkdir()
        _write_all(temporary, state)
        sync_directory(temporary)
        if target.exists():  # of an earlier life that saved the same version: out of the way, gone with the next save
            os.replace(target, root / f".{state.version}.old.{secrets.token_hex(4)}")
        os.replace(temporary, target)
        sync_directory(root)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise SaveFailed(f"checkpoint {state.version} is not written: {error}; the ones before it stay") from error
    for _, old in versions(root)[keep:]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def _write_all(directory: Path, state: Checkpoint) -> None:
    """Every file, durable, and read back. Raises OSError."""
    optimizer = {**state.moments, **{MASTER + name: array for name, array in state.masters.items()}}
    digests = {
        CONFIG: _write(directory / CONFIG, iter([config_json(state.config, state.weights)])),
        WEIGHTS: _write(directory / WEIGHTS, safetensors_parts(state.weights)),
        OPTIMIZER: _write(directory / OPTIMIZER, safetensors_parts(optimizer)),
        RNG: _write(directory / RNG, safetensors_parts(state.rng)),
    }
    for name, expected in digests.items():
        if _digest_of(directory / name) != expected:
            raise OSError(f"{name} reads back otherwise than it was written")
    ledger = {
        "form": FORM,
        "version": str(state.version),
        "next_batch": state.next_batch,
        "applied": list(state.applied),
        "optimizer_steps": state.optimizer_steps,
        "digests": digests,
    }
    _write(directory / LEDGER, iter([json.dumps(ledger, indent=2).encode()]))


def _write(path: Path, parts: Iterator[bytes | memoryview]) -> str:
    """A durable file out of parts, so that no second copy of a model is made; its xxh3-128."""
    state = xxhash.xxh3_128()
    with open(path, "wb") as file:
        for part in parts:
            file.write(part)
            state.update(part)
        file.flush()
        os.fsync(file.fileno())
        with contextlib.suppress(OSError):  # else what is read back is the memory that was written from
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return state.hexdigest()


def _digest_of(path: Path) -> str:
    state = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        while part := file.read(READ_BYTES):
            state.update(part)
    return state.hexdigest()


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

    def checked(name: str) -> bytes:
        content = (directory / name).read_bytes()
        if xxhash.xxh3_128_hexdigest(content) != ledger["digests"][name]:
            raise ValueError(f"{name} is damaged")
        return content

    optimizer = safetensors_arrays(checked(OPTIMIZER))
    return Checkpoint(
        version=PolicyVersion.parse(ledger["version"]),
        next_batch=ledger["next_batch"],
        applied=tuple(ledger["applied"]),
        optimizer_steps=ledger["optimizer_steps"],
        config=json.loads(checked(CONFIG)),
        weights=safetensors_arrays(checked(WEIGHTS)),
        moments={name: array for name, array in optimizer.items() if not name.startswith(MASTER)},
        masters={n.removeprefix(MASTER): array for n, array in optimizer.items() if n.startswith(MASTER)},
        rng=safetensors_arrays(checked(RNG)),
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


def rng_state() -> dict[str, Any]:
    """This process's torch generators, as bytes. With dropout 0 no step reads them; whatever else draws goes on."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return {name: state.numpy().copy() for name, state in states.items()}


def set_rng_state(states: Mapping[str, Any]) -> None:
    """Inverse of `rng_state`, as far as this machine has the generators."""
    torch.set_rng_state(torch.from_numpy(states["cpu"].copy()))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.from_numpy(states["cuda"].copy()))
