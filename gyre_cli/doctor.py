"""`gyre doctor`: looks at this machine, at Slurm's settings, and, where there is an allocation or one is asked for, at
every node and between them. Starts one short step; leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import queue
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from gyre_base import config as configuration
from gyre_base.allocation import Allocation
from gyre_base.config import Config
from gyre_cli import checks, probe, slurm
from gyre_cli.findings import Finding, fail, failed, note, ok, warn

START_S = 60.0  # nodes of a new allocation, or of a full one where steps queue
LOOK_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Where:
    """Which nodes to look at: those of a job, or `nodes` new ones; none if both are empty."""

    job: str = ""
    nodes: int = 0
    partition: str = ""
    account: str = ""
    gpus: int = 0


def examine(folder: Path, config_file: Path | None, where: Where) -> list[Finding]:
    """All findings, in the order in which a reader wants them. Raises ConfigError."""
    if config_file is None and Path("gyre.toml").exists():
        config_file = Path("gyre.toml")
    config = configuration.load(config_file) if config_file is not None else Config()
    here = probe.facts(engine_python=config.engine.python)
    around = Allocation.here()
    findings = [*of_here(here, around), *of_own_folder(folder)]
    if not slurm.here():
        words = "no Slurm here: this machine alone was looked at"
        return [*findings, *checks.of_nodes([here], None, config)[1:], note("Slurm", words)]
    try:
        findings += checks.of_settings(slurm.settings())
        findings += of_partition(where.partition)
        findings += of_allocation(here, folder, config, where, around)
    except slurm.SlurmError as error:
        findings.append(fail("Slurm", str(error), "try again; `scontrol ping` says whether the controller is up"))
    return findings


def of_here(here: dict[str, Any], around: Allocation | None) -> list[Finding]:
    place = f"node {around.node} of job {around.job}" if around else f"{here['host']}, outside of a job"
    return [ok("gyre", f"{here['packages'].get('gyre-rl', 'not installed as a package')} on {place}")]


def of_partition(name: str) -> list[Finding]:
    if not name:
        return []
    record = slurm.partitions().get(name)
    if record is None:
        return [fail(f"partition {name}", "does not exist", "`sinfo` lists partitions")]
    return checks.of_partition(name, record)


def of_own_folder(folder: Path) -> list[Finding]:
    """Whether runs can live here at all: writable, renames, locks, space, length of paths."""
    kind, source = probe.mount_of(folder)
    try:
        with workplace(folder) as work:
            (work / "a").write_text("x")
            os.replace(work / "a", work / "b")
            with (work / "b").open("r+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return [fail("run folder", f"{folder}: {error.strerror}", "choose another folder for runs (--folder)")]
    free_gib = shutil.disk_usage(folder).free / 2**30
    findings = [ok("run folder", f"{folder}: writable, renames and locks ({kind} of {source})")]
    if kind in checks.LOCAL_TYPES and slurm.here():
        do = "choose a folder on a file system that all nodes share"
        findings.append(warn("run folder", f"{kind} belongs to this machine alone", do))
    if free_gib < 10:
        findings.append(warn("space", f"{free_gib:.1f} GiB free", "checkpoints and call logs need more"))
    return findings


@contextlib.contextmanager
def workplace(folder: Path) -> Iterator[Path]:
    """A folder of the doctor's own in `folder`. Raises OSError."""
    work = Path(tempfile.mkdtemp(prefix=".gyre-doctor-", dir=folder))
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


# ---- nodes ----------------------------------------------------------------------------------------------------------


def of_allocation(
    here: dict[str, Any], folder: Path, config: Config, where: Where, around: Allocation | None
) -> list[Finding]:
    """One step on every node of the job around us, of the job named, or of a small new allocation."""
    job = where.job or (around.job if around else "")
    if not job and not where.nodes:
        do = "gyre doctor --nodes 2 [--partition P --gpus N] asks Slurm for a minute; or run it inside an allocation"
        return [note("nodes", "not looked at", do)]
    line, count = step_line(job, config, where)
    try:
        with workplace(folder) as work:
            found = look_around(line, count, work, here, config, inside=around is not None)
        return [*found, *(of_job(job) if job and not failed(found) else [])]
    except OSError as error:
        return [fail("nodes", str(error), "choose another folder for runs (--folder)")]


def of_job(job: str) -> list[Finding]:
    return checks.of_job(slurm.parse_record(slurm.call("scontrol", "-o", "show", "job", job)))


def step_line(job: str, config: Config, where: Where) -> tuple[list[str], int]:
    """(srun line, number of nodes). Raises SlurmError for a job that does not run."""
    command = [*(config.cluster.python or (sys.executable,)), "-u", "-m", "gyre_cli.probe", config.engine.python]
    if job:
        found = slurm.job(job)
        if found is None or found.state != "RUNNING":
            raise slurm.SlurmError(f"job {job} does not run ({found.state if found else 'unknown to squeue'})")
        options = config.cluster.srun_options
        return slurm.step(job, command, nodes=found.count, options=options, gpus=True), found.count
    words = ["srun", f"-N{where.nodes}", f"-n{where.nodes}", "--ntasks-per-node=1", "-c1", "--mpi=none"]
    words += ["--job-name=gyre-doctor", "--time=5", f"--immediate={START_S:.0f}"]
    words += [f"--partition={where.partition}"] if where.partition else []
    words += [f"--account={where.account}"] if where.account else []
    words += [f"--gres=gpu:{where.gpus}"] if where.gpus else []
    return [*words, *config.cluster.srun_options, *command], where.nodes


def look_around(
    line: list[str], count: int, work: Path, here: dict[str, Any], config: Config, *, inside: bool
) -> list[Finding]:
    """Start the probes, tell each of the others, gather what they saw."""
    nonce = secrets.token_hex(8)
    with Step(line, work.parent) as step:
        hellos = step.stamped(count, START_S)
        nodes = sorted((n for _, n in hellos), key=lambda n: str(n["node"]))
        if len(nodes) < count:
            do = "see its words; more nodes or another partition may be free"
            return [fail("nodes", f"{len(nodes)} of {count} answered. {step.complaint()}", do)]
        findings = checks.of_nodes(nodes, here, config)
        with shared_folder(work, nonce):
            table = {n["node"]: [n["address"], n["port"]] for n in nodes}
            told = time.time()
            step.say({"nodes": table, "folder": str(work), "nonce": nonce})
            closed = [n["node"] for n in nodes if probe.connects(n["address"], n["port"])]
            looks = [look for _, look in step.stamped(count, LOOK_S)]
            if len(looks) < count:
                gone = sorted(set(table) - {look["node"] for look in looks})
                return [*findings, fail("nodes", f"no further word of {checks.listed(gone)}", "see their slurmd log")]
            unseen = [n for n in table if probe.read(work / f"from-{n}") != nonce]
    seen_by_all = all(look["visible_s"] is not None for look in looks)
    return [
        *findings,
        checks.of_reach(looks),
        checks.of_login(closed, inside),
        checks.of_skew(skews(hellos, told, looks)),
        *checks.of_folder(looks, str(work.parent), unseen if seen_by_all else []),
    ]


def skews(
    hellos: list[tuple[float, dict[str, Any]]], told: float, looks: list[dict[str, Any]]
) -> dict[str, tuple[float, float]]:
    """(seconds ahead of us, uncertainty) by node. A node's stamp on its first word, less our time when it came, is the
    least that it can be ahead; its stamp on our word, less our time when we said it, the most.
    """
    least = {n["node"]: n["at"] - came for came, n in hellos}
    most = {look["node"]: look["at"] - told for look in looks}
    return {name: ((least[name] + most[name]) / 2, (most[name] - least[name]) / 2) for name in most if name in least}


@contextlib.contextmanager
def shared_folder(work: Path, nonce: str) -> Iterator[None]:
    """A file to be seen, a file that is replaced all the time, and a lock that is held."""
    stop = threading.Event()

    def replace(number: int) -> None:
        (work / ".new").write_text(f"{number} {number}")
        os.replace(work / ".new", work / "replaced")

    def go_on() -> None:
        number = 1
        while not stop.wait(0.005):
            replace(number)
            number += 1

    replace(0)
    with (work / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (work / "nonce").write_text(nonce)
        thread = threading.Thread(target=go_on, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


class Step:
    """The srun that carries the probes: lines of JSON out, one line in for all."""

    def __init__(self, line: list[str], folder: Path) -> None:
        environment = slurm.clean_environment()
        self._process = subprocess.Popen(
            line,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=folder,
        )
        self._lines: queue.Queue[tuple[float, str] | None] = queue.Queue()
        self._words: list[str] = []
        assert self._process.stdout and self._process.stderr
        for target, pipe in ((self._read, self._process.stdout), (self._listen, self._process.stderr)):
            threading.Thread(target=target, args=(pipe,), daemon=True).start()

    def _read(self, pipe: IO[str]) -> None:
        for line in pipe:
            self._lines.put((time.time(), line))
        self._lines.put(None)

    def _listen(self, pipe: IO[str]) -> None:
        self._words.extend(pipe)

    def stamped(self, count: int, timeout_s: float) -> list[tuple[float, dict[str, Any]]]:
        """Up to `count` objects with their time of arrival; fewer if the step ends or is silent. Other words, as of a
        site's prolog, are passed over.
        """
        out: list[tuple[float, dict[str, Any]]] = []
        deadline = time.monotonic() + timeout_s
        while len(out) < count and (left := deadline - time.monotonic()) > 0:
            try:
                item = self._lines.get(timeout=left)
            except queue.Empty:
                break
            if item is None:
                break
            with contextlib.suppress(ValueError):
                found = json.loads(item[1])
                if isinstance(found, dict) and "node" in found:
                    out.append((item[0], found))
        return out

    def say(self, message: dict[str, Any]) -> None:
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()

    def complaint(self) -> str:
        """Why it said no more, once it has ended or been ended."""
        self.close()
        return slurm.said("".join(self._words[-5:]))

    def __enter__(self) -> Step:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """The probes end when their input does; one that does not is given up."""
        assert self._process.stdin
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
