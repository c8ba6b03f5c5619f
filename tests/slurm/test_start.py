"""From `sbatch` to a finished run, on nodes that share nothing but their file systems."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.slurm.minislurm import Cluster
from tests.slurm.running import STEPS, JobRun, setting, whole


@pytest.mark.slurm_slice
def test_four_nodes_from_sbatch_to_trained_steps_and_no_loopback_address(
    quiet_slurm: Cluster, tmp_path: Path, model: Path
) -> None:
    with JobRun(quiet_slurm, tmp_path, model, setting(cluster__cells=4)) as run:
        run.submit()
        run.until(lambda s: s["step"] >= 1)
        placed = {name: run.node_of(name) for name in run.addresses() if name.startswith(("celld-", "rank-"))}
        for i in range(4):
            assert placed[f"celld-c{i}"] == placed[f"rank-c{i}"] == f"node{i + 1}"
        engines = [row["url"] for row in run.rows("cellctl") if "cell" in row]
        advertised = [host for hosts in run.addresses().values() for host in hosts]
        assert len(advertised) == len(run.addresses()) + 1  # proxyd has two
        assert not [host for host in advertised + engines if "127." in host or "localhost" in host or "0.0.0.0" in host]
        whole(run.finish())
        assert run.batches() == list(range(STEPS))
        run.until_nothing_is_left()
