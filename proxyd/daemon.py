"""The daemon: HTTP in front, engines behind, cellctl at the side. Feeds the core, keeps its journal, carries out what
it says.

`python -m proxyd.daemon --run DIR --shard N` is one shard of a run (gyre_base/shards.py). Killed, it is started again
on the same directory: its journal brings back which executions are open, its call log their trees, so that histories go
on with the same ids and finished calls are answered again. It reads nothing of other shards.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import hashlib
import logging
import os
import sys
from pathlib import Path
from typing import Any

import orjson

from gyre_base import config as configuration
from gyre_base import journal as journals
from gyre_base import messages as m
from gyre_base import wire
from gyre_base.allocation import own_address
from gyre_base.bus import CannotListen, Client, NoAnswer, Received, Server, cannot_listen
from gyre_base.config import Config, ConfigError
from gyre_base.daemon import Answer, Shell, WakeAt, log_to, run_main, stop_on_signals
from gyre_base.keys import Keys, load_keys
from gyre_base.rundir import RunDir, RunDirError
from gyre_base.runfile import RunHeader
from gyre_base.shards import proxyd_name, proxyd_peer
from proxyd import calllog, records, views
from proxyd.chat import ChatModel
from proxyd.core import Router
from proxyd.engine import EngineClient
from proxyd.events import Abort, CallArrived, Cut, EngineLoad, Finish, Refuse, Restarted, SubmissionEnded, Submit
from proxyd.families import UnknownFamily
from proxyd.http import Front, wording
from proxyd.metrics import LoopLag, exposition
from proxyd.server import HttpServer
from proxyd.service import Service
from proxyd.template import TemplateRefused

log = logging.getLogger(__name__)
LOADS_S = 4.0
_OF_CALLS = (CallArrived, SubmissionEnded)


class ProxydShell(Shell):
    """One ordered stream: every event is decided, journalled and carried out before the next, without waiting."""

    core: Router

    def __init__(self, core: Router, journal: journals.Journal | None, client: Client, run: RunDir) -> None:
        super().__init__(core, journal)
        self._client, self._run_dir = client, run
        self._unknown_there = False  # cellctl has forgotten us
        self._flushing = False
        self._asker: tuple[Server, Received] | None = None
        self.service: Service
        self.lag = LoopLag()
        self.failure: BaseException | None = None

    def feed(self, event: Any) -> None:
        """An event through the core. A core that raises stops the daemon: its journal is the bug report."""
        now = self.clock.now()
        try:
            commands = self.core.handle(event, now)
            if self.journal is not None:
                self._write(now, event, commands)
            for command in commands:
                self._do(command, now)
        except BaseException as error:
            self.fail(error)
            raise
        if isinstance(event, m.CloseExecution):
            self.service.closed(event.execution)

    def _write(self, now: float, event: Any, commands: list[Any]) -> None:
        """Calls are for the bug report alone: those of one turn of the loop are one write. A restart needs the rest."""
        assert self.journal is not None
        held = isinstance(event, _OF_CALLS)
        self.journal.write(now, event, commands, held=held)
        if held and not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        if self.journal is not None:
            self.journal.flush()

    def fail(self, error: BaseException) -> None:
        log.critical("proxyd stops: %r", error, exc_info=error)
        self.failure = self.failure or error
        self.stopping.set()

    def _do(self, command: Any, now: float) -> None:
        match command:
            case Submit() | Abort() | Cut() | Finish() | Refuse():
                self.service.perform(command)
            case WakeAt(at=at):
                self._wake_at(at, now)
            case Answer(message=message):
                if self._asker is not None:
                    server, asked = self._asker
                    self.spawn(server.send(asked.peer, message, asked.correlation))
            case _:
                self.spawn(self._tell(command))

    async def _tell(self, message: Any) -> None:
        await self._client.send(message)

    async def step(self, event: Any) -> None:
        self.feed(event)

    async def perform(self, command: Any) -> None:
        self._do(command, self.clock.now())

    def numbers(self) -> bytes:
        """For Prometheus."""
        return exposition(self.core, self.service, self.lag, self.clock.now())

    # ---- peers ------------------------------------------------------------------------------------------------------

    async def answer_questions(self, server: Server) -> None:
        """The command line and whoever else asks."""
        async for received in server:
            message = received.message
            if isinstance(message, m.StatusRequest):
                found = views.rows(message.what, message.argument, self.core, self.service, self.lag, self.clock.now())
                await server.send(received.peer, m.StatusReply(rows=tuple(found)), received.correlation)
            elif isinstance(message, m.OperatorOrder):
                self._asker = (server, received)
                self.feed(message)
                self._asker = None
            elif isinstance(message, m.OpenExecution | m.CloseExecution):  # one that no scheduler knows: `gyre exec`
                self.feed(message)
                await server.send(received.peer, m.Done(), received.correlation)
            elif received.correlation:
                await server.send(received.peer, m.Refused(why="proxyd answers status and order"), received.correlation)

    async def watch_engines(self, engines: EngineClient) -> None:
        """Ask the engines how busy they are. The core hears of changes, and of work that goes on."""
        heard: dict[str, int] = {}
        while True:
            await asyncio.sleep(LOADS_S)
            urls = [e.url for e in self.core.engines.values() if e.serving]
            for url, work in zip(urls, await asyncio.gather(*map(engines.work, urls)), strict=True):
                if work is not None and (work or heard.get(url)):
                    self.feed(EngineLoad(url=url, work=work))
                heard[url] = work or 0

    async def report(self, life: int) -> None:
        """Hello to each life of cellctl, then heartbeats. It answers a hello with the open executions and the table."""
        greeted, name = -1, str(self.core.shard)
        while True:
            endpoint = self._run_dir.endpoint("cellctl")
            if endpoint is not None and (endpoint.life != greeted or self._unknown_there):
                self._unknown_there = False
                hello = m.Hello(kind="proxyd", name=name, life=life, pid=os.getpid(), holds=tuple(self.core.executions))
                try:
                    await self._client.ask(hello, timeout_s=5.0)
                    greeted = endpoint.life
                except NoAnswer:
                    log.warning("cellctl does not answer a hello")
                continue
            if endpoint is not None:
                work = sum(map(len, self.core.on_cell.values()))  # calls that an engine has
                progress = self.service.vital_signs
                beat = m.Heartbeat(kind="proxyd", name=name, life=life, progress=progress, work=work)
                await self._client.send(beat)
            await asyncio.sleep(self.heartbeat_s if greeted >= 0 else 0.1)

    def close(self) -> None:
        """The last thing of a clean end."""
        self._client.close()
        if self.journal is not None:
            self.journal.close()

    async def obey(self) -> None:
        """What cellctl says unasked, in its order."""
        while True:
            message = await self._client.inbox.get()
            if isinstance(message, m.Welcome):  # it does not know us (any more)
                self._unknown_there = True
            elif isinstance(message, m.OpenExecution | m.CloseExecution | m.EngineTable | m.DrainCell):
                self.feed(message)


# ---- start ----------------------------------------------------------------------------------------------------------


def left_open(path: Path) -> tuple[dict[str, m.OpenExecution], set[str]]:
    """When the last life ended, by its journal: executions that were open, cells that a person had drained."""
    found: dict[str, m.OpenExecution] = {}
    held: set[str] = set()
    if not path.exists():
        return found, held
    with path.open("rb") as journal:
        for line in journal:
            if b'"tag":"execution.' not in line and b'"tag":"order"' not in line:
                continue  # most lines are calls; they are not even parsed
            entry = orjson.loads(line)
            event = entry["event"]
            match event["tag"]:
                case "execution.open":
                    found[event["execution"]] = wire.from_json(event)
                case "execution.close":
                    found.pop(event["execution"], None)
                case "order" if any(command["tag"] == "done" for command in entry["commands"]):
                    (held.add if event["verb"] == "drain" else held.discard)(event["argument"])
    return found, held


def load_chat(config: Config) -> tuple[ChatModel, dict[str, Any]]:
    """The model's chat form and what the call log says of its tokenizer. Raises ConfigError."""
    folder = Path(config.model.tokenizer or config.model.path)
    try:
        chat = ChatModel.load(folder, config.model.family)
        digest = hashlib.blake2b((folder / "tokenizer.json").read_bytes(), digest_size=16).hexdigest()
    except (OSError, TemplateRefused) as error:
        raise ConfigError(f"model.tokenizer: {error}") from None
    except UnknownFamily as error:
        raise ConfigError(f"model.family: {error}") from None
    if config.rollout.delivery == "live" and not chat.decodes_in_parts:
        raise ConfigError(
            "rollout.delivery = live needs a byte-level vocabulary, and this tokenizer has none: set it to durable"
        )
    vocab = max(chat.tokenizer.get_vocab_size(), embedding_rows(config))
    return chat, {"name": folder.name, "digest": digest, "vocab": vocab}


def embedding_rows(config: Config) -> int:
    """Ids the model can sample: padded beyond the tokenizer's, and an unsure model does sample there. 0 if not known
    here.
    """
    path = Path(config.model.path) / "config.json"
    return int(orjson.loads(path.read_bytes()).get("vocab_size", 0)) if config.model.path and path.exists() else 0


async def run_proxyd(run_dir: str, shard: int = 0) -> None:
    """Serve one shard of a run until TERM. A second start continues from its directory. Raises ConfigError."""
    run = RunDir.open(run_dir)
    config, name = configuration.from_json(run.path("run.json").read_text()), proxyd_name(shard)
    if shard not in range(config.proxyd.shards):
        raise ConfigError(f"the run has no shard {shard}: proxyd.shards is {config.proxyd.shards}, the first is 0")
    log_to(run.path("log", f"{name}.log"), name=name)
    with run.lock(name):
        await _serve(run, config, shard)


async def _serve(run: RunDir, config: Config, shard: int) -> None:
    keys, name = load_keys(run), proxyd_name(shard)
    chat, tokenizer = load_chat(config)
    life = run.next_life(name)
    path = run.path("journal", f"{name}.jsonl")
    journals.mend_tail(path)
    opened, held = left_open(path)
    forests = records.restore(calllog.earlier_records(run, name), chat, set(opened))
    client = Client(run, keys, "cellctl", identity=f"{proxyd_peer(shard)}:{life}")
    core = Router(config.engine.max_running_requests, shard, config.proxyd.shards)
    shell = ProxydShell(core, journals.Journal(path), client, run)
    shell.heartbeat_s = config.cluster.heartbeat_s
    stop_on_signals(shell.stopping)
    header = RunHeader(run=run.root.name, tokenizer=tokenizer, writer=name, created=shell.clock.now())
    durable = config.rollout.durability == "fdatasync"
    calls = calllog.CallLog(run.path("calls", calllog.NAME.format(proxyd=name, life=life)), header, durable=durable)
    engines = EngineClient(keys.admin, chat.stop_ids, config.engine.stream_interval)
    shell.service = Service(config, chat, engines, calls, shell.feed, shell.clock.now, shell.fail)
    shell.service.forests = forests
    gc.freeze()  # trees live as long as their executions: looking through them for garbage finds none
    gc.set_threshold(20_000, 20, 20)
    for event in (Restarted(life=life, held=tuple(sorted(held))), *opened.values()):
        shell.feed(event)
    await _until_stopped(shell, run, keys, config, life, calls, engines)
    if shell.failure is not None:
        raise shell.failure


async def _until_stopped(
    shell: ProxydShell,
    run: RunDir,
    keys: Keys,
    config: Config,
    life: int,
    calls: calllog.CallLog,
    engines: EngineClient,
) -> None:
    live = config.rollout.delivery == "live"
    front = Front(shell.service, keys, config.model.served_name, shell.numbers, live=live)
    web = HttpServer(front.handle, wording)
    try:
        host, port = await web.start(own_address(config.cluster.bind))
    except OSError as error:
        raise cannot_listen(config.cluster.bind, error.strerror or str(error)) from None
    name = proxyd_name(shell.core.shard)
    server = Server(run, keys, kind="proxyd", name=name, life=life, bind=config.cluster.bind)
    server.start({"http": f"http://{host}:{port}"})
    log.info("%s life %d serves http://%s:%s, %d executions open", name, life, host, port, len(shell.core.executions))
    for work in (
        shell.answer_questions(server),
        shell.report(life),
        shell.obey(),
        shell.lag.watch(),
        shell.watch_engines(engines),
    ):
        shell.spawn(work)
    try:
        await shell.run()
    finally:
        server.close()
        web.stop()
        await shell.service.stop()
        calls.close()
        shell.close()
        log.info("%s life %d has ended", name, life)


def main(arguments: list[str] | None = None) -> int:
    """`python -m proxyd.daemon --run DIR --shard N`. Exit codes as everywhere (DESIGN 12)."""
    options = argparse.ArgumentParser(prog="proxyd.daemon", description="One shard of the request router of a run.")
    options.add_argument("--run", required=True, help="run directory")
    options.add_argument("--shard", type=int, default=0, help="which of proxyd.shards; the first is 0 (default)")
    given = options.parse_args(arguments)
    try:
        run_main(lambda: run_proxyd(given.run, given.shard))
    except (ConfigError, CannotListen, RunDirError) as error:
        print(f"proxyd: {error}", file=sys.stderr)
        return 4 if isinstance(error, RunDirError) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
