"""Clocks and quotas with real processes: what is charged to a harness and what is not."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from gyre_base import bus
from gyre_base import messages as m
from gyre_base.keys import make_keys
from gyre_base.vocabulary import Outcome
from gyre_exec.quota import usage
from tests.exec.rig import nothing_left, rig, task
from tests.exec.test_walls import needs_bwrap

WRITE = ("write", "answer", "seven77")
KINDS = ["plain", pytest.param("bwrap", marks=needs_bwrap)]


@pytest.mark.parametrize("kind", KINDS)
async def test_a_harness_that_fills_its_disk_is_ended_and_its_work_is_scored(tmp_path: Path, kind: str) -> None:
    async with rig(tmp_path, workspace=kind, disk_mib=8, grace_s=0.2) as (cellctl, _proxyd, executor):
        full = task(["call", "x"], ["stubborn"], WRITE, ["fill", "waste", 40], ["sleep", 60])
        await cellctl.order("full", full, 60.0)
        await cellctl.order("big", task(["call", "x"], WRITE, ["grow", "waste", 40]), 60.0)
        full, big = await cellctl.outcome("full"), await cellctl.outcome("big")
        assert (full.outcome, full.score) == (Outcome.PARTIAL, 0.7)
        assert "MiB on disk; the run allows 8 (tasks.disk_mib)" in full.error
        assert (big.outcome, big.score) == (Outcome.SCORED, 0.7), (
            "one file can not outgrow it: that is the agent's error"
        )
        assert big.exit_code and full.wall_s < 30.0
        assert await nothing_left(executor.run)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_harness_with_too_many_processes_is_ended_with_all_of_them(tmp_path: Path, kind: str) -> None:
    async with rig(tmp_path, workspace=kind, processes=30, grace_s=0.2) as (cellctl, _proxyd, executor):
        await cellctl.order("swarm", task(["call", "x"], WRITE, ["swarm", 40], ["sleep", 60]), 60.0)
        await cellctl.order("few", task(["call", "x"], WRITE, ["swarm", 10]), 60.0)
        swarm, few = await cellctl.outcome("swarm"), await cellctl.outcome("few")
        assert (swarm.outcome, swarm.score) == (Outcome.PARTIAL, 0.7)
        assert "processes at once; the run allows 30 (tasks.processes)" in swarm.error
        assert few.outcome is Outcome.SCORED
        assert await nothing_left(executor.run)


async def test_waits_of_ours_are_credited_and_shown_while_it_runs(tmp_path: Path) -> None:
    async def held(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(1.5)
        return web.json_response({"choices": []}, headers={"X-Gyre-Waited": "1.4"})

    async with rig(tmp_path, held) as (cellctl, _proxyd, executor):
        await cellctl.order("e1", task(["call", "x"], ["call", "y"], WRITE, ["sleep", 60]) | {"limit_s": 2.0}, 30.0)
        client = bus.Client(executor.run, make_keys(executor.run), "ex0")
        row: dict[str, Any] = {}
        async with asyncio.timeout(10):
            while not row.get("waited_s"):
                await asyncio.sleep(0.1)
                row = next(iter((await client.ask(m.StatusRequest(what="executions"))).rows), {})
        assert (row["limit_s"], row["waited_s"], row["state"]) == (2.0, 1.4, "running")
        client.close()
        done = await cellctl.outcome("e1")
        assert (done.outcome, done.score, done.waited_s) == (Outcome.PARTIAL, 0.7, 2.8)
        assert done.wall_s >= 4.8, "the task's own limit of 2 s, moved by what it waited for us"


async def test_the_overall_limit_ends_what_we_keep_waiting_and_that_is_our_failure(tmp_path: Path) -> None:
    async def never(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(status=503)

    async with rig(tmp_path, never, overall_limit_s=2.0) as (cellctl, _proxyd, executor):
        await cellctl.order("e1", task(WRITE, ["call", "x"]), 1.0)
        done = await cellctl.outcome("e1")
        assert (done.outcome, done.score) == (Outcome.INFRA_FAILED, None) and "overall limit" in done.error
        assert await nothing_left(executor.run)


async def test_a_harness_that_ends_well_without_an_answer_is_measured_by_what_is_there(tmp_path: Path) -> None:
    async with rig(tmp_path) as (cellctl, _proxyd, _executor):
        await cellctl.order("nothing", task(["call", "x"], ["exit", 0]))
        await cellctl.order("half", task(["call", "x"], WRITE, ["exit", 0]))
        assert (await cellctl.outcome("nothing")).outcome is Outcome.NO_ARTIFACT
        assert (await cellctl.outcome("half")).outcome is Outcome.SCORED


def test_usage_counts_blocks_not_sizes_and_follows_no_link(tmp_path: Path) -> None:
    place = tmp_path / "w"
    (place / "deep" / "er").mkdir(parents=True)
    (place / "deep" / "er" / "file").write_bytes(os.urandom(1 << 20))
    with open(place / "sparse", "wb") as file:
        file.truncate(1 << 30)
    (place / "out").symlink_to("/usr")
    (place / "loop").symlink_to(place)
    assert 1 << 20 <= usage(place, 1 << 40) < 2 << 20
    assert usage(tmp_path / "none", 1) == 0
