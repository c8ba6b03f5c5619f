"""The way of bulk bytes in this process: which engine, and what is asked of a peer that has another one.

`auto` is measured, not wished (docs/adr/0018): where there is an RDMA adapter and Mooncake is installed, Mooncake; on
TCP plain sockets, which are the faster of the two and let nobody write. Over the bus goes what neither brings.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from pathlib import Path
from typing import Any, TypeVar

from celld.transfer.engine import Engine, TransferEngine, TransferUnavailable, installed
from celld.transfer.reader import Reader
from celld.transfer.shelf import Shelf
from celld.transfer.streams import StreamEngine
from gyre_base.allocation import own_address
from gyre_base.bus import Client
from gyre_base.config import ClusterConfig, ConfigError
from gyre_base.messages import SlotDone

log = logging.getLogger(__name__)
M = TypeVar("M")
ADAPTERS = Path("/sys/class/infiniband")


class Bulk:
    """One engine with its shelf (to give) and its reader (to take)."""

    def __init__(self, engine: Engine) -> None:
        self.kind, self.name = engine.kind, engine.name
        self.shelf, self.reader = Shelf(engine), Reader(engine)
        self._one_at_a_time = asyncio.Lock()

    async def filled(self, answer: Any, owner: Client) -> Any:
        """`answer` with the payload that its slot holds. Raises TransferFailed."""
        if answer.slot is None:
            return answer
        try:
            async with self._one_at_a_time:
                payload = await asyncio.to_thread(self.reader.fetch, answer.slot)
        finally:
            await owner.send(SlotDone(lease=answer.slot.lease))
        return dataclasses.replace(answer, payload=payload, slot=None)

    def emptied(self, answer: M, name: str) -> M:
        """`answer` whose payload was `put` on the shelf as `name`, with the slot instead."""
        return dataclasses.replace(answer, payload=b"", slot=self.shelf.offer(name))  # type: ignore[type-var]


def open_bulk(cluster: ClusterConfig) -> Bulk | None:
    """As `cluster.transport` says; None: over the bus. Raises ConfigError if Mooncake can't be had although it must."""
    if cluster.transport == "bus":
        return None
    return Bulk(open_engine(cluster.transport, cluster.transfer_protocol, own_address(cluster.bind)))


def open_engine(transport: str, protocol: str, host: str) -> Engine:
    """`transport`: socket, mooncake or auto. Raises ConfigError."""
    if transport == "mooncake":
        try:
            return TransferEngine(host, protocol)
        except TransferUnavailable as error:
            raise ConfigError(f'{error}; cluster.transport = "auto" does without') from error
    if transport == "auto" and any(ADAPTERS.iterdir() if ADAPTERS.is_dir() else ()):
        if installed():
            try:
                return TransferEngine(host, "rdma")
            except TransferUnavailable as error:
                log.warning("%s; weights and gradients go over plain sockets", error)
        else:
            log.warning("this node has RDMA and no mooncake: weights and gradients go over plain sockets")
    return StreamEngine(host)
