"""A client of the intake: sends a recording, call by call in delta form, and believes only what is acknowledged.

Sending again is safe: what is there already is answered `duplicate`. A recording without token ids is not sent.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgpack

from gyre_base.runcodec import to_object
from gyre_base.runfile import Call, ExecEnd, Record, Reward
from trajtools.load import Source, Stream
from trajtools.recording import Execution
from trajtools.trajd.frames import HEAD, call_frame, pack_frame
from trajtools.trajd.store import RECORDS

AHEAD = 64  # frames sent and not yet answered


class NotSent(ValueError):
    """The intake did not take us or went away; the text says after how many acknowledgements."""


@dataclass
class Sent:
    """What was acknowledged, by state; `refused`: the first few reasons."""

    states: Counter[str] = field(default_factory=Counter)
    refused: list[str] = field(default_factory=list)
    frozen: list[dict[str, Any]] = field(default_factory=list)
    text_level: int = 0

    @property
    def ok(self) -> bool:
        return not self.states["refused"] and not self.text_level

    def as_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "states": dict(self.states), "ok": self.ok}

    def lines(self) -> list[str]:
        out = [", ".join(f"{n:,} {state}" for state, n in sorted(self.states.items())) or "nothing to send"]
        if self.text_level:
            out.append(f"  {self.text_level:,} executions at text level were not sent: the intake takes token ids")
        out += [f"  refused: {why}" for why in self.refused]
        return out + [f"  {f['exec']} frozen: {f['digest']}{' incomplete' * f['incomplete']}" for f in self.frozen]


async def send(source: Source, address: str, *, token: str = "", freeze: bool = False) -> Sent:
    """Send all of it. `address`: unix:PATH or tcp:HOST:PORT. Raises NotSent, OSError."""
    kind, _, where = address.partition(":")
    if kind == "unix":
        reader, writer = await asyncio.open_unix_connection(where)
    else:
        host, _, port = where.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
    sent, asked = Sent(), deque[str]()
    try:
        for what, frame in _frames(source, token, freeze, sent):
            writer.write(frame)
            await writer.drain()
            asked.append(what)
            if len(asked) >= AHEAD:
                _note(sent, asked.popleft(), await _answer(reader))
        while asked:
            _note(sent, asked.popleft(), await _answer(reader))
    except (asyncio.IncompleteReadError, ConnectionError):
        total = sum(sent.states.values())
        raise NotSent(f"the intake closed the connection after {total:,} acknowledgements; send again") from None
    finally:
        writer.close()
    return sent


def _frames(source: Source, token: str, freeze: bool, sent: Sent) -> Iterator[tuple[str, bytes]]:
    """(what it is, frame): calls after what opens their execution, before what closes it."""
    if token:
        yield "hello", pack_frame({"op": "hello", "token": token})
    for execution in Stream(source).executions():
        if execution.level != "token":
            sent.text_level += 1
            continue
        closing = [r for r in execution.others if isinstance(r, (Reward, ExecEnd))]
        yield from (_record(r) for r in execution.others if r not in closing)
        yield from _calls(execution)
        yield from map(_record, closing)
        if freeze:
            yield "freeze", pack_frame({"op": "freeze", "exec": execution.id})


def _calls(execution: Execution) -> Iterator[tuple[str, bytes]]:
    for call, base, keep in execution.calls():
        yield f"call {call.call} of {call.exec}", call_frame(call, base=base, keep=keep)


def _record(record: Record) -> tuple[str, bytes]:
    assert not isinstance(record, Call)
    obj = to_object(record)
    assert obj["k"] in RECORDS
    return f"{obj['k']} of {obj.get('exec')}", pack_frame({"op": "record", "record": obj})


def _note(sent: Sent, what: str, answer: dict[str, Any]) -> None:
    if not answer.get("ok"):
        if what == "hello":
            raise NotSent("the intake does not know this token")
        sent.states["refused"] += 1
        if len(sent.refused) < 8:
            sent.refused.append(f"{what}: {answer.get('why')}")
    elif what == "freeze":
        sent.frozen.append({k: answer[k] for k in ("exec", "digest", "calls", "incomplete")})
    elif what != "hello":
        sent.states[str(answer.get("state", "ok"))] += 1


async def _answer(reader: asyncio.StreamReader) -> dict[str, Any]:
    size, _, _ = HEAD.unpack(await reader.readexactly(HEAD.size))
    answer: dict[str, Any] = msgpack.unpackb(await reader.readexactly(size))
    return answer
