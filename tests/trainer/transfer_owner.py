"""A process with a shelf over the engine that its argument names, driven by lines on stdin: `put N SEED` (N bytes),
`offer`, `done LEASE`, `spoil AT`, `drop`."""

from __future__ import annotations

import random
import sys

import msgspec

from celld.transfer.bulk import open_engine
from celld.transfer.shelf import Shelf


def payload(count: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(count)


def main() -> None:
    shelf = Shelf(open_engine(sys.argv[1], "tcp", "127.0.0.1"))
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
        elif verb == "drop":
            shelf.drop("it")
        elif verb == "spoil":
            shelf._newest["it"].buffer[int(words[0])] ^= 1
        print(answer, flush=True)


if __name__ == "__main__":
    main()
