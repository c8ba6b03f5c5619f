"""Where a run lives: beside another on the same nodes, in paths with spaces, on another file system than home."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.minislurm import Cluster
from tests.slurm.running import STEPS, JobRun, emulated, setting, whole


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """Another file system, shared by all nodes as a site's scratch is: it is mounted before they are asked."""
    folder = tmp_path / "scratch of the site"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300m", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_two_runs_of_one_user_share_the_nodes_each_in_paths_with_spaces(
    quiet_slurm: Cluster, tmp_path: Path, no_model: Path
) -> None:
    folders = tmp_path / "my first run", tmp_path / "my second run"
    first, second = (JobRun(quiet_slurm, folder, no_model, emulated(folder)) for folder in folders)
    with first, second:
        first.submit("-w", "node1,node2")
        second.submit("-w", "node1,node2")
        for run in (first, second):
            run.until(lambda s: s["step"] >= 1)
        assert first.node_of("cellctl") == second.node_of("cellctl")
        for run in (first, second):
            whole(run.finish())
            assert run.batches() == list(range(STEPS))
            run.until_nothing_is_left()


def test_the_run_directory_is_on_another_file_system_than_home(
    slurm: Cluster, scratch: Path, tmp_path: Path, model: Path
) -> None:
    for node in slurm.nodes:  # mounts made after a node's start are not seen there: start them anew
        slurm.crash(node)
    slurm.mend_all()
    assert scratch.stat().st_dev != Path.home().stat().st_dev
    with JobRun(slurm, tmp_path / "home", model, setting(), run=scratch / "runs" / "mine") as run:
        run.submit()
        whole(run.finish())
        assert run.batches() == list(range(STEPS))
        run.until_nothing_is_left()
        assert not (run.folder / "run").exists()
