"""What a harness takes for its model: http://127.0.0.1:PORT/x/{execution}, for the execution's whole life.

A request becomes a call with an id of its own. It is sent to proxyd, again after any break and under the same id,
until a whole answer is there; only then does content go out, but for what proxyd gives out live: that is kept here
with the tokens it was made of (live.py), and given back with the call when it is sent again. So proxyd may die and
move, and the harness sees a slow answer. Counts what the waits cost and what errors were shown. Knows no dialect
beyond how a stream stays open and how it says that it failed. For a sandbox without network an execution may have a
listening socket which is its alone: a Unix socket, or one in the sandbox's own network.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import re
import socket
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from gyre_exec import http1
from gyre_exec.downstream import Downstream, Waiter, asks_for_stream
from gyre_exec.live import SO_FAR, Live, without_wait
from gyre_exec.upstream import Broken, Upstreams

log = logging.getLogger(__name__)
TARGET = re.compile(rb"/x/([A-Za-z0-9][A-Za-z0-9._-]{0,127})/[^#]*")
CLIMBS = re.compile(rb"(^|/)(\.|%2e){1,2}(/|$)", re.IGNORECASE)
RESEND = frozenset({502, 503})  # proxyd is there but can't yet
# how the stream and the plain form of one request differ; within a JSON text the quotes would be escaped
FORM = re.compile(rb'"stream"\s*:\s*(?:true|false)\s*,?\s*|"stream_options"\s*:\s*\{[^{}]*\}\s*,?\s*')
REFUSED_KEPT, TOKENS_KEPT = 16, 16
SENT_KEPT = 256  # answers per execution whose delivery may still turn out to have failed
DROPPED = http1.HOP_BY_HOP | {b"host", b"expect", b"accept-encoding", b"x-gyre-call", SO_FAR}
BACKOFF_FIRST_S, BACKOFF_MAX_S = 0.05, 2.0
MAX_SOCKET_PATH_BYTES = 107  # what the kernel takes
MAX_CONNECTIONS_HERE = 16_384  # at the port that executions without walls share


@dataclass(frozen=True, kw_only=True)
class RelayLimits:
    """Numbers of the relay."""

    quiet_s: float = 2.0  # a stream request that waits longer gets its headers; faster answers keep proxyd's status
    ping_s: float = 10.0  # SSE comments while it waits on
    plain_quiet_s: float = 60.0  # an answer in one piece that takes longer begins with blanks; no status after that
    orphan_s: float = 30.0  # a call whose harness hung up lives so long, for its retry to meet it
    twin_s: float = 0.02  # an identical request beside a live one waits so long to see whether that one hangs up
    calls_per_execution: int = 64


@dataclass
class Account:
    """What one execution did here."""

    execution: str
    calls: int = 0  # answered with success
    errors: int = 0  # shown to the harness: 5xx, or an answer that broke
    resent: int = 0
    waited_s: float = 0.0  # as proxyd says
    open: dict[bytes, list[Call]] = field(default_factory=dict)
    sent: dict[bytes, Sent] = field(default_factory=dict)  # the newest per request, oldest first
    refused: dict[bytes, http1.Message] = field(default_factory=dict)  # refusals that are still to be shown
    taken: set[bytes] = field(default_factory=set)  # tokens that proxyd has accepted
    closed: bool = False
    servers: list[asyncio.AbstractServer] = field(default_factory=list)
    paths: list[Path] = field(default_factory=list)
    connections: set[Downstream] = field(default_factory=set)  # through its own listening sockets
    _broken: int = 0
    _broken_since: float = 0.0
    _broken_s: float = 0.0
    _counted_until: float = 0.0

    def break_begins(self, since: float) -> None:
        """An attempt that began at `since` was in vain."""
        since = max(since, self._counted_until)
        self._broken_since = min(self._broken_since, since) if self._broken else since
        self._broken += 1

    def break_ends(self, now: float) -> None:
        self._broken -= 1
        if self._broken == 0:
            self._broken_s += now - self._broken_since
            self._counted_until = now

    def credit_s(self, now: float) -> float:
        """Waits that the infrastructure caused. Time without proxyd counts once, however many calls hang on it."""
        running = now - self._broken_since if self._broken else 0.0
        return self.waited_s + self._broken_s + running

    def open_calls(self) -> int:
        return sum(len(calls) for calls in self.open.values())


@dataclass(frozen=True, slots=True)
class Sent:
    """An answer that was written to a connection. If its end did not arrive, the same request gets the same call."""

    call: str
    connection: Downstream
    at: float


class Call:
    """One request of the harness and its answer, with everyone who waits for it."""

    def __init__(self, account: Account, key: bytes, request: http1.Message, number: str, live: Live) -> None:
        self.id = number or uuid.uuid4().hex
        self.live = live
        self.account = account
        self.key = key
        self.request = request
        self.began = 0.0
        self.waiters: list[Waiter] = []
        self.answer: http1.Message | None = None
        self.task: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None

    def stop(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
        if self.task is not None:
            self.task.cancel()


class Relay:
    """One per executor process. `open` and `close` bracket an execution."""

    def __init__(self, upstreams: Upstreams, limits: RelayLimits | None = None) -> None:
        self._upstreams = upstreams
        self._limits = limits or RelayLimits()
        self._accounts: dict[str, Account] = {}
        self._server: asyncio.Server | None = None
        self._goodbyes: set[asyncio.Task[None]] = set()
        self._connections: set[Downstream] = set()
        self._now: Callable[[], float] = lambda: 0.0
        self.port = 0

    async def start(self, host: str = "127.0.0.1") -> None:
        loop = asyncio.get_running_loop()
        self._now = loop.time
        self._server = await loop.create_server(
            lambda: Downstream(self.accept, self._connections, MAX_CONNECTIONS_HERE), host, 0, backlog=1024
        )
        self.port = self._server.sockets[0].getsockname()[1]

    def base_url(self, execution: str) -> str:
        return f"http://127.0.0.1:{self.port}/x/{execution}"

    def open(self, execution: str) -> Account:
        account = self._accounts[execution] = Account(execution)
        return account

    async def listen(self, execution: str, path: Path) -> None:
        """A Unix socket (0600) for an open execution until `close`: whoever connects is that execution.

        Both `/x/{execution}/v1/...` and plain `/v1/...` are understood: a harness that is given a socket may drop the
        path of its base URL. Raises OSError, ValueError for a path that is too long for a socket.
        """
        if len(str(path).encode()) > MAX_SOCKET_PATH_BYTES:
            raise ValueError(f"a socket's path has at most {MAX_SOCKET_PATH_BYTES} bytes: {path}")
        account = self._accounts[execution]
        account.servers.append(
            await asyncio.get_running_loop().create_unix_server(self._only(execution), str(path), backlog=128)
        )
        account.paths.append(path)
        path.chmod(0o600)

    async def adopt(self, execution: str, listener: socket.socket) -> None:
        """The same for a socket that listens already: one that was made in the network of the execution's sandbox."""
        account = self._accounts.get(execution)
        if account is None:  # it ended meanwhile
            listener.close()
            return
        server = await asyncio.get_running_loop().create_server(self._only(execution), sock=listener)
        if account.closed:
            server.close()
        else:
            account.servers.append(server)

    def _only(self, execution: str) -> Callable[[], Downstream]:
        """Connections on which every request is this execution's."""
        prefix = b"/x/" + execution.encode()

        def accept(waiter: Waiter, request: http1.Message) -> None:
            if not request.target.startswith(prefix + b"/"):
                request = dataclasses.replace(request, target=prefix + request.target)
            self.accept(waiter, request)

        connections = self._accounts[execution].connections
        return lambda: Downstream(accept, connections)

    def clock(self, execution: str) -> tuple[float, bool]:
        """(seconds to credit so far, whether a call is open)."""
        account = self._accounts[execution]
        return account.credit_s(self._now()), bool(account.open)

    def close(self, execution: str) -> tuple[Account, float]:
        """The execution ended: its calls are dropped. Gives its figures."""
        account = self._accounts.pop(execution)
        waited_s = account.credit_s(self._now())
        account.closed = True
        for server in account.servers:
            server.close()
        for path in account.paths:
            path.unlink(missing_ok=True)
        for connection in list(account.connections):
            connection.abort()
        for calls in list(account.open.values()):
            for call in calls:
                call.stop()
                for waiter in call.waiters:
                    waiter.abort()
        account.open.clear()
        account.sent.clear()
        return account, waited_s

    def proxy_moved(self, shard: int) -> None:
        """A shard of proxyd has a new life: open calls of its executions are sent again now."""
        self._upstreams.moved(shard)

    async def stop(self) -> None:
        for execution in list(self._accounts):
            self.close(execution)
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.abort()
        for task in list(self._goodbyes):
            task.cancel()
        self._upstreams.close()

    # ---- a request comes in ---------------------------------------------------------------------------------------

    def accept(self, waiter: Waiter, request: http1.Message) -> None:
        """From a connection: answer now, attach to a call, or begin one."""
        found = TARGET.fullmatch(request.target)
        account = self._accounts.get(found.group(1).decode()) if found else None
        if account is None or CLIMBS.search(request.target.partition(b"?")[0]):
            waiter.refuse(404, "no execution of this name runs here")
            return
        key = _key(request)
        twins = account.open.get(key)
        refusal = account.refused.pop(key, None)
        if refusal is not None:
            waiter.answer(refusal)
        elif twins and not self._attach(twins, waiter, request):
            self._later(account, waiter, request, key)
        elif not twins:
            self._begin(account, waiter, request, key, self._undelivered(account, key, waiter))

    def _attach(self, twins: list[Call], waiter: Waiter, request: http1.Message) -> bool:
        """An identical retry joins its call: one nobody waits for now, or any if the client says it retries.

        A retry that wants the other form (a stream, or one piece) asks proxyd again under the same id.
        """
        says_retry = request.header(b"x-stainless-retry-count") not in (b"", b"0")
        for call in twins:
            if not says_retry and any(w.alive for w in call.waiters):
                continue
            if _same_form(call.request, request):
                self._join(call, waiter)
            elif any(twin.id == call.id and _same_form(twin.request, request) for twin in twins):
                continue  # somebody listens to it in this form
            else:
                self._begin(call.account, waiter, request, call.key, call.id, call.live)
            return True
        return False

    def _undelivered(self, account: Account, key: bytes, waiter: Waiter) -> str:
        """The call whose answer to this very request went out but did not arrive; empty if there is none.

        An answer that arrived is another matter: the same request then wishes for a fresh sample.
        """
        sent = account.sent.pop(key, None)
        if sent is None or self._now() - sent.at > self._limits.orphan_s:
            return ""
        return "" if sent.connection is waiter.connection or sent.connection.has_all else sent.call

    def _later(self, account: Account, waiter: Waiter, request: http1.Message, key: bytes) -> None:
        """The first one still listens: two siblings with one body, or a retry whose hang-up is still to be seen."""

        def again() -> None:
            if account.closed or not waiter.alive:
                waiter.abort()
            elif not self._attach(account.open.get(key, []), waiter, request):
                self._begin(account, waiter, request, key, self._undelivered(account, key, waiter))

        asyncio.get_running_loop().call_later(self._limits.twin_s, again)

    def _join(self, call: Call, waiter: Waiter) -> None:
        call.waiters = [w for w in call.waiters if w.alive]
        call.waiters.append(waiter)
        waiter.on_gone = lambda: self._hung_up(call)
        for events in call.live.pieces:
            waiter.piece(events)
        if call.answer is not None:
            self._deliver(call)

    def _begin(
        self,
        account: Account,
        waiter: Waiter,
        request: http1.Message,
        key: bytes,
        number: str,
        live: Live | None = None,
    ) -> None:
        """A call, new or known under `number`; `live`: what was told of it."""
        if account.open_calls() >= self._limits.calls_per_execution:
            waiter.refuse(429, f"more than {self._limits.calls_per_execution} calls at once")
            return
        call = Call(account, key, request, number, live or Live())
        call.began = self._now()
        account.open.setdefault(key, []).append(call)
        loop = asyncio.get_running_loop()
        self._join(call, waiter)
        call.timer = loop.call_later(self._limits.quiet_s, self._ping, call)
        call.task = loop.create_task(self._carry(call))
        call.task.add_done_callback(lambda task: self._carried(call, task))

    def _ping(self, call: Call) -> None:
        plain = self._now() - call.began >= self._limits.plain_quiet_s
        for waiter in call.waiters:
            waiter.keep_open(plain=plain)
        call.timer = asyncio.get_running_loop().call_later(self._limits.ping_s, self._ping, call)

    # ---- a call is carried ----------------------------------------------------------------------------------------

    async def _carry(self, call: Call) -> None:
        """Until proxyd has answered in full. Ends by the answer or by cancellation."""
        account = call.account
        delay = BACKOFF_FIRST_S
        while True:
            began = self._now()
            answer, why = await self._attempt(call)
            if answer is not None:
                break
            if delay == BACKOFF_FIRST_S:
                log.info("call %s of %s is sent again until it is answered: %s", call.id, account.execution, why)
            self._upstreams.of(account.execution).look_again()
            account.resent += 1
            account.break_begins(began)
            try:
                await asyncio.sleep(delay)
            finally:
                account.break_ends(self._now())
            delay = min(delay * 2, BACKOFF_MAX_S)
        answer, waited_s = without_wait(answer, _waited(answer))
        account.waited_s += min(waited_s, self._now() - began)
        call.answer = answer
        if call.request.method == b"POST" and answer.status < 400:
            account.calls += 1
        self._deliver(call)

    def _carried(self, call: Call, task: asyncio.Task[None]) -> None:
        """A bug of ours must not leave a harness waiting for ever."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("call %s of %s broke", call.id, call.account.execution, exc_info=error)
            call.answer = http1.Message((), b"the relay failed", True, status=500)
            self._deliver(call)

    async def _attempt(self, call: Call) -> tuple[http1.Message | None, str]:
        end: list[bytes] = []

        def chunk(data: bytes) -> None:
            events = call.live.take(data)
            if events is None:
                end.append(data)
                return
            for waiter in call.waiters:
                waiter.piece(events)

        is_head = call.request.method == b"HEAD"
        try:
            upstream = self._upstreams.of(call.account.execution)
            answer = await upstream.exchange(_forwarded(call), is_head=is_head, on_chunk=chunk)
        except Broken as error:
            return None, str(error)
        if answer.status in RESEND or self._is_strange(call, answer):
            return None, f"proxyd answered {answer.status}"
        return (dataclasses.replace(answer, body=b"".join(end)) if end else answer), ""

    def _is_strange(self, call: Call, answer: http1.Message) -> bool:
        """Whether a 401 is another run's: a proxyd that was killed leaves its port to whoever listens next, which knows
        our executions' tokens not. Ours has taken this token before.
        """
        token = call.request.header(b"authorization") or call.request.header(b"x-api-key")
        if answer.status < 400 and len(call.account.taken) < TOKENS_KEPT:
            call.account.taken.add(token)
        return answer.status == 401 and token in call.account.taken

    def _deliver(self, call: Call) -> None:
        """To all who wait. With nobody there the answer stays for the retry."""
        assert call.answer is not None
        if call.timer is not None:
            call.timer.cancel()
        alive = [w for w in call.waiters if w.alive]
        for waiter in alive:
            waiter.on_gone = None
            if waiter.begun and 400 <= call.answer.status < 500 and not call.live.pieces:
                self._refuse_again(call, waiter)
                continue
            if not waiter.answer(call.answer):
                call.account.errors += 1
            self._sent(call, waiter.connection)
        if alive:
            self._drop(call)

    def _refuse_again(self, call: Call, waiter: Waiter) -> None:
        """The status is gone out as 200 while the call waited, and only as a status is a refusal understood (a context
        overflow makes a harness compact, an error event makes it give up). So cut: every harness then asks again, and
        that is refused at once.
        """
        assert call.answer is not None
        refused = call.account.refused
        refused[call.key] = call.answer
        if len(refused) > REFUSED_KEPT:
            del refused[next(iter(refused))]
        waiter.abort()

    def _sent(self, call: Call, connection: Downstream) -> None:
        sent = call.account.sent
        sent.pop(call.key, None)
        sent[call.key] = Sent(call.id, connection, self._now())
        if len(sent) > SENT_KEPT:
            del sent[next(iter(sent))]

    def _hung_up(self, call: Call) -> None:
        """The harness closed its connection: a grace time, for its retry to meet the same call."""
        if not call.account.closed:
            asyncio.get_running_loop().call_later(self._limits.orphan_s, self._drop_orphan, call)

    def _drop_orphan(self, call: Call) -> None:
        if any(w.alive for w in call.waiters) or call.account.closed:
            return
        unanswered = call.answer is None
        call.stop()
        self._drop(call)
        if unanswered:
            task = asyncio.get_running_loop().create_task(self._give_up(call))
            self._goodbyes.add(task)
            task.add_done_callback(self._goodbyes.discard)

    async def _give_up(self, call: Call) -> None:
        """Tell proxyd that nobody will come for this call, so that it need not wait for us in turn."""
        head = [(k, v) for k, v in call.request.headers if k in (b"authorization", b"x-api-key")]
        target = f"/x/{call.account.execution}/calls/{call.id}".encode()
        with contextlib.suppress(Broken):
            await self._upstreams.of(call.account.execution).exchange(
                http1.request(b"DELETE", target, [(b"host", b"proxyd"), *head], b""), is_head=False
            )

    def _drop(self, call: Call) -> None:
        calls = call.account.open.get(call.key, [])
        if call in calls:
            calls.remove(call)
        if not calls:
            call.account.open.pop(call.key, None)


def _same_form(one: http1.Message, other: http1.Message) -> bool:
    return asks_for_stream(one) == asks_for_stream(other)


def _key(request: http1.Message) -> bytes:
    """Identical requests have one key, whether they ask for a stream or for one piece.

    The token is part of it: nobody attaches to a call without knowing it.
    """
    body = FORM.sub(b"", request.body).rstrip(b" \r\n\t}").rstrip(b",")
    digest = xxhash.xxh3_128(body)
    for part in (request.method, request.target, request.header(b"authorization"), request.header(b"x-api-key")):
        digest.update(b"%d:%s" % (len(part), part))
    return digest.digest()


def _forwarded(call: Call) -> bytes:
    request = call.request
    headers = [(key, value) for key, value in request.headers if key not in DROPPED]
    headers += [(b"host", b"proxyd"), (b"x-gyre-call", call.id.encode())]
    told = call.live.so_far()
    if told:
        headers.append((SO_FAR, b"%d" % len(told)))
    return http1.request(request.method, request.target, headers, request.body + told)


def _waited(answer: http1.Message) -> float:
    try:
        waited = float(answer.header(b"x-gyre-waited") or 0.0)
    except ValueError:
        return 0.0
    return waited if 0.0 <= waited < 1e9 else 0.0
