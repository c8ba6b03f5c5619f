"""The shell around trajd's core: sockets, journal, the packing thread, payloads. Decides nothing.

Restart: the journal is replayed through the core (who holds what, what is applied), the call log is scanned again, and
groups that are not applied are packed again to the same bytes. Only events that changed the ledger are journalled;
those that answer for finished work are on disk before the answer goes out.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gyre_base import config as configuration
from gyre_base import journal as journals
from gyre_base import messages as m
from gyre_base import wire
from gyre_base.bus import Client, NoAnswer, Received, Server
from gyre_base.config import Config
from gyre_base.daemon import Answer, PeerLost, Send, Shell, log_to, run_main, stop_on_signals
from gyre_base.keys import load_keys
from gyre_base.rundir import RunDir
from trajtools.trajd import view
from trajtools.trajd.core import TrajdCore
from trajtools.trajd.events import Free, Holder, LedgerFrom, Pack, Packed, Reported, Restarted
from trajtools.trajd.index import CallIndex
from trajtools.trajd.packing import PackedGroup, pack_group

log = logging.getLogger(__name__)
DURABLE = (m.GroupClosed, Packed, m.BatchApplied, m.BatchesRetired, LedgerFrom)
TO_CORE = (
    m.ClaimMicroStep,
    m.MicroStepComputed,
    m.LeaseReturned,
    m.ContributionLost,
    m.BatchApplied,
    m.BatchesRetired,
)
Asker = tuple[bytes, int]


class Packer:
    """The call log and the work on it, in one thread: scans, loads, packs."""

    def __init__(self, folder: Path, config: Config) -> None:
        self.index = CallIndex(folder)
        self._config = config
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pack")

    async def scan(self) -> None:
        await asyncio.get_running_loop().run_in_executor(self._thread, self.index.scan)

    async def pack(self, closed: m.GroupClosed, extent: dict[str, int] | None) -> PackedGroup:
        """`extent`: how far the log was read the first time, None if this is the first."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._pack, closed, extent)

    def _pack(self, closed: m.GroupClosed, extent: dict[str, int] | None) -> PackedGroup:
        self.index.scan()
        reach = dict(self.index.extent) if extent is None else extent
        return pack_group(closed, lambda execution: self.index.load(execution, reach), reach, self._config)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


class TrajdShell(Shell):
    """Ranks ask it; it asks cellctl."""

    core: TrajdCore

    def __init__(
        self, core: TrajdCore, journal: journals.Journal, server: Server, cellctl: Client, packer: Packer, life: int
    ) -> None:
        super().__init__(core, journal)
        self._server, self._cellctl, self._packer, self._life = server, cellctl, packer, life
        self._payloads: dict[str, tuple[dict[str, Any], bytes]] = {}
        self._packing: set[str] = set()
        self._reporting: set[str] = set()
        self._seen: dict[str, float] = {}  # by cell

    # ---- what comes in ----------------------------------------------------------------------------------------------

    async def listen(self) -> None:
        async for received in self._server:
            await self._take(received)

    async def _take(self, received: Received) -> None:
        message, asker = received.message, (received.peer, received.correlation)
        match message:
            case m.Hello(kind="rank", name=cell):
                self._seen[cell] = self.clock.now()
                if received.correlation:
                    await self._server.send(received.peer, m.Welcome(life=self._life), received.correlation)
                await self.decide(message)
            case m.Heartbeat(kind="rank", name=cell, life=life):
                known = cell in self._seen and self.core.ledger.knows(Holder(cell, life))
                if not known:  # we are new, or gave it up, or its hello was lost
                    await self._server.send(received.peer, m.Welcome(life=self._life))
                self._seen[cell] = self.clock.now()
            case m.Goodbye(kind="rank"):
                await self.decide(message)
            case m.StatusRequest(what=what):
                about = view.rows(self.core, what, self._about())
                await self._server.send(received.peer, m.StatusReply(rows=tuple(about)), received.correlation)
            case m.Ledger(next_batch=next_batch, version=version, applied=applied):
                source = received.peer.decode(errors="backslashreplace")
                word = LedgerFrom(source=source, next_batch=next_batch, version=version, applied=applied)
                await self.decide(word, asker)
            case _ if isinstance(message, TO_CORE):
                if isinstance(message, m.ClaimMicroStep | m.MicroStepComputed):
                    self._seen[message.cell] = self.clock.now()
                await self.decide(message, asker)
            case _:
                why = f"trajd does not answer {getattr(message, 'TAG', message)!r}"
                await self._server.send(received.peer, m.Refused(why=why), received.correlation)

    def _about(self) -> dict[str, Any]:
        index = self._packer.index
        return {"daemon": "trajd", "life": self._life, "log_records": index.records, "log_executions": index.executions}

    async def decide(self, event: Any, asker: Asker | None = None) -> None:
        """One event through the core; journalled if it changed the ledger. Answers go to `asker`."""
        now, before = self.clock.now(), self.core.ledger.changes
        commands = self.core.handle(event, now)
        if self.journal is not None and self.core.ledger.changes != before:
            self.journal.write(now, event, commands, durable=isinstance(event, DURABLE))
        for command in commands:
            if isinstance(command, Answer):
                if asker is not None:
                    await self._server.send(asker[0], self._whole(command.message), asker[1])
            else:
                await self.perform(command)

    def _whole(self, message: Any) -> Any:
        """A lease with its arrays."""
        if not isinstance(message, m.MicroStepLease):
            return message
        layout, payload = self._payloads[message.id]
        return dataclasses.replace(message, layout=layout, payload=payload)

    # ---- what goes out ----------------------------------------------------------------------------------------------

    async def perform(self, command: Any) -> None:
        match command:
            case Pack(group=group):
                if group not in self._packing:
                    self._packing.add(group)
                    self.spawn(self._pack(group))
            case Send(message=m.GroupPacked() as message):
                if message.group not in self._reporting:
                    self._reporting.add(message.group)
                    self.spawn(self._report(message))
            case Free(groups=groups):
                for id in [i for i in self._payloads if self.core.ledger.lots.group_of[i].name in groups]:
                    del self._payloads[id]
            case _:
                raise TypeError(f"trajd can't perform {command!r}")

    async def _pack(self, name: str) -> None:
        group = self.core.ledger.lots.groups[name]
        extent = dict(group.packed.extent) if group.packed is not None else None
        made = await self._packer.pack(group.closed, extent)
        self._packing.discard(name)
        self._payloads.update(made.payloads)
        await self.decide(made.packed)

    async def _report(self, message: m.GroupPacked) -> None:
        """Until cellctl has it."""
        while True:
            try:
                await self._cellctl.ask(message, timeout_s=30.0)
                break
            except NoAnswer as error:
                log.warning("%s", error)
        self._reporting.discard(message.group)
        await self.decide(Reported(group=message.group))

    # ---- beside the stream ------------------------------------------------------------------------------------------

    async def follow_cellctl(self) -> None:
        """Say hello, then take what cellctl sends. It says welcome unasked when it does not know us any more."""
        await self._greet()
        while True:
            message = await self._cellctl.inbox.get()
            if isinstance(message, m.GroupClosed):
                await self.decide(message)
            elif isinstance(message, m.Welcome):
                await self._greet()
            else:
                log.warning("cellctl sent %r", getattr(message, "TAG", message))

    async def _greet(self) -> None:
        hello = m.Hello(kind="trajd", name="trajd", life=self._life, pid=os.getpid())
        while True:
            try:
                await self._cellctl.ask(hello, timeout_s=30.0)
                return
            except NoAnswer as error:
                log.warning("%s", error)

    async def beat(self) -> None:
        while True:
            ledger = self.core.ledger
            work = len(ledger.leased) + len(self._packing)
            beat = m.Heartbeat(kind="trajd", name="trajd", life=self._life, progress=ledger.changes, work=work)
            await self._cellctl.send(beat)
            await asyncio.sleep(self.heartbeat_s)

    async def follow_log(self) -> None:
        """The index keeps up with the log, so that little is left to read when a group closes."""
        while True:
            await self._packer.scan()
            await asyncio.sleep(self.heartbeat_s)

    async def watch_ranks(self, timeout_s: float) -> None:
        """Silence is a loss. Our own absence (a stopped or swapped-out process) is not theirs."""
        held = (*self.core.ledger.leased.values(), *self.core.ledger.computed.values())
        checked = self.clock.now()
        self._seen |= dict.fromkeys((holder.cell for holder in held), checked)
        while True:
            await asyncio.sleep(self.heartbeat_s)
            now = self.clock.now()
            if now - checked > 2 * self.heartbeat_s:
                self._seen = dict.fromkeys(self._seen, now)
            checked = now
            for cell, seen in list(self._seen.items()):
                if now - seen > timeout_s:
                    del self._seen[cell]
                    await self.decide(PeerLost(kind="rank", name=cell, why=f"silent for {now - seen:.0f} s"))


def restore(
    path: Path, groups_per_batch: int, *, streaming: bool = True, order: str = "arrival", reserve_groups: int = 0
) -> TrajdCore:
    """The core as its journal left it. An empty or missing journal gives a new one."""
    core = TrajdCore(groups_per_batch, streaming=streaming, order=order, reserve_groups=reserve_groups)
    if path.exists():
        for entry in journals.read(path):
            core.handle(wire.from_json(entry.event), entry.at)
    return core


async def run_trajd(run_dir: str) -> None:
    """Serve one run until TERM. A second start continues from the journal and the call log."""
    run = RunDir.open(run_dir)
    log_to(run.path("log", "trajd.log"), name="trajd")
    with run.lock("trajd"):
        await _serve(run)


async def _serve(run: RunDir) -> None:
    keys = load_keys(run)
    config = configuration.from_json(run.path("run.json").read_text())
    life = run.next_life("trajd")
    path = run.path("journal", "trajd.jsonl")
    journals.mend_tail(path)
    core = restore(
        path,
        config.scheduler.groups_per_batch,
        streaming=config.scheduler.streaming,
        order=config.trajectories.order,
        reserve_groups=config.trajectories.reserve_groups,
    )
    server = Server(run, keys, kind="trajd", name="trajd", life=life, bind=config.cluster.bind)
    cellctl = Client(run, keys, "cellctl", identity=f"trajd:trajd:{life}")
    packer = Packer(run.path("calls"), config)
    shell = TrajdShell(core, journals.Journal(path), server, cellctl, packer, life)
    shell.heartbeat_s = config.cluster.heartbeat_s
    stop_on_signals(shell.stopping)
    server.start()
    log.info("trajd life %d listens on %s, batch %d is open", life, server.address, core.ledger.open_batch)
    if life > 1:
        await shell.decide(Restarted(life=life))
    timeout_s = config.cluster.peer_timeout_s
    for work in (shell.listen, shell.follow_cellctl, shell.beat, shell.follow_log):
        shell.spawn(work())
    shell.spawn(shell.watch_ranks(timeout_s))
    try:
        await shell.stopping.wait()
    finally:
        await cellctl.send(m.Goodbye(kind="trajd", name="trajd", life=life))
        await shell.cancel_tasks()
        packer.close()
        assert shell.journal is not None
        shell.journal.close()
        cellctl.close()
        server.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="trajd", description="trajd of one run, until TERM")
    parser.add_argument("--run", required=True, metavar="DIR", help="run directory")
    run_dir = parser.parse_args().run
    run_main(lambda: run_trajd(run_dir))


if __name__ == "__main__":
    main()
