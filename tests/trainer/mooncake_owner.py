"""A process with a shelf, driven by lines on stdin: `put N SEED` (N bytes), `offer`, `done LEASE`, `spoil AT`."""

from __future__ import annotations

import random
import sys

import msgspec

from celld.transfer.engine import TransferEngine
from celld.transfer.shelf import Shelf


def payload(count: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(count)


def main() -> None:
    shelf = Shelf(TransferEngine("127.0.0.1"))
    print("ready", flush=True)
    for line in sys.stdin:
        verb, *words = line.split()
        answer = "ok"
        if verb == "put":
            shelf.put("it", payload(int(words[0]), int(words[1])))
        elif verb == "offer":
            answer = msgspec.json.encode(shelf.offer("it")).decode()
        elif verb == "done":
            shelf.done(int(words[0]))
        elif verb == "spoil":
            shelf._newest["it"].buffer[int(words[0])] ^= 1
        print(answer, flush=True)


if __name__ == "__main__":
    main()
