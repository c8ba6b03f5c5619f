from __future__ import annotations

from pathlib import Path

import pytest

from proxyd.chat import ChatModel
from proxyd.families import qwen3
from tests.proxyd.tokens import SPECIAL, write_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def chat(tokenizer: Path) -> ChatModel:
    return ChatModel.load(tokenizer)


@pytest.fixture(scope="session")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> ChatModel:
    """A model that thinks in tags, with the append-only template of its family."""
    folder = tmp_path_factory.mktemp("thinker")
    return ChatModel.load(write_tokenizer(folder, qwen3.VARIANT, (*SPECIAL, "<think>", "</think>")))
