"""An executor dies with everything it holds: nothing runs on, nothing recorded is lost, the work is given out again."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

from aiohttp import web

from cellctl.ledger import Ledger
from gyre_base import messages as m
from gyre_base.vocabulary import Outcome, Purpose
from gyre_exec import keeping
from tests.exec.rig import Cellctl, ExecutorProcess, nothing_left, processes_of, rig, task

MANY = 50


async def give(cellctl: Cellctl, execution: Any, body: dict[str, Any]) -> None:
    await cellctl.order(execution.id, body, 60.0, execution.attempt)


async def test_fifty_executions_in_flight_survive_the_death_of_their_executor(tmp_path: Path) -> None:
    """cellctl's real ledger says what is given out again. The relay dies too: it is the executor's."""
    release = asyncio.Event()

    async def hold(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await release.wait()
        return web.json_response({"choices": []})

    ledger = Ledger(retry_budget=1)
    members = ledger.open_group("t", MANY, Purpose.TRAIN, "0.0", 0.0)
    body = task(["say", "stdout", "began"], ["fork"], ["call", "x"], ("write", "answer", "seven77"))
    async with rig(tmp_path, hold, concurrent_per_executor=MANY) as (cellctl, proxyd, executor):
        for member in members:
            member.executor = "ex0"
            await give(cellctl, member, body)
        await cellctl.until(lambda: len(proxyd.requests) == MANY, 60.0)
        assert len(processes_of(executor.run)) == 2 * MANY
        await executor.stop(signal.SIGKILL)
        assert await nothing_left(executor.run, 20.0)
        assert cellctl.said == [], "a harness that we killed says nothing about the agent"

        lost = list(ledger.held_by("ex0"))
        assert {e.id for e in lost} == {e.id for e in members}
        again = [ledger.finish(e.id, Outcome.INFRA_FAILED, None, 0.0, 1.0) for e in lost]
        folders = [executor.run.path("executions", e.id) for e in members]
        assert {keeping.read(folder, "stdout") for folder in folders} == {b"began"}

        release.set()
        next_life = ExecutorProcess(executor.run)
        await cellctl.until(lambda: len(cellctl.hellos) == 2, 30.0)
        assert cellctl.hellos[1].holds == () and cellctl.hellos[1].life == cellctl.hellos[0].life + 1
        assert {keeping.read(folder, "stdout") for folder in folders} == {b"began"}
        assert all([p.name for p in folder.iterdir()] == ["stdout.zst"] for folder in folders)
        for attempt in again:
            assert attempt is not None and attempt.attempt == 1
            await give(cellctl, attempt, body)
        for attempt in again:
            assert attempt is not None
            done = await cellctl.outcome(attempt.id, 60.0)
            assert (done.outcome, done.score, done.calls) == (Outcome.SCORED, 0.7, 1), done
            assert ledger.finish(attempt.id, done.outcome, done.score, done.wall_s, 2.0) is None
        assert ledger.closes(members[0].group) and ledger.retries == MANY
        assert await next_life.stop() == 0
        assert await nothing_left(executor.run)

        journal = executor.run.path("journal", "ex0.jsonl").read_text().splitlines()
        orders = [line for line in journal if "execution.order" in line and json.loads(line)]
        assert len(orders) == 2 * MANY


async def test_the_budget_of_attempts_is_not_passed(tmp_path: Path) -> None:
    ledger = Ledger(retry_budget=1)
    (first,) = ledger.open_group("t", 1, Purpose.TRAIN, "0.0", 0.0)
    async with rig(tmp_path) as (cellctl, _proxyd, _executor):
        attempt: Any = first
        tries = 0
        while attempt is not None:
            await give(cellctl, attempt, task(["raise"]))
            done: m.ExecutionFinished = await cellctl.outcome(attempt.id)
            assert done.outcome is Outcome.INFRA_FAILED and "the agent lost its mind" in done.error
            tries += 1
            attempt = ledger.finish(attempt.id, done.outcome, done.score, done.wall_s, 1.0)
        assert tries == 2 and ledger.closes(first.group)
