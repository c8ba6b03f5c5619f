"""A process that publishes weights of a given size: `python -m bench.celld_rig.owner RUN BYTES KIND`.

On the bus and in a slot of the engine KIND (auto, socket, mooncake), as a core rank does; and to whoever connects to
its plain TCP port, with one `sendall`. Prints that port. Each line on stdin publishes the next version, every byte of
it new, and is answered.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import threading

import numpy as np

from celld.transfer.bulk import Bulk, open_engine
from celld.weights import Published, Snapshot
from gyre_base.bus import Server
from gyre_base.keys import load_keys
from gyre_base.messages import PullWeights, SlotDone
from gyre_base.rundir import RunDir

NAME = "rank-c0"


def give_plainly(listener: socket.socket, published: Published) -> None:
    while True:
        taker, _ = listener.accept()
        with taker:
            assert published.snapshot is not None
            taker.sendall(published.snapshot.payload)


def publish(published: Published, step: int, size: int) -> None:
    weights = np.random.default_rng(step).random(size // 4, dtype=np.float32)
    published.publish(Snapshot.of(f"0.{step}", {"all": weights}))


def publish_when_told(published: Published, size: int) -> None:
    for step, _ in enumerate(sys.stdin, start=2):
        publish(published, step, size)
        say(f"0.{step}")


def say(word: object) -> None:
    print(word, file=sys.stderr, flush=True)  # mooncake has words of its own on stdout


async def serve(run: RunDir, size: int, kind: str) -> None:
    bulk = Bulk(open_engine(kind, "tcp", "127.0.0.1"))
    published = Published(bulk)
    publish(published, 1, size)
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=give_plainly, args=(listener, published), daemon=True).start()
    threading.Thread(target=publish_when_told, args=(published, size), daemon=True).start()
    server = Server(run, load_keys(run), kind="rank", name=NAME, life=1, bind="127.0.0.1")
    server.start()
    say(listener.getsockname()[1])
    async for received in server:
        match received.message:
            case PullWeights():
                await server.send(received.peer, published.answer(received.message), received.correlation)
            case SlotDone(lease=lease):
                bulk.shelf.done(lease)


if __name__ == "__main__":
    asyncio.run(serve(RunDir.open(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
