"""Engines for the contract suite: two tiny ones, then two emulated ones; or with `GYRE_ENGINE=sglang` two real ones
(`make test-sglang`), which run in the environment of the interpreter `GYRE_SGLANG_PYTHON`.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import torch

from celld.tiny.model import TinyConfig, TinyQwen3, load, save
from celld.transfer.engine import installed
from tests.engine.calls import Caller
from tests.engine.process import EngineProcess, sglang_pair

torch.set_num_threads(1)  # two engines want the cores
CONFIG = TinyConfig(vocab_size=320, hidden_size=64, intermediate_size=96, initializer_range=0.12, eos_token_id=1)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two directories with different weights of one network."""
    folders = tuple(tmp_path_factory.mktemp(f"model{seed}") for seed in (1, 2))
    for seed, folder in enumerate(folders):
        save(TinyQwen3(CONFIG).initialise(seed), folder)
    return folders[0], folders[1]


@pytest.fixture(scope="session")
def reference(models: tuple[Path, Path]) -> TinyQwen3:
    """The first model, for full forward passes."""
    return load(models[0]).eval()


KINDS = ["sglang"] if os.environ.get("GYRE_ENGINE") == "sglang" else ["tiny", "emulate"]
OWN = {
    "tiny": ("--max-running-requests", "48"),
    "emulate": ("--slots", "48", "--tokens-per-s", "400"),
}


@pytest.fixture(scope="session", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def urls(kind: str, models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Base URLs of two engines that serve the first model."""
    if kind == "sglang":
        python = os.environ["GYRE_SGLANG_PYTHON"]
        with sglang_pair(python, models[0], tmp_path_factory.mktemp("sglang")) as pair:
            yield pair
        return
    options = ("--weight-version", "0.0", "--context-length", "1024", *OWN[kind])
    module, shared = f"celld.{kind}.server", [(), ()]
    if kind == "tiny":
        store = ("--kv-store", str(tmp_path_factory.mktemp("kv")))
        transport = ("--kv-transport", "mooncake" if installed() else "socket")
        shared = [(*store, *transport, "--kv-name", name) for name in ("first", "second")]
    with (
        EngineProcess(models[0], *options, *shared[0], module=module) as first_engine,
        EngineProcess(models[0], *options, *shared[1], module=module) as second_engine,
    ):
        yield first_engine.url, second_engine.url


@pytest.fixture
async def engine(
    kind: str, urls: tuple[str, str], models: tuple[Path, Path], request: pytest.FixtureRequest
) -> AsyncIterator[Caller]:
    """The first engine, in its first state: serving the first model as 0.0 with an empty cache."""
    needed = request.node.get_closest_marker("needs_a_model")
    if needed and kind == "emulate":
        pytest.skip(f"the emulated engine has no model: {needed.args[0]}")
    async with Caller(urls[0]) as caller:
        await caller.reset(models[0])
        yield caller
        await caller.reset(models[0])


@pytest.fixture
async def other(urls: tuple[str, str], models: tuple[Path, Path]) -> AsyncIterator[Caller]:
    """The second engine, likewise."""
    async with Caller(urls[1]) as caller:
        await caller.reset(models[0])
        yield caller
