"""The test's own Slurm does what the tests rely on: nodes of their own, power loss, a cut cable."""

from __future__ import annotations

import contextlib
from pathlib import Path

from tests.slurm.minislurm import Cluster, until


def commands(slurm: Cluster, node: str) -> bytes:
    found = []
    for pid in slurm.pids(node):
        with contextlib.suppress(OSError):  # it has just ended
            found.append(Path(f"/proc/{pid}/cmdline").read_bytes())
    return b"\n".join(found)


def test_every_node_has_its_own_name_and_a_routable_address(quiet_slurm: Cluster) -> None:
    seen = quiet_slurm.run("srun", "-N4", "sh", "-c", "echo $(hostname) $(getent hosts $SLURMD_NODENAME)")
    wanted = {f"node{i} {quiet_slurm.address(f'node{i}')} node{i}" for i in range(1, 5)}
    assert set(seen.splitlines()) == wanted


def test_a_crashed_node_loses_its_processes_and_comes_back_empty(quiet_slurm: Cluster) -> None:
    quiet_slurm.on_node("node4", "sh", "-c", "sleep 612 >/dev/null 2>&1 &")
    until(lambda: b"sleep\x00612" in commands(quiet_slurm, "node4"), 30, "the process did not start")
    quiet_slurm.crash("node4")
    assert list(quiet_slurm.pids("node4")) == []
    quiet_slurm.start("node4")
    until(quiet_slurm.all_idle, 30, "node4 did not come back")
    assert b"sleep\x00612" not in commands(quiet_slurm, "node4")


def test_a_cut_node_is_not_reached_until_it_is_mended(quiet_slurm: Cluster) -> None:
    port = quiet_slurm.conf.read_text().partition("NodeAddr=")[2].partition("Port=")[2].split()[0]
    reach = f"timeout 2 bash -c '</dev/tcp/{quiet_slurm.address('node2')}/{port}' && echo reached"
    quiet_slurm.cut("node2")
    assert "reached" not in quiet_slurm.on_node("node1", "sh", "-c", reach, check=False)
    quiet_slurm.mend("node2")
    until(lambda: "reached" in quiet_slurm.on_node("node1", "sh", "-c", reach, check=False), 20, "not mended")
