"""`gyre quickstart`: warm start, run, report. Everything it starts are the real daemons with the real messages.

The example's own programs (tasks, teacher, harness, evaluator) are started as processes and never imported.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import orjson

from gyre_base import config as configuration
from gyre_base import messages as m
from gyre_base.allocation import Allocation
from gyre_base.bus import Client
from gyre_base.config import Config, ConfigError
from gyre_base.daemon import die_with_parent
from gyre_base.keys import load_keys
from gyre_base.rundir import RunDir
from gyre_cli import common, report, runs
from gyre_cli.display import Display
from gyre_cli.supervisor import RunFailed, Supervisor

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "quickstart"
WARM_START_SEED = 7
SHORT_STEPS, SHORT_HELDOUT = 10, 32  # a run too short to learn measures fewer tasks, unless told otherwise


def run(
    run_dir: str,
    *,
    steps: int | None,
    policy: str | None,
    seed: int | None,
    heldout: int | None,
    settings: tuple[str, ...],
    fresh: bool,
    quiet: bool,
    as_json: bool,
) -> int:
    """The whole quickstart; the exit code."""
    if not EXAMPLE.is_dir():
        raise ConfigError("the quickstart's files are not here: run it from a checkout of the repository")
    if fresh:
        remove(Path(run_dir))
    overrides: dict[str, Any] = {
        "scheduler.steps": steps,
        "scheduler.policy": policy,
        "scheduler.seed": seed,
        "evaluation.tasks": SHORT_HELDOUT if heldout is None and steps is not None and steps < SHORT_STEPS else heldout,
        **parse_settings(settings),
    }
    given = {key: value for key, value in overrides.items() if value is not None}
    check_writable(Path(run_dir))
    configuration.load(EXAMPLE / "gyre.toml", given)  # a wrong key is said before the warm start, not after it
    with Display("gyre quickstart: warm start", quiet=quiet) as display:
        model = warm_start(display)
    given["model.path"] = str(model)
    made, config = runs.create(run_dir, EXAMPLE / "gyre.toml", given)
    if made.path("summary.json").exists():
        click.echo(f"{made.root} is done already; --fresh starts anew", err=True)
        summary = orjson.loads(made.path("summary.json").read_bytes())
        common.print_json([summary]) if as_json else print_summary(summary)
        return 0
    return serve_and_report(made, config, title="gyre quickstart", quiet=quiet, as_json=as_json)


def parse_settings(settings: tuple[str, ...]) -> dict[str, Any]:
    """`key=value` with the value as TOML, or as a plain string if it is none."""
    import tomllib

    out: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise ConfigError(f"--set {setting}: write KEY=VALUE, such as trajectories.jmax=1")
        try:
            out[key] = tomllib.loads(f"v = {text}")["v"]
        except tomllib.TOMLDecodeError:
            out[key] = text
    return out


def remove(root: Path) -> None:
    """An earlier run of this name; anything else that lies there is not ours to remove."""
    if not root.exists():
        return
    if not (root / "run.json").exists():
        raise ConfigError(f"{root} exists and is not a run directory; choose another with --run")
    with RunDir(root).lock("supervisor"):
        pass
    shutil.rmtree(root)


def check_writable(root: Path) -> None:
    """Fail in the first second, not after the warm start."""
    runs_folder = root if root.exists() else root.parent
    try:
        runs_folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write {runs_folder}: {error.strerror}; choose another with --run") from None
    if not os.access(runs_folder, os.W_OK):
        raise ConfigError(f"cannot write {runs_folder}: permission denied; choose another with --run")


# ---- warm start ---------------------------------------------------------------------------------------------------


def warm_start(display: Display) -> Path:
    """The model to begin with: made once from its seed (about a minute), then found in the cache."""
    target = cache_folder() / f"quickstart-{digest_of_sources()}"
    if (target / "model.safetensors").exists():
        display.say(f"warm start: found in {target}")
        return target
    display.say("warm start: writing transcripts that show the form of the work and not the answers")
    work = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.rmtree(work, ignore_errors=True)
    try:
        work.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"cannot write the cache {work.parent}: {error.strerror}; set XDG_CACHE_HOME") from None
    transcripts = work / "transcripts.jsonl"
    teacher = [sys.executable, str(EXAMPLE / "teacher.py"), "--out", str(transcripts), "--seed", str(WARM_START_SEED)]
    run_step(teacher, "the teacher")
    train_warm_start(display, work, transcripts)
    for left in work.glob("*.jsonl"):
        left.unlink()
    shutil.rmtree(target, ignore_errors=True)
    os.replace(work, target)
    return target


def train_warm_start(display: Display, work: Path, transcripts: Path) -> None:
    """`celld.warmstart` in its own process; its progress lines go to the display."""
    command = [sys.executable, "-m", "celld.warmstart", "--train", str(transcripts)]
    command += ["--validation", str(transcripts.with_suffix(".validation.jsonl")), "--out", str(work)]
    command += ["--tokenizer", str(EXAMPLE / "tokenizer"), "--seed", str(WARM_START_SEED)]
    command += ["--threads", "1"]  # always one: the same count gives the same weights, and two wait for each other
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    with subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        preexec_fn=die_with_parent,
    ) as process:
        assert process.stderr is not None
        words: list[str] = []
        for line in process.stderr:
            words.append(line)
            if line.startswith("{"):
                display.say("warm start: " + " ".join(f"{k} {common.plain(v)}" for k, v in json.loads(line).items()))
    if process.returncode:
        raise ConfigError("the warm start failed:\n" + "".join(words[-20:]))


def run_step(command: list[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=die_with_parent)
    if done.returncode:
        raise ConfigError(f"{what} failed:\n{done.stderr[-2000:]}")


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gyre"


def digest_of_sources() -> str:
    """What the checkpoint depends on; another source makes another checkpoint."""
    names = (
        "teacher.py",
        "make_tasks.py",
        "harness.py",
        "rendering.py",
        "tokenizer/tokenizer.json",
        "tokenizer/chat_template.jinja",
    )
    files = [EXAMPLE / name for name in names] + [ROOT / "celld" / "warmstart.py", ROOT / "celld" / "tiny" / "model.py"]
    total = hashlib.sha256(str(WARM_START_SEED).encode())
    for path in files:
        total.update(path.read_bytes())
    return total.hexdigest()[:16]


# ---- the run ------------------------------------------------------------------------------------------------------


def serve_and_report(
    run: RunDir,
    config: Config,
    *,
    title: str,
    quiet: bool,
    as_json: bool = False,
    allocation: Allocation | None = None,
) -> int:
    """Serve until done; then the summary on stdout, its picture beside it. Exit code 1 if it failed or a signal ended
    it before, 0 if `gyre stop` did: the order was carried out. With an `allocation` the cells are steps of that job.
    """
    with Display(title, quiet=quiet) as display:
        display.say(f"run directory {run.root}; from another terminal: cellctl status --run {run.root}")

        async def serve() -> Supervisor:
            async def at_end() -> None:
                await write_report(run, config, supervisor.cpu_seconds())

            if allocation is None:
                supervisor = Supervisor(run, config, display.update, at_end)
            else:
                from gyre_cli.cluster import ClusterSupervisor

                supervisor = ClusterSupervisor(run, config, display.update, at_end, allocation)
            await supervisor.serve()
            return supervisor

        failure: RunFailed | None = None
        try:
            ended = asyncio.run(serve())
        except RunFailed as error:
            failure = error
    if failure is not None:
        common.fail(str(failure), failure.code)
    if ended.restarts:
        click.echo(f"daemons that were started again: {ended.restarts}", err=True)
    if not ended.finished:
        how = "stopped by order" if ended.ordered else "stopped"
        click.echo(f"{how}; the same command goes on from where it was", err=True)
        return 0 if ended.ordered else common.NO
    summary = orjson.loads(run.path("summary.json").read_bytes())
    common.print_json([summary]) if as_json else print_summary(summary)
    click.echo(f"picture: {run.path('run.png')}", err=True)
    return 0


async def write_report(run: RunDir, config: Config, cpu_s: dict[str, float]) -> None:
    """summary.json, run.png and run.svg from the daemons' last words."""
    status = (await rows(run, "cellctl", "status"))[0]
    results = await rows(run, "cellctl", "results")
    trajd = (await rows(run, "trajd", "status"))[0]
    summary = {**report.gather(run, config, status, results, trajd), "cpu_s": cpu_s}
    run.write_atomic("results.json", orjson.dumps(results).decode())
    run.write_atomic("summary.json", orjson.dumps(summary, option=orjson.OPT_INDENT_2).decode())
    await asyncio.to_thread(report.draw, run, summary, results, run.path("run.png"))


async def rows(run: RunDir, server: str, what: str) -> list[dict[str, Any]]:
    client = Client(run, load_keys(run), server)
    try:
        reply = await client.ask(m.StatusRequest(what=what), timeout_s=30.0)
        return [dict(row) for row in reply.rows]
    finally:
        client.close()


def print_summary(summary: dict[str, Any]) -> None:
    """The closing table, on stdout."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title="what the run amounted to", show_header=False)
    for what, value in report.lines(summary):
        table.add_row(Text(what), Text(value))
    Console().print(table)
