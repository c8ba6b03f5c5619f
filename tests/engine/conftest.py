"""Engines for the contract suite. `GYRE_ENGINE_URLS=http://a,http://b` and `GYRE_ENGINE_MODEL` (plus
`GYRE_ENGINE_MODEL2`, other weights of the same network) run it against engines that are already there."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import torch

from celld.tiny.model import TinyConfig, TinyQwen3, load, save
from tests.engine.calls import Caller
from tests.engine.process import EngineProcess

torch.set_num_threads(1)  # two engines want the cores
CONFIG = TinyConfig(vocab_size=320, hidden_size=64, intermediate_size=96, initializer_range=0.12, eos_token_id=1)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two directories with different weights of one network."""
    if found := os.environ.get("GYRE_ENGINE_MODEL"):
        return Path(found), Path(os.environ["GYRE_ENGINE_MODEL2"])
    folders = tuple(tmp_path_factory.mktemp(f"model{seed}") for seed in (1, 2))
    for seed, folder in enumerate(folders):
        save(TinyQwen3(CONFIG).initialise(seed), folder)
    return folders[0], folders[1]


@pytest.fixture(scope="session")
def reference(models: tuple[Path, Path]) -> TinyQwen3:
    """The first model, for full forward passes."""
    return load(models[0]).eval()


@pytest.fixture(scope="session")
def urls(models: tuple[Path, Path]) -> Iterator[tuple[str, str]]:
    """Base URLs of two engines that serve the first model."""
    if found := os.environ.get("GYRE_ENGINE_URLS"):
        first, second = found.split(",")
        yield first, second
        return
    options = ("--weight-version", "0.0", "--context-length", "1024", "--max-running-requests", "48")
    with EngineProcess(models[0], *options) as first_engine, EngineProcess(models[0], *options) as second_engine:
        yield first_engine.url, second_engine.url


@pytest.fixture
async def engine(urls: tuple[str, str], models: tuple[Path, Path]) -> AsyncIterator[Caller]:
    """The first engine, in its first state: serving the first model as 0.0 with an empty cache."""
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
