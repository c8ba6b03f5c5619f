"""A scripted engine with SGLang's /generate shapes, a cellctl that only speaks, and a real proxyd process between
them.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from aiohttp import web

from gyre_base import config as configuration
from gyre_base import messages as m
from gyre_base.bus import Client, Received, Server
from gyre_base.keys import Keys, make_keys
from gyre_base.rundir import RunDir
from gyre_base.runfile import Call, Note, RunReader
from gyre_base.shards import proxyd_name, proxyd_names, shard_of
from gyre_base.vocabulary import Purpose
from proxyd.chat import ChatModel

Script = Callable[[list[int]], list[int]]  # prompt without the answer so far -> the whole answer
REPOSITORY = Path(__file__).parents[2]


@dataclass
class FakeEngine:
    """Says what the script says, token by token. `hold_after` stops each stream at so many tokens until released."""

    name: str
    script: Script
    version: str = "0.0"
    admin: str = ""
    hold_after: int | None = None
    die_after: int | None = None
    repeat_on_abort: bool = True
    routes: int | None = 0  # its experts differ from another's by so many; None: it does not say them
    requests: list[dict[str, Any]] = field(default_factory=list)
    aborted: set[str] = field(default_factory=set)
    running: dict[str, int] = field(default_factory=dict)
    url: str = ""
    _runner: web.AppRunner | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def start(self) -> FakeEngine:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        return self

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def release(self) -> None:
        self.hold_after = None
        self._changed.set()

    async def _abort(self, http: web.Request) -> web.Response:
        if http.headers.get("Authorization") != f"Bearer {self.admin}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        self.aborted.add((await http.json())["rid"])
        self._changed.set()
        return web.Response()

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        body = await http.json()
        self.requests.append(body)
        rid, prompt, params = body["rid"], body["input_ids"], body["sampling_params"]
        assert body["stream"] and body["return_logprob"] and params["top_p"] == 1 and params["top_k"] == -1
        assert body["cache_salt"] == self.version and len(rid) == 32
        answer = self.script(prompt)[: params["max_new_tokens"]]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        self.running[rid] = 0
        try:
            await self._send(http, response, rid, prompt, answer, params)
        finally:
            del self.running[rid]
        return response

    async def _send(
        self,
        http: web.Request,
        response: web.StreamResponse,
        rid: str,
        prompt: list[int],
        answer: list[int],
        params: Any,
    ) -> None:
        sent = 0
        stops = set(params["stop_token_ids"])
        while True:
            await self._wait_to_go_on(rid, sent)
            if rid in self.aborted:
                said = self.routing(rid, answer[:sent])
                await response.write(self._abort_chunk(rid, prompt, answer, sent, said) + b"data: [DONE]\n\n")
                return
            if self.die_after is not None and sent >= self.die_after:
                assert http.transport is not None
                http.transport.abort()
                return
            ended = answer[sent] in stops
            finish: Any = {"type": "stop", "matched": answer[sent]} if ended else None
            sent += 1
            if not ended and sent == params["max_new_tokens"]:
                finish = {"type": "length", "length": sent}
            self.running[rid] = sent
            said = self.routing(rid, answer[:sent]) if finish else {}
            await response.write(self._chunk(rid, prompt, answer[sent - 1 : sent], sent, finish, said))
            if finish:
                await response.write(b"data: [DONE]\n\n")
                return

    async def _wait_to_go_on(self, rid: str, sent: int) -> None:
        while self.hold_after is not None and sent >= self.hold_after and rid not in self.aborted:
            self._changed.clear()
            await self._changed.wait()

    def logprob(self, token: int) -> float:
        return -((token % 7) + 1) / 8

    def experts(self, token: int, position: int) -> list[list[int]]:
        """Of two layers, two of eight each."""
        assert self.routes is not None
        first, second = token + self.routes, position + self.routes
        return [[first % 8, (first + 1) % 8], [second % 8, (second + 3) % 8]]

    def routing(self, rid: str, sampled: list[int]) -> dict[str, str]:
        """As SGLang says it in the last chunk: of every token that was computed, from where it was asked to."""
        body = next(body for body in self.requests if body["rid"] == rid)
        if self.routes is None or not body.get("return_routed_experts"):
            return {}
        computed = list(enumerate([*body["input_ids"], *sampled][:-1]))[body["routed_experts_start_len"] :]
        rows = np.array([self.experts(token, position) for position, token in computed], "<i4")
        return {"routed_experts": base64.b64encode(rows.tobytes()).decode()}

    def _chunk(
        self, rid: str, prompt: list[int], ids: list[int], total: int, finish: Any, said: dict[str, str] | None = None
    ) -> bytes:
        meta: dict[str, Any] = {
            **(said or {}),
            "id": rid,
            "finish_reason": finish,
            "prompt_tokens": len(prompt),
            "cached_tokens": len(prompt) - 1,
            "completion_tokens": total,
            "weight_version": self.version,
            "output_token_logprobs": [[self.logprob(i), i, None] for i in ids],
        }
        if finish is not None:
            meta["weight_versions"] = [{"version": self.version, "start": 0, "end": total}]
        return b"data: " + json.dumps({"output_ids": ids, "meta_info": meta}).encode() + b"\n\n"

    def _abort_chunk(
        self, rid: str, prompt: list[int], answer: list[int], sent: int, said: dict[str, str] | None = None
    ) -> bytes:
        """As SGLang does it: the last id again and the whole list of logprobs."""
        finish = {"type": "abort", "message": "Abort by user", "status_code": None, "err_type": None}
        chunk = json.loads(self._chunk(rid, prompt, answer[:sent], sent, finish, said)[6:])
        chunk["output_ids"] = answer[max(0, sent - 1) : sent] if self.repeat_on_abort else []
        return b"data: " + json.dumps(chunk).encode() + b"\n\n"


class FakeCellctl:
    """Welcomes whoever says hello and keeps what it hears. What is said of an execution goes to its shard."""

    def __init__(self, run: RunDir, keys: Keys, shards: int = 1) -> None:
        self.run, self.keys, self.shards = run, keys, shards
        self.server: Server | None = None
        self.peers: dict[int, bytes] = {}
        self.hellos: list[m.Hello] = []
        self.heard: list[Any] = []
        self.table = 0
        self.latest: tuple[m.EngineTable, ...] = ()
        self.opened: dict[str, m.OpenExecution] = {}
        self._lives: list[tuple[Server, asyncio.Task[None]]] = []

    async def start(self) -> FakeCellctl:
        life = self.run.next_life("cellctl")
        self.server = Server(self.run, self.keys, kind="cellctl", name="cellctl", life=life, bind="127.0.0.1")
        self.server.start()
        task = asyncio.get_running_loop().create_task(self._listen(life))
        self._lives.append((self.server, task))
        return self

    async def restart(self) -> None:
        """The old life is deaf from now on and the endpoint names a new one."""
        self._lives[-1][1].cancel()
        self.peers.clear()
        await self.start()

    async def _listen(self, life: int) -> None:
        assert self.server is not None
        async for received in self.server:
            await self._take(received, life)

    async def _take(self, received: Received, life: int) -> None:
        assert self.server is not None
        if isinstance(received.message, m.Hello):
            self.peers[int(received.message.name)] = received.peer
            self.hellos.append(received.message)
            await self.server.send(received.peer, m.Welcome(life=life), received.correlation)
            await self.say(*self.opened.values(), *self.latest)
        elif not isinstance(received.message, m.Heartbeat):
            self.heard.append(received.message)

    async def until(self, condition: Callable[[], Any], seconds: float = 15.0) -> Any:
        """Wait until the condition holds."""
        async with asyncio.timeout(seconds):
            while not (value := condition()):  # noqa: ASYNC110 - what is waited for happens in another process
                await asyncio.sleep(0.01)
        return value

    async def say(self, *messages: Any) -> None:
        assert self.server is not None
        for message in messages:
            name = getattr(message, "execution", None)
            of = range(self.shards) if name is None else (shard_of(name, self.shards),)
            for peer in [self.peers[shard] for shard in of if shard in self.peers]:
                await self.server.send(peer, message)

    async def serve(self, *engines: FakeEngine, away: tuple[str, ...] = ()) -> None:
        """A new table with these engines in this order, and until proxyd goes by it."""
        self.table += 1
        lines = tuple(
            m.Engine(cell=e.name, url=e.url, version=e.version, order=n, slots=8, serving=e.name not in away)
            for n, e in enumerate(engines)
        )
        self.latest = (m.EngineTable(number=self.table, engines=lines),)
        await self.say(*self.latest)
        for name in proxyd_names(self.shards):
            client = Client(self.run, self.keys, name)
            async with asyncio.timeout(15.0):
                while (await client.ask(m.StatusRequest())).rows[0]["table"] < self.table:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
            client.close()

    async def open(self, execution: str, temperature: float = 1.0) -> None:
        self.opened[execution] = m.OpenExecution(execution=execution, purpose=Purpose.TRAIN, temperature=temperature)
        await self.say(self.opened[execution])

    def said(self, kind: type) -> list[Any]:
        return [h for h in self.heard if isinstance(h, kind)]

    async def stop(self) -> None:
        for server, task in self._lives:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            server.close()


class World:
    """A run directory, a fake cellctl, a process for each shard of proxyd (`process` is the first)."""

    def __init__(self, root: Path, tokenizer: Path, **overrides: Any) -> None:
        self.run = RunDir.create(root)
        tree: dict[str, Any] = {"model": {"tokenizer": str(tokenizer)}, "engine": {"context_length": 400}}
        tree["rollout"] = {"max_new_tokens": 64}
        for section, values in overrides.items():
            tree.setdefault(section, {}).update(values)
        self.config = configuration.from_tree(tree)
        self.run.write_atomic("run.json", configuration.to_json(self.config))
        self.keys = make_keys(self.run)
        self.shards = self.config.proxyd.shards
        self.cellctl = FakeCellctl(self.run, self.keys, self.shards)
        self.chat = ChatModel.load(tokenizer)
        self.processes: dict[int, asyncio.subprocess.Process] = {}
        self.engines: list[FakeEngine] = []
        self.session: aiohttp.ClientSession

    async def __aenter__(self) -> World:
        await self.cellctl.start()
        self.session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=40))
        for shard in range(self.shards):
            await self.start_proxyd(shard)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.session.close()
        for shard in list(self.processes):
            await self.stop_proxyd(shard=shard)
        for engine in self.engines:
            await engine.stop()
        await self.cellctl.stop()

    async def engine(self, name: str, script: Script, **options: Any) -> FakeEngine:
        made = await FakeEngine(name, script, admin=self.keys.admin, **options).start()
        self.engines.append(made)
        return made

    @property
    def process(self) -> asyncio.subprocess.Process:
        return self.processes[0]

    def shard_of(self, execution: str) -> int:
        return shard_of(execution, self.shards)

    async def start_proxyd(self, shard: int = 0) -> None:
        before = len(self.cellctl.hellos)
        name = proxyd_name(shard)
        old = self.run.endpoint(name)
        words = ("-m", "proxyd.daemon", "--run", str(self.run.root), "--shard", str(shard))
        self.processes[shard] = await asyncio.create_subprocess_exec(sys.executable, *words, cwd=REPOSITORY)
        await self.cellctl.until(lambda: len(self.cellctl.hellos) > before, 120.0)
        await self.cellctl.until(lambda: (e := self.run.endpoint(name)) and (old is None or e.life > old.life))

    async def stop_proxyd(self, how: signal.Signals = signal.SIGTERM, shard: int = 0) -> int:
        process = self.processes[shard]
        if process.returncode is None:
            os.kill(process.pid, how)
        return await asyncio.wait_for(process.wait(), 15.0)

    def base(self, execution: str) -> str:
        endpoint = self.run.endpoint(proxyd_name(self.shard_of(execution)))
        assert endpoint is not None
        return f"{endpoint.extra['http']}/x/{execution}"

    async def chat_call(
        self, execution: str, messages: list[dict[str, Any]], call: str = "", token: str | None = None, **more: Any
    ) -> tuple[int, Any, dict[str, str]]:
        """(status, body, headers) of one request."""
        headers = {"Authorization": f"Bearer {self.keys.token(execution) if token is None else token}"}
        if call:
            headers["X-Gyre-Call"] = call
        body = {"model": "m", "messages": messages, **more}
        url = f"{self.base(execution)}/v1/chat/completions"
        async with self.session.post(url, json=body, headers=headers) as response:
            text = await response.text()
            parsed = json.loads(text) if response.content_type == "application/json" else text
            return response.status, parsed, dict(response.headers)

    def records(self) -> list[Any]:
        """All records of all lives, and no damage."""
        out: list[Any] = []
        for path in sorted(self.run.path("calls").glob("*.gtr")):
            reader = RunReader(path)
            out += [located.record for located in reader.records()]
            assert not reader.report.bad and not reader.report.defects and not reader.report.conflicts
        return out

    def calls(self, execution: str = "e1") -> dict[str, Call]:
        return {r.call: r for r in self.records() if isinstance(r, Call) and r.exec == execution}

    def notes(self, execution: str = "e1") -> list[Note]:
        return [r for r in self.records() if isinstance(r, Note) and r.exec == execution]

    def says(self, text: str) -> list[int]:
        """Ids of an answer with its end token."""
        return [*self.chat.encode(text), self.chat.end_id]
