"""Shards of proxyd: which one has an execution, and what each is called.

A run has `proxyd.shards` processes that share nothing and never talk to each other. An execution belongs to one of
them from its first call to its last, by its name alone: whoever knows the name knows the address. Shard N is called
`proxyd-N` (process, endpoint, lock, life, journal, log, call log) and is the peer `proxyd:N`, also where it is alone.
"""

from __future__ import annotations

import xxhash

ALL = "proxyd:*"  # every shard, as a peer to send to


def shard_of(execution: str, shards: int) -> int:
    """0 .. shards - 1; the same in every process and life."""
    return xxhash.xxh3_64_intdigest(execution.encode("utf-8", "surrogatepass")) % shards


def proxyd_name(shard: int) -> str:
    """Of its process and its files."""
    return f"proxyd-{shard}"


def proxyd_names(shards: int) -> list[str]:
    return [proxyd_name(shard) for shard in range(shards)]


def proxyd_peer(shard: int) -> str:
    """As `kind:name`; the name that it says in its hello is the number."""
    return f"proxyd:{shard}"
