"""Executors as jobs: submitted through submitit to a Slurm partition, or as local processes by the same code.

`python -m gyre_exec.launch --run DIR` keeps the pool of a run (pool.py decides) until TERM, then ends its jobs. Owns
<run>/submitit (what submitit writes) and <run>/pool.json (name -> job), by which a later life finds its jobs again.
submitit is imported here and nowhere else, and only when something is launched.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import shlex
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gyre_base import bus, config, daemon
from gyre_base import messages as m
from gyre_base.clock import WallClock
from gyre_base.journal import Journal
from gyre_base.keys import load_keys
from gyre_base.rundir import RunDir, RunDirError, RunLocked
from gyre_exec import pool

log = logging.getLogger(__name__)
LOOK_S = 1.0
SLURM_LOOK_S = 10.0  # squeue is asked no oftener
SLURM_CALL_S = 10.0
SLURM_UNSEEN_S = 60.0  # an array just submitted may not be in squeue's answer yet; a local process is at once
END_S = 15.0  # for executors to leave when the pool ends
LONGEST_LOCAL_MIN = 60 * 24 * 365
MINUTES = 24 * 60  # of a Slurm job unless executor_options say another `time`


class LaunchError(RuntimeError):
    """Jobs can't be submitted: says what to do."""


class Away(LaunchError):
    """Nobody answers just now; the next look asks again."""


def serve_executor(run_dir: str, name: str) -> int:
    """What a job runs: one executor until TERM. submitit ignores TERM and means "soon over" by USR2: both end it."""
    from gyre_exec import daemon as executor

    signal.signal(signal.SIGUSR2, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    return executor.main(["--run", run_dir, "--name", name])


# ---- where jobs run -----------------------------------------------------------------------------------------------


class Backend(ABC):
    """One kind of place for jobs. `states` says pending or running; a job that has ended is absent."""

    def __init__(self, run: RunDir, settings: config.ClusterConfig) -> None:
        self.run, self.settings = run, settings
        self.folder = run.path("submitit")

    @abstractmethod
    def submit(self, names: Sequence[str]) -> dict[str, str]:
        """Job ids by name. Raises LaunchError."""

    @abstractmethod
    def states(self, jobs: Mapping[str, str]) -> dict[str, str]:
        """By name. Raises LaunchError if nobody can tell."""

    @abstractmethod
    def cancel(self, jobs: Mapping[str, str]) -> None:
        """TERM to the executors of these jobs."""


class Local(Backend):
    """Processes of this machine: submitit's controller, and below it the executor."""

    def __init__(self, run: RunDir, settings: config.ClusterConfig) -> None:
        super().__init__(run, settings)
        self._jobs: dict[str, Any] = {}

    def submit(self, names: Sequence[str]) -> dict[str, str]:
        submitit = _submitit()
        executor = submitit.LocalExecutor(folder=self.folder)
        executor.update_parameters(timeout_min=LONGEST_LOCAL_MIN, signal_delay_s=0, stderr_to_stdout=True)
        made = {name: executor.submit(serve_executor, str(self.run.root), name) for name in names}
        self._jobs |= {job.job_id: job for job in made.values()}
        return {name: job.job_id for name, job in made.items()}

    def states(self, jobs: Mapping[str, str]) -> dict[str, str]:
        return {name: "running" for name, job in jobs.items() if self._runs(name, job)}

    def _runs(self, name: str, job: str) -> bool:
        if job in self._jobs:
            return bool(self._jobs[job].state == "RUNNING")
        try:  # a job of an earlier life of the pool: not our child, known by the executor's lock
            with self.run.lock(name):
                return False
        except RunLocked:
            return True

    def cancel(self, jobs: Mapping[str, str]) -> None:
        for name, job in jobs.items():
            with contextlib.suppress(ProcessLookupError):
                if job in self._jobs:
                    os.kill(int(job), signal.SIGTERM)
                elif self._runs(name, job):  # its number may be another's by now: the lock says who it is
                    os.kill(int(self.run.path("lives", f"{name}.lock").read_text().partition("@")[0]), signal.SIGTERM)


class Slurm(Backend):
    """Jobs of a CPU partition, several at once as an array, requeued by Slurm when it takes their node away."""

    def submit(self, names: Sequence[str]) -> dict[str, str]:
        executor = self.executor()
        with _own_environment(), _said_as_launch_error():
            with executor.batch():
                jobs = [executor.submit(serve_executor, str(self.run.root), name) for name in names]
            return {name: job.job_id for name, job in zip(names, jobs, strict=True)}

    def executor(self) -> Any:
        """submitit's, with the run's options. Raises LaunchError."""
        python = shlex.join(self.settings.python) or None
        with _said_as_launch_error():
            executor = _submitit().SlurmExecutor(folder=self.folder, python=python)
            executor.update_parameters(**self.parameters())
        return executor

    def parameters(self) -> dict[str, Any]:
        """What sbatch is told. Words that submitit has no name for go to sbatch as they are."""
        from submitit.slurm.slurm import _get_default_parameters

        given: dict[str, Any] = dict(option.partition("=")[::2] for option in self.settings.executor_options)
        known = _get_default_parameters()
        ours: dict[str, Any] = {
            "job_name": f"gyre-ex-{self.run.root.name}",
            "partition": self.settings.executor_partition,
            "nodes": 1,
            "ntasks_per_node": 1,
            "time": MINUTES,
            "stderr_to_stdout": True,
            **{k: int(v) if str(v).isdigit() else v for k, v in given.items() if k in known},
        }
        return {
            **ours,
            "additional_parameters": {"requeue": True, **{k: v for k, v in given.items() if k not in known}},
        }

    def states(self, jobs: Mapping[str, str]) -> dict[str, str]:
        if not jobs:
            return {}
        heads = ",".join(sorted({job.partition("_")[0] for job in jobs.values()}))
        text = _slurm("squeue", "-h", "-r", "-j", heads, "-o", "%i|%T", fine=(1,))
        found = dict(line.split("|") for line in text.split())
        ended = {"COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "COMPLETING"}
        alive = {name: found[job] for name, job in jobs.items() if found.get(job, "COMPLETED") not in ended}
        return {name: "running" if state == "RUNNING" else "pending" for name, state in alive.items()}

    def cancel(self, jobs: Mapping[str, str]) -> None:
        if jobs:
            _slurm("scancel", *jobs.values())


def _submitit() -> Any:
    try:
        import submitit
    except ImportError:
        raise LaunchError("submitit is not installed: pip install 'gyre-rl[launch]'") from None
    return submitit


@contextlib.contextmanager
def _said_as_launch_error() -> Any:
    try:
        yield
    except LaunchError:
        raise
    except Exception as error:  # submitit raises RuntimeError, ValueError and its own, by what went wrong
        kind = Away if "contact slurm controller" in str(error) or "timed out" in str(error) else LaunchError
        raise kind(f"no job can be submitted: {str(error).strip()[:500]}") from None


@contextlib.contextmanager
def _own_environment() -> Any:
    """sbatch inside a job would hand the outer job's variables on to the new one."""
    kept = {k: v for k, v in os.environ.items() if k.startswith(("SLURM_", "SBATCH_")) and k != "SLURM_CONF"}
    for name in kept:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(kept)


def _slurm(*words: str, fine: tuple[int, ...] = ()) -> str:
    """One call of a Slurm client. Raises LaunchError; `fine` exit codes are an answer ("no such job")."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=SLURM_CALL_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Away(f"{words[0]} does not answer: {error}") from None
    if done.returncode and not (done.returncode in fine and "nvalid job id" in done.stderr):
        raise LaunchError(f"{words[0]}: {done.stderr.strip()[:300]}")
    return done.stdout


# ---- the pool's shell ---------------------------------------------------------------------------------------------


class Keeper:
    """Looks, lets the core decide, and does it. Nothing is decided here."""

    def __init__(self, run: RunDir, settings: config.Config, backend: Backend, life: int) -> None:
        cluster = settings.cluster
        self.run, self.backend = run, backend
        self.core = pool.Pool(bounds_of(settings))
        self.keys = load_keys(run)
        self.client = bus.Client(run, self.keys, "cellctl", identity=f"pool:{life}")
        self.clock = WallClock()
        self.journal = Journal(run.path("journal", "ex-pool.jsonl"))
        self.jobs: dict[str, str] = _read_jobs(run)
        self.look_s = SLURM_LOOK_S if cluster.executor_partition else LOOK_S
        self._submitted = bool(self.jobs)
        self._said = ""

    async def serve(self, stopping: asyncio.Event) -> None:
        while not stopping.is_set():
            try:
                await self._look()
                self._said = ""
            except (bus.NoAnswer, LaunchError) as error:  # the next look asks again
                if isinstance(error, LaunchError) and not isinstance(error, Away) and not self._submitted:
                    raise  # a first job that is refused will be refused again
                if str(error) != self._said:
                    log.warning("%s", error)
                self._said = str(error)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stopping.wait(), self.look_s)
        await self._end()

    async def _look(self) -> None:
        reply = await self.client.ask(m.StatusRequest(), timeout_s=4.0)
        rows = [dict(row) for row in reply.rows]
        held = {str(row["executor"]): int(row["held"]) for row in rows if "executor" in row}
        jobs = await asyncio.to_thread(self.backend.states, self.jobs)
        self._keep({name: self.jobs[name] for name in jobs})
        seen = pool.Seen(level=int(rows[0]["water_level"]), held=held, jobs=jobs)
        now = self.clock.now()
        commands = self.core.handle(seen, now)
        if commands:
            self.journal.write(now, seen, commands)
        for command in commands:
            await self._perform(command)

    async def _perform(self, command: Any) -> None:
        match command:
            case pool.Submit(names=names):
                made = await asyncio.to_thread(self.backend.submit, names)
                self._submitted = True
                self._keep({**self.jobs, **made})
                log.info("submitted %s", ", ".join(f"{name} as {job}" for name, job in made.items()))
            case pool.Withdraw(name=name):
                await asyncio.to_thread(self.backend.cancel, {name: self.jobs[name]})
                log.info("withdrew %s: no work for it", name)
            case pool.Leave(name=name):
                await self._dismiss(name)

    async def _dismiss(self, name: str) -> None:
        client = bus.Client(self.run, self.keys, name)
        try:
            answer = await client.ask(m.OperatorOrder(verb="leave"), timeout_s=4.0)
            log.info("%s %s", name, "leaves: it stood idle" if isinstance(answer, m.Done) else f"stays: {answer}")
        except bus.NoAnswer as error:
            log.warning("%s does not answer: %s", name, error)
        finally:
            client.close()

    def _keep(self, jobs: dict[str, str]) -> None:
        if jobs != self.jobs:
            self.jobs = jobs
            self.run.write_atomic("pool.json", json.dumps(jobs))

    async def _end(self) -> None:
        """All jobs; executors end what they run and say goodbye."""
        with contextlib.suppress(LaunchError):
            await asyncio.to_thread(self.backend.cancel, self.jobs)
            for _ in range(int(END_S / 0.25)):
                if not await asyncio.to_thread(self.backend.states, self.jobs):
                    self._keep({})
                    break
                await asyncio.sleep(0.25)
        self.client.close()
        self.journal.close()


def bounds_of(settings: config.Config) -> pool.Bounds:
    cluster = settings.cluster
    return pool.Bounds(
        least=cluster.executors,
        most=max(cluster.executors, cluster.executors_max),
        slots=settings.tasks.concurrent_per_executor,
        idle_s=cluster.executor_idle_s,
        unseen_s=SLURM_UNSEEN_S if cluster.executor_partition else 0.0,
    )


def _read_jobs(run: RunDir) -> dict[str, str]:
    try:
        return dict(json.loads(run.path("pool.json").read_text()))
    except FileNotFoundError:
        return {}


def backend_of(run: RunDir, settings: config.ClusterConfig) -> Backend:
    return Slurm(run, settings) if settings.executor_partition else Local(run, settings)


async def keep_pool(run_dir: str | Path) -> None:
    """Keep the pool of a run until TERM. Raises RunDirError, ConfigError, LaunchError."""
    run = RunDir.open(run_dir)
    settings = config.from_json(run.path("run.json").read_text())
    _submitit()
    with run.lock("ex-pool"):
        stopping = asyncio.Event()
        daemon.stop_on_signals(stopping)
        keeper = Keeper(run, settings, backend_of(run, settings.cluster), run.next_life("ex-pool"))
        await keeper.serve(stopping)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m gyre_exec.launch", description="Keep the executors of a run.")
    parser.add_argument("--run", required=True, help="the run directory")
    options = parser.parse_args(argv)
    logs = Path(options.run, "log")
    daemon.log_to(logs / "ex-pool.log" if logs.is_dir() else None, name="ex-pool")
    try:
        daemon.run_main(lambda: keep_pool(options.run))
    except RunDirError as error:
        print(f"pool: {error}", file=sys.stderr)
        return 4
    except (config.ConfigError, LaunchError) as error:
        print(f"pool: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
