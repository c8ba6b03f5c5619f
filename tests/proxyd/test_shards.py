"""Several proxyd of one run: an execution belongs to one, they share nothing, and together they overload no engine."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
from collections import Counter
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre_base.config import ConfigError, from_tree
from gyre_base.messages import CellDrained, DrainCell
from gyre_base.shards import proxyd_name, shard_of
from proxyd.balance import share
from proxyd.core import Router
from proxyd.events import Submit
from tests.proxyd.fakes import REPOSITORY, World
from tests.proxyd.test_core import arrived, ended, only, opened, table
from tests.proxyd.test_delivery import ANSWER, Harness

TWO = {"shards": 2}
TASK = [{"role": "user", "content": "task"}]


def named(shard: int, shards: int = 2, count: int = 1) -> list[str]:
    """Executions of a shard."""
    names = (f"g{n:05}-00.0" for n in range(10_000))
    return [name for name in names if shard_of(name, shards) == shard][:count]


# ---- by name alone --------------------------------------------------------------------------------------------------


def test_an_execution_has_the_same_shard_in_every_process_and_life() -> None:
    """Part of the run directory's format: the records of an execution lie in its shard's files."""
    assert [shard_of(f"g00000-{n:02}.0", 4) for n in range(8)] == [0, 0, 0, 3, 3, 3, 0, 2]
    assert shard_of("anything", 1) == 0


@given(shards=st.integers(1, 16), attempt=st.integers(0, 3))
def test_executions_of_a_run_are_spread_evenly(shards: int, attempt: int) -> None:
    count = 2000
    found = Counter(shard_of(f"g{n // 16:05}-{n % 16:02}.{attempt}", shards) for n in range(count))
    assert set(found) == set(range(shards))
    mean = count / shards
    assert max(abs(n - mean) for n in found.values()) < 5 * mean**0.5


@pytest.mark.parametrize(
    ("tree", "complaint"),
    [
        ({"proxyd": {"shards": 0}}, "proxyd.shards must be at least 1"),
        ({"proxyd": {"shards": 257}}, "proxyd.shards must be at most 256"),
        ({"proxyd": {"shards": 5}, "engine": {"max_running_requests": 4}}, "each needs at least one"),
        ({"proxyd": {"shard": 2}}, "did you mean proxyd.shards?"),
    ],
)
def test_a_number_of_shards_that_can_not_be_is_refused(tree: dict[str, dict[str, int]], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint.replace("?", r"\?")):
        from_tree(tree)


# ---- the engines' room ----------------------------------------------------------------------------------------------


@given(shards=st.integers(1, 16), more=st.integers(0, 100))
def test_shares_add_up_and_each_shard_has_one(shards: int, more: int) -> None:
    cap = shards + more
    shares = [share(cap, shard, shards) for shard in range(shards)]
    assert sum(shares) == cap and min(shares) >= 1 and max(shares) - min(shares) <= 1
    assert [share(0, shard, shards) for shard in range(shards)] == [0] * shards


@given(seed=st.integers(0, 10**6), shards=st.integers(1, 4), more=st.integers(0, 6))
def test_together_shards_never_overload_an_engine_and_answer_every_call(seed: int, shards: int, more: int) -> None:
    rng, cap = random.Random(seed), shards + more
    routers = [Router(cap, shard, shards) for shard in range(shards)]
    flying: list[Submit] = []
    answered: set[str] = set()
    waiting = {f"e{n}" for n in range(40)}
    for router in routers:
        router.handle(table(1, "a", "b", slots=4), 0.0)

    def took(router: Router, event: object) -> None:
        flying.extend(only(router.handle(event, 1.0), Submit))
        router.check()
        at = Counter(submit.cell for submit in flying)
        assert max(at.values(), default=0) <= cap, "more calls at an engine than it runs at once"

    for name in sorted(waiting):
        router = routers[shard_of(name, shards)]
        router.handle(opened(name), 0.0)
        took(router, arrived(f"{name}:k", name))
        if flying and rng.random() < 0.4:
            answered.add(one := (done := flying.pop(rng.randrange(len(flying)))).call)
            took(routers[shard_of(one.partition(":")[0], shards)], ended(done))
    while flying:
        done = flying.pop(rng.randrange(len(flying)))
        answered.add(done.call)
        took(routers[shard_of(done.call.partition(":")[0], shards)], ended(done))
    assert {name.partition(":")[0] for name in answered} == waiting


def test_a_shard_takes_what_it_can_not_see_to_be_like_its_own() -> None:
    """Of two shards each with 4 of 8 homes at one engine of 8 slots: it is full, not half empty."""
    alone, one_of_two = Router(), Router(shard=0, shards=2)
    for core in (alone, one_of_two):
        core.handle(table(1, "a", slots=8), 0.0)
        for n in range(4):
            core.handle(opened(f"e{n}"), 0.0)
            core.handle(arrived(f"k{n}", f"e{n}"), 0.0)
    loads = [core.balance.load(core.engines["a"], core.on_cell, 0.0) for core in (alone, one_of_two)]
    assert loads == [0.5, 1.0]


@given(shards=st.integers(1, 256), calls=st.integers(1, 20))
def test_request_ids_are_of_one_length_and_name_their_shard(shards: int, calls: int) -> None:
    """Engines abort whatever begins with the id they are told: no id may begin another."""
    rids = []
    for shard in {0, shards // 2, shards - 1}:
        core = Router(0, shard, shards)
        core.handle(table(1, "a"), 0.0)
        core.handle(opened("e"), 0.0)
        sent = [s for n in range(calls) for s in only(core.handle(arrived(f"k{n}"), 0.0), Submit)]
        assert {int(s.rid[:2], 16) for s in sent} == {shard}
        rids += [s.rid for s in sent]
    assert {len(rid) for rid in rids} == {32} and len(set(rids)) == len(rids)


# ---- real processes -------------------------------------------------------------------------------------------------


async def test_one_shard_killed_leaves_the_calls_of_the_other_untouched(tmp_path: Path, tokenizer: Path) -> None:
    async with World(tmp_path / "run", tokenizer, proxyd=TWO) as world:
        harness, ((dead,), (alive,)) = Harness(world), (named(0), named(1))
        await harness.relay.start()
        engine = await world.engine("a", lambda prompt: world.says(ANSWER), hold_after=4)
        await harness.begin(dead)
        await harness.begin(alive)
        await world.cellctl.serve(engine)
        calls = {name: asyncio.create_task(harness.whole(name, "messages", stream=True)) for name in (dead, alive)}
        await world.cellctl.until(lambda: list(engine.running.values()) == [4, 4])
        assert sorted(r["rid"][:2] for r in engine.requests) == ["00", "01"]
        assert not talk_to_each_other(world)
        await world.stop_proxyd(signal.SIGKILL, shard=0)
        await world.cellctl.until(lambda: len(engine.running) == 1)
        engine.release()
        assert b"message_stop" in await calls[alive], "its shard was not touched"
        assert not calls[dead].done()

        for folder in ("journal", "calls"):  # what belongs to the other can't even be read any more
            for path in world.run.path(folder).glob("proxyd-1*"):
                with path.open("ab") as file:
                    file.write(b'{"tag":"execution.open" torn\n')
        await world.start_proxyd(0)
        assert world.cellctl.hellos[-1].holds == (dead,), "it holds its own executions"
        await world.cellctl.serve(engine)
        assert b"message_stop" in await calls[dead]
        assert "bad lines" not in world.run.path("log", "proxyd-0.log").read_text()
        assert (harness.relay.close(alive)[0].resent, len(engine.requests)) == (0, 3)
        account, _ = harness.relay.close(dead)
        assert account.errors == 0 and account.resent >= 1
        await harness.relay.stop()


def talk_to_each_other(world: World) -> bool:
    """Whether a shard has a connection to a port of another's."""
    ports: dict[int, set[int]] = {}
    remote: dict[int, set[int]] = {}
    for shard, process in world.processes.items():
        sockets = psutil.Process(process.pid).net_connections("tcp")
        ports[shard] = {c.laddr.port for c in sockets if c.status == psutil.CONN_LISTEN}
        remote[shard] = {c.raddr.port for c in sockets if c.raddr}
        assert ports[shard] and remote[shard], "a shard listens, and speaks to cellctl and the engine"
    return any(remote[a] & ports[b] for a in remote for b in ports if a != b)


async def test_every_shard_drains_a_cell_and_every_command_asks_all_shards(tmp_path: Path, tokenizer: Path) -> None:
    async with World(tmp_path / "run", tokenizer, proxyd=TWO) as world:
        names = [*named(0), *named(1)]
        leaving = await world.engine("a", lambda prompt: world.says(ANSWER), hold_after=4)
        await world.cellctl.serve(leaving)
        for name in names:
            await world.cellctl.open(name)
        calls = [asyncio.create_task(world.chat_call(name, TASK, "c1")) for name in names]
        await world.cellctl.until(lambda: list(leaving.running.values()) == [4, 4])
        stays = await world.engine("b", lambda prompt: world.says(ANSWER))
        await world.cellctl.serve(leaving, stays, away=("a",))
        await world.cellctl.say(DrainCell(cell="a", epoch=1))
        await world.cellctl.until(lambda: len(world.cellctl.said(CellDrained)) == 2)
        drained = [(d.shard, d.moved, d.moved_mid_generation) for d in world.cellctl.said(CellDrained)]
        assert sorted(drained) == [(0, 1, 1), (1, 1, 1)]
        assert [status for status, _, _ in await asyncio.gather(*calls)] == [200, 200]
        await _commands(world, names)


async def _commands(world: World, names: list[str]) -> None:
    async def say(*words: str) -> tuple[int | None, list[str], str]:
        line = (sys.executable, "-m", "gyre_cli.proxyd", *words, "--run", str(world.run.root))
        made = await asyncio.create_subprocess_exec(*line, stdout=-1, stderr=-1, cwd=REPOSITORY)
        out, err = await made.communicate()
        return made.returncode, out.decode().splitlines(), err.decode()

    views = ("status", "routes", "sessions", "tail")
    said = await asyncio.gather(*(say(view, "--json") for view in views), say("tail", names[1], "--json"))
    rows = [[json.loads(line) for line in lines] for _, lines, _ in said]
    assert {code for code, _, _ in said} == {0}
    assert [[row["shard"] for row in found] for found in rows[:3]] == [[0, 1], [0, 0, 1, 1], [0, 1]]
    assert [row["execution"] for row in rows[2]] == names
    assert sorted((row["shard"], row["execution"]) for row in rows[3]) == list(enumerate(names))
    assert [row["execution"] for row in rows[4]] == [names[1]]
    code, lines, _ = await say("drain", "b")
    assert (code, lines) == (0, ["proxyd-0: 0 calls still there", "proxyd-1: 0 calls still there"])

    await world.stop_proxyd(signal.SIGKILL, shard=1)
    said = await asyncio.gather(say("status", "--json"), say("undrain", "b"), say("tail", names[1]))
    (code, lines, why), undrained, (alone, _, whose) = said
    assert code == 3 and [json.loads(line)["shard"] for line in lines] == [0] and "proxyd-1 does not answer" in why
    assert undrained[0] == 3 and undrained[1] == ["proxyd-0: 0 calls still there"] and "proxyd-1" in undrained[2]
    assert alone == 3 and "proxyd-1 does not answer" in whose
    await world.start_proxyd(1)
    _, lines, _ = await say("routes", "--json")
    routable = {(row["shard"], row["cell"]): row["routable"] for row in map(json.loads, lines)}
    assert (routable[0, "b"], routable[1, "b"]) == (True, False), "a person's drain outlives the process"


async def test_a_shard_that_the_run_does_not_have_does_not_start(tmp_path: Path, tokenizer: Path) -> None:
    async with World(tmp_path / "run", tokenizer, proxyd=TWO) as world:
        line = (sys.executable, "-m", "gyre_cli.proxyd", "run", "--shard", "2", "--run", str(world.run.root))
        made = await asyncio.create_subprocess_exec(*line, stdout=-1, stderr=-1, cwd=REPOSITORY)
        _, err = await made.communicate()
        assert made.returncode == 2 and b"no shard 2: proxyd.shards is 2" in err
        assert not world.run.path("lives", proxyd_name(2)).exists()
