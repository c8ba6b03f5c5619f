"""How bytes of another process are read: what an engine promises, and Mooncake's with its silent traps closed.

What it does by itself, and what is done about it here: an unknown protocol or RDMA without an adapter becomes TCP (the
topology is looked at); a timed-out read may go on writing (`Reader` never uses such a buffer again); more than some
2,000 operations at once poison the peer (batches are bounded); after a fault every read from a peer may fail (the
engine is made anew). It listens on all interfaces without a password, and whoever reaches it may read *and write* what
is registered: only slots are ever registered, digests travel over the authenticated bus, and `docs/install.md` says to
keep its ports inside the cluster.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Buffer = npt.NDArray[np.uint8]
Operation = tuple[int, int, int]  # where to in our buffer, where from in the peer (addresses), bytes
OPERATION_BYTES = 8 << 20  # several reads of this size beat one large one
BATCH = 8  # operations at once; what has come is checked while the next ones travel
SLOWEST_BYTES_PER_S = 20e6  # a slower network is a fault
PROGRESS_S = 5  # a peer that sends nothing for so long is given up before a late write can start
TRANSFER_S = 3600  # the other limit, the one with late writes, is never the first to be reached


class TransferUnavailable(RuntimeError):
    """Mooncake can't be used here as asked; says what to install or set."""


class TransferFailed(RuntimeError):
    """A read did not work; the bytes in its buffer mean nothing."""


class Engine(Protocol):
    """Reads registered memory of peers. `Shelf` gives and `Reader` takes over any of them."""

    kind: str  # what a peer must have too, to be read
    name: str  # for people
    late_writes: bool  # whether a failed read may still change its buffer afterwards

    @property
    def peer(self) -> str:
        """The name by which others reach this engine."""

    def register(self, buffer: Buffer, *, shared: bool = False) -> None:
        """Make memory known: to read into, or (`shared`) to be read by others. Raises TransferFailed."""

    def unregister(self, buffer: Buffer) -> None:
        """Forget it."""

    def read(self, peer: str, buffer: Buffer, operations: Sequence[Operation], arrived: Callable[[int], None]) -> None:
        """Blocks. `arrived` is called once for each operation (its index) whose bytes are there, while others travel,
        from this or another thread, never two at once. Raises TransferFailed."""

    def renew(self) -> None:
        """After a failed read: whatever makes the next one possible."""


def installed() -> bool:
    """Whether Mooncake can be imported: package and Debian library."""
    try:
        _module()
    except TransferUnavailable:
        return False
    return True


def _module() -> Any:
    os.environ.setdefault("MC_TCP_PROGRESS_TIMEOUT_SEC", str(PROGRESS_S))
    os.environ.setdefault("MC_TRANSFER_TIMEOUT", str(TRANSFER_S))
    os.environ.setdefault("GLOG_minloglevel", "2")
    try:
        from mooncake import engine
    except ImportError as error:
        raise TransferUnavailable(
            f"mooncake can't be imported ({error}): pip install 'gyre-rl[mooncake]' and libibverbs1 from the system"
        ) from error
    return engine


class TransferEngine:
    """One Mooncake engine of this process at `host`, an address that its peers can reach."""

    kind, late_writes = "mooncake", True

    def __init__(self, host: str, protocol: str = "tcp", *, patience_s: float = 20.0) -> None:
        self.host, self.protocol, self._patience_s = host, protocol, patience_s
        self.name = f"mooncake over {protocol}"
        self._engine: Any = None
        self._registered: dict[int, Buffer] = {}  # held here: freed memory that is registered could be read and written
        self._open()

    def _open(self) -> None:
        engine = _module().TransferEngine()
        if engine.initialize(self.host, "P2PHANDSHAKE", self.protocol, "") != 0:
            raise TransferUnavailable(f"mooncake does not start at {self.host} with {self.protocol}")
        if self.protocol != "tcp" and not adapters(engine.get_local_topology()):
            raise TransferUnavailable(
                f"cluster.transfer_protocol = {self.protocol!r}, but mooncake finds no RDMA adapter on this node: "
                "set it to tcp, or look at ibv_devinfo"
            )
        self._engine = engine

    @property
    def peer(self) -> str:
        """The name by which others reach this engine."""
        return f"{self.host}:{self._engine.get_rpc_port()}"

    def renew(self) -> None:
        """A new engine in place of one that may be poisoned; what was registered stays so."""
        known = dict(self._registered)
        self._open()
        self._registered = {}
        for buffer in known.values():
            self.register(buffer)

    def register(self, buffer: Buffer, *, shared: bool = False) -> None:
        """Mooncake knows one kind of memory: what is read into can be read (and written) by whoever reaches us."""
        address = int(buffer.ctypes.data)
        if (code := self._engine.register_memory(address, buffer.nbytes)) != 0:
            raise TransferFailed(f"mooncake did not register {buffer.nbytes} bytes (code {code})")
        self._registered[address] = buffer

    def unregister(self, buffer: Buffer) -> None:
        address = int(buffer.ctypes.data)
        self._engine.unregister_memory(address)
        self._registered.pop(address, None)

    def read(self, peer: str, buffer: Buffer, operations: Sequence[Operation], arrived: Callable[[int], None]) -> None:
        """A peer that is stopped before the first byte would hold the caller for minutes, so the read has a thread of
        its own that is left behind, with the buffer that it may still write into, when its time is up.
        """
        results: queue.Queue[range | None] = queue.Queue()
        engine = self._engine

        def work(_kept_alive: Buffer) -> None:
            for start in range(0, len(operations), BATCH):
                batch = operations[start : start + BATCH]
                local, remote, sizes = zip(*batch, strict=True)
                if engine.batch_transfer_sync_read(peer, list(local), list(remote), list(sizes)) < 0:
                    return results.put(None)
                results.put(range(start, start + len(batch)))

        threading.Thread(target=work, args=(buffer,), name="mooncake read", daemon=True).start()
        limit_s = self._patience_s + sum(size for _, _, size in operations) / SLOWEST_BYTES_PER_S
        deadline = time.monotonic() + limit_s
        for _ in range(0, len(operations), BATCH):
            try:
                done = results.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise TransferFailed(f"{peer} gave nothing for {limit_s:.0f} s") from None
            if done is None:
                raise TransferFailed(f"a read from {peer} failed")
            for index in done:
                arrived(index)


def adapters(topology: str) -> set[str]:
    """RDMA adapters in mooncake's own description of this node: {place: [[preferred...], [others...]]}."""
    found = json.loads(topology or "{}")
    return {name for lists in found.values() for names in lists for name in names}
