"""Cells of real rank processes over the real bus, against a scripted trajd: celld's part is played by the test."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from gyre_base import config as configuration
from gyre_base import messages as m
from gyre_base.bus import Client
from gyre_base.rundir import RunDir
from tests.trainer.fake_trajd import FakeTrajd

START_S, STEP_S = 240.0, 90.0


class World:
    """The run directory, its daemons and its rank processes: `c0` leads its cell, `c0.1` is the next rank."""

    def __init__(self, run: RunDir, keys, fake: FakeTrajd, transport: str = "") -> None:
        self.run, self.keys, self.fake, self.transport = run, keys, fake, transport
        self.ranks = configuration.from_json(run.path("run.json").read_text()).trainer.ranks
        self.processes: dict[str, subprocess.Popen] = {}
        self.clients: dict[str, Client] = {}
        self.lost: set[str] = set()  # cells of which a rank was killed or stopped: others of them may end

    def start(self, cell: str) -> None:
        """All ranks of a cell."""
        self.lost.discard(cell)
        command = [sys.executable, "-m", "celld.trainer.main", "--run", str(self.run.root), "--cell", cell]
        with socket.create_server(("127.0.0.1", 0)) as meeting:
            for number in range(self.ranks):
                words, keep_open = [], ()
                if self.ranks > 1:
                    words = ["--rank", str(number), "--meet", f"127.0.0.1:{meeting.getsockname()[1]}"]
                if self.ranks > 1 and number == 0:
                    words, keep_open = [*words, "--meet-fd", str(meeting.fileno())], (meeting.fileno(),)
                self.processes[f"{cell}.{number}" if number else cell] = subprocess.Popen(
                    [*command, *words],
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                    cwd=Path(__file__).parents[2],
                    pass_fds=keep_open,
                )

    def send(self, name: str, how: int) -> None:
        self.lost.add(name.split(".")[0])
        self.processes[name].send_signal(how)

    def kill(self, name: str, how: int = signal.SIGKILL) -> int:
        self.send(name, how)
        return self.processes[name].wait(timeout=STEP_S)

    def kill_cell(self, cell: str) -> None:
        """As celld does when one of its ranks is gone."""
        for name, process in self.processes.items():
            if name.split(".")[0] == cell:
                process.kill()
                process.wait()

    async def ended(self, cell: str, within_s: float = STEP_S) -> None:
        """Until no rank of the cell lives."""
        mine = [process for name, process in self.processes.items() if name.split(".")[0] == cell]
        deadline = time.monotonic() + within_s
        while any(process.poll() is None for process in mine):
            assert time.monotonic() < deadline, f"a rank of {cell} lives on: see {self.run.root}/log"
            await asyncio.sleep(0.05)

    async def ask(self, name: str, message, timeout_s: float = STEP_S):
        client = self.clients.setdefault(name, Client(self.run, self.keys, f"rank-{name}"))
        return await client.ask(message, timeout_s=timeout_s)

    async def train(self, cell: str, epoch: int, life: int) -> None:
        """celld's part: wait for this life, then let it claim."""
        await self.until(lambda: (e := self.run.endpoint(f"rank-{cell}")) and e.life == life, START_S)
        state = await self.ask(cell, m.StartTraining(epoch=epoch))
        assert (state.cell, state.life, state.training) == (cell, life, True)

    async def until(self, condition, timeout_s: float = STEP_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            for name, process in self.processes.items():
                over = process.poll() is not None and name.split(".")[0] not in self.lost
                assert not over, f"rank {name} ended: see {self.run.root}/log"
            assert time.monotonic() < deadline, f"waited {timeout_s} s; trajd heard {self.fake.said[-5:]}"
            await asyncio.sleep(0.02)

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()
        for client in self.clients.values():
            client.close()
