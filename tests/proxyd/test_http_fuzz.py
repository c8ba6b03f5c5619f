"""HTTP as no client should speak it, at proxyd's own port and at a relay's: 4xx or a closed connection, never a 5xx,
never a hang, nothing kept, and the next request is served.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import random
import re
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from gyre_exec.relay import Relay, RelayLimits
from gyre_exec.upstream import Upstreams, address_of
from tests.proxyd.fakes import World

COUNT = "/x/e1/v1/messages/count_tokens?beta=true"
PATHS = ("/x/e1/v1/messages", "/x/e1/v1/chat/completions", "/x/e1/v1/responses", COUNT)
GOOD = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
GROWTH_BYTES = 96 << 20


class Target:
    """A port, and what is needed to be let in."""

    def __init__(self, host: str, port: int, token: str, pid: int | None) -> None:
        self.host, self.port, self.token = host, port, token
        self.process = psutil.Process(pid) if pid else psutil.Process()

    def request(self, path: str, body: bytes, *extra: bytes, method: bytes = b"POST") -> bytes:
        lines = [
            method + b" " + path.encode() + b" HTTP/1.1",
            b"Host: x",
            b"Authorization: Bearer " + self.token.encode(),
        ]
        lines += [b"Content-Type: application/json", b"Content-Length: %d" % len(body), *extra]
        return b"\r\n".join(lines) + b"\r\n\r\n" + body

    async def exchange(self, parts: list[bytes], *, end: bool = False, wait_s: float = 5.0) -> bytes:
        """Send the parts one after the other and give what comes back until quiet, closed, or the time is up."""
        reader, writer = await asyncio.open_connection(self.host, self.port)
        got = b""
        with contextlib.suppress(ConnectionError):
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0)
            if end:
                writer.write_eof()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    while piece := await reader.read(1 << 16):
                        got += piece
                        if _complete(got):
                            break
        writer.close()
        return got

    async def alive(self) -> None:
        answer = await self.exchange([self.request(COUNT, GOOD)])
        assert STATUS.match(answer) and b" 200 " in answer[:20] and b"input_tokens" in answer, answer[:300]


def _complete(got: bytes) -> bool:
    head, sep, body = got.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
    return bool(sep) and length is not None and len(body) >= int(length.group(1))


def statuses(got: bytes) -> list[int]:
    return [int(s) for s in STATUS.findall(got)]


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=["proxyd", "relay"])
async def target(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tokenizer: Path
) -> AsyncIterator[Target]:
    async with World(tmp_path_factory.mktemp("run"), tokenizer) as world:
        await world.cellctl.open("e1")
        endpoint = world.run.endpoint("proxyd-0")
        assert endpoint is not None
        host, port = address_of(str(endpoint.extra["http"]))
        relay = Relay(Upstreams(lambda _: (host, port)), RelayLimits(quiet_s=0.2, ping_s=0.2))
        await relay.start()
        relay.open("e1")
        if request.param == "relay":
            yield Target("127.0.0.1", relay.port, world.keys.token("e1"), None)
        else:
            yield Target(host, port, world.keys.token("e1"), world.process.pid)
        await relay.stop()


@pytest.mark.asyncio(loop_scope="module")
async def test_split_anywhere_a_request_is_the_same(target: Target) -> None:
    raw, rng = target.request(COUNT, GOOD), random.Random(1)
    for _ in range(25):
        cuts = sorted(rng.sample(range(1, len(raw)), rng.randrange(1, 6)))
        parts = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
        assert statuses(await target.exchange(parts)) == [200]
    assert statuses(await target.exchange([bytes([b]) for b in raw])) == [200]


@pytest.mark.asyncio(loop_scope="module")
async def test_requests_in_one_go_are_answered_in_order(target: Target) -> None:
    raw = (
        target.request(COUNT, GOOD) * 4
        + target.request(COUNT, b"[")
        + target.request(COUNT, GOOD, b"Connection: close")
    )
    got = b""
    reader, writer = await asyncio.open_connection(target.host, target.port)
    writer.write(raw)
    async with asyncio.timeout(10):
        while piece := await reader.read(1 << 16):
            got += piece
    writer.close()
    assert statuses(got) == [200, 200, 200, 200, 400, 200]


@pytest.mark.asyncio(loop_scope="module")
async def test_chunked_bodies_and_continue_are_understood(target: Target) -> None:
    head = target.request(COUNT, b"").partition(b"Content-Length")[0]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(c), c) for c in (GOOD[:7], GOOD[7:])) + b"0\r\n\r\n"
    assert statuses(await target.exchange([head + b"Transfer-Encoding: chunked\r\n\r\n", chunks])) == [200]
    reader, writer = await asyncio.open_connection(target.host, target.port)
    writer.write(target.request(COUNT, GOOD, b"Expect: 100-continue").removesuffix(GOOD))
    async with asyncio.timeout(5):
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100")
        writer.write(GOOD)
        assert b" 200 " in (await reader.readuntil(b"\r\n\r\n"))[:20]
    writer.close()


def broken(target: Target, rng: random.Random) -> bytes:
    """A request with one thing wrong."""
    good = target.request(rng.choice(PATHS), GOOD)
    head, _, body = good.partition(b"\r\n\r\n")
    match rng.randrange(9):
        case 0:  # a body that is no JSON, or no request
            wrong = rng.choice(
                [b"", b"{", b"[]", b"null", b'"x"', b"{}", b'{"messages": 1}', b'{"messages": [1]}', b"\xff\xfe"]
            )
            return target.request(rng.choice(PATHS), wrong)
        case 1:  # deep or odd JSON
            deep = b'{"messages":' + b"[" * 5000 + b"]" * 5000 + b"}"
            return target.request(
                rng.choice(PATHS), rng.choice([deep, b'{"messages":[{"role":"user","content":"\\ud800"}]}x'])
            )
        case 2:  # two framings
            return head + b"\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        case 3:  # a length that is none
            length = rng.choice([b"-1", b"1e3", b"99999999999999999999", b"0x10", b"5, 6"])
            return re.sub(rb"Content-Length: \d+", b"Content-Length: " + length, head) + b"\r\n\r\n" + body
        case 4:  # too many or too long headers
            more = rng.choice([b"\r\n".join(b"X-%d: y" % n for n in range(9000)), b"X: " + b"y" * 200_000])
            return head + b"\r\n" + more + b"\r\n\r\n" + body
        case 5:  # a byte changed in the head
            at = rng.randrange(len(head))
            return head[:at] + bytes([rng.randrange(256)]) + head[at + 1 :] + b"\r\n\r\n" + body
        case 6:  # not HTTP at all
            return bytes(rng.randrange(256) for _ in range(rng.randrange(1, 400))) + b"\r\n\r\n"
        case 7:  # a chunk that lies
            chunked = target.request(rng.choice(PATHS), b"").partition(b"Content-Length")[0]
            return (
                chunked
                + b"Transfer-Encoding: chunked\r\n\r\n"
                + rng.choice([b"zz\r\nxx\r\n", b"5\r\nxx", b"-1\r\n\r\n"])
            )
    return target.request(rng.choice(["/x/e1/../e2/v1/messages", "/x/e1/v1/%2e%2e/x", "/x/e2/v1/messages", "/"]), GOOD)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("seed", range(3))
async def test_what_is_broken_is_refused_and_hurts_nobody(target: Target, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(40):
        raw = broken(target, rng)
        got = await target.exchange([raw], end=True, wait_s=1.0)
        seen = [s for s in statuses(got) if s != 100]
        assert all(s < 500 for s in seen), (raw[:300], got[:300])
    await target.alive()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("path", PATHS[:3])
async def test_malformed_bodies_are_refused_in_the_dialect(target: Target, path: str) -> None:
    for body in (b"", b"{", b"[]", b"{}", b'{"messages": {}, "input": {}}', b"\xff"):
        got = await target.exchange([target.request(path, body)])
        error = json.loads(got.partition(b"\r\n\r\n")[2])["error"]
        assert statuses(got) == [400] and error["type"] == "invalid_request_error" and error["message"], got


@pytest.mark.asyncio(loop_scope="module")
async def test_a_compressed_body_is_refused_in_words(target: Target) -> None:
    got = await target.exchange([target.request(PATHS[0], gzip.compress(GOOD), b"Content-Encoding: gzip")])
    assert statuses(got) == [400] and b"must not be compressed" in got


@pytest.mark.asyncio(loop_scope="module")
async def test_a_body_that_is_too_large_is_refused_and_not_kept(target: Target) -> None:
    before = target.process.memory_info().rss
    huge = 1 << 40
    head = target.request(COUNT, b"").replace(b"Content-Length: 0", b"Content-Length: %d" % huge)
    assert statuses(await target.exchange([head, b"x"])) == [413], "refused by its length, before it is sent"
    chunked = target.request(COUNT, b"").partition(b"Content-Length")[0] + b"Transfer-Encoding: chunked\r\n\r\n"
    piece = b"%x\r\n%b\r\n" % (1 << 20, b" " * (1 << 20))
    assert statuses(await target.exchange([chunked, *[piece] * 80])) in ([413], [])
    await target.alive()
    assert target.process.memory_info().rss - before < GROWTH_BYTES


@pytest.mark.asyncio(loop_scope="module")
async def test_heads_are_bounded_however_they_come(target: Target) -> None:
    head, _, body = target.request(COUNT, GOOD).partition(b"\r\n\r\n")
    many = b"".join(b"\r\nX-%d: y" % n for n in range(250))
    assert statuses(await target.exchange([head + many + b"\r\n\r\n" + body])) == [431]
    long = b"\r\nX: " + b"y" * 100_000
    assert statuses(await target.exchange([head + long + b"\r\n\r\n" + body])) == [431]
    drops = [long[at : at + 4096] for at in range(0, len(long), 4096)]
    got = await target.exchange([head, *drops, b"\r\n\r\n" + body])
    assert statuses(got) in ([431], []), "hung up before all was sent, at the latest"
    await target.alive()


@pytest.mark.asyncio(loop_scope="module")
async def test_clients_that_leave_early_or_do_not_read_cost_nothing(target: Target) -> None:

    def connections() -> int:
        """Those at the target's port: others are the relay's own, to proxyd."""
        return sum(bool(c.laddr) and c.laddr.port == target.port for c in target.process.net_connections())

    before = connections()
    raw = target.request(COUNT, GOOD)
    for cut in range(1, len(raw), 17):
        _, writer = await asyncio.open_connection(target.host, target.port)
        writer.write(raw[:cut])
        writer.transport.abort()
    silent = [await asyncio.open_connection(target.host, target.port) for _ in range(20)]
    for _, writer in silent:
        writer.write(raw * 8)  # and never reads
    await target.alive()
    for _, writer in silent:
        writer.transport.abort()
    async with asyncio.timeout(10):
        while connections() > before + 3:  # noqa: ASYNC110 - it happens in another process
            await asyncio.sleep(0.05)
    await target.alive()
