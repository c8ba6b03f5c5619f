"""Start one emulated rank: `python -m celld.emulate.trainer --run DIR --cell c0`. celld starts it as its child."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging

from celld.emulate.rank import EmulatedTeam
from celld.trainer.rank import Rank
from celld.trainer.service import RankService
from gyre_base import config as configuration
from gyre_base.bus import Server
from gyre_base.daemon import die_with_parent, log_to, run_main, stop_on_signals
from gyre_base.keys import load_keys
from gyre_base.rundir import RunDir

log = logging.getLogger(__name__)


async def run_rank(run_dir: str, cell: str) -> None:
    """Serve and train until a signal. Raises RunLocked if this cell's rank already runs."""
    die_with_parent()
    run = RunDir.open(run_dir)
    name = f"rank-{cell}"
    log_to(run.path("log", f"{name}.log"), name=name)
    with run.lock(name):
        await _run(run, cell)


async def _run(run: RunDir, cell: str) -> None:
    stopping = asyncio.Event()
    stop_on_signals(stopping)
    keys, life = load_keys(run), run.next_life(f"rank-{cell}")
    config = configuration.from_json(run.path("run.json").read_text())
    rank = Rank(config, run, keys, EmulatedTeam(config, run, keys, cell=cell), cell=cell, life=life)
    await rank.start()
    server = Server(run, keys, kind="rank", name=f"rank-{cell}", life=life, bind=config.cluster.bind)
    service = RankService(rank, server)
    server.start({"cell": cell, "core": rank.core})
    for work in (service.serve(), service.beat(), rank.work()):
        service.spawn(work)
    ends = [asyncio.ensure_future(event.wait()) for event in (stopping, service.failed)]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    try:
        if service.failed.is_set():
            raise RuntimeError(f"rank-{cell} failed; see its log")
        rank.may_claim.clear()
        if rank.core and rank.saved[0] != str(rank.version):
            await rank.save()
    finally:
        for end in ends:
            end.cancel()
        await service.leave()
        rank.close()
        with contextlib.suppress(OSError):
            server.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m celld.emulate.trainer", description="a trainer that takes time")
    parser.add_argument("--run", required=True, help="run directory")
    parser.add_argument("--cell", required=True, help="name of the cell, such as c0")
    options = parser.parse_args()
    run_main(lambda: run_rank(options.run, options.cell))


if __name__ == "__main__":
    main()
