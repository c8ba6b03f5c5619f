"""The way of bulk bytes in this process: Mooncake where it is asked for or serves, else none (they go over the bus)."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from typing import Any, TypeVar

from celld.transfer.engine import TransferEngine, TransferUnavailable, installed
from celld.transfer.reader import Reader
from celld.transfer.shelf import Shelf
from gyre_base.allocation import LOOPBACK, own_address
from gyre_base.bus import Client
from gyre_base.config import ClusterConfig, ConfigError
from gyre_base.messages import SlotDone

log = logging.getLogger(__name__)
M = TypeVar("M")


class Bulk:
    """One engine with its shelf (to give) and its reader (to take)."""

    def __init__(self, host: str, protocol: str) -> None:
        engine = TransferEngine(host, protocol)
        self.name = f"mooncake over {protocol}"
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
    """As `cluster.transport` says. Raises ConfigError if Mooncake can't be had although it should."""
    host = own_address(cluster.bind)
    if cluster.transport == "socket" or (cluster.transport == "auto" and host == LOOPBACK):
        return None
    if cluster.transport == "auto" and not installed():
        log.warning("mooncake is not installed: weights and gradients go over the bus, which is slow for large models")
        return None
    try:
        return Bulk(host, cluster.transfer_protocol)
    except TransferUnavailable as error:
        raise ConfigError(f'{error}; cluster.transport = "socket" does without') from error
