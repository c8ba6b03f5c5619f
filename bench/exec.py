"""What one executor costs per execution, beyond the harness itself.

    python -m bench.exec [--json] [--executions 300] [--window 30] [--every 20] [--workspace plain|bwrap|both]

A real executor process holds N real harness processes (a shell that calls the model every --every seconds and sleeps
between); cellctl and proxyd are played here. Counted is everything below and including the executor but the harnesses
themselves: executor, guard, and in `bwrap` the two processes around each sandbox. Memory is the resident size, summed
(shared pages count in each process: an upper bound; the proportional size stands beside it) and divided by N with
nothing subtracted. CPU is of the kernel's own counters over the window, in per cent of one core. The least of N is 300
in the figures that have a target; where bubblewrap can't run, `both` means `plain`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.figures import Figure, figure, show
from gyre_base import bus, config
from gyre_base import messages as m
from gyre_base.keys import make_keys
from gyre_base.rundir import EndpointFile, RunDir
from gyre_base.vocabulary import Purpose
from gyre_exec import child as children

ROOT = Path(__file__).parents[1]
TICK_S = 1 / os.sysconf("SC_CLK_TCK")
RSS_MIB, CPU_PCT = 30.0, 0.5  # what an execution may cost
AGENT = r"""
u=${OPENAI_BASE_URL#http://}; host=${u%%:*}; rest=${u#*:}; port=${rest%%/*}; path=/${rest#*/}
body='{"model":"m","messages":[{"role":"user","content":"go on"}]}'
head='POST %s/chat/completions HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer %s\r\nContent-Type: application/json\r\n'
while :; do
    exec 3<>"/dev/tcp/$host/$port" || exit 1
    printf "$head"'Content-Length: %d\r\nConnection: close\r\n\r\n%s' "$path" "$OPENAI_API_KEY" ${#body} "$body" >&3
    while read -r line <&3; do :; done
    exec 3>&-
    sleep "$EVERY_S"
done
"""
ANSWER = b'{"choices":[{"message":{"role":"assistant","content":"ok"}}]}'
RESPONSE = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(ANSWER), ANSWER)


@dataclass(frozen=True)
class Cost:
    """Of one moment."""

    rss_mib: float
    pss_mib: float
    cpu_s: float
    processes: int


def cost(pids: Iterable[int]) -> Cost:
    rss = pss = cpu = 0.0
    count = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            sizes = {line.split(":")[0]: line.split()[1] for line in rollup.splitlines() if line.endswith("kB")}
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            rss, pss = rss + int(sizes["Rss"]) / 1024, pss + int(sizes["Pss"]) / 1024
            cpu += (int(fields[11]) + int(fields[12])) * TICK_S
            count += 1
    return Cost(rss, pss, cpu, count)


def ours(executor: int) -> list[int]:
    """The executor, its guard, and what stands around sandboxes; not the harnesses."""
    tree = children.process_tree()
    out, walls = [executor], set(children.inmates(executor, tree))
    for pid in tree.get(executor, ()):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if any(w.endswith(b"guard.py") for w in words):
                out.append(pid)
            elif words[0].endswith(b"bwrap"):
                out += [pid, *(p for p in children.descendants(pid, tree) if p not in walls)]
    return out


# ---- the rest of a run, played ------------------------------------------------------------------------------------


class Cellctl:
    """Says welcome, gives orders."""

    def __init__(self, run: RunDir) -> None:
        self.life = run.next_life("cellctl")
        self.server = bus.Server(run, make_keys(run), kind="cellctl", name="cellctl", life=self.life, bind="127.0.0.1")
        self.peer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.ended: list[m.ExecutionFinished] = []

    async def serve(self) -> None:
        async for received in self.server:
            match received.message:
                case m.Hello():
                    await self.server.send(received.peer, m.Welcome(life=self.life), received.correlation)
                    if not self.peer.done():
                        self.peer.set_result(received.peer)
                case m.ExecutionFinished() as finished:
                    self.ended.append(finished)

    async def order(self, name: str, task: dict[str, Any]) -> None:
        order = m.ExecutionOrder(
            execution=name, group="g", task=task, attempt=0, purpose=Purpose.TRAIN, limit_s=86_400.0
        )
        await self.server.send(await self.peer, order)


class Proxyd:
    """Answers every request at once."""

    def __init__(self) -> None:
        self.seen: set[bytes] = set()

    async def start(self, run: RunDir) -> asyncio.Server:
        server = await asyncio.start_server(self.answer, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        life = run.next_life("proxyd-0")
        run.publish(EndpointFile("proxyd-0", "proxyd", "tcp://127.0.0.1:1", life, os.getpid(), {"http": url}))
        return server

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
                await reader.readexactly(length)
                self.seen.add(head.partition(b"\r\n")[0])
                writer.write(RESPONSE)
        writer.close()


@contextlib.asynccontextmanager
async def executor(run: RunDir) -> AsyncIterator[int]:
    command = [sys.executable, "-m", "gyre_exec.daemon", "--run", str(run.root)]
    process = await asyncio.to_thread(subprocess.Popen, command, cwd=ROOT)
    try:
        yield process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(process.wait)


async def measure(root: Path, kind: str, count: int, window_s: float, every_s: float) -> list[Figure]:
    """N executions up, each with one call behind it; then one window of quiet."""
    run = RunDir.create(root)
    agent = {"harness": ["/bin/bash", "-c", AGENT], "harness_env": {"EVERY_S": f"{every_s:g}"}}
    tasks = {**agent, "workspace": kind, "concurrent_per_executor": count, "harness_limit_s": 86_400.0}
    run.write_atomic("run.json", config.to_json(config.from_tree({"tasks": tasks})))
    task = {"id": "t", "instruction": "-", "workspace": {"a": "b"}, "evaluator": {"command": ["true"]}}
    cellctl, proxyd = Cellctl(run), Proxyd()
    cellctl.server.start()
    serving = asyncio.create_task(cellctl.serve())
    async with await proxyd.start(run), executor(run) as pid:
        for number in range(count):
            await cellctl.order(f"e{number:03d}", task)
        async with asyncio.timeout(60 + count):
            while len(proxyd.seen) < count:
                if cellctl.ended:
                    raise RuntimeError(f"a harness ended: {cellctl.ended[0]}")
                await asyncio.sleep(0.2)
        await asyncio.sleep(2.0)
        before, at = cost(ours(pid)), time.monotonic()
        await asyncio.sleep(window_s)
        after, wall_s = cost(ours(pid)), time.monotonic() - at
        if cellctl.ended or after.processes != before.processes:
            raise RuntimeError(
                f"{len(cellctl.ended)} executions ended, {before.processes} -> {after.processes} processes"
            )
        serving.cancel()
        cellctl.server.close()
    return figures(kind, count, after, (after.cpu_s - before.cpu_s) / wall_s * 100)


def figures(kind: str, count: int, after: Cost, cpu_pct: float) -> list[Figure]:
    end, bounded = "" if kind == "plain" else f"_{kind}", count >= 300
    cpu, rss = cpu_pct / count, after.rss_mib / count
    return [
        _figure(f"rss_mib_per_execution{end}", rss, "MiB", RSS_MIB if bounded else None),
        _figure(f"cpu_pct_per_execution{end}", cpu, "% of core", CPU_PCT if bounded else None),
        figure(f"pss_mib_per_execution{end}", [after.pss_mib / count], "MiB"),
        figure(f"own_processes{end}", [float(after.processes)], "processes"),
        figure(f"executions{end}", [float(count)], "executions"),
    ]


def _figure(name: str, value: float, unit: str, bound: float | None) -> Figure:
    if bound is None:
        return figure(name, [value], unit)
    return figure(name, [value], unit, f"< {bound:g}", lambda v: v < bound)


def walls_work() -> bool:
    probe = ["bwrap", "--unshare-user", "--unshare-pid", "--ro-bind", "/", "/", "--proc", "/proc", "true"]
    return shutil.which("bwrap") is not None and subprocess.run(probe, capture_output=True).returncode == 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.exec", description=__doc__.splitlines()[0] if __doc__ else ""
    )
    parser.add_argument("--json", action="store_true", help="one object per line")
    parser.add_argument("--executions", type=int, default=300, help="at once in one executor")
    parser.add_argument("--window", type=float, default=30.0, help="seconds that are measured")
    parser.add_argument("--every", type=float, default=20.0, help="seconds between two calls of an execution")
    parser.add_argument("--workspace", choices=("plain", "bwrap", "both"), default="both")
    options = parser.parse_args(argv)
    chosen = ["plain", "bwrap"] if options.workspace == "both" else [options.workspace]
    if options.workspace == "both" and not walls_work():
        print("bubblewrap can't run here: plain only", file=sys.stderr)
        chosen = ["plain"]
    out: list[Figure] = []
    for kind in chosen:
        with tempfile.TemporaryDirectory(prefix="gyre-bench-") as place:
            out += asyncio.run(measure(Path(place, "run"), kind, options.executions, options.window, options.every))
    return show(out, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
