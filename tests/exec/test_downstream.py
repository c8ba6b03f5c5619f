"""What one connection of a harness may cost, whatever the harness does: bounded in requests, answers, descriptors."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import AsyncIterator

import pytest

from gyre_exec import http1
from gyre_exec.downstream import MAX_PIPELINED, Downstream, Waiter
from gyre_exec.relay import Relay
from gyre_exec.upstream import Upstreams

MIB = 1 << 20


@contextlib.asynccontextmanager
async def server(accept, room: int = 64) -> AsyncIterator[tuple[int, set[Downstream]]]:
    connections: set[Downstream] = set()
    listening = await asyncio.get_running_loop().create_server(
        lambda: Downstream(accept, connections, room), "127.0.0.1", 0
    )
    try:
        yield listening.sockets[0].getsockname()[1], connections
    finally:
        for connection in list(connections):
            connection.abort()
        listening.close()
        await listening.wait_closed()


async def settle(count) -> int:
    """A number that has stopped to grow."""
    last, same = -1, 0
    while same < 10:
        await asyncio.sleep(0.02)
        last, same = (last, same + 1) if count() == last else (count(), 0)
    return last


async def test_who_does_not_read_gets_no_further_answers() -> None:
    asked: list[Waiter] = []

    def accept(waiter: Waiter, request: http1.Message) -> None:
        asked.append(waiter)
        waiter.answer(http1.Message((), b"x" * MIB, True, status=200))

    async with server(accept) as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
        request = http1.request(b"POST", b"/x", (), b"y" * 1000)
        writer.write(request * 12)
        served = await settle(lambda: len(asked))
        assert 0 < served < 12, "it kept answering into its own memory"
        got = 0
        while len(asked) < 12 or got < 12 * MIB:  # read now: the others come
            got += len(await reader.read(MIB))
        writer.close()


async def test_requests_ahead_of_their_turn_wait_in_the_clients_memory() -> None:
    """One is answered, few bytes of the others are taken in."""
    asked: list[Waiter] = []
    async with server(lambda waiter, request: asked.append(waiter)) as (port, _):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(64):
            writer.write(http1.request(b"POST", b"/x", (), b"y" * MIB))
        left = await settle(writer.transport.get_write_buffer_size)
        assert len(asked) == 1 and left > 48 * MIB
        for n in range(1, 64):
            asked[-1].answer(http1.Message((), b"", True, status=200))
            async with asyncio.timeout(20):
                while len(asked) <= n:  # noqa: ASYNC110 - it comes over a socket
                    await asyncio.sleep(0.001)
        writer.close()


async def test_a_flood_of_small_requests_ends_the_connection() -> None:
    async with server(lambda waiter, request: None) as (port, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(http1.request(b"GET", b"/x", (), b"") * (MAX_PIPELINED + 10))
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_body_in_tiny_chunks_takes_no_more_than_its_size(size: int) -> None:
    """Three million chunks once took sixty bytes each."""
    reader = http1.Reader(requests=True)
    reader.feed(b"POST /x HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n")
    piece = http1.chunk(b"ab"[:1] * size) * 10_000
    reader.feed(piece)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(100):
        reader.feed(piece)
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    (message,) = reader.feed(http1.LAST_CHUNK)
    assert len(message.body) == 1_010_000 * size and grown_kib < 24 << 10, f"{grown_kib >> 10} MiB"


async def test_one_execution_cannot_take_all_descriptors(tmp_path) -> None:
    relay = Relay(Upstreams(lambda shard: None, 1))
    await relay.start()
    relay.open("e1")
    relay.open("e2")
    await relay.listen("e1", tmp_path / "s1")
    await relay.listen("e2", tmp_path / "s2")
    held = [await asyncio.open_unix_connection(tmp_path / "s1") for _ in range(300)]
    beyond = 0
    for reader, _ in held:
        with contextlib.suppress(TimeoutError):
            beyond += await asyncio.wait_for(reader.read(1), 0.01) == b""
    assert beyond == 300 - 256
    reader, writer = await asyncio.open_unix_connection(tmp_path / "s2")
    writer.write(http1.request(b"GET", b"/x/../v1/models", (), b""))
    assert b" 404 " in await reader.readline(), "another execution is served"
    relay.close("e1")
    for reader, w in held:
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b"", "what it left open goes with it"
        w.close()
    writer.close()
    await relay.stop()
