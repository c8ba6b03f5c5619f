"""How SGLang is started as a cell's engine: settings, environment and command, all pure but for one file written.

Settings go through a file of mode 0600, because a command line, and with it the admin key, is readable by everyone on
the node. The pinned version is 0.5.23; `EngineClient.probe` looks at what a started engine really is.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gyre_base.config import ConfigError
from gyre_base.routing import RoutingShape

PINNED = "0.5.23"
PAGE_TOKENS = 16  # only whole pages move to another engine: at most 15 tokens and the last one are computed again
CPU_SHIM = Path(__file__).parent / "cpu"


@dataclass(frozen=True, kw_only=True)
class SGLangSettings:
    """One engine. `kv_store` names a folder that all engines share: there KV survives a hand-over (HiCache L3)."""

    model: Path
    host: str
    port: int
    served_name: str
    weight_version: str
    max_running_requests: int = 64
    context_length: int = 2048  # tokens
    stream_interval: int = 16  # tokens per chunk
    seed: int = 0
    tensor_parallel: int = 1
    device: str = "cuda"  # or cpu
    admin_key: str | None = None
    kv_store: Path | None = None
    routed_experts: bool = False  # a request may ask which experts its tokens went to
    cpu_tokens: int = 8192  # of KV on a machine without a GPU
    extra: Mapping[str, Any] = field(default_factory=dict)  # SGLang's own options by name, these win

    def options(self) -> dict[str, Any]:
        """SGLang's options by their names on its command line."""
        return {
            **self._always(),
            **(self._cpu() if self.device == "cpu" else self._gpu()),
            **self._store(),
            **self.extra,
        }

    def _always(self) -> dict[str, Any]:
        # one key for all: generation too, since the network may have other users
        named = {"admin-api-key": self.admin_key, "api-key": self.admin_key} if self.admin_key else {}
        routed = {"enable-return-routed-experts": True} if self.routed_experts else {}
        return {
            "model-path": str(self.model),
            "host": self.host,
            "port": self.port,
            "served-model-name": self.served_name,
            "weight-version": self.weight_version,
            "max-running-requests": self.max_running_requests,
            "context-length": self.context_length,
            "stream-interval": self.stream_interval,
            "random-seed": self.seed,
            "tp-size": self.tensor_parallel,
            "skip-tokenizer-init": True,  # proxyd renders and parses; ids go in and come out
            "skip-server-warmup": True,  # the probe of the agent generates
            "incremental-streaming-output": True,
            "enable-cache-report": True,
            "enable-metrics": True,
            "load-snapshot-publish-interval": 1,  # a drain waits for /v1/loads: 15 steps of age would be waited too
            "page-size": PAGE_TOKENS,
            **routed,
            **named,
        }

    @staticmethod
    def _gpu() -> dict[str, Any]:
        return {"enable-memory-saver": True, "enable-weights-cpu-backup": True}

    def _cpu(self) -> dict[str, Any]:
        return {
            "device": "cpu",
            "sleep-on-idle": True,  # else an engine with nothing to do takes half a core
            "attention-backend": "torch_native",
            "dtype": "float32",
            "disable-overlap-schedule": True,
            "max-total-tokens": self.cpu_tokens,
            "mem-fraction-static": 0.3,
        }

    def _store(self) -> dict[str, Any]:
        if self.kv_store is None:
            return {}
        return {
            "enable-hierarchical-cache": True,
            "hicache-size": 1,
            "hicache-write-policy": "write_through",  # what is aborted must be there for the next engine
            "hicache-io-backend": "direct",
            "hicache-mem-layout": "layer_first",
            "hicache-storage-backend": "file",
            "hicache-storage-prefetch-policy": "wait_complete",
        }

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """The process's environment: never a hub, and on a CPU the stand-ins for what is only there for GPUs."""
        out = {**base, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        out["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "0"  # else /health fails in a pause
        if self.kv_store is not None:
            out["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = str(self.kv_store)
        if self.device == "cpu":
            out["SGLANG_USE_CPU_ENGINE"] = "1"
            out["PYTHONPATH"] = os.pathsep.join(filter(None, (str(CPU_SHIM), base.get("PYTHONPATH"))))
        return out

    def write(self, path: Path) -> None:
        """The settings as a file that only the owner can read; `path` must end in .yaml (JSON is YAML)."""
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump(self.options(), file, indent=1)


def check_model(model: Mapping[str, Any]) -> None:
    """`model` is its config.json. Raises ConfigError for one that this SGLang would serve as another: of a qwen3_moe it
    reads experts in every layer and an output matrix, and what is not there is noise, or zero.
    """
    if model.get("model_type") != "qwen3_moe":
        return
    if not all(RoutingShape.of(model).sparse):
        raise ConfigError(
            f"SGLang {PINNED} takes every layer of a qwen3_moe for one with experts: it can't serve a model with "
            "mlp_only_layers or a decoder_sparse_step above 1"
        )
    if model.get("tie_word_embeddings"):
        raise ConfigError(
            f"SGLang {PINNED} can't serve a qwen3_moe with tie_word_embeddings: it reads no output matrix"
        )


def command(python: str, settings_file: Path) -> list[str]:
    """`python` is the interpreter of the environment that has SGLang, which is seldom the one that trains."""
    return [python, "-m", "sglang.launch_server", "--config", str(settings_file)]


def free_port(host: str) -> int:
    """A port that is free now. SGLang can't choose one itself; who loses the race is started again by the agent."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
