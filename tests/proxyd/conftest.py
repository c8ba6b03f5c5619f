from __future__ import annotations

from pathlib import Path

import pytest

from proxyd.chat import ChatModel
from tests.proxyd.tokens import write_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def chat(tokenizer: Path) -> ChatModel:
    return ChatModel.load(tokenizer)
