"""Whether a cell's memory holds what training needs, said before a switch; and what was measured after one.

The account (`need`) is pure: bytes by purpose from the model's sizes and the configuration, exact for weights,
gradients, moments and slots, a bound for activations and caches. What there is comes from the kernel (RAM, narrowed by
the cgroup) or nvidia-smi. Only a switch to training can be refused: what serving needs was there when the cell started.
A rank of ours keeps its memory while the engine serves, so it stands in both roles.
"""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gyre_base.config import Config
from gyre_base.vocabulary import Role

FP32 = 4
WIDTH = {"fp32": FP32, "bf16": 2}  # bytes of a number by trainer.dtype
GIB = 1 << 30
PROCESS_BYTES = {"rank": 550 << 20, "tiny": 350 << 20, "sglang": 1800 << 20}  # the libraries, before any tensor
IN_RAM = {  # whatever the tensors lie in
    "rank: process",
    "engine: process",
    "agent: snapshot",
    "rank: gradient sum",
    "rank: pending micro-step",
    "rank: sums of a step",
    "rank: published snapshots",
    "rank: pulled snapshot",
    "rank: checkpoint copy",
    "engine: keys and values for others",
}
LAYER_STATES = 16  # hidden-sized states that the backward pass of a layer keeps for each token
LOGIT_COPIES = 3  # logits, their log-softmax, their gradient
STORED = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of the model."""

    parameters: int
    expert_parameters: int  # of them
    stored_bytes: int  # as its files have the weights
    kv_numbers: int  # of one token's keys and values, all layers
    layers: int
    hidden: int
    intermediate: int
    vocabulary: int

    @classmethod
    def read(cls, folder: Path) -> Sizes:
        """From config.json and the headers of the weights. Raises OSError, ValueError, KeyError."""
        config = json.loads((folder / "config.json").read_text())
        heads = config["num_attention_heads"]
        head = config.get("head_dim") or config["hidden_size"] // heads
        tensors = [each for path in sorted(folder.glob("*.safetensors")) for each in _tensors(path)]
        counts = [math.prod(spec["shape"]) for _, spec in tensors]
        return cls(
            parameters=sum(counts),
            expert_parameters=sum(n for n, (name, _) in zip(counts, tensors, strict=True) if ".experts." in name),
            stored_bytes=sum(n * STORED[spec["dtype"]] for n, (_, spec) in zip(counts, tensors, strict=True)),
            kv_numbers=2 * config["num_hidden_layers"] * config.get("num_key_value_heads", heads) * head,
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            intermediate=config["intermediate_size"],
            vocabulary=config["vocab_size"],
        )


def _tensors(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """(name, what the header says of it) of each."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    return [(name, spec) for name, spec in header.items() if name != "__metadata__"]


@dataclass(frozen=True, kw_only=True)
class Account:
    """`parts`: bytes by purpose that the cell needs of `place` (RAM, or GPU memory) in `role`. `there`: bytes that it
    may have. `measured`: RAM that its processes have now."""

    role: Role
    place: str
    parts: Mapping[str, int]
    there: int
    measured: Mapping[str, int] = field(default_factory=dict)

    @property
    def need(self) -> int:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        return self.need <= self.there

    def why(self) -> str:
        """The refusal in words, largest parts first."""
        largest = sorted(self.parts.items(), key=lambda part: -part[1])
        words = ", ".join(f"{name} {_gib(size)}" for name, size in largest if size)
        return (
            f"{self.role.value} needs {_gib(self.need)} GiB of {self.place} ({words}), this cell may have "
            f"{_gib(self.there)}: larger "
            "nodes, fewer cells on one, smaller trainer.micro_step_tokens or model; cluster.cell_memory_gib if this is "
            "not what it has"
        )

    def row(self) -> dict[str, Any]:
        """For people: GiB, the account beside the measurement."""
        return {
            "role": self.role.value,
            "place": self.place,
            "need_gib": _gib(self.need),
            "there_gib": _gib(self.there),
            "measured_gib": _gib(sum(self.measured.values())),
            "parts_gib": {name: _gib(size) for name, size in self.parts.items()},
            "measured_parts_gib": {name: _gib(size) for name, size in self.measured.items()},
        }


def _gib(size: int) -> float:
    return round(size / GIB, 3)


def need(role: Role, config: Config, sizes: Sizes, *, core: bool) -> dict[str, int]:
    """Bytes by purpose in `role` (rollout or train), of one cell. Weights are as `trainer.dtype` says, gradients, their
    sums, moments and masters fp32."""
    width, numbers = WIDTH[config.trainer.dtype], held_parameters(config, sizes)
    weights, held = sizes.parameters * width, numbers * FP32
    masters = 0 if width == FP32 else FP32  # bytes of a weight that a core has once more
    parts = {
        "rank: process": PROCESS_BYTES["rank"] * config.trainer.ranks,
        "rank: weights": numbers * width,
        "rank: gradient": held,
        "engine: process": PROCESS_BYTES[config.engine.kind],
        "agent: snapshot": 2 * weights,  # the one that the engine loads, and the next one
    }
    if core:
        parts |= {
            "rank: moments": sizes.parameters * 2 * FP32,  # these and masters once, by ranks with copies of weights too
            "rank: masters": sizes.parameters * masters,
            "rank: published snapshots": 3 * weights,  # the newest, in a slot, and one that is still read
            "rank: checkpoint copy": sizes.parameters * (width + 2 * FP32 + masters),  # written while training goes on
        }
    else:
        parts["rank: pulled snapshot"] = weights
    if role is Role.TRAIN:
        parts["rank: gradient sum"] = held
        parts["rank: pending micro-step"] = held  # computed, and not yet in the sum
        if core:  # what it adds up, and of two satellites the bytes and the tensor
            parts["rank: sums of a step"] = held * (1 + 2 * min(2, config.cluster.cells - 1))
        parts["rank: activations"] = int(config.trainer.activation_gib * GIB) or activations(config, sizes)
        parts["engine: keys and values for others"] = _shared_kv(config)
    else:
        parts["engine: weights"] = _served(config, sizes)
        parts["engine: keys and values"] = _kv(config, sizes) + _shared_kv(config)
    return parts


def held_parameters(config: Config, sizes: Sizes) -> int:
    """Of all ranks of a cell together: those that share the tokens have copies, those that share the experts too have
    fewer of those."""
    copies, sharing = config.trainer.context_parallel, config.trainer.expert_parallel
    return copies * (sizes.parameters - sizes.expert_parameters) + copies // sharing * sizes.expert_parameters


def activations(config: Config, sizes: Sizes) -> int:
    """A bound on what the backward pass of one micro-step keeps, all ranks together; one execution may be longer than a
    micro-step. Ranks that share the tokens each have the keys and values of all. Scores are fp32, and beside bf16
    weights so are a copy of those that make them and its gradient."""
    tokens, width = max(config.trainer.micro_step_tokens, config.engine.context_length), WIDTH[config.trainer.dtype]
    layer = LAYER_STATES * sizes.hidden + 3 * sizes.intermediate + 2 * sizes.kv_numbers // sizes.layers
    copies = (config.trainer.context_parallel - 1) * sizes.kv_numbers
    scores = FP32 * LOGIT_COPIES * sizes.vocabulary * tokens
    if width != FP32:
        scores += 2 * FP32 * sizes.vocabulary * sizes.hidden
    return width * tokens * (sizes.layers * layer + copies) + scores


def _served(config: Config, sizes: Sizes) -> int:
    """Weights in what the engine computes in: the embedded one, and any on a CPU, fp32; else that of a bf16 run, or the
    stored type."""
    if config.engine.kind != "sglang" or config.engine.device == "cpu":
        return sizes.parameters * FP32
    return sizes.stored_bytes if config.trainer.dtype == "fp32" else sizes.parameters * WIDTH["bf16"]


def _kv(config: Config, sizes: Sizes) -> int:
    """Of as many tokens as may run at once, and the embedded engine's cached prefixes beside them."""
    engine = config.engine
    kept = 3 if engine.kind == "tiny" else 1
    width = _served(config, sizes) // sizes.parameters
    return kept * engine.max_running_requests * engine.context_length * sizes.kv_numbers * width


def _shared_kv(config: Config) -> int:
    return config.engine.kv_share_mib << 20 if config.engine.kv_store and config.engine.kind == "tiny" else 0


# ---- what there is ---------------------------------------------------------------------------------------------------


class Books:
    """One cell's accounts."""

    def __init__(self, config: Config, cell: str) -> None:
        self._config, self._core = config, cell == "c0"
        self._sizes = None if config.engine.kind == "emulate" else Sizes.read(Path(config.model.path))

    def account(self, role: Role, groups: Mapping[str, Iterable[int]]) -> Account | None:
        """Of the place with the least room; `groups`: process groups by child. None: an emulated cell has no model."""
        if self._sizes is None:
            return None
        measured = {**resident_bytes(groups), "agent": _own_bytes()}
        parts = need(role, self._config, self._sizes, core=self._core)
        told, ram = int(self._config.cluster.cell_memory_gib * GIB), sum(measured.values()) + free_bytes()
        accounts = [Account(role=role, place="RAM", parts=parts, there=told or ram, measured=measured)]
        if gpu := gpu_bytes():
            host = {name: size for name, size in parts.items() if name in IN_RAM}
            device = {name: size for name, size in parts.items() if name not in IN_RAM}
            accounts = [
                Account(role=role, place="RAM", parts=host, there=ram, measured=measured),
                Account(role=role, place="GPU memory", parts=device, there=told or gpu, measured=measured),
            ]
        return min(accounts, key=lambda account: account.there - account.need)


def free_bytes(root: Path = Path("/")) -> int:
    """RAM that can be had without swapping: of the machine, or less if a cgroup above us allows less."""
    lines = (root / "proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    return min([free, *_cgroup_room(root)])


def _cgroup_room(root: Path) -> Iterable[int]:
    """Of every level of ours that has a limit; page cache counts as free."""
    own = (root / "proc/self/cgroup").read_text().splitlines()
    path = next((line[3:].strip("/") for line in own if line.startswith("0::")), None)
    if path is None:
        return
    base = root / "sys/fs/cgroup"
    for folder in (base / path, *(base / path).parents):
        try:
            limit = (folder / "memory.max").read_text().strip()
            used = int((folder / "memory.current").read_text())
            cache = (folder / "memory.stat").read_text().splitlines()
        except OSError:
            continue
        if limit != "max":
            inactive = next((int(line.split()[1]) for line in cache if line.startswith("inactive_file ")), 0)
            yield max(0, int(limit) - used + inactive)


def gpu_bytes() -> int:
    """All memory of the GPUs that this cell sees; 0 without any."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES", "").strip():
        command.append(f"--id={visible}")
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split()
        return sum(int(size) << 20 for size in found)
    except (OSError, subprocess.SubprocessError, ValueError):
        return 0


def _own_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def resident_bytes(groups: Mapping[str, Iterable[int]]) -> dict[str, int]:
    """Resident memory by child: of all processes in the groups that its processes lead."""
    found = dict.fromkeys(groups, 0)
    of_group = {pid: name for name, pids in groups.items() for pid in pids}
    page = os.sysconf("SC_PAGE_SIZE")
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                group = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[2])
                if group in of_group:
                    found[of_group[group]] += int((folder / "statm").read_text().split()[1]) * page
            except (OSError, IndexError, ValueError):  # it has just ended
                continue
    return found
