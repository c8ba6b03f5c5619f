"""The supervisor of a run in a Slurm job: one celld step per cell, everything else beside the batch script.

The batch script becomes this process. Services, and executors that have no partition of their own, are its children on
the first node: they are started again without asking the controller. Cells are steps (`srun --overlap --no-kill`), one
node each; their engines and ranks are children of celld. Who left is told by heartbeats and by the end of a step, what
that means by Slurm's own list of the job's nodes: a node that is gone is not waited for.

Leaving is one path, whatever asked for it (a signal, preemption, little time left): dispatch nothing more, save, stop
every daemon in order, requeue. A job that Slurm is ending already is not requeued: it was cancelled, or Slurm does it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import time
from typing import Any

import click

from gyre_base import messages as m
from gyre_base import saving
from gyre_base.allocation import SHARE, Allocation
from gyre_base.bus import Client, NoAnswer, Received
from gyre_base.config import Config, ConfigError
from gyre_base.rundir import RunDir
from gyre_cli import slurm
from gyre_cli.common import NO, REFUSED
from gyre_cli.slurm import SlurmError
from gyre_cli.supervisor import Daemon, RunFailed, Supervisor, executors, line, services

BEAT_S = 2.0
CLOCK_S = 30.0  # the job's end is asked for again: `scontrol update TimeLimit=` may move it
MOVED_S = 5.0  # squeue's seconds are whole, and a call takes time: a smaller move is none
ASK_AGAIN_S = 3.0  # a step that ended while the controller is away, or whose lock is still held elsewhere
ENDING_PAUSE_S = 6.0  # a step that Slurm told to end is not started again before it is known why
STEP_STOP_S = 5.0  # for the answer to a stop
TERM_BUDGET_S = 20.0  # of the 30 s that Slurm leaves between TERM and KILL by default
SAVING_S = 60.0  # at least, for a save by message, if the job's end leaves it
REQUEUE_S = 600.0


def place(cells: int, nodes: list[str]) -> dict[str, str]:
    """The node of each cell: the core on the first node, where the services are. Raises ConfigError."""
    if cells < len(nodes):
        raise ConfigError(
            f"the job has {len(nodes)} nodes ({', '.join(nodes)}) and cluster.cells is {cells}: a cell has one node, "
            f"so {len(nodes) - cells} would stand idle; set cluster.cells = {len(nodes)} or ask for fewer nodes"
        )
    return {f"c{i}": nodes[i * len(nodes) // cells] for i in range(cells)}


def step_command(config: Config, job: str, node: str, command: list[str]) -> list[str]:
    """One node's step beside whatever else runs there; everything is said, since srun takes the rest from the job."""
    words = ["srun", f"--jobid={job}", "--overlap", "--no-kill", "-N1", "-n1", "-w", node]
    return [*words, "--mem=0", "--mpi=none", "--input=none", *config.cluster.srun_options, *command]


class ClusterSupervisor(Supervisor):
    """`serve` as on one machine; `why` says what made it leave, `requeued` whether the job starts again."""

    def __init__(self, run: RunDir, config: Config, on_status: Any, at_end: Any, allocation: Allocation) -> None:
        self.allocation = allocation
        try:
            self.nodes = slurm.hostnames(allocation.nodelist)
        except SlurmError as error:
            raise ConfigError(f"cannot read the job's nodes: {error}") from None
        self.places = place(config.cluster.cells, self.nodes)
        self.lost: dict[str, str] = {}  # cell: why
        self.why = ""
        self.requeued = False
        self._comes_back = False  # this job is requeued: what runs in jobs of its own may wait
        self._save_first = False  # there is time to save before anything is stopped
        self._ends_at = 0.0
        self._began_at = time.time()
        self._plan = saving.plan(save_s=0.0, micro_step_s=0.0, ends_at=0.0, now=self._began_at)
        self._told: m.JobFacts | None = None
        super().__init__(run, config, on_status, at_end)

    def table(self) -> list[Daemon]:
        config, run, job = self._config, self._run, self.allocation.job
        python = list(config.cluster.python) or [sys.executable]
        serving, executing = services(run, python, config), executors(run, python, config)
        for daemon in (*serving, *executing):
            daemon.environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        steps = []
        for cell, node in self.places.items():
            daemon = line(run, python, f"celld-{cell}", "celld", "run", "--cell", cell)
            daemon.command = step_command(config, job, node, daemon.command)
            more = {"SLURM_RESTART_COUNT": str(self.allocation.restarts)}
            if len(beside_it := [c for c, n in self.places.items() if n == node]) > 1:
                more[SHARE] = f"{beside_it.index(cell)}/{len(beside_it)}"
            daemon.environment = {**slurm.clean_environment(), **more}
            daemon.node, daemon.cell = node, cell
            steps.append(daemon)
        return [*serving, *steps, *executing]

    # ---- why it leaves ----------------------------------------------------------------------------------------------

    def _heed_signals(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, lambda: self.leave("Slurm warned us (USR1)", save_first=True))
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, lambda: self.leave("Slurm ends the job (TERM)", save_first=False))

    def leave(self, why: str, *, save_first: bool, comes_back: bool = True) -> None:
        """The first reason counts; a TERM later cuts the saving short. By order alone the job does not come back."""
        self._save_first = save_first and (self._save_first or not self.stopping.is_set())
        if not self.stopping.is_set():
            self.why, self._comes_back, self.ordered = why, comes_back, not comes_back
            click.echo(f"leaving: {why}", err=True)
            self.stopping.set()

    def _reply(self, received: Received) -> Any:
        match received.message:
            case m.Heartbeat(name=cell, life=life):
                if life != self.allocation.restarts:
                    return m.Refused(why=f"life {life} of job {self.allocation.job} is over")
                if cell in self.lost:
                    return m.Refused(why=f"{cell} was given up: {self.lost[cell]}")
                return m.Done()
            case m.OperatorOrder(verb="stop"):
                self.leave("by order (gyre stop)", save_first=True, comes_back=False)
                return m.Done(note="saving and stopping")
            case m.CellEnding(cell=cell):
                self._beside(self._cell_ending(cell))
                return m.Done()
        return super()._reply(received)

    async def _cell_ending(self, cell: str) -> None:
        """A step was told to end. If Slurm preempts the job, all of them were, and the batch script hears nothing."""
        for daemon in self._daemons:
            if daemon.cell == cell:
                daemon.not_before = time.monotonic() + ENDING_PAUSE_S
        facts = await self._job_record()
        if facts.get("PreemptTime", "None") != "None":
            self.leave("Slurm preempts the job", save_first=False)

    # ---- Slurm's word, asked for beside the loop --------------------------------------------------------------------

    async def _slurm(self, *words: str) -> str:
        return await asyncio.to_thread(slurm.call, *words)

    async def _job_record(self) -> dict[str, str]:
        """`scontrol show job`; empty while the controller does not answer."""
        with contextlib.suppress(SlurmError):
            text = await self._slurm("scontrol", "-o", "show", "job", self.allocation.job)
            return dict(re.findall(r"(\w+)=(\S*)", text))
        return {}

    async def _present_nodes(self) -> list[str] | None:
        """The job's nodes now; None while the controller does not answer."""
        with contextlib.suppress(SlurmError):
            text = await self._slurm("squeue", "-h", "-j", self.allocation.job, "-o", "%N")
            return await asyncio.to_thread(slurm.hostnames, text.strip())
        return None

    async def _clock(self) -> None:
        """When the job ends."""
        while True:
            with contextlib.suppress(SlurmError):
                job = await asyncio.to_thread(slurm.job, self.allocation.job)
                ends_at = time.time() + job.left_s if job is not None and job.left_s is not None else 0.0
                if abs(ends_at - self._ends_at) > MOVED_S:
                    self._ends_at = ends_at
            await asyncio.sleep(CLOCK_S)

    async def _beat(self) -> None:
        """A word on the shared file system, for cells that can't hear us."""
        count = 0
        while True:
            word = f"{self.allocation.restarts}.{count}"
            with contextlib.suppress(OSError):  # a full disk is no reason to end: cells hear us anyway
                await asyncio.to_thread(self._run.write_atomic, "lives/supervisor.beat", word)
            count += 1
            await asyncio.sleep(BEAT_S)

    # ---- steps that end ---------------------------------------------------------------------------------------------

    async def _may_restart(self, daemon: Daemon) -> bool:
        if not daemon.cell:
            return True
        if daemon.cell in self.lost or self.stopping.is_set():
            return False
        present = await self._present_nodes()
        daemon.not_before = time.monotonic() + ASK_AGAIN_S
        if present is None:
            return False
        if daemon.node not in present:
            self._lose(daemon, f"{daemon.node} left the job")
            return False
        assert daemon.process is not None
        if daemon.process.returncode == REFUSED:  # its lock is held by an earlier life that is not over yet
            daemon.starts.clear()
        return True

    async def _keeps_ending(self, daemon: Daemon) -> None:
        if not daemon.cell:
            return await super()._keeps_ending(daemon)
        self._lose(daemon, f"it ended again and again on {daemon.node}; see log/{daemon.name}.log and .out")

    def _lose(self, daemon: Daemon, why: str) -> None:
        """The run goes on without this cell, or starts anew if it can't."""
        self.lost[daemon.cell] = why
        click.echo(f"{daemon.cell} is lost: {why}", err=True)
        left = len(self.places) - len(self.lost)
        if daemon.cell == "c0":
            if daemon.node == self.nodes[0] and "left the job" not in why:
                raise RunFailed(f"the core can't run: {why}", code=NO)
            self.leave("the core's node is lost", save_first=False)
        elif left < self._config.cluster.min_cells:
            self.leave(f"{left} cells are left, cluster.min_cells is {self._config.cluster.min_cells}", save_first=True)

    # ---- watching ---------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        self._beside(self._beat())
        self._beside(self._clock())
        await super()._watch()

    async def _look(self, client: Client) -> list[dict[str, Any]]:
        rows = await super()._look(client)
        if rows:
            await self._tell_facts(client, rows[0])
        self._plan = self._plan_of(rows[0] if rows else {})
        if self._plan.must_leave and not self.finished:
            self.leave(f"{self._plan.left_s:.0f} s are left of the job's time", save_first=True)
        return rows

    def _plan_of(self, row: dict[str, Any]) -> saving.SavePlan:
        """By the scheduler's measurements, and by our own clock while it does not answer."""
        window_s = row.get("save_window_s") or self._plan.window_s
        return saving.plan(save_s=0.0, micro_step_s=0.0, ends_at=self._ends_at, now=time.time(), window_s=window_s)

    async def _tell_facts(self, client: Client, row: dict[str, Any]) -> None:
        facts = m.JobFacts(
            job=self.allocation.job,
            restarts=self.allocation.restarts,
            nodes=tuple(dict.fromkeys(node for cell, node in self.places.items() if cell not in self.lost)),
            began_at=self._began_at,
            ends_at=self._ends_at,
            window_s=self._config.cluster.save_window_s,
            lost=tuple(self.lost),
        )
        knows = row.get("job") == facts.job and row.get("job_restarts") == facts.restarts
        if facts != self._told or not knows or list(row.get("lost_cells", ())) != list(facts.lost):
            with contextlib.suppress(NoAnswer):
                await client.ask(facts, timeout_s=2.0)
                self._told = facts

    # ---- the way out ------------------------------------------------------------------------------------------------

    async def _stop_all(self) -> None:
        if self.stopping.is_set() and self._save_first:
            await self._save()
        if self._comes_back:
            state = (await self._job_record()).get("JobState", "RUNNING")
            self._comes_back = state == "RUNNING" and not self.finished
        await super()._stop_all()
        if self._comes_back:
            await self._requeue()

    async def _save(self) -> None:
        """Until the core has saved, or the time for it is over: then it saves what it has as it ends."""
        client = Client(self._run, self._keys, "cellctl") if self._keys is not None else None
        if client is None:
            return
        until = time.time() + max(self._plan.window_s, SAVING_S)
        if self._ends_at:
            until = min(until, self._ends_at - saving.ENDING_S)
        try:
            told = False
            while self._save_first and time.time() < until:
                with contextlib.suppress(NoAnswer):
                    if not told:
                        await client.ask(m.LeaveJob(why=self.why), timeout_s=2.0)
                        told = True
                    row = (await client.ask(m.StatusRequest(), timeout_s=2.0)).rows[0]
                    if row["leaving"] and not row["saving"]:
                        click.echo(f"saved {row['saved']}", err=True)
                        return
                    told = bool(row["leaving"])  # a cellctl that was started again does not know
                await asyncio.sleep(0.2)
            click.echo("not saved by message: the ranks save as they end", err=True)
        finally:
            client.close()

    async def _stop(self, daemon: Daemon) -> None:
        """A step is asked by message: a signal to its srun would kill it without a word."""
        if daemon.name == "ex-pool" and self._comes_back and daemon.runs:
            assert daemon.process is not None
            daemon.process.kill()  # told to end it would end the executors' jobs; they wait for our next life instead
            await daemon.process.wait()
            return
        if not daemon.cell or not daemon.runs:
            return await super()._stop(daemon)
        assert daemon.process is not None and self._keys is not None
        client = Client(self._run, self._keys, daemon.name)
        try:
            await client.ask(m.OperatorOrder(verb="stop"), timeout_s=STEP_STOP_S)
        except NoAnswer:
            click.echo(f"{daemon.name} on {daemon.node} does not answer; its step is killed", err=True)
            return await super()._stop(daemon)
        finally:
            client.close()
        grace_s = max(TERM_BUDGET_S, self._plan.window_s if self._save_first else 0.0)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(daemon.process.wait(), grace_s)
        await super()._stop(daemon)

    async def _requeue(self) -> None:
        """Unless Slurm ends the job already. Repeats while the controller does not answer."""
        deadline = time.monotonic() + REQUEUE_S
        while time.monotonic() < deadline:
            facts = await self._job_record()
            if facts and facts.get("JobState") != "RUNNING":
                click.echo(f"not requeued: the job is {facts['JobState']}", err=True)
                return
            try:
                if facts:
                    await self._slurm("scontrol", "requeue", self.allocation.job)
                    self.requeued = True
                    click.echo("requeued: Slurm starts the job again", err=True)
                    return
            except SlurmError as error:
                if facts.get("Requeue") == "0":
                    raise RunFailed(f"saved, not requeued: {error}; submit it again to go on", code=NO) from None
                click.echo(f"can't requeue yet: {error}", err=True)
            await asyncio.sleep(ASK_AGAIN_S)
