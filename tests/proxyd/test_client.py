"""The client to engines, against servers that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from proxyd.client import Disconnected, HttpClient
from proxyd.engine import Ended, EngineClient
from proxyd.stream import Sampled

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter, int], Awaitable[None]]
ODD = b'data: {"output_ids": [1], "meta_info": {"completion_tokens": 1, "output_token_logprobs": %b}}\n\n'
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


@contextlib.asynccontextmanager
async def server(script: Script) -> AsyncIterator[str]:
    """`script` gets each connection and its number."""
    count = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        count += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await script(reader, writer, count)
        writer.close()

    made = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = made.sockets[0].getsockname()[:2]
    try:
        yield f"http://{host}:{port}"
    finally:
        made.close()


async def a_request(reader: asyncio.StreamReader) -> None:
    await reader.readuntil(b"\r\n\r\nbody")


async def ask(client: HttpClient, url: str, silence_s: float = 5.0) -> tuple[int, bytes]:
    parts: list[bytes] = []
    status = await client.ask("POST", url, "/p", [b"body"], lambda _, piece: parts.append(piece), silence_s)
    return status, b"".join(parts)


async def test_connections_are_kept_and_a_stale_one_is_replaced_once() -> None:
    connections: list[int] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        for _ in range(2):  # two answers, then it hangs up as idle servers do
            await a_request(reader)
            connections.append(number)
            writer.write(OK)

    async with server(script) as url:
        client = HttpClient({})
        for _ in range(5):
            assert await ask(client, url) == (200, b"ok")
            await asyncio.sleep(0.02)
        client.close()
    assert connections == [1, 1, 2, 2, 3]


@pytest.mark.parametrize(
    ("answer", "begun"),
    [
        (b"", False),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf", True),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhe", True),
        (b"SSH-2.0-x\r\n", True),
    ],
)
async def test_what_is_not_a_whole_answer_is_an_error(answer: bytes, begun: bool) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        await a_request(reader)
        writer.write(answer)

    async with server(script) as url:
        client = HttpClient({})
        with pytest.raises(Disconnected) as raised:
            await ask(client, url)
        assert raised.value.begun is begun
        client.close()


async def test_silence_ends_a_request_and_pieces_keep_it_alive() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        await a_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(6):
            writer.write(b"1\r\nx\r\n")
            await asyncio.sleep(0.1)
        await asyncio.sleep(0.0 if number == 1 else 10.0)
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    async with server(script) as url:
        client = HttpClient({})
        assert await ask(client, url, silence_s=0.4) == (200, b"xxxxxx")
        client.close()
        with pytest.raises(TimeoutError):
            await ask(HttpClient({}), url, silence_s=0.4)


async def test_a_cancelled_request_hangs_up() -> None:
    gone = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        await a_request(reader)
        with contextlib.suppress(ConnectionError):
            await reader.read()
        gone.set()

    async with server(script) as url:
        task = asyncio.create_task(ask(HttpClient({}), url))
        await asyncio.sleep(0.1)
        task.cancel()
        async with asyncio.timeout(5):
            await gone.wait()


async def stream(engines: EngineClient, url: str) -> Ended:
    ended: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
    engines.stream(url, [b"body"], Sampled("v"), lambda: None, ended.set_result)
    return await ended


@pytest.mark.parametrize(
    ("head", "body", "how", "lost"),
    [
        (b"400 Bad Request", b'{"error": "no"}', "refused", False),
        (b"503 Busy", b"later", "cut", False),
        (b"500 Oh", b"oh", "cut", True),
        (b"200 OK", b'data: {"error": {"message": "bad ids"}}\n\n', "refused", False),
        (b"200 OK", b"data: {\n\n", "cut", True),
        (b"200 OK", b"", "cut", True),
        (b"200 OK", b'data: {"output_ids": [1], "meta_info": {"completion_tokens": -1}}\n\n', "cut", True),
        (b"200 OK", b"data: [1]\n\n", "cut", True),
        (b"200 OK", ODD % b"[1]", "cut", True),
        (b"200 OK", ODD % b'[["x", 1, null]]', "cut", True),
    ],
)
async def test_an_engines_failures_are_told_apart(head: bytes, body: bytes, how: str, lost: bool) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        await a_request(reader)
        writer.write(b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (head, len(body), body))
        await writer.drain()
        await asyncio.sleep(0.2)

    async with server(script) as url:
        engines = EngineClient("k", frozenset({0}), 16)
        ended = await stream(engines, url)
        assert (ended.how, ended.lost) == (how, lost), ended
        engines.close()
    engines = EngineClient("k", frozenset({0}), 16)
    assert (await stream(engines, "http://127.0.0.1:1")).lost
    assert await engines.work("http://127.0.0.1:1") is None
