"""Bulk bytes between two processes, over plain sockets and the real Mooncake: whole or not at all, whatever the other
side does."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from celld.transfer.bulk import open_engine
from celld.transfer.engine import (
    OPERATION_BYTES,
    Engine,
    TransferEngine,
    TransferFailed,
    TransferUnavailable,
    installed,
)
from celld.transfer.reader import Reader
from celld.transfer.shelf import LEASE_S, Shelf
from celld.transfer.streams import StreamEngine
from gyre_base.messages import RemoteSlot
from tests.trainer.transfer_owner import payload

needs_mooncake = pytest.mark.skipif(not installed(), reason="mooncake can't be imported: the extra and libibverbs1")
THREE = 3 * OPERATION_BYTES - 1000  # bytes; the last chunk is short


class Owner:
    """Another process's shelf."""

    def __init__(self, kind: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.trainer.transfer_owner", kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        assert self._line() == "ready"

    def _line(self) -> str:
        """Its next answer; the library has words of its own on stdout."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(("ready", "ok", "{")):
                return line.strip()
        raise AssertionError("the owner has ended")

    def say(self, *words: object) -> str:
        assert self.process.stdin is not None
        print(*words, file=self.process.stdin, flush=True)
        return self._line()

    def offer(self) -> RemoteSlot:
        return msgspec.json.decode(self.say("offer"), type=RemoteSlot)


@pytest.fixture(scope="module", params=["socket", pytest.param("mooncake", marks=needs_mooncake)])
def engine(request: pytest.FixtureRequest) -> Engine:
    return open_engine(request.param, "tcp", "127.0.0.1")


@pytest.fixture
def owner(engine: Engine) -> Iterator[Owner]:
    made = Owner(engine.kind)
    yield made
    made.process.kill()
    made.process.wait()


@pytest.mark.parametrize("size", [1, 1000, OPERATION_BYTES, THREE])
def test_a_slot_is_read_whole(owner: Owner, engine: Engine, size: int):
    owner.say("put", size, 1)
    assert Reader(engine).fetch(owner.offer()) == payload(size, 1)


def test_equal_chunks_are_not_read_again(owner: Owner, engine: Engine):
    reader = Reader(engine)
    owner.say("put", THREE, 1)
    reader.fetch(owner.offer())
    assert reader.fetch(owner.offer()) == payload(THREE, 1)
    assert (reader.fetched_bytes, reader.reused_bytes) == (THREE, THREE)


def test_a_newer_version_is_another_slot_while_the_old_one_is_read(owner: Owner, engine: Engine):
    owner.say("put", THREE, 1)
    old = owner.offer()
    owner.say("put", THREE, 2)
    assert Reader(engine).fetch(old) == payload(THREE, 1)
    owner.say("done", old.lease)
    owner.say("put", THREE, 3)
    owner.say("put", THREE, 4)  # into the slot that is free again
    with pytest.raises(TransferFailed, match="not what it offered"):
        Reader(engine).fetch(old)


def test_a_wrong_byte_is_found_and_read_again(owner: Owner, engine: Engine):
    owner.say("put", THREE, 1)
    slot = owner.offer()
    owner.say("spoil", OPERATION_BYTES + 5)
    reader = Reader(engine)
    with pytest.raises(TransferFailed):
        reader.fetch(slot)
    owner.say("spoil", OPERATION_BYTES + 5)  # right again
    before = reader.fetched_bytes
    assert reader.fetch(slot) == payload(THREE, 1)
    assert reader.fetched_bytes - before == OPERATION_BYTES  # the other chunks were confirmed


def test_a_dead_owner_is_a_failure_and_its_successor_serves_the_rest(engine: Engine):
    first, reader = Owner(engine.kind), Reader(engine)
    try:
        first.say("put", THREE, 1)
        slot = first.offer()
        assert reader.fetch(slot) == payload(THREE, 1)
    finally:
        first.process.kill()
        first.process.wait()
    with pytest.raises(TransferFailed):
        Reader(engine).fetch(slot)
    second = Owner(engine.kind)
    try:
        second.say("put", THREE, 1)
        before = reader.fetched_bytes
        assert reader.fetch(second.offer()) == payload(THREE, 1)
        assert reader.fetched_bytes == before  # the same bytes from another peer need no reading
    finally:
        second.process.kill()
        second.process.wait()


def test_a_stopped_owner_is_given_up_and_read_after_it_goes_on(owner: Owner, engine: Engine):
    owner.say("put", THREE, 1)
    slot = owner.offer()
    os.kill(owner.process.pid, signal.SIGSTOP)
    hurried = StreamEngine("127.0.0.1", progress_s=0.2)
    reader = Reader(hurried if engine.kind == "socket" else TransferEngine("127.0.0.1", patience_s=0.2))
    with pytest.raises(TransferFailed, match=r"gave nothing|timed out"):
        reader.fetch(slot)
    os.kill(owner.process.pid, signal.SIGCONT)
    reader = Reader(engine)
    assert reader.fetch(slot) == payload(THREE, 1)


PULLING = """
import sys, msgspec
from celld.transfer.bulk import open_engine
from celld.transfer.reader import Reader
from gyre_base.messages import RemoteSlot
reader = Reader(open_engine(sys.argv[1], "tcp", "127.0.0.1"))
slot = msgspec.json.decode(sys.argv[2], type=RemoteSlot)
print("pulling", flush=True)
while True:
    reader._rooms.clear()
    reader.fetch(slot)
"""


def test_a_satellite_that_is_killed_while_it_pulls_costs_the_owner_nothing(owner: Owner, engine: Engine):
    owner.say("put", THREE, 1)
    slot = owner.offer()
    command = [sys.executable, "-c", PULLING, engine.kind, msgspec.json.encode(slot).decode()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as satellite:
        assert satellite.stdout is not None
        assert any(line == "pulling\n" for line in satellite.stdout)
        time.sleep(0.3)  # somewhere in the middle of a read
        satellite.kill()
    owner.say("put", THREE, 2)  # its lease still lives: the slot is not used again
    assert Reader(engine).fetch(slot) == payload(THREE, 1)
    assert Reader(engine).fetch(owner.offer()) == payload(THREE, 2)


def test_an_address_that_is_not_a_slot_is_refused(owner: Owner, engine: Engine):
    owner.say("put", 1000, 1)
    slot = owner.offer()
    past = dataclasses.replace(slot, address=slot.address + 900)
    with pytest.raises(TransferFailed):
        Reader(engine).fetch(past)
    assert Reader(engine).fetch(owner.offer()) == payload(1000, 1)


def test_what_was_given_stays_as_it_is_while_it_is_held_and_its_memory_is_used_again(owner: Owner, engine: Engine):
    reader = Reader(engine)
    owner.say("put", THREE, 1)
    first = reader.fetch(owner.offer())
    with pytest.raises(TypeError):
        first[0] = 0
    arrays = np.frombuffer(first, dtype=np.uint8)[5:]  # what a snapshot's tensors do
    del first
    owner.say("put", THREE, 2)
    second = reader.fetch(owner.offer())
    assert arrays.tobytes() == payload(THREE, 1)[5:] and second == payload(THREE, 2)
    del arrays, second
    for seed in (3, 4, 5, 6):
        owner.say("put", THREE, seed)
        assert reader.fetch(owner.offer()) == payload(THREE, seed)
    assert len(reader._rooms) == 2


def test_what_was_dropped_is_not_given(owner: Owner, engine: Engine):
    owner.say("put", THREE, 1)
    slot = owner.offer()
    owner.say("drop")
    with pytest.raises(TransferFailed):
        Reader(engine).fetch(slot)


def test_without_the_key_nothing_is_given_and_the_owner_goes_on():
    giver, taker = StreamEngine("127.0.0.1"), StreamEngine("127.0.0.1")
    shelf = Shelf(giver)
    shelf.put("it", payload(1000, 1))
    slot = shelf.offer("it")
    address, _, key = slot.peer.partition("/")
    for wrong in ("0" * len(key), key[:-2], ""):
        with pytest.raises(TransferFailed):
            Reader(taker).fetch(dataclasses.replace(slot, peer=f"{address}/{wrong}"))
    assert Reader(taker).fetch(slot) == payload(1000, 1)
    giver.close()
    taker.close()


def test_memory_that_is_only_read_into_is_not_given():
    giver, taker = StreamEngine("127.0.0.1"), StreamEngine("127.0.0.1")
    private = np.zeros(1000, dtype=np.uint8)
    giver.register(private)
    slot = RemoteSlot(
        peer=giver.peer, address=int(private.ctypes.data), size=1000, chunk_bytes=OPERATION_BYTES, digests=(1,), lease=0
    )
    with pytest.raises(TransferFailed, match="too early"):
        Reader(taker).fetch(slot)
    giver.close()
    taker.close()


@needs_mooncake
def test_rdma_without_an_adapter_is_said():
    with pytest.raises(TransferUnavailable, match="transfer_protocol"):
        TransferEngine("127.0.0.1", "rdma")


class Registry:
    """An engine that only counts."""

    peer = "nowhere:1"

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def register(self, buffer: np.ndarray, *, shared: bool) -> None:
        assert shared
        self.sizes.append(buffer.nbytes)


def test_slots_are_used_again_once_their_leases_are_over():
    now = [0.0]
    registry = Registry()
    shelf = Shelf(registry, clock=lambda: now[0])  # type: ignore[arg-type]
    shelf.put("weights", b"a" * 100)
    lease = shelf.offer("weights")
    shelf.put("weights", b"b" * 100)
    assert len(registry.sizes) == 2
    shelf.put("weights", b"c" * 100)  # the first is leased, the second is the newest
    assert len(registry.sizes) == 3
    shelf.done(lease.lease)
    shelf.put("weights", b"d" * 100)
    assert len(registry.sizes) == 3
    shelf.offer("weights")
    now[0] += LEASE_S + 1
    for letter in b"ef":
        shelf.put("weights", bytes([letter]) * 100)
    assert len(registry.sizes) == 3
    assert np.frombuffer(b"f" * 100, dtype=np.uint8).tolist() == list(shelf._newest["weights"].buffer)
