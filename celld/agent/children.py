"""The processes of a cell: how they are started, watched and ended. No decision here."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from celld.sglang.launch import SGLangSettings, free_port
from gyre_base.allocation import own_address
from gyre_base.config import Config
from gyre_base.daemon import die_with_parent
from gyre_base.keys import Keys
from gyre_base.rundir import RunDir

STOP_GRACE_S = 10.0
FOLLOW_S = 2.0  # between the end of the leading rank and that of the others


class Child:
    """One process with its own group and log; `on_exit` is called once if it ends without being asked."""

    def __init__(self, name: str, log: Path, on_exit: Callable[[str, str], None]) -> None:
        self.name = name
        self._log, self._on_exit = log, on_exit
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    @property
    def stacks(self) -> dict[int, Path]:
        """Of each process that lives: where it writes its stacks when it is asked for them."""
        return {self.pid: self._log.with_suffix(".stacks")} if self.pid is not None else {}

    async def start(
        self, command: list[str], environment: Mapping[str, str] | None = None, *, keep_open: tuple[int, ...] = ()
    ) -> None:
        with open(self._log, "ab") as output:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=die_with_parent,
                env=environment,
                pass_fds=keep_open,
            )
        self._watch = asyncio.get_running_loop().create_task(self._wait(self._process))

    async def _wait(self, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        end_group(process.pid)  # an engine's own children would keep its memory
        self._on_exit(self.name, f"ended with code {code}; its last words are in {self._log.name}")

    async def end(self, grace_s: float = STOP_GRACE_S) -> None:
        """TERM, a grace, KILL of the whole group. No exit is reported."""
        if self._watch is not None:
            self._watch.cancel()
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), grace_s)
        end_group(process.pid)
        await process.wait()


class Ranks:
    """The trainer ranks of a cell as one child: none goes on without the others, and their end is told once."""

    def __init__(self, run: RunDir, cell: str, on_exit: Callable[[str, str], None]) -> None:
        self._run, self._cell, self._on_exit = run, cell, on_exit
        self._ranks: list[Child] = []
        self._ending: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """The leader's, while all of them live."""
        return self._ranks[0].pid if self._ranks and len(self.stacks) == len(self._ranks) else None

    @property
    def stacks(self) -> dict[int, Path]:
        """As of one child."""
        return {pid: file for rank in self._ranks for pid, file in rank.stacks.items()}

    async def start(self, config: Config) -> None:
        """All of them. A cell of several gets a free port of its own, on which they find each other."""
        count = config.trainer.ranks
        names = [f"rank-{self._cell}.{number}" if number else f"rank-{self._cell}" for number in range(count)]
        self._ranks = [Child(name, self._run.path("log", f"{name}.log"), self._ended) for name in names]
        self._retract()
        if count == 1:
            await self._ranks[0].start(rank_command(self._run, config, self._cell))
            return
        with socket.create_server((own_address(config.cluster.bind), 0)) as meeting:
            host, port = meeting.getsockname()[:2]
            for number, rank in enumerate(self._ranks):
                words = ["--rank", str(number), "--meet", f"{host}:{port}"]
                keep_open = () if number else (meeting.fileno(),)
                words += ["--meet-fd", str(meeting.fileno())] if number == 0 else []
                await rank.start([*rank_command(self._run, config, self._cell), *words], keep_open=keep_open)

    def _ended(self, name: str, detail: str) -> None:
        """Its collectives will never be met: the others are killed before anybody hears of it."""
        if self._ending is None:
            self._ending = asyncio.get_running_loop().create_task(self._end_others(name, detail))

    async def _end_others(self, name: str, detail: str) -> None:
        await asyncio.gather(*(rank.end(0.0) for rank in self._ranks))
        self._retract()  # at once: a core that wants this cell's sum would else wait for an answer
        self._ending = None
        self._on_exit("rank", f"{name} {detail}")

    def _retract(self) -> None:
        for rank in self._ranks:
            self._run.retract(rank.name)

    async def end(self) -> None:
        """The leader is told, has its time, and tells the others. No exit is reported."""
        if self._ending is not None:
            self._ending.cancel()
            self._ending = None
        if self._ranks:
            await self._ranks[0].end()
            await asyncio.gather(*(rank.end(FOLLOW_S) for rank in self._ranks[1:]))


def end_group(pid: int) -> None:
    """Whatever is left of the group that `pid` leads or led."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


ENGINES = {"tiny": "celld.tiny.server", "emulate": "celld.emulate.server"}


def engine_command(
    run: RunDir, config: Config, cell: str, model: Path, version: str, port_file: Path, seed: int
) -> list[str]:
    """The engine of `engine.kind` on a free port of the cluster's address, with weights from `model`."""
    engine = config.engine
    return [
        sys.executable,
        *("-m", ENGINES[engine.kind]),
        *("--model", str(model)),
        *("--host", own_address(config.cluster.bind)),
        *("--port", "0"),
        *("--port-file", str(port_file)),
        *("--served-model-name", config.model.served_name),
        *("--weight-version", version),
        *("--admin-api-key-file", str(run.path("keys", "admin"))),
        *("--context-length", str(engine.context_length)),
        *("--stacks-file", str(run.path("log", f"engine-{cell}.stacks"))),
        *(_emulated(config, cell) if engine.kind == "emulate" else _tiny(run, config, cell, seed)),
    ]


def sglang_settings(
    run: RunDir, config: Config, keys: Keys, cell: str, model: Path, version: str, seed: int
) -> SGLangSettings:
    """The real engine on a free port of the cluster's address, with weights from `model`."""
    engine = config.engine
    store = run.path("kv") if engine.kv_store else None
    if store is not None:
        store.mkdir(mode=0o700, exist_ok=True)
    host = own_address(config.cluster.bind)
    return SGLangSettings(
        model=model,
        host=host,
        port=free_port(host),
        served_name=config.model.served_name,
        weight_version=version,
        max_running_requests=engine.max_running_requests,
        context_length=engine.context_length,
        stream_interval=engine.stream_interval,
        seed=seed,
        tensor_parallel=engine.tensor_parallel,
        device=engine.device,
        admin_key=keys.admin,
        kv_store=store,
        routed_experts=engine.routed_experts,
        extra={name: True if value == "true" else value for name, value in engine.options.items()},
    )


def _tiny(run: RunDir, config: Config, cell: str, seed: int) -> list[str]:
    engine = config.engine
    mooncake = config.cluster.transport == "mooncake"
    store = [
        *("--kv-store", str(run.path("kv"))),
        *("--kv-name", cell),
        *("--kv-transport", "mooncake" if mooncake else "socket"),
        *("--kv-share-mib", str(engine.kv_share_mib)),
    ]
    return [
        *(store if engine.kv_store else ()),
        *("--api-key-file", str(run.path("keys", "admin"))),  # generation too: the network may have other users
        *("--max-running-requests", str(engine.max_running_requests)),
        *("--stream-interval", str(engine.stream_interval)),
        *("--threads", str(engine.threads)),
        *("--seed", str(seed)),
    ]


def _emulated(config: Config, cell: str) -> list[str]:
    """The profile's laws in seconds that pass."""
    laws, scheduler = config.emulate, config.scheduler
    order = int(cell.removeprefix("c"))
    slots = scheduler.cell_slots[order] if scheduler.cell_slots else scheduler.slots_per_cell
    return [
        *("--slots", str(slots)),
        *("--tokens-per-s", repr(laws.tokens_per_h / 3600.0 / laws.time_scale)),
        *("--load-slope", repr(laws.load_slope)),
        *("--load-floor", repr(laws.load_floor)),
        *("--release-s", repr(laws.to_train_s * laws.time_scale)),
        *("--update-s", repr(laws.to_rollout_s * laws.time_scale)),
    ]


def rank_command(run: RunDir, config: Config, cell: str) -> list[str]:
    """One trainer rank; emulated beside an emulated engine."""
    module = "celld.emulate.trainer" if config.engine.kind == "emulate" else "celld.trainer.main"
    return [sys.executable, "-m", module, "--run", str(run.root), "--cell", cell]
