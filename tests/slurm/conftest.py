"""A real Slurm for the tests of this folder: started once per session, gone after it.

`make test-slurm` sets GYRE_TEST_SLURM=1. Without it the tests are skipped: they need root and minutes.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from gyre_cli.emulate import write_model
from tests.slurm.minislurm import Cluster, why_not
from tests.system.conftest import make_random


@pytest.fixture(scope="session")
def slurm() -> Iterator[Cluster]:
    """node1..node4 with 8 CPUs and 8 make-believe GPUs each, cpu1 without; `slurm.run("sbatch", ...)` is the login
    node."""
    if not os.environ.get("GYRE_TEST_SLURM"):
        pytest.skip("real Slurm: `make test-slurm` (root, minutes)")
    if why := why_not():
        pytest.fail(f"no Slurm can run here: {why}")
    root = Path(tempfile.mkdtemp(prefix="ms"))  # pytest's own folders are too long for unix sockets
    cluster = Cluster(root)
    try:
        yield cluster.up()
    finally:
        if os.environ.get("GYRE_KEEP_SLURM_LOGS"):
            shutil.copytree(root / "log", os.environ["GYRE_KEEP_SLURM_LOGS"], dirs_exist_ok=True)
        cluster.down()


@pytest.fixture
def quiet_slurm(slurm: Cluster) -> Iterator[Cluster]:
    """No job before and none after, every node up: what a test did to the cluster is undone."""
    slurm.mend_all()
    yield slurm
    slurm.clear()
    slurm.mend_all()


@pytest.fixture(scope="session")
def no_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer and a vocabulary for emulated engines."""
    folder = tmp_path_factory.mktemp("model") / "none"
    write_model(folder)
    return folder


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny engine's own network with random weights."""
    folder = tmp_path_factory.mktemp("model") / "random"
    folder.mkdir()
    make_random(folder)
    return folder
