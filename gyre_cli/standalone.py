"""`gyre exec --task`: one execution, against a running run's proxyd or against a script behind a proxyd of its own."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import subprocess
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import click

from gyre_base import config as configuration
from gyre_base import messages as m
from gyre_base.bus import Client, NoAnswer, Server
from gyre_base.config import Config, ConfigError
from gyre_base.daemon import die_with_parent, run_main
from gyre_base.keys import load_keys, make_keys
from gyre_base.rundir import RunDir
from gyre_base.shards import proxyd_name, shard_of
from gyre_base.vocabulary import Purpose
from gyre_cli import common
from gyre_exec.fields import TaskError
from gyre_exec.harness import ADAPTERS
from gyre_exec.tasks import Task, load

CONFIG, SCRIPT = "gyre.toml", "script.json"
VERSION = "0.0"
CELL = "script"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wishes:
    """The command line."""

    task: str
    harness: str
    command: tuple[str, ...]
    script: Path | None
    config_file: Path | None
    workspace: str | None
    limit_s: float | None
    run_dir: str | None
    as_json: bool


def run(wishes: Wishes) -> int:
    """The exit code: 0 if the outcome counts, 1 if not."""
    wishes = dataclasses.replace(wishes, script=wishes.script.absolute() if wishes.script else None)
    task, body = find_task(wishes.task)
    if wishes.run_dir is not None and Path(wishes.run_dir, "run.json").exists() and wishes.script is None:
        root, config = _existing(wishes)
        live = True
    else:
        root, config = _made(wishes, task)
        live = False
    execution = free_name(root, task)
    limit_s = wishes.limit_s or task.limit_s or config.tasks.harness_limit_s
    order = m.ExecutionOrder(
        execution=execution, group="exec", task=body, attempt=0, purpose=Purpose.EVAL_SAMPLED, limit_s=limit_s
    )
    found: list[m.ExecutionFinished | None] = []
    why: list[str] = []

    async def main() -> None:
        from gyre_exec.single import run_one

        models = against_run(root, config, order) if live else against_script(root, config, order, wishes)
        async with models as hopeless:
            found.append(await run_one(root, config, order, hopeless))
            why.extend([hopeless.result()] if hopeless.done() else [])

    run_main(main, watch_loop=False)
    if found[0] is None:
        common.fail(why[0] if why else "stopped before it ended", common.NO)
    tell(found[0], root, wishes.as_json)
    return 0 if found[0].outcome.counts else common.NO


# ---- what is asked ------------------------------------------------------------------------------------------------


def find_task(given: str) -> tuple[Task, dict[str, Any]]:
    """PATH or PATH:ID; without an id, the first task. Gives the task and what an order says of it."""
    place, _, wanted = (given, "", "") if Path(given).exists() else given.rpartition(":")
    path = Path(place or wanted)
    if not path.exists():
        common.fail(f"no such task: {given}; name a JSONL, FILE:ID, or a task directory", common.USAGE)
    wanted = wanted if place != given else ""
    from gyre_base.tasklist import entries

    try:
        tasks = {task.id: task for task in load(path)}
        bodies = entries(path)
    except TaskError as error:
        common.fail(str(error), common.USAGE)
    if wanted and wanted not in tasks:
        common.fail(f"no task {wanted!r} in {path}; `gyre tasks list {path}` names them", common.USAGE)
    task = tasks[wanted] if wanted else next(iter(tasks.values()))
    return task, {**bodies[task.id], "task_file_dir": task.folder}


def beside(path: Path, name: str) -> Path | None:
    """The nearest file of this name, upward from the task's."""
    start = path.absolute()
    return next((folder / name for folder in (start, *start.parents[:3]) if (folder / name).is_file()), None)


def free_name(run: RunDir, task: Task) -> str:
    """The task's id and the first number that is free."""
    taken = {p.name for p in run.path("executions").iterdir()}
    return next(name for n in range(10**6) if (name := f"{task.id[:100]}.{n}") not in taken)


def with_wishes(config: Config, wishes: Wishes) -> Config:
    """The harness and workspace of the command line over those of the configuration."""
    known = ", ".join(sorted(ADAPTERS))
    if wishes.harness and wishes.harness not in ADAPTERS:
        common.fail(f"no harness is called {wishes.harness!r}; there are: {known}", common.USAGE)
    harness = config.tasks.harness
    if wishes.command:
        harness = (*((wishes.harness,) if wishes.harness else ()), *wishes.command)
    elif wishes.harness and wishes.harness != "command":
        harness = (wishes.harness,)
    if not harness:
        words = "what shall run? put the harness's command after `--`, or tasks.harness into gyre.toml"
        common.fail(words, common.USAGE)
    tasks = dataclasses.replace(
        config.tasks, harness=harness, keep_workspaces=True, workspace=wishes.workspace or config.tasks.workspace
    )
    return dataclasses.replace(config, tasks=tasks)


def _existing(wishes: Wishes) -> tuple[RunDir, Config]:
    root = RunDir.open(wishes.run_dir or "")
    return root, with_wishes(configuration.from_json(root.path("run.json").read_text()), wishes)


def _made(wishes: Wishes, task: Task) -> tuple[RunDir, Config]:
    """A run directory for the scripted engine: --run, else runs/exec."""
    folder = Path(task.folder)
    file = wishes.config_file or beside(folder, CONFIG)
    config = configuration.load(file) if file else Config()
    config = with_wishes(config, wishes)
    if not config.model.tokenizer:
        hint = "name a configuration with --config, or put gyre.toml beside the tasks"
        raise ConfigError(f"model.tokenizer is not set, which a scripted engine needs; {hint}")
    root = RunDir.create_new(wishes.run_dir or "runs/exec")
    make_keys(root)
    root.write_atomic("run.json", configuration.to_json(config))
    if file and not wishes.command:
        os.chdir(file.parent)  # relative files of that harness's command are beside its configuration
    return root, config


# ---- who answers --------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def against_run(run: RunDir, config: Config, order: m.ExecutionOrder) -> AsyncIterator[asyncio.Future[str]]:
    """The shard of a run that serves: it is told of the execution, and that it is over."""
    client = Client(run, load_keys(run), proxyd_name(shard_of(order.execution, config.proxyd.shards)))
    temperature = config.rollout.temperature
    opening = m.OpenExecution(execution=order.execution, purpose=order.purpose, temperature=temperature)
    try:
        answer = await client.ask(opening, timeout_s=5.0)
        if not isinstance(answer, m.Done):
            raise ConfigError(f"proxyd does not take this execution: {answer}")
        yield asyncio.get_running_loop().create_future()
        with contextlib.suppress(NoAnswer):
            await client.ask(m.CloseExecution(execution=order.execution), timeout_s=5.0)
    finally:
        client.close()


@contextlib.asynccontextmanager
async def against_script(
    run: RunDir, config: Config, order: m.ExecutionOrder, wishes: Wishes
) -> AsyncIterator[asyncio.Future[str]]:
    """A scripted engine, a proxyd of its own, and the little that it needs of a scheduler."""
    from gyre_cli.scripted import ScriptedEngine, read_script

    script = wishes.script or beside(Path(order.task["task_file_dir"]), SCRIPT)
    if script is None:
        hint = "give the model's answers with --script FILE, or --run DIR of a run that serves"
        raise ConfigError(f"who shall answer? {hint}")
    engine = ScriptedEngine(read_script(script), Path(config.model.tokenizer), VERSION)
    await engine.start()
    keys = load_keys(run)
    server = Server(run, keys, kind="cellctl", name="cellctl", life=run.next_life("cellctl"), bind="127.0.0.1")
    server.start()
    telling = asyncio.ensure_future(_tell_proxyd(server, order, engine.url, config))
    shard = shard_of(order.execution, config.proxyd.shards)  # the only one that it needs
    proxyd = await _start_proxyd(run, shard)
    ended = asyncio.ensure_future(_ended(proxyd, run, proxyd_name(shard)))
    try:
        yield ended
    finally:
        ended.cancel()
        with contextlib.suppress(ProcessLookupError):
            proxyd.terminate()
        await proxyd.wait()
        telling.cancel()
        server.close()
        await engine.stop()
    if engine.ran_out:
        click.echo(f"the script ran out: {engine.ran_out} calls were answered with nothing ({script})", err=True)


async def _start_proxyd(run: RunDir, shard: int) -> Process:
    command = [sys.executable, "-m", "gyre_cli.proxyd", "run", "--shard", str(shard), "--run", str(run.root)]
    with open(run.path("log", f"{proxyd_name(shard)}.out"), "wb") as output:
        return await asyncio.create_subprocess_exec(
            *command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, preexec_fn=die_with_parent
        )


async def _ended(proxyd: Process, run: RunDir, name: str) -> str:
    """Its last words, when it has ended: without it nobody answers."""
    await proxyd.wait()
    words = run.path("log", f"{name}.out").read_text(errors="replace").strip().splitlines()
    last = words[-1].removeprefix("error: ") if words else f"no word in {run.path('log', f'{name}.log')}"
    return f"{name} ended with code {proxyd.returncode}: {last}"


async def _tell_proxyd(server: Server, order: m.ExecutionOrder, url: str, config: Config) -> None:
    """Answers each hello as the scheduler would: the open execution and the one engine."""
    line = m.Engine(cell=CELL, url=url, version=VERSION, order=0, slots=8, serving=True)
    opening = m.OpenExecution(execution=order.execution, purpose=order.purpose, temperature=config.rollout.temperature)
    async for received in server:
        if isinstance(received.message, m.Hello):
            await server.send(received.peer, m.Welcome(life=0), received.correlation)
            await server.send(received.peer, opening)
            await server.send(received.peer, m.EngineTable(number=1, engines=(line,)))


# ---- what came of it ----------------------------------------------------------------------------------------------


def tell(finished: m.ExecutionFinished, run: RunDir, as_json: bool) -> None:
    from gyre_base import wire

    row = {k: v for k, v in wire.to_json(finished).items() if k != "tag"}
    if as_json:
        common.print_json([row])
    else:
        passed = sum(value >= 1 for value in finished.parts.values())
        parts = {"parts": f"{passed} of {len(finished.parts)} in full"} if finished.parts else {}
        common.print_tables([{**{k: v for k, v in row.items() if k != "parts"}, **parts}])
    click.echo(f"more: gyre show {finished.execution} --run {run.root}", err=True)
