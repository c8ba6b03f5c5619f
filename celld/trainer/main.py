"""Start one trainer rank: `python -m celld.trainer.main --run DIR --cell c0 --core`. celld starts it as its child.

TERM, INT and USR1 mean: finish the micro-step in hand, save (the core, if it stepped since), leave with code 0.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import warnings
from typing import TYPE_CHECKING

from gyre_base import config as configuration
from gyre_base import messages as m
from gyre_base.bus import Client, NoAnswer, Server
from gyre_base.daemon import die_with_parent, log_to, run_main, stop_on_signals
from gyre_base.keys import Keys, load_keys
from gyre_base.rundir import RunDir

if TYPE_CHECKING:
    from celld.trainer.rank import Rank

log = logging.getLogger(__name__)
INTRODUCE_S = 2.0  # a trajd that does not answer hears of this life again when the rank is up
LEAVE_S = 6.0  # how long a stop waits for the micro-step in hand; celld kills after 10 s


async def run_rank(run_dir: str, cell: str, core: bool, rank: int = 0) -> None:
    """Serve and train until a signal. Raises RunLocked if this cell's rank already runs, RankError if it can't go
    on."""
    die_with_parent()
    run = RunDir.open(run_dir)
    name = f"rank-{cell}"
    log_to(run.path("log", f"{name}.log"), name=name)
    with run.lock(name):
        await _run(run, cell, core, rank)


async def _run(run: RunDir, cell: str, core: bool, number: int) -> None:
    stopping = asyncio.Event()
    stop_on_signals(stopping)
    keys, life = load_keys(run), run.next_life(f"rank-{cell}")
    if life > 1:
        await introduce(run, keys, cell, life)
    warnings.filterwarnings("ignore", module=r"(megatron|torch)\..*")  # what it does without Apex and TransformerEngine
    import torch  # late: `--help` and a refused start stay quick

    from celld.trainer import cpu
    from celld.trainer.model import read_config
    from celld.trainer.rank import Rank, RankError
    from celld.trainer.service import RankService

    config = configuration.from_json(run.path("run.json").read_text())
    if core != (cell == "c0"):
        raise RankError("c0 is the core, every other cell a satellite: the cells' order is fixed")
    torch.set_num_threads(config.trainer.threads)
    cpu.start_parallel()
    rank = Rank(config, run, keys, cell=cell, core=core, life=life)
    await rank.build(read_config(config.model.path))
    server = Server(run, keys, kind="rank", name=f"rank-{cell}", life=life, bind=config.cluster.bind)
    service = RankService(rank, server, number)
    server.start({"cell": cell, "core": core})
    log.info("rank-%s life %d listens on %s", cell, life, server.address)
    for work in (service.serve(), service.beat(), rank.work()):
        service.spawn(work)
    ends = [asyncio.ensure_future(event.wait()) for event in (stopping, service.failed)]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    try:
        if service.failed.is_set():
            raise RankError(f"rank-{cell} failed; see its log")
        await _finish(rank)
    finally:
        for end in ends:
            end.cancel()
        await service.leave()
        rank.close()
        server.close()


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
    if rank.core and rank.optimizer.steps and rank.saved[0] != str(rank.version):
        saved = await rank.save()
        log.info("saved %s before leaving", saved.version)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m celld.trainer.main", description="one trainer rank of a cell")
    parser.add_argument("--run", required=True, help="run directory")
    parser.add_argument("--cell", required=True, help="name of the cell, such as c0")
    parser.add_argument("--core", action="store_true", help="this cell owns weights and optimizer")
    parser.add_argument("--rank", type=int, default=0, help="rank within the cell")
    options = parser.parse_args()
    run_main(lambda: run_rank(options.run, options.cell, options.core, options.rank))


if __name__ == "__main__":
    main()
