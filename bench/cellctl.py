"""What the scheduler costs: one real cellctl process with real sockets and emulated peers, and a simulated year.

    python -m bench.cellctl [--json] [--quick] [--cells 512] [--in-flight 20000] [--rate 1000] [--seconds 20]

Peers live in this process: a client per cell with heartbeats, executors, proxyd, trajd and the core's rank. CPU time is
that of the cellctl process alone (user + system, from /proc), over a window in which events arrive at the asked rate.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import heapq
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.figures import Figure, figure, show
from gyre_base import config as configuration
from gyre_base import messages as m
from gyre_base.bus import Client
from gyre_base.config import ClusterConfig
from gyre_base.keys import Keys, make_keys
from gyre_base.rundir import RunDir
from gyre_base.vocabulary import Outcome, Role

GROUP, BATCH, EXECUTORS = 16, 8, 8
WARM_UP_S = 3.0


@dataclasses.dataclass
class Emulated:
    """All peers of one cellctl. `finish` ends executions, oldest first; answers to the core's commands come at once."""

    run: RunDir
    keys: Keys
    cells: int
    clients: dict[str, Client] = dataclasses.field(default_factory=dict)
    held: list[tuple[str, str]] = dataclasses.field(default_factory=list)  # heap of (execution, executor)
    packed: int = 0
    step: int = 0
    sent: int = 0
    readers: list[asyncio.Task[None]] = dataclasses.field(default_factory=list)

    async def join(self) -> None:
        await self._peer("proxyd", "0")
        await self._peer("trajd", "trajd")
        for i in range(self.cells):
            await self._peer("celld", f"c{i}")
            await self._role(f"c{i}", Role.ROLLOUT, 0)
        for i in range(EXECUTORS):
            await self._peer("executor", f"ex{i}", slots=1 << 16)

    async def _peer(self, kind: str, name: str, slots: int = 0) -> None:
        key = f"{kind}:{name}"
        client = self.clients[key] = Client(self.run, self.keys, "cellctl", identity=f"{key}:1")
        await self.send(key, m.Hello(kind=kind, name=name, life=1, pid=os.getpid(), slots=slots))
        self.readers.append(asyncio.create_task(self._listen(key, client)))

    async def send(self, peer: str, message: object) -> None:
        self.sent += 1
        await self.clients[peer].send(message)

    async def _role(self, cell: str, role: Role, epoch: int) -> None:
        url = f"http://{cell}" if role is Role.ROLLOUT else ""
        await self.send(
            f"celld:{cell}", m.RoleChanged(cell=cell, role=role, epoch=epoch, version="0.0", engine_url=url)
        )

    async def _listen(self, key: str, client: Client) -> None:
        while True:
            match await client.inbox.get():
                case m.ExecutionOrder(execution=execution):
                    heapq.heappush(self.held, (execution, key))
                case m.DrainCell(cell=cell, epoch=epoch):
                    done = m.CellDrained(cell=cell, epoch=epoch, moved=0, moved_mid_generation=0, seconds=0.0)
                    await self.send(key, done)
                case m.FlipCell(cell=cell, to=to, epoch=epoch):
                    await self._role(cell, to, epoch)
                case m.GroupClosed(group=group):
                    await self._pack(key, group)

    async def _pack(self, key: str, group: str) -> None:
        await self.send(key, m.GroupPacked(group=group, enough=True, counted=GROUP, micro_steps=1, owned_tokens=1))
        self.packed += 1
        if self.packed % BATCH == 0:
            self.step += 1
            done = m.StepDone(batch=self.step - 1, version=f"0.{self.step}", metrics={"staleness_mean": 0.0})
            await self.send("celld:c0", done)

    async def beat(self) -> None:
        """Every peer once per interval, spread evenly."""
        begin = time.monotonic()
        for count, key in enumerate(itertools.cycle(list(self.clients))):
            kind, _, name = key.partition(":")
            await self.send(key, m.Heartbeat(kind=kind, name=name, life=1))
            due = begin + count * ClusterConfig.heartbeat_s / len(self.clients)
            await asyncio.sleep(max(0.0, due - time.monotonic()))

    async def finish(self, per_second: float, seconds: float) -> None:
        begin, count = time.monotonic(), 0
        while (passed := time.monotonic() - begin) < seconds:
            while count < passed * per_second and self.held:
                execution, key = heapq.heappop(self.held)
                await self.send(key, m.ExecutionFinished(execution=execution, outcome=Outcome.SCORED, score=0.5))
                count += 1
            await asyncio.sleep(0.005)


def prepare(root: Path, cells: int, in_flight: int) -> tuple[RunDir, Keys]:
    """A run directory whose pipeline always holds `in_flight` executions."""
    run = RunDir.create(root)
    tasks = root / "tasks.jsonl"
    tasks.write_text("".join(f'{{"id": "t{i}", "instruction": "x"}}\n' for i in range(64)))
    tree = {
        "cluster": {"cells": cells, "peer_timeout_s": 120.0},
        "scheduler": {
            "policy": "async",
            "steps": 1_000_000,
            "group_size": GROUP,
            "groups_per_batch": BATCH,
            "look_ahead_groups": in_flight // GROUP - BATCH,
        },
        "tasks": {"train": str(tasks)},
        "evaluation": {"tasks": 0},
    }
    run.write_atomic("run.json", configuration.to_json(configuration.from_tree(tree)))
    return run, make_keys(run)


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(600):
        if holds():
            return
        await asyncio.sleep(0.1)
    raise SystemExit("the scheduler did not come up within a minute")


async def measure(run: RunDir, keys: Keys, pid: int, given: argparse.Namespace) -> tuple[float, float, float]:
    """(CPU share, events per second, mean in flight) of cellctl over the window."""
    peers = Emulated(run, keys, given.cells)
    await until(lambda: run.endpoint("cellctl") is not None)
    await peers.join()
    beating = asyncio.create_task(peers.beat())
    await until(lambda: len(peers.held) >= given.in_flight)
    beats = len(peers.clients) / ClusterConfig.heartbeat_s
    finishes = (given.rate - beats) / (1.0 + 1.0 / GROUP + 1.0 / (GROUP * BATCH))
    await peers.finish(finishes, WARM_UP_S)
    before, at, sent = cpu_seconds(pid), time.monotonic(), peers.sent
    await peers.finish(finishes, given.seconds)
    share = (cpu_seconds(pid) - before) / (time.monotonic() - at)
    rate = (peers.sent - sent) / (time.monotonic() - at)
    for task in (beating, *peers.readers):
        task.cancel()
    return share, rate, float(len(peers.held))


def live(given: argparse.Namespace) -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="gyre-bench-") as folder:
        run, keys = prepare(Path(folder) / "run", given.cells, given.in_flight)
        command = [sys.executable, "-m", "gyre_cli.cellctl", "run", "--run", str(run.root)]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as daemon:
            try:
                share, rate, held = asyncio.run(measure(run, keys, daemon.pid, given))
            finally:
                daemon.terminate()
    least = 0.95 * given.rate
    name = f"cpu_share_{given.cells}_cells_{given.in_flight // 1000}k_executions"
    return [
        figure(name, [share], "core", "< 0.50", lambda v: v < 0.5),
        figure("events_per_s", [rate], "1/s", f">= {least:g}", lambda v: v >= least),
        figure("executions_in_flight", [held], "executions"),
    ]


def year(quick: bool) -> Figure:
    """Seconds to simulate a year of the shipped 192-node profile (elastic), or a tenth of it scaled up."""
    from cellctl.simulate.profile import load
    from cellctl.simulate.world import World

    profile = load("qwengyre-2.4t")
    hours = 8760.0 / (10 if quick else 1)
    steps = round(hours / 1.571)
    begin = time.process_time()
    world = World(dataclasses.replace(profile, steps=steps), profile.arm("E0"), 0).run()
    took = (time.process_time() - begin) * 8760.0 / (world.now / 3600.0)
    return figure("simulated_year_192_nodes", [took], "s CPU", "< 60", lambda v: v < 60.0)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--json", action="store_true")
    options.add_argument("--quick", action="store_true", help="a tenth of a year, a window of 8 s")
    options.add_argument("--cells", type=int, default=512)
    options.add_argument("--in-flight", type=int, default=20_000)
    options.add_argument("--rate", type=float, default=1000.0, help="messages per second, heartbeats included")
    options.add_argument("--seconds", type=float, default=20.0)
    options.add_argument("--only", choices=("live", "year"))
    given = options.parse_args()
    given.seconds = 8.0 if given.quick else given.seconds
    figures: list[Figure] = []
    with contextlib.suppress(KeyboardInterrupt):
        figures += live(given) if given.only != "year" else []
        figures += [year(given.quick)] if given.only != "live" else []
    return show(figures, as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
