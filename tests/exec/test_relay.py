"""The relay over real sockets, with a scripted proxyd behind it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from gyre_exec.relay import Account, Relay, RelayLimits
from gyre_exec.upstream import Address, Upstreams

SSE = {"Content-Type": "text/event-stream"}
Script = Callable[[web.Request], Awaitable[web.StreamResponse]]
BODY: dict[str, Any] = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "hi"}]}


class World:
    """A relay, one open execution `e`, and a proxyd that can be killed and moved."""

    def __init__(self) -> None:
        self.address: Address | None = None
        self.script: Script = plain
        self.ids: list[str] = []
        self.headers: list[Any] = []
        self.cut = 0
        self.relay = Relay(
            Upstreams(lambda _: self.address), RelayLimits(quiet_s=0.3, ping_s=0.1, orphan_s=0.5, twin_s=0.02)
        )
        self.session: aiohttp.ClientSession
        self._runner: web.AppRunner | None = None

    @property
    def account(self) -> Account:
        return self.relay._accounts["e"]

    async def serve(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/{tail:.*}", self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=0.01, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.address = ("127.0.0.1", site._server.sockets[0].getsockname()[1])  # type: ignore[union-attr]

    async def die(self) -> None:
        assert self._runner is not None
        for connection in list(self._runner.server.connections if self._runner.server else []):
            if connection.transport is not None:
                connection.transport.abort()
        await self._runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        await request.read()
        self.ids.append(request.headers["X-Gyre-Call"])
        self.headers.append(request.headers.copy())
        try:
            return await self.script(request)
        except asyncio.CancelledError:
            self.cut += 1
            raise

    def post(self, body: Any = BODY, path: str = "v1/chat/completions", **options: Any) -> Any:
        return self.session.post(f"{self.relay.base_url('e')}/{path}", json=body, **options)


@contextlib.asynccontextmanager
async def world() -> AsyncIterator[World]:
    made = World()
    await made.relay.start()
    await made.serve()
    made.relay.open("e")
    made.session = aiohttp.ClientSession(headers={"Authorization": "Bearer t"})
    try:
        yield made
    finally:
        await made.session.close()
        await made.relay.stop()
        await made.die()


async def plain(request: web.Request) -> web.StreamResponse:
    return web.json_response(
        {"path": request.path_qs, "method": request.method}, headers={"X-Gyre-Waited": "0", "X-A": "b"}
    )


def after(seconds: float, text: str = "data: 1\n\ndata: [DONE]\n\n", **headers: str) -> Script:
    async def script(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(seconds)
        return web.Response(text=text, headers={**SSE, **headers})

    return script


async def test_any_method_and_path_goes_through_with_the_harness_headers() -> None:
    async with world() as w:
        for method, path in (
            ("GET", "v1/models?x=1"),
            ("POST", "v1/messages?beta=true"),
            ("DELETE", "a/b"),
            ("HEAD", "api"),
        ):
            async with w.session.request(method, f"{w.relay.base_url('e')}/{path}", headers={"X-Own": "1"}) as answer:
                assert (answer.status, answer.headers["X-A"]) == (200, "b") and "X-Gyre-Waited" not in answer.headers
                if method != "HEAD":
                    assert await answer.json() == {"path": f"/x/e/{path}", "method": method}
        assert len(set(w.ids)) == 4
        assert (w.headers[0]["Authorization"], w.headers[0]["X-Own"]) == ("Bearer t", "1")
        assert "Accept-Encoding" not in w.headers[0]
        assert (w.account.calls, w.account.errors, w.account.open) == (1, 0, {})


@pytest.mark.parametrize("path", ["/", "/x/e", "/x/other/v1", "/x/e/../other/v1", "/x/e/%2e%2E/other/v1", "/x/e/."])
async def test_only_the_own_execution_can_be_reached(path: str) -> None:
    async with world() as w:
        reader, writer = await asyncio.open_connection("127.0.0.1", w.relay.port)
        writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
        assert (await reader.read()).startswith(b"HTTP/1.1 404 ")
        writer.close()
        assert w.ids == []


async def test_a_fast_answer_keeps_its_status_and_a_slow_stream_gets_headers_and_comments_first() -> None:
    async with world() as w:
        w.script = after(0.0)
        async with w.post() as answer:
            assert answer.headers.get("Content-Length") and await answer.text() == "data: 1\n\ndata: [DONE]\n\n"
        w.script = after(0.8)
        at = time.monotonic()
        async with w.post() as answer:
            assert answer.status == 200 and time.monotonic() - at < 0.7
            text = await answer.text()
        assert text.startswith(": waiting\n\n" * 4) and text.endswith("\n\ndata: 1\n\ndata: [DONE]\n\n")
        async with w.post({**BODY, "stream": False}) as answer:
            assert (await answer.text()).startswith("data: 1")
        assert (w.account.calls, w.account.errors) == (3, 0)


@pytest.mark.parametrize(("path", "named"), [("v1/messages", True), ("v1/chat/completions", False)])
async def test_an_error_after_early_headers_is_an_event_and_a_cut(path: str, named: bool) -> None:
    async def fails(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(0.5)
        return web.json_response({"error": {"message": "boom"}}, status=500)

    async with world() as w:
        w.script = fails
        async with w.post(path=path) as answer:
            with pytest.raises(aiohttp.ClientPayloadError):
                while line := await answer.content.readline():
                    last = line
                    if line.startswith(b"event:"):
                        assert named and line == b"event: error\n"
                    if line.startswith(b"data:"):
                        assert json.loads(line[5:]) == {"error": {"message": "boom"}}
                        seen = True
                await answer.content.read()
        assert seen and last and w.account.errors == 1


@pytest.mark.parametrize("status", [400, 401, 404, 429, 500, 529])
async def test_an_error_of_proxyd_is_shown_as_it_is_and_only_5xx_count(status: int) -> None:
    async def fails(request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {}}, status=status)

    async with world() as w:
        w.script = fails
        async with w.post() as answer:
            assert answer.status == status
        assert (w.account.errors, w.account.calls) == (int(status >= 500), 0)


@pytest.mark.parametrize("again", [{}, {"stream": False}])
async def test_a_refusal_after_early_headers_is_a_cut_and_at_once_a_status_when_it_is_asked_again(again: Any) -> None:
    """A context overflow must reach the harness as the 400 that it understands, however long the answer took."""
    body = {"type": "error", "error": {"type": "invalid_request_error", "message": "prompt is too long: 9 tokens > 8"}}

    async def refuses(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(0.5)
        return web.json_response(body, status=400)

    async with world() as w:
        w.script = refuses
        async with w.post(path="v1/messages") as answer:
            assert answer.status == 200
            with pytest.raises(aiohttp.ClientPayloadError):
                await answer.read()
        async with w.post({**BODY, **again}, path="v1/messages") as answer:
            assert (answer.status, await answer.json()) == (400, body)
        assert (len(w.ids), w.account.errors, w.account.refused, w.account.open) == (1, 0, {}, {})
        async with w.post(path="v1/messages") as answer:
            assert answer.status == 200, "a later wish is another call"
        assert len(w.ids) == 2


async def test_another_runs_proxyd_at_the_old_port_is_no_answer() -> None:
    """It refuses a token that ours has taken before; a token that was never taken is refused as it is."""
    refused = 0

    async def strange(request: web.Request) -> web.StreamResponse:
        nonlocal refused
        refused += 1
        if refused == 4:
            w.script = after(0.0)
        return web.json_response({"error": {"message": "Incorrect API key provided."}}, status=401)

    async with world() as w:
        w.script = strange
        async with w.post() as answer:
            assert answer.status == 401, "never taken"
        w.script = after(0.0)
        async with w.post() as answer:
            assert answer.status == 200
        w.script = strange
        async with w.post({**BODY, "n": 2}) as answer:
            assert answer.status == 200 and "data: 1" in await answer.text()
        assert refused == 4 and w.account.errors == 0
        w.script, refused = strange, 0
        async with w.post(headers={"Authorization": "Bearer guessed"}) as answer:
            assert answer.status == 401


async def test_a_call_is_sent_again_under_its_id_until_it_is_answered_whole() -> None:
    turn = 0

    async def moody(request: web.Request) -> web.StreamResponse:
        nonlocal turn
        turn += 1
        if turn in (1, 2):
            return web.Response(status=501 + turn)
        if turn == 3:
            half = web.StreamResponse(headers=SSE)
            await half.prepare(request)
            await half.write(b"data: ha")
            assert request.transport is not None
            request.transport.abort()
            return half
        return web.Response(text="data: whole\n\n", headers={**SSE, "X-Gyre-Waited": "7"})

    async with world() as w:
        w.script = moody
        async with w.post() as answer:
            assert answer.status == 200 and (await answer.text()).replace(": waiting\n\n", "") == "data: whole\n\n"
        assert len(w.ids) == 4 and len(set(w.ids)) == 1
        assert w.account.resent == 3 and w.account.errors == 0
        credit = w.account.credit_s(asyncio.get_running_loop().time())
        assert 0.3 < credit < 7.0  # the back-off, not the 7 s that the answer claims and can't have had


async def test_time_without_proxyd_is_credited_once_for_calls_side_by_side() -> None:
    async with world() as w:
        await w.die()
        w.script = after(0.0)
        calls = [asyncio.create_task(_text(w.post({**BODY, "n": n}))) for n in range(5)]
        await asyncio.sleep(0.8)
        assert w.relay.clock("e")[1] is True
        await w.serve()
        await asyncio.gather(*calls)
        waited_s, call_open = w.relay.clock("e")
        assert 0.7 < waited_s < 3.0 and not call_open


async def _text(request: Any) -> str:
    async with request as answer:
        return str(await answer.text())


async def test_calls_that_hang_on_an_old_proxyd_are_sent_again_when_it_has_moved() -> None:
    async with world() as w:
        w.script = after(60.0)
        call = asyncio.create_task(_text(w.post()))
        await asyncio.sleep(0.1)
        w.script = after(0.0, "data: new\n\n")
        w.relay.proxy_moved(0)
        assert (await call).endswith("data: new\n\n") and len(set(w.ids)) == 1 and len(w.ids) == 2


async def test_a_retry_after_a_hang_up_meets_the_same_call_in_flight_or_finished() -> None:
    async with world() as w:
        w.script = after(0.4)
        for wait in (0.1, 0.45):  # before and after the answer is there
            w.ids.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(_text(w.post()), 0.1)
            await asyncio.sleep(wait)
            assert "[DONE]" in await _text(w.post())
            assert len(w.ids) == 1
        await _text(w.post())  # delivered: the same words again are a wish for a fresh answer
        assert len(w.ids) == 2


async def test_identical_requests_on_live_connections_are_two_calls_unless_the_client_says_retry() -> None:
    async with world() as w:
        w.script = after(0.3)
        await asyncio.gather(_text(w.post()), _text(w.post()))
        assert len(set(w.ids)) == 2
        w.ids.clear()
        first = asyncio.create_task(_text(w.post()))
        await asyncio.sleep(0.1)
        second = _text(w.post(headers={"X-Stainless-Retry-Count": "1"}))
        assert "[DONE]" in await second and "[DONE]" in await first and len(w.ids) == 1
        w.ids.clear()
        other = w.post(headers={"Authorization": "Bearer someone else"})
        await asyncio.gather(_text(w.post()), _text(other))
        assert len(set(w.ids)) == 2


async def test_a_call_whose_harness_is_gone_is_dropped_after_the_grace_time() -> None:
    async with world() as w:
        w.script = after(60.0)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(_text(w.post()), 0.1)
        assert w.account.open_calls() == 1
        await asyncio.sleep(0.7)
        assert w.account.open_calls() == 0 and w.cut == 1


async def test_closing_an_execution_ends_its_calls_and_its_address() -> None:
    async with world() as w:
        w.script = after(60.0)
        call = asyncio.create_task(_text(w.post()))
        await asyncio.sleep(0.1)
        account, _ = w.relay.close("e")
        with pytest.raises(aiohttp.ClientError):
            await call
        await asyncio.sleep(0.05)
        assert account.errors == 0 and w.cut == 1
        async with w.post() as answer:
            assert answer.status == 404


async def test_too_many_calls_at_once_are_refused() -> None:
    async with world() as w:
        w.relay._limits = RelayLimits(calls_per_execution=2)
        w.script = after(0.3)
        statuses = await asyncio.gather(*(_status(w.post({**BODY, "n": n})) for n in range(3)))
        assert sorted(statuses) == [200, 200, 429]


async def _status(request: Any) -> int:
    async with request as answer:
        await answer.read()
        return int(answer.status)


async def test_raw_http_pipelining_continue_chunked_and_garbage() -> None:
    async with world() as w:
        reader, writer = await asyncio.open_connection("127.0.0.1", w.relay.port)
        writer.write(b"GET /x/e/1 HTTP/1.1\r\nhost: a\r\n\r\nGET /x/e/2 HTTP/1.1\r\nhost: a\r\n\r\n")
        writer.write(b"POST /x/e/3 HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ntransfer-encoding: chunked\r\n\r\n")
        text = await asyncio.wait_for(reader.readuntil(b"100 Continue\r\n\r\n"), 5)
        assert text.index(b"/x/e/1") < text.index(b"/x/e/2")
        writer.write(b"2\r\n{}\r\n0\r\n\r\n")
        await asyncio.wait_for(reader.readuntil(b'"/x/e/3", "method": "POST"}'), 5)
        writer.write(b"nonsense\r\n\r\n")
        assert b"HTTP/1.1 400 " in await asyncio.wait_for(reader.read(), 5)
        writer.close()


async def test_a_unix_socket_is_its_executions_alone_with_and_without_the_path(tmp_path: Path) -> None:
    async with world() as w:
        path = tmp_path / "relay.sock"
        w.relay.open("f")
        await w.relay.listen("e", path)
        assert path.stat().st_mode & 0o777 == 0o600
        async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as session:
            for target in ("/x/e/v1/messages", "/v1/messages"):
                async with session.post(f"http://relay{target}?beta=true", json=BODY) as answer:
                    assert (await answer.json())["path"] == "/x/e/v1/messages?beta=true"
            async with session.post("http://relay/x/f/v1/messages", json=BODY) as answer:
                assert (await answer.json())["path"] == "/x/e/x/f/v1/messages", "it reached another execution"
        w.relay.close("e")
        assert not path.exists()
        w.relay.open("e")
        with pytest.raises(ValueError, match="at most 107 bytes"):
            await w.relay.listen("e", tmp_path / ("x" * 120))


async def test_a_retry_in_the_other_form_is_the_same_call_in_flight() -> None:
    async with world() as w:
        w.script = after(0.6)
        first = asyncio.create_task(_text(w.post({**BODY, "stream_options": {"include_usage": True}})))
        await asyncio.sleep(0.1)
        first.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await first
        plain_body = {k: v for k, v in BODY.items() if k != "stream"}
        assert await _status(w.post(plain_body)) == 200
        assert len(w.ids) == 2 and len(set(w.ids)) == 1


async def raw_post(w: World, body: bytes, *, receive_bytes: int = 0) -> tuple[socket.socket, bytes]:
    """A request by hand on a socket with a small receive buffer."""
    loop = asyncio.get_running_loop()
    sock = socket.socket()
    if receive_bytes:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    sock.setblocking(False)
    await loop.sock_connect(sock, ("127.0.0.1", w.relay.port))
    head = b"POST /x/e/v1/messages HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer t\r\nContent-Length: %d\r\n\r\n" % len(
        body
    )
    await loop.sock_sendall(sock, head + body)
    return sock, await loop.sock_recv(sock, 100)


async def test_an_answer_whose_end_did_not_arrive_is_the_same_call_again_and_a_delivered_one_is_not() -> None:
    async with world() as w:
        w.script = after(0.0, "data: " + "x" * 4_000_000 + "\n\n")
        body = json.dumps(BODY).encode()
        reader, _ = await raw_post(w, body, receive_bytes=4096)
        reader.close()  # with most of the answer unread
        await asyncio.sleep(0.1)
        sock, _ = await raw_post(w, body, receive_bytes=4096)
        assert w.ids[0] == w.ids[1], "what was not delivered must not be sampled again"
        sock.close()
        w.script = after(0.0)
        await asyncio.sleep(0.1)
        async with w.post(path="v1/messages") as answer:
            await answer.read()
        async with w.post(path="v1/messages") as answer:
            await answer.read()
        assert w.ids[2] == w.ids[1] and w.ids[3] != w.ids[2], "after delivery the same request wishes for a sibling"


async def test_a_long_wait_for_one_piece_begins_with_blanks() -> None:
    async with world() as w:
        w.relay._limits = RelayLimits(quiet_s=0.1, ping_s=0.1, plain_quiet_s=0.25)
        w.script = after(0.8, '{"a": 1}', **{"Content-Type": "application/json"})
        async with w.post({"messages": []}) as answer:
            text = await answer.text()
        assert text.startswith("\n") and json.loads(text) == {"a": 1}
