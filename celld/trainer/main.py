"""Start one trainer rank: `python -m celld.trainer.main --run DIR --cell c0`. celld starts it as its child.

A cell of several ranks: each with `--rank R` and `--meet HOST:PORT`, rank 0 with `--meet-fd`, a socket that listens
there. TERM, INT and USR1 mean for rank 0: finish the micro-step in hand, save (the core, if it stepped since), leave
with code 0. The other ranks leave when it says so, or when it is lost.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import warnings
from typing import TYPE_CHECKING, NoReturn

from gyre_base import config as configuration
from gyre_base import messages as m
from gyre_base.allocation import LOOPBACK, own_address
from gyre_base.bus import Client, NoAnswer, Server
from gyre_base.config import Config
from gyre_base.daemon import die_with_parent, log_to, run_main, stop_on_signals
from gyre_base.keys import Keys, load_keys
from gyre_base.rundir import RunDir

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

    from celld.trainer.rank import Rank
    from celld.trainer.service import Service
    from celld.trainer.tensors import Tensors
    from celld.transfer.bulk import Bulk

log = logging.getLogger(__name__)
INTRODUCE_S = 2.0  # a trajd that does not answer hears of this life again when the rank is up
LEAVE_S = 6.0  # how long a stop waits for the micro-step in hand; celld kills after 10 s
MEET_S = 180.0  # torch and megatron on a busy machine: how long the ranks of a cell wait for each other
LIFE = "life"  # of the cell, as the leader tells the other ranks


async def run_rank(run_dir: str, cell: str, number: int, meet: str, meet_fd: int) -> None:
    """Serve and train until a signal. Raises RunLocked if this rank already runs, RankError if it can't go on."""
    die_with_parent()
    run = RunDir.open(run_dir)
    name = f"rank-{cell}.{number}" if number else f"rank-{cell}"
    log_to(run.path("log", f"{name}.log"), name=name)
    with run.lock(name):
        if number:
            await _follow(run, cell, number, meet)
        else:
            await _lead(run, cell, meet, meet_fd)


async def _lead(run: RunDir, cell: str, meet: str, meet_fd: int) -> None:
    stopping = asyncio.Event()
    stop_on_signals(stopping)
    config = configuration.from_json(run.path("run.json").read_text())
    keys, life = load_keys(run), run.next_life(f"rank-{cell}")
    if life > 1:
        await introduce(run, keys, cell, life)
    _prepare(config)
    from celld.trainer.rank import Rank, RankError, endpoint_of
    from celld.trainer.service import RankService
    from celld.trainer.team import RankTeam
    from celld.weights import transport_to

    if (ranks := config.trainer.ranks) > 1:
        store = _store(config, meet, meet_fd)
        store.set(LIFE, str(life))
        _join(config, 0, store)
    else:
        _join(config, 0, None)
    tensors, bulk = _tensors(run, keys, config, cell, 0)
    followers = [Client(run, keys, endpoint_of(cell, number), identity=f"leader:{life}") for number in range(1, ranks)]
    transport = transport_to(run, keys, "rank-c0", bulk)
    folder = run.path("checkpoints")
    team = RankTeam(config, tensors, followers, transport=transport, bulk=bulk, checkpoints=folder)
    rank = Rank(config, run, keys, team, cell=cell, life=life)
    server = Server(run, keys, kind="rank", name=f"rank-{cell}", life=life, bind=config.cluster.bind)
    service = RankService(rank, server)

    async def live() -> None:
        if followers:
            beat = m.Heartbeat(kind="rank", name=cell, life=life)
            await team.meet(beat, MEET_S)
            service.spawn(team.watch(beat, config.cluster.heartbeat_s, config.cluster.peer_timeout_s))
        await rank.start()
        server.start({"cell": cell, "core": rank.core})
        log.info("rank-%s life %d listens on %s", cell, life, server.address)
        for work in (service.serve(), service.beat(), rank.work()):
            service.spawn(work)

    service.spawn(live())
    failed = await _until(service, stopping)
    if not failed:
        try:
            await _finish(rank)
        except RankError as error:
            log.critical("could not finish: %s", error)
            failed = True
    await service.leave()
    await team.leave(m.Goodbye(kind="rank", name=cell, life=life))
    rank.close()
    server.close()
    if failed:
        _end(f"rank-{cell}")


async def _follow(run: RunDir, cell: str, number: int, meet: str) -> None:
    config = configuration.from_json(run.path("run.json").read_text())
    keys = load_keys(run)
    _prepare(config)
    from celld.trainer.follower import Follower
    from celld.trainer.rank import endpoint_of

    store = _store(config, meet, None)
    life = int(store.get(LIFE))
    name, bind = endpoint_of(cell, number), config.cluster.bind
    server = Server(run, keys, kind="rank", name=name, life=life, bind=bind)
    server.start({"cell": cell, "rank": number})  # before the ranks meet: then the leader finds no older one's endpoint
    _join(config, number, store)
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        asyncio.get_running_loop().add_signal_handler(each, log.info, "told to stop; that is the leader's to say")
    tensors, bulk = _tensors(run, keys, config, cell, number)
    patience_s = config.cluster.peer_timeout_s + 2 * config.cluster.heartbeat_s
    follower = Follower(tensors, server, cell=cell, rank=number, life=life, bulk=bulk, patience_s=patience_s)
    for work in (follower.serve(), follower.work(), follower.watch(MEET_S)):
        follower.spawn(work)
    log.info("rank %d of %s in life %d follows", number, cell, life)
    failed = await _until(follower, follower.dismissed)
    await follower.leave()
    tensors.close()
    server.close()
    if failed or tensors.computing:
        _end(name)


def _prepare(config: Config) -> None:
    """The slow imports: late, so that `--help` and a refused start stay quick."""
    warnings.filterwarnings("ignore", module=r"(megatron|torch)\..*")  # what it does without Apex and TransformerEngine
    import torch

    torch.set_num_threads(config.trainer.threads)


def _store(config: Config, meet: str, meet_fd: int | None) -> Store:
    """Where the ranks of this cell, and only they, find each other."""
    from datetime import timedelta

    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from celld.trainer.rank import RankError

    host, colon, port = meet.rpartition(":")
    if not colon:
        raise RankError(f"trainer: a cell of {config.trainer.ranks} ranks is started by celld, which says --meet")
    return TCPStore(
        host,
        int(port),
        is_master=meet_fd is not None,
        timeout=timedelta(seconds=MEET_S),
        wait_for_workers=False,
        master_listen_fd=meet_fd,
    )


def _join(config: Config, number: int, store: Store | None) -> None:
    from celld.trainer import cpu

    trainer = config.trainer
    if own_address(config.cluster.bind) == LOOPBACK:  # gloo would else listen where the network can reach it
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    cpu.start_parallel(
        tp=trainer.tensor_parallel,
        pp=trainer.pipeline_parallel,
        cp=trainer.context_parallel,
        ep=trainer.expert_parallel,
        rank=number,
        store=store,
        timeout_s=config.cluster.stall_s,
    )


def _tensors(run: RunDir, keys: Keys, config: Config, cell: str, number: int) -> tuple[Tensors, Bulk | None]:
    """This rank's part of the network; on the core also of the optimizer."""
    from celld.trainer.dtypes import DTYPES
    from celld.trainer.exchange import GradientExchange
    from celld.trainer.model import Policy, read_config
    from celld.trainer.optimizer import AdamW
    from celld.trainer.tensors import Tensors
    from celld.transfer.bulk import open_bulk

    trainer = config.trainer
    policy = Policy(read_config(config.model.path), piece_tokens=trainer.piece_tokens, dtype=DTYPES[trainer.dtype])
    bulk = open_bulk(config.cluster)
    if cell != "c0":
        return Tensors(config, policy, None, None), bulk
    exchange = GradientExchange(
        run,
        keys,
        [f"c{i}" for i in range(1, config.cluster.cells)],
        size=policy.gradient.numel(),
        patience_s=config.cluster.peer_timeout_s,
        bulk=bulk,
        rank=number,
    )
    return Tensors(config, policy, AdamW(policy, config.trainer), exchange), bulk


async def _until(service: Service, over: asyncio.Event) -> bool:
    """Whether something failed before `over`."""
    ends = [asyncio.ensure_future(event.wait()) for event in (over, service.failed)]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    for end in ends:
        end.cancel()
    return service.failed.is_set()


def _end(name: str) -> NoReturn:
    """At once: a collective whose other side is lost would keep its thread, and so the process, for minutes."""
    log.critical("%s ends in the middle of its work", name)
    logging.shutdown()
    os._exit(1)


async def introduce(run: RunDir, keys: Keys, cell: str, life: int) -> None:
    """Before the slow imports: what an earlier life held is free at once, not only when the network is built."""
    trajd = Client(run, keys, "trajd")
    with contextlib.suppress(NoAnswer):
        await trajd.ask(m.Hello(kind="rank", name=cell, life=life, pid=os.getpid()), timeout_s=INTRODUCE_S)
    trajd.close()


async def _finish(rank: Rank) -> None:
    """The micro-step in hand ends, then the core saves what no checkpoint holds."""
    rank.may_claim.clear()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(rank.busy.acquire(), LEAVE_S)
    unsaved = rank.core and rank.version is not None and rank.version.step and rank.saved[0] != str(rank.version)
    if unsaved and (durable := await rank.save()):
        log.info("saved %s before leaving", durable.saved.version)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m celld.trainer.main", description="one trainer rank of a cell")
    parser.add_argument("--run", required=True, help="run directory")
    parser.add_argument("--cell", required=True, help="name of the cell, such as c0 (the core)")
    parser.add_argument("--rank", type=int, default=0, help="rank within the cell")
    parser.add_argument("--meet", default="", help="HOST:PORT where the ranks of a cell of several find each other")
    parser.add_argument("--meet-fd", type=int, help="rank 0: descriptor of a socket that listens there")
    options = parser.parse_args()
    run_main(lambda: run_rank(options.run, options.cell, options.rank, options.meet, options.meet_fd))


if __name__ == "__main__":
    main()
