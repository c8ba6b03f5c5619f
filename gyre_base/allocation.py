"""What a process knows of the Slurm job it runs in, and the address under which other nodes reach it.

Reads the environment that Slurm sets; calls no Slurm client. The node's name in Slurm is the only identity of a node
that is the same in every step: ranks and node numbers count anew in each, and HOSTNAME is the submitting shell's.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

AUTO = "auto"
SHARE = "GYRE_GPU_SHARE"  # "1/4": the second of four cells on this node takes the second quarter of its GPUs
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """The job and its life. `restarts` counts requeues: what an earlier life left running is told by a smaller one."""

    job: str
    restarts: int
    node: str
    nodelist: str  # as it was at the start; Slurm's own word on the present nodes is squeue's %N

    @classmethod
    def here(cls, environment: Mapping[str, str] | None = None) -> Allocation | None:
        """The job around this process, or None outside of one."""
        environment = os.environ if environment is None else environment
        job = environment.get("SLURM_JOB_ID", "")
        if not job or not environment.get("SLURMD_NODENAME"):
            return None
        return cls(
            job=job,
            restarts=int(environment.get("SLURM_RESTART_COUNT") or 0),
            node=environment["SLURMD_NODENAME"],
            nodelist=environment.get("SLURM_JOB_NODELIST", ""),
        )


def own_gpus(environment: Mapping[str, str]) -> str | None:
    """CUDA_VISIBLE_DEVICES of a cell that shares its node, or None where nothing is to be divided."""
    share, devices = environment.get(SHARE, ""), environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
    place, slash, count = share.partition("/")
    if not slash or devices == [""]:
        return None
    low, high = (len(devices) * (int(place) + side) // int(count) for side in (0, 1))
    return ",".join(devices[low:high])


def this_host() -> str:
    """How others would call this machine: its name in Slurm, else its host name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def own_address(bind: str) -> str:
    """`cluster.bind` as an address: "auto" is this node's own in a Slurm job and the loopback elsewhere.

    Raises OSError if the node's name has no address that others can reach.
    """
    if bind != AUTO:
        return bind
    if Allocation.here() is None:
        return LOOPBACK
    for name in dict.fromkeys((this_host(), socket.gethostname())):
        try:
            found = {str(info[4][0]) for info in socket.getaddrinfo(name, None, socket.AF_INET)}
        except OSError:
            continue
        if routable := sorted(address for address in found if not address.startswith("127.")):
            return routable[0]
    raise OSError(f"{this_host()} has no address that other nodes reach; set cluster.bind to one")
