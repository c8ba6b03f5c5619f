"""Models of this folder's tests: one random, one warmed for some seconds; all workers of a session share them."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.system.running import EXAMPLE, ROOT

WARM_STEPS, TRANSCRIPTS = 60, 1200
FLATTEN = 0.3  # tied embeddings of random weights like to repeat a token; smaller logits make every answer another


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the workers of one session share."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if base.name.startswith("popen-") else base) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


def once(folder: Path, make: Callable[[Path], None], proof: str = "model.safetensors") -> Path:
    """Made by the worker that comes first; it is whole when `proof` is there."""
    folder.mkdir(exist_ok=True)
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / proof).exists():
            make(folder)
    return folder


@pytest.fixture(scope="session")
def random_model(shared: Path) -> Path:
    """It talks rubbish and never stops by itself."""
    return once(shared / "random", make_random)


def make_random(target: Path) -> None:
    from celld.tiny.model import TinyConfig, TinyQwen3, save

    model = TinyQwen3(TinyConfig(eos_token_id=2)).initialise(0)
    model.model.norm.weight.data.mul_(FLATTEN)
    save(model, target)
    for file in (EXAMPLE / "tokenizer").iterdir():
        shutil.copy(file, target)


@pytest.fixture(scope="session")
def warm_model(shared: Path) -> Path:
    """It knows the form of the quickstart's work a little: tool calls, files, sub-agents, scores that differ."""
    return once(shared / "warm", make_warm)


def make_warm(target: Path) -> None:
    data = target.with_suffix(".jsonl")
    count = ["--count", str(TRANSCRIPTS), "--validation", "40", "--seed", "7"]
    subprocess.run([sys.executable, str(EXAMPLE / "teacher.py"), "--out", str(data), *count], check=True)
    line = [sys.executable, "-m", "celld.warmstart", "--train", str(data), "--out", str(target), "--threads", "1"]
    line += ["--validation", str(data.with_suffix(".validation.jsonl")), "--tokenizer", str(EXAMPLE / "tokenizer")]
    subprocess.run([*line, "--max-steps", str(WARM_STEPS)], check=True, cwd=ROOT, capture_output=True)
