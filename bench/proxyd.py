"""What proxyd costs, against the public peers, in front of one fake engine.

    python -m bench.proxyd [--json] [--quick] [--peers DIR] [--only NAME,...]

CPU is that of the measured process tree (the kernel's count), so a busy machine matters little; each ratio is of two
measurements of one run. Peers live in environments of their own under DIR (made on first use by pip): sglang-router
0.3.2, and a FastAPI + httpx stack that renders and tokenises the whole history with every call
(`bench/proxyd_rig/peer_app.py`). A peer that can't be had leaves its figures out.

proxyd does all its work in every row: match, render, tokenise, route, record, fdatasync. The router only relays.
`added_p50_vs_sglang_router` compares what each adds, in live delivery, to the time in which the engine alone gives the
first content of a small call, the three asked in turn; ends wait for the disk (`durable_p50_vs_sglang_router`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from bench.figures import Figure, figure, show
from bench.proxyd_rig.measuring import PeerMissing, cpu_s, free_port, memory_bytes, python_of, running, until_up
from gyre_base import messages as m
from tests.proxyd.fakes import FakeEngine, World
from tests.proxyd.tokens import write_tokenizer

LONG, SHORT = 600_000, 10_000
RATE_PER_S = 40
TURNS = 12  # measured calls per history
LINES = "def f1(x):\n    return x.upper()\n\n\nclass Writer:\n    path = 'f1.md'\n" * 6


def at_most(bound: float) -> tuple[str, Callable[[float], bool]]:
    return f"<= {bound:g}", lambda value: value <= bound


@dataclass
class Rig:
    """proxyd between its fake cellctl and the fake engine, which serves the peers as well."""

    world: World
    engine: str  # its URL
    session: aiohttp.ClientSession
    quick: bool
    peers: Path | None
    tokenizer: Path

    @property
    def pid(self) -> int:
        return self.world.process.pid

    @property
    def pids(self) -> list[int]:
        """Of every shard."""
        return [process.pid for process in self.world.processes.values()]

    async def mode(self, hold: int, *, keep: bool = False) -> None:
        async with self.session.post(f"{self.engine}/mode", json={"hold": hold, "keep": keep}) as response:
            await response.read()

    async def at_engine(self) -> int:
        async with self.session.get(f"{self.engine}/stats") as response:
            return int((await response.json())["running"])

    async def until_at_engine(self, count: int, limit_s: float = 60.0) -> None:
        async with asyncio.timeout(limit_s):
            while await self.at_engine() != count:  # noqa: ASYNC110 - it happens in another process
                await asyncio.sleep(0.02)

    async def call(self, execution: str, body: bytes, call: str) -> bytes:
        headers = {"Authorization": f"Bearer {self.world.keys.token(execution)}", "X-Gyre-Call": call}
        url = f"{self.world.base(execution)}/v1/chat/completions"
        async with self.session.post(url, data=body, headers=headers) as response:
            text = await response.read()
            assert response.status == 200, text[:300]
            return text


def body_of(messages: list[Any], stream: bool = False) -> bytes:
    return orjson.dumps({"model": "m", "messages": messages, "stream": stream})


def history_of(tokens: int, per_message: int) -> list[dict[str, str]]:
    """Alternating messages that come to about so many tokens, the last one the user's."""
    count = max(1, tokens // per_message) | 1
    return [{"role": ("user", "assistant")[n % 2], "content": f"{n}\n{LINES}"} for n in range(count)]


async def settled(*pids: int) -> float:
    """CPU so far, once the processes have come to rest."""
    before = -1.0
    while (now := sum(map(cpu_s, pids))) - before > 0.0005 * len(pids):
        before = now
        await asyncio.sleep(0.05)
    return now


async def long_history(rig: Rig, tokens: int) -> list[float]:
    """CPU seconds of each call that adds one turn to a history of so many tokens."""
    execution, costs = f"long-{tokens}-{time.monotonic_ns()}", []
    await rig.world.cellctl.open(execution)
    history: list[Any] = history_of(tokens, len(rig.world.chat.encode(LINES)) + 8)
    for turn in range(TURNS + 1):
        before = await settled(rig.pid)
        answer = orjson.loads(await rig.call(execution, body_of(history), f"c{turn}"))
        if turn:
            costs.append(await settled(rig.pid) - before)
        history += [answer["choices"][0]["message"], {"role": "user", "content": f"turn {turn}: {LINES}"}]
    await rig.world.cellctl.say(m.CloseExecution(execution=execution))
    return costs


async def small_calls(rig: Rig, count: int, at_once: int = 16) -> float:
    """CPU seconds per call: first calls of the executions of a group, which share their short prompt."""
    names = [f"small-{time.monotonic_ns()}-{n}" for n in range(count)]
    for name in names:
        await rig.world.cellctl.open(name)
    before = await settled(*rig.pids)
    for at in range(0, count, at_once):
        batch = names[at : at + at_once]
        await asyncio.gather(*(rig.call(n, body_of([{"role": "user", "content": LINES}], True), "c") for n in batch))
    cost = (await settled(*rig.pids) - before) / count
    for name in names:
        await rig.world.cellctl.say(m.CloseExecution(execution=name))
    return cost


async def latency_s(call: Callable[[int], Any], count: int) -> float:
    """The median wall time of calls one after the other."""
    times = []
    for n in range(count):
        began = time.perf_counter()
        await call(n)
        times.append(time.perf_counter() - began)
    return sorted(times)[len(times) // 2]


# ---- figures --------------------------------------------------------------------------------------------------------


async def histories(rig: Rig) -> list[Figure]:
    long, short = await long_history(rig, LONG), await long_history(rig, SHORT)
    ratios = [a / b for a, b in zip(sorted(long), sorted(short), strict=True)]
    out = [figure("cpu_600k_vs_10k", ratios, "ratio", *at_most(3))]
    out.append(figure("cpu_600k_ms", [1000 * c for c in long], "ms"))
    middle = sorted(long)[len(long) // 2]
    with contextlib.suppress(PeerMissing):
        whole = await full_render(rig)
        out.append(figure("cpu_600k_vs_full_render", [middle / w for w in whole], "ratio", *at_most(0.01)))
    with contextlib.suppress(PeerMissing):
        relayed = await router_long(rig)
        out.append(figure("cpu_600k_vs_sglang_router", [middle / r for r in relayed], "ratio", *at_most(0.2)))
    return out


async def small(rig: Rig) -> list[Figure]:
    count = 96 if rig.quick else 320
    await small_calls(rig, 32)
    ours = [await small_calls(rig, count) for _ in range(3)]
    out = [figure("cpu_small_ms", [1000 * c for c in ours], "ms")]
    middle = sorted(ours)[1]

    async def one(n: int) -> None:
        await rig.world.cellctl.open(f"p50-{n}")
        await rig.call(f"p50-{n}", body_of([{"role": "user", "content": "hi"}], True), "c")

    p50_s = await latency_s(one, 100)
    with contextlib.suppress(PeerMissing):
        async with router(rig) as (pid, call):
            await asyncio.gather(*(call(200) for _ in range(32)))
            theirs = [await per_call(pid, call, count) for _ in range(3)]
            router_p50_s = await latency_s(lambda n: call(200), 100)
        out.append(figure("cpu_small_vs_sglang_router", [middle / t for t in theirs], "ratio", *at_most(2)))
        out.append(figure("durable_p50_vs_sglang_router", [p50_s / router_p50_s], "ratio"))
    with contextlib.suppress(PeerMissing):
        async with stack(rig) as (pid, call):
            await asyncio.gather(*(call(1) for _ in range(8)))
            theirs = [await per_call(pid, call, count // 4, 1) for _ in range(3)]
        out.append(figure("cpu_small_vs_fastapi_httpx", [middle / t for t in theirs], "ratio", *at_most(0.1)))
    return out


async def shards(rig: Rig) -> list[Figure]:
    """CPU per small call of two shards together, against one: runs of their own, asked in turn for the same calls.

    Many at once, as where one shard would not do: what a process does anyway (timers, heartbeats) is for all of them.
    """
    count, rounds, at_once = (512, 7, 128) if rig.quick else (1024, 9, 128)
    costs: dict[int, list[float]] = {1: [], 2: []}
    async with contextlib.AsyncExitStack() as stack:
        rigs = {}
        for number in costs:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "run"
            limits = {"engine": {"context_length": 1 << 21, "max_running_requests": 8192}}
            limits |= {"rollout": {"max_new_tokens": 128}, "proxyd": {"shards": number}}
            world = World(folder, rig.tokenizer, **limits)
            rigs[number] = dataclasses.replace(rig, world=await stack.enter_async_context(world))
            await world.cellctl.serve(_named("a", rig.engine))
            await small_calls(rigs[number], at_once)
        for _ in range(rounds):
            for number, its in rigs.items():
                costs[number].append(await small_calls(its, count, at_once))
    one, two = costs.values()
    out = [figure("two_shards_cpu_ms", [1000 * c for c in two], "ms")]
    return [
        *out,
        figure("two_shards_cpu_ratio", [b / a for a, b in zip(one, two, strict=True)], "ratio", *at_most(1.1)),
    ]


async def first_content_s(session: aiohttp.ClientSession, url: str, body: bytes, headers: dict[str, str]) -> float:
    """Wall time to the first content of a stream, which is read to its end."""
    began = time.perf_counter()
    async with session.post(url, data=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        first = await response.content.readany()
        took = time.perf_counter() - began
        assert first and b"[DONE]" in (first + await response.read())[-40:]
    return took


async def live(rig: Rig) -> list[Figure]:
    """What live delivery adds to the first content of a call, against the router."""
    count = 100 if rig.quick else 400
    limits = {"engine": {"context_length": 1 << 21}, "rollout": {"max_new_tokens": 128, "delivery": "live"}}
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(PeerMissing):
        async with World(Path(folder) / "run", rig.tokenizer, **limits) as world, router_at(rig) as (_, routed):
            await world.cellctl.serve(_named("a", rig.engine))
            await world.cellctl.open("live")
            headers = {"Authorization": f"Bearer {world.keys.token('live')}", "Content-Type": "application/json"}
            ours = f"{world.base('live')}/v1/chat/completions"
            times: dict[str, list[float]] = {ours: [], routed: [], f"{rig.engine}/generate": []}
            # each call on a connection of its own: on kept ones the router's small writes wait for delayed ACKs (40 ms)
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
                for n in range(count + 20):
                    for url, taken in times.items():
                        said = body_of([{"role": "user", "content": f"hi {n}"}], True)
                        body = said if url == ours else generate(200)
                        taken.append(await first_content_s(session, url, body, headers))
        mine, theirs, alone = (sorted(taken[20:])[count // 2] for taken in times.values())
        added, ms = (mine - alone) / (theirs - alone), [1000 * t for t in (mine, theirs, alone)]
        out = [
            figure(f"{who}_p50_ms", [value], "ms") for who, value in zip(("live", "router", "engine"), ms, strict=True)
        ]
        return [*out, figure("added_p50_vs_sglang_router", [added], "ratio", *at_most(1.5))]
    return []


def generate(count: int) -> bytes:
    """The body of a /generate with so many prompt ids."""
    sampling = {"max_new_tokens": 128, "temperature": 1.0}
    ids = [65 + n % 300 for n in range(count)]
    more = {"stream": True, "return_logprob": True}
    return orjson.dumps({"rid": os.urandom(16).hex(), "input_ids": ids, "sampling_params": sampling, **more})


async def per_call(pid: int, call: Callable[[int], Any], count: int, size: int = 200) -> float:
    before = await settled(pid)
    for _ in range(0, count, 16):
        await asyncio.gather(*(call(size) for _ in range(16)))
    return (await settled(pid) - before) / (-(-count // 16) * 16)


async def grown(rig: Rig, names: list[str]) -> int:
    """Executions that grow to 100k tokens each, turn by turn. Gives their tokens."""
    tokens = 0
    for name in names:
        await rig.world.cellctl.open(name)
        history: list[Any] = history_of(4_000, len(rig.world.chat.encode(LINES)) + 8)
        while True:
            answer = orjson.loads(await rig.call(name, body_of(history), f"c{len(history)}"))
            more = {"role": "user", "content": f"{name} {len(history)} {LINES * 4}"}
            history += [answer["choices"][0]["message"], more]
            if answer["usage"]["prompt_tokens"] > 100_000:
                tokens += answer["usage"]["total_tokens"]
                break
    return tokens


async def memory(rig: Rig) -> list[Figure]:
    """Memory per token of executions at rest, once the caches that all share are full, and per call that is open."""
    filling, names = [f"fill-{n}" for n in range(4)], [f"mem-{n}" for n in range(4 if rig.quick else 8)]
    await grown(rig, filling)
    before = memory_bytes(rig.pid)
    tokens = await grown(rig, names)
    after = memory_bytes(rig.pid)
    out = [figure("bytes_per_token", [(after - before) / tokens], "bytes", *at_most(16))]
    for name in filling + names:
        await rig.world.cellctl.say(m.CloseExecution(execution=name))
    with contextlib.suppress(PeerMissing):
        ours = await ours_open_memory(rig, 200 if rig.quick else 1000)
        theirs = await router_open_memory(rig, 200 if rig.quick else 1000)
        out.append(figure("memory_per_open_call_vs_sglang_router", [ours / theirs], "ratio", *at_most(1)))
    return out


async def held(rig: Rig, calls: list[Any], count: int) -> list[asyncio.Task[Any]]:
    """Calls that the engine holds after their first chunk."""
    await rig.mode(1)
    tasks = [asyncio.ensure_future(c) for c in calls]
    await rig.until_at_engine(count)
    await asyncio.sleep(0.5)
    return tasks


async def open_calls(rig: Rig, count: int, prefix: str) -> list[asyncio.Task[Any]]:
    names = [f"{prefix}-{n}" for n in range(count)]
    for name in names:
        await rig.world.cellctl.open(name)
    body = body_of([{"role": "user", "content": LINES}], True)
    return await held(rig, [rig.call(name, body, "c") for name in names], count)


async def ours_open_memory(rig: Rig, count: int) -> float:
    await small_calls(rig, 64)
    before = memory_bytes(rig.pid)
    tasks = await open_calls(rig, count, "open")
    each = (memory_bytes(rig.pid) - before) / count
    await rig.mode(-1)
    await asyncio.gather(*tasks)
    return each


async def router_open_memory(rig: Rig, count: int) -> float:
    async with router(rig) as (pid, call):
        await asyncio.gather(*(call(200) for _ in range(64)))
        before = memory_bytes(pid)
        tasks = await held(rig, [call(200) for _ in range(count)], count)
        each = (memory_bytes(pid) - before) / count
        await rig.mode(-1)
        await asyncio.gather(*tasks)
    return each


async def lag(rig: Rig) -> list[Figure]:
    """Lateness of the loop with 2,000 executions that each have a call open, while 40 calls a second come and go."""

    async def p99_s() -> float:
        url = f"{rig.world.base('x').rpartition('/x/')[0]}/metrics"
        async with rig.session.get(url, headers={"Authorization": f"Bearer {rig.world.keys.admin}"}) as response:
            lines = (await response.text()).splitlines()
        return float(next(line for line in lines if 'lag_seconds{quantile="0.99"}' in line).split()[-1])

    await asyncio.sleep(62)  # the figure is of the last minute
    idle_s = await p99_s()
    count = 400 if rig.quick else 2000
    tasks = await open_calls(rig, count, "lag")
    await rig.mode(-1, keep=True)
    body, end, number = body_of([{"role": "user", "content": LINES}], True), time.monotonic() + 62, 0
    while time.monotonic() < end:
        number += 1
        await rig.world.cellctl.open(f"turn-{number}")
        tasks.append(asyncio.ensure_future(rig.call(f"turn-{number}", body, "c")))
        await asyncio.sleep(1 / RATE_PER_S)
    busy_s = await p99_s()
    await rig.mode(-1)
    await asyncio.gather(*tasks)
    return [figure(f"loop_lag_p99_ratio_{count}", [busy_s / max(idle_s, 1e-4)], "ratio", *at_most(10))]


async def drains(rig: Rig) -> list[Figure]:
    """CPU of moving 512 open calls to another engine (the same one under another name), per call and plain call."""
    count = 128 if rig.quick else 512
    plain_s = await small_calls(rig, count)
    tasks = await open_calls(rig, count, "drain")
    engine = FakeEngine("b", lambda prompt: [], admin=rig.world.keys.admin)
    engine.url = rig.engine.replace("127.0.0.1", "localhost")
    await rig.world.cellctl.serve(_named("a", rig.engine), engine, away=("a",))
    await rig.mode(2)
    before = await settled(rig.pid)
    await rig.world.cellctl.say(m.DrainCell(cell="a", epoch=time.monotonic_ns()))
    heard = len(rig.world.cellctl.said(m.CellDrained))
    await rig.world.cellctl.until(lambda: len(rig.world.cellctl.said(m.CellDrained)) > heard - 1, 60.0)
    await rig.until_at_engine(count)
    cost = (await settled(rig.pid) - before) / count
    await rig.mode(-1)
    await asyncio.gather(*tasks)
    await rig.world.cellctl.serve(_named("a", rig.engine))
    return [figure(f"drain_cost_per_call_ratio_{count}", [cost / plain_s], "ratio", *at_most(3))]


def _named(name: str, url: str) -> FakeEngine:
    engine = FakeEngine(name, lambda prompt: [])
    engine.url = url
    return engine


async def orphans(rig: Rig) -> list[Figure]:
    """Engine calls that are left one second after 64 clients are gone for good (their relay says so)."""
    tasks = await open_calls(rig, 64, "orphan")
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for n in range(64):
        name = f"orphan-{n}"
        headers = {"Authorization": f"Bearer {rig.world.keys.token(name)}"}
        async with rig.session.delete(f"{rig.world.base(name)}/calls/c", headers=headers) as response:
            assert response.status == 204
    await asyncio.sleep(1.0)
    left = await rig.at_engine()
    await rig.mode(-1)
    return [figure("orphan_engine_calls_after_1s", [left], "calls", "= 0", lambda value: value == 0)]


# ---- peers ----------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def router_at(rig: Rig) -> AsyncIterator[tuple[int, str]]:
    """sglang-router in front of the engine: (pid, URL of its /generate)."""
    if rig.peers is None:
        raise PeerMissing("no peers wanted")
    python, port = python_of(rig.peers, "sglang-router"), free_port()
    words = ("--worker-urls", rig.engine, "--policy", "round_robin", "--host", "127.0.0.1", "--port", str(port))
    more = ("--prometheus-port", str(free_port()), "--log-level", "error", "--max-concurrent-requests", "8192")
    async with running(str(python), "-m", "sglang_router.launch_router", *words, *more) as process:
        url = f"http://127.0.0.1:{port}/generate"

        await until_up(rig.session, url, {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}})
        yield process.pid, url


@contextlib.asynccontextmanager
async def router(rig: Rig) -> AsyncIterator[tuple[int, Callable[[int], Any]]]:
    """sglang-router in front of the engine: (pid, a call with so many prompt ids)."""
    async with router_at(rig) as (pid, url):

        async def call(count: int) -> None:
            headers = {"Content-Type": "application/json"}
            async with rig.session.post(url, data=generate(count), headers=headers) as response:
                text = await response.read()
                assert response.status == 200 and b"[DONE]" in text[-40:], text[-200:]

        yield pid, call


async def router_long(rig: Rig) -> list[float]:
    async with router(rig) as (pid, call):
        await call(LONG)
        out = []
        for _ in range(6):
            before = await settled(pid)
            await call(LONG)
            out.append(await settled(pid) - before)
    return out


@contextlib.asynccontextmanager
async def stack(rig: Rig) -> AsyncIterator[tuple[int, Callable[[int], Any]]]:
    """FastAPI + httpx: (pid, a call with a history of so many messages)."""
    if rig.peers is None:
        raise PeerMissing("no peers wanted")
    python, port = python_of(rig.peers, "fastapi-httpx"), free_port()
    script = Path(__file__).parent / "proxyd_rig" / "peer_app.py"
    async with running(str(python), str(script), str(port), rig.engine, str(rig.tokenizer)) as process:
        url = f"http://127.0.0.1:{port}/v1/chat/completions"

        async def call(count: int) -> None:
            messages = [{"role": ("user", "assistant")[n % 2], "content": f"{n}\n{LINES}"} for n in range(count)]
            async with rig.session.post(url, data=body_of(messages, True)) as response:
                text = await response.read()
                assert response.status == 200 and b"[DONE]" in text[-40:], text[-200:]

        await until_up(rig.session, url, {"messages": [{"role": "user", "content": "x"}]})
        yield process.pid, call


async def full_render(rig: Rig) -> list[float]:
    messages = len(history_of(LONG, len(rig.world.chat.encode(LINES)) + 8))
    async with stack(rig) as (pid, call):
        out = []
        for _ in range(2):
            before = await settled(pid)
            await call(messages)
            out.append(await settled(pid) - before)
    return out


# ---- run ------------------------------------------------------------------------------------------------------------

GROUPS: dict[str, Callable[[Rig], Any]] = {
    "histories": histories,
    "small": small,
    "shards": shards,
    "live": live,
    "memory": memory,
    "drains": drains,
    "orphans": orphans,
    "lag": lag,
}


async def measure(given: argparse.Namespace) -> list[Figure]:
    out: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = write_tokenizer(Path(folder) / "tokenizer")
        limits = {
            "engine": {"context_length": 1 << 21, "max_running_requests": 8192},
            "rollout": {"max_new_tokens": 128},
        }
        async with World(Path(folder) / "run", tokenizer, **limits) as world:
            stop = str(world.chat.end_id)
            async with running(sys.executable, "-m", "bench.proxyd_rig.engine", "--stop", stop) as engine:
                assert engine.stdout is not None
                url = f"http://127.0.0.1:{int(await engine.stdout.readline())}"
                await world.cellctl.serve(_named("a", url))
                connector = aiohttp.TCPConnector(limit=0)
                timeout = aiohttp.ClientTimeout(total=300)
                async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
                    peers = Path(given.peers) if given.peers else None
                    rig = Rig(world, url, session, given.quick, peers, tokenizer)
                    for name in given.only.split(",") if given.only else GROUPS:
                        out += await GROUPS[name](rig)
    return out


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--json", action="store_true")
    options.add_argument("--quick", action="store_true", help="fewer calls")
    options.add_argument("--peers", default="", help="folder for the peers' environments; none: without peers")
    options.add_argument("--only", default="", help=f"groups, by comma: {', '.join(GROUPS)}")
    given = options.parse_args()
    return show(asyncio.run(measure(given)), as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
