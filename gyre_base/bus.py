"""ZeroMQ with CURVE between daemons: a ROUTER that binds, DEALERs that connect, questions with answers.

A server knows its peers by the routing id `kind:name:life`. A client reads the server's address from the run
directory each
time it has to reconnect, so that a daemon may die and come back elsewhere. Nothing here decides anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import zmq
import zmq.asyncio
from zmq.auth import Authenticator

from gyre_base import wire
from gyre_base.allocation import own_address
from gyre_base.keys import Keys
from gyre_base.messages import DumpStacks, Stacks
from gyre_base.rundir import EndpointFile, RunDir
from gyre_base.stacks import stacks

log = logging.getLogger(__name__)
QUEUE_LIMIT = 20_000  # messages per peer held by ZeroMQ; beyond that a sender is told instead of memory growing


class NoAnswer(TimeoutError):
    """The daemon does not answer (exit code 3)."""


class CannotListen(RuntimeError):
    """The configured address can't be bound; says what to change (exit code 2)."""


def cannot_listen(bind: str, why: str | None) -> CannotListen:
    """One sentence for every socket that a daemon opens on `cluster.bind`."""
    return CannotListen(f"cannot listen on {bind}: {why}; set cluster.bind to an address of this machine")


@dataclass(frozen=True)
class Received:
    """One message as it came in. `peer` is the routing id; `correlation` is to be given back with the answer."""

    peer: bytes
    message: Any
    correlation: int


class _OnlyOurKey:
    """CURVE callback of the authenticator: exactly the run's client key is let in."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._public


class _Doorkeeper(Authenticator):
    """Asks the callback for each connection, in the running loop.

    pyzmq's own for asyncio waits on a poller, which lets go of its file descriptor only some turns of the loop after
    `stop`: by then another server may have got the same number, and would be deaf.
    """

    _task: asyncio.Task[None] | None = None

    def start(self) -> None:
        super().start()
        self._door: Any = zmq.asyncio.Socket.from_socket(self.zap_socket)
        self._task = asyncio.create_task(self._answer())

    async def _answer(self) -> None:
        while True:
            await self.handle_zap_message(await self._door.recv_multipart())

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._door.close()
        super().stop()


class Server:
    """Binds a free port, publishes its endpoint, yields what arrives."""

    def __init__(self, run: RunDir, keys: Keys, *, kind: str, name: str, life: int, bind: str) -> None:
        self._run, self._keys, self._kind, self._name, self._life = run, keys, kind, name, life
        self._context = zmq.asyncio.Context()
        self._authenticator = _Doorkeeper(self._context)
        self._socket = self._context.socket(zmq.ROUTER)
        self._bind = bind
        self.address = ""

    def start(self, extra: dict[str, Any] | None = None) -> None:
        """Bind and publish. Call inside the running loop."""
        self._authenticator.start()
        self._authenticator.configure_curve_callback(
            "*", _OnlyOurKey(zmq.utils.z85.encode(zmq.utils.z85.decode(self._keys.client_public)))
        )
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.SNDHWM, QUEUE_LIMIT)
        self._socket.setsockopt(zmq.RCVHWM, QUEUE_LIMIT)
        self._socket.curve_server = True
        self._socket.curve_secretkey = self._keys.server_secret
        self._socket.curve_publickey = self._keys.server_public
        try:
            host = own_address(self._bind)
            port = self._socket.bind_to_random_port(f"tcp://{host}")
        except (zmq.ZMQError, OSError) as error:
            raise cannot_listen(self._bind, error.strerror or str(error)) from None
        self.address = f"tcp://{host}:{port}"
        self._run.publish(EndpointFile(self._name, self._kind, self.address, self._life, os.getpid(), extra or {}))

    async def __aiter__(self) -> AsyncIterator[Received]:
        while True:
            peer, *frames = await self._socket.recv_multipart()
            try:
                message, correlation = wire.decode(frames)
            except wire.WireError as error:
                log.warning("dropped a frame from %r: %s", peer, error)
                continue
            yield Received(peer, message, correlation)

    async def send(self, peer: bytes, message: Any, correlation: int = 0) -> None:
        """To one peer. A peer that is gone is no error here: its heartbeat is missed elsewhere."""
        await self._socket.send_multipart([peer, *wire.encode(message, correlation)])

    def close(self, *, retract: bool = True) -> None:
        self._socket.close()
        self._authenticator.stop()
        self._context.term()
        published = self._run.endpoint(self._name)
        if retract and published is not None and published.life == self._life:  # a newer life's word stays
            self._run.retract(self._name)


class Client:
    """A DEALER to one daemon. `ask` waits for the answer and repeats the question; `send` does not wait."""

    def __init__(self, run: RunDir, keys: Keys, server: str, *, identity: str = "") -> None:
        self._run, self._keys, self.server = run, keys, server
        self._identity = identity.encode()
        self._context = zmq.asyncio.Context.instance()
        self._socket: zmq.asyncio.Socket | None = None
        self._connected_to = ""
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._reader: asyncio.Task[None] | None = None
        self.inbox: asyncio.Queue[Any] = asyncio.Queue()  # what the server says unasked

    def _open(self) -> bool:
        """Connect, or reconnect when the endpoint file names another address. False while there is none."""
        endpoint = self._run.endpoint(self.server)
        if endpoint is None:
            return self._socket is not None
        if endpoint.address == self._connected_to:
            return True
        self._drop_socket()
        socket = self._context.socket(zmq.DEALER)
        if self._identity:
            socket.setsockopt(zmq.ROUTING_ID, self._identity)
        socket.setsockopt(zmq.LINGER, 500)
        socket.setsockopt(zmq.SNDHWM, QUEUE_LIMIT)
        socket.setsockopt(zmq.RCVHWM, QUEUE_LIMIT)
        socket.curve_publickey = self._keys.client_public
        socket.curve_secretkey = self._keys.client_secret
        socket.curve_serverkey = self._keys.server_public
        socket.connect(endpoint.address)
        self._socket, self._connected_to = socket, endpoint.address
        self._reader = asyncio.get_running_loop().create_task(self._read(socket))
        return True

    def _drop_socket(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
        if self._socket is not None:
            self._socket.close()
        self._socket, self._connected_to = None, ""

    async def _read(self, socket: zmq.asyncio.Socket) -> None:
        with contextlib.suppress(asyncio.CancelledError, zmq.ZMQError):
            while True:
                try:
                    message, correlation = wire.decode(await socket.recv_multipart())
                except wire.WireError as error:
                    log.warning("dropped a frame from %s: %s", self.server, error)
                    continue
                future = self._waiting.pop(correlation, None)
                if future is not None and not future.done():
                    future.set_result(message)
                elif isinstance(message, DumpStacks):  # here, so that a daemon answers whatever it is busy with
                    await socket.send_multipart(wire.encode(Stacks(text=stacks())))
                elif correlation == 0:
                    self.inbox.put_nowait(message)

    async def send(self, message: Any) -> bool:
        """Hand over to ZeroMQ. False if the daemon has no endpoint yet."""
        if not self._open() or self._socket is None:
            return False
        await self._socket.send_multipart(wire.encode(message))
        return True

    async def ask(self, message: Any, *, timeout_s: float = 10.0, again_every_s: float = 2.0) -> Any:
        """The answer to `message`, which is repeated until it comes. Raises NoAnswer after `timeout_s`."""
        loop = asyncio.get_running_loop()
        number = next(self._numbers)
        deadline = loop.time() + timeout_s
        future: asyncio.Future[Any] = loop.create_future()
        self._waiting[number] = future
        try:
            while (left := deadline - loop.time()) > 0:
                if self._open() and self._socket is not None:
                    await self._socket.send_multipart(wire.encode(message, number))
                    wait = min(left, again_every_s)
                else:
                    wait = min(left, 0.1)
                done, _ = await asyncio.wait([future], timeout=wait)
                if done:
                    return future.result()
            raise NoAnswer(
                f"{self.server} does not answer (waited {timeout_s:g} s); see log/{self.server}.log in {self._run.root}"
            )
        finally:
            self._waiting.pop(number, None)

    def close(self) -> None:
        self._drop_socket()
