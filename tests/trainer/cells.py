"""A cell of several ranks for tests: its model, and a process for each rank."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from celld.tiny import model as tiny
from tests.trainer import experts

ROOT = Path(__file__).parents[2]
END_S = 500.0


def a_model(folder: Path, reference, kind: str) -> Path:
    """The small model: its output matrix is its embedding, or is one of its own, or some of its layers have experts."""
    if kind == "experts":
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(experts.config_of()))
        save_file(dict(experts.twin().state_dict()), folder / "model.safetensors", {"format": "pt"})
        return folder
    tiny.save(reference, folder)
    if kind == "untied":
        config = folder / "config.json"
        config.write_text(config.read_text().replace('"tie_word_embeddings": true', '"tie_word_embeddings": false'))
        tensors = load_file(folder / "model.safetensors")
        generator = torch.Generator().manual_seed(9)
        tensors["lm_head.weight"] = torch.randn(tensors["model.embed_tokens.weight"].shape, generator=generator) * 0.2
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@contextmanager
def ranks(module: str, model: Path, folder: Path, layout: Mapping[str, int]) -> Iterator[list[Path]]:
    """`module` as each rank of a cell with this layout; gives the files into which they write. When the block ends all
    have ended well; none outlives it.
    """
    size = math.prod(layout.values()) // layout.get("ep", 1)
    outputs = [folder / f"rank{number}" for number in range(size)]
    command = [sys.executable, "-m", module, str(model), str(folder / "store")]
    processes = [
        subprocess.Popen([*command, str(number), str(size), json.dumps(layout), str(output)], cwd=ROOT)
        for number, output in enumerate(outputs)
    ]
    try:
        yield outputs
        assert [process.wait(timeout=END_S) for process in processes] == [0] * size
    finally:
        for process in processes:
            process.kill()
            process.wait()
