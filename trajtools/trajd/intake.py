"""The stand-alone intake: calls recorded elsewhere, taken over a Unix or TCP socket into files that every tool reads.

Owns the frame, the acknowledgement and the promise behind it: `ok` means that the record is on disk (fdatasync, many
frames per flush). Idempotent by call id and payload: the same call again is acknowledged again, another payload under
its id is refused. Back-pressure by bytes: no frame is read while `limit_bytes` of them wait for the disk. A frozen
execution takes no more calls; late ones are refused and noted. Restart: the files are scanned, a torn tail is cut off.

Frame: u32 head bytes, u32 raw bytes, u32 xxh32 of both, little-endian; head = msgpack map with `op`; raw = int32 prompt
tail, int32 completion, float32 logprobs. Answers are frames without raw, in the order of the questions.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import struct
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgpack
import numpy as np
import xxhash

from gyre_base.runcodec import BadRecord, CallWriter, call_fields, decode, encode, repair_tail
from gyre_base.runfile import NO_IDS, Call, Ids, Intent, Logprobs, Note, RunHeader, RunReader
from gyre_base.runrecords import ExecEnd, chain_hash
from trajtools.forest import Forest

HEAD = struct.Struct("<III")
MAX_HEAD = 1 << 20
MAX_RAW = 1 << 30
LIMIT_BYTES = 64 << 20
FROZEN = "frozen"
RECORDS = ("exec", "exec_end", "intent", "reward", "note")


class BadFrame(ValueError):
    """Bytes that are no frame: the connection can't go on. Nothing was stored."""


def pack_frame(head: dict[str, Any], raw: bytes = b"") -> bytes:
    body: bytes = msgpack.packb(head)
    return HEAD.pack(len(body), len(raw), xxhash.xxh32_intdigest(body + raw)) + body + raw


def call_frame(call: Call, *, base: str | None = None, keep: int = 0) -> bytes:
    """The frame of a call; its prompt begins with the first `keep` tokens of base's prompt + completion."""
    tail = np.ascontiguousarray(call.prompt_ids[keep:], "<i4")
    completion = np.ascontiguousarray(call.completion_ids, "<i4")
    logprobs = np.zeros(0, "<f4") if call.logprobs is None else np.ascontiguousarray(call.logprobs, "<f4")
    import orjson

    head = orjson.loads(
        encode(Call(**{**call.__dict__, "prompt_ids": NO_IDS, "completion_ids": NO_IDS, "logprobs": None}))
    )
    about = {k: v for k, v in head.items() if k not in ("k", "h", "prompt_ids", "completion_ids", "logprobs")}
    sizes = [len(tail), len(completion), -1 if call.logprobs is None else len(logprobs)]
    link = {"base": base, "keep": keep} if base else {}
    raw = tail.tobytes() + completion.tobytes() + logprobs.tobytes()
    return pack_frame({"op": "call", "about": about, "sizes": sizes, **link}, raw)


# ---- what is known (no IO but reading at the start) ----------------------------------------------------------------


@dataclass(eq=False)
class _Known:
    """One execution."""

    forest: Forest
    hashes: dict[str, bytes] = field(default_factory=dict)
    intents: set[str] = field(default_factory=set)
    expected: int | None = None
    frozen: dict[str, Any] | None = None


class Store:
    """Decides what a frame means. `take` returns the answer and the line to write before it may go out."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._writer = CallWriter()

    def recall(self, path: Path) -> None:
        """What a file of an earlier life says."""
        for located in RunReader(path).records():
            record = located.record
            name = getattr(record, "exec", None)
            if not isinstance(name, str):
                continue
            known = self._execution(name)
            match record:
                case Call():
                    known.hashes[record.call] = _payload(record.prompt_ids, record.completion_ids, record.logprobs)
                    known.forest.insert(record)
                case Intent():
                    known.intents.add(record.call)
                case ExecEnd():
                    known.expected = record.calls
                case Note(text="frozen"):
                    self._freeze(name, known)

    def take(self, head: dict[str, Any], raw: bytes) -> tuple[dict[str, Any], bytes]:
        """(answer, line or b""). Bad input is an answer, never an exception."""
        try:
            match head.get("op"):
                case "call":
                    return self._call(head, raw)
                case "record":
                    return self._record(head)
                case "freeze":
                    return self._frozen(str(head.get("exec")))
                case op:
                    return _no(f"unknown op {op!r}"), b""
        except (BadRecord, ValueError, TypeError, KeyError) as error:
            return _no(f"{type(error).__name__}: {error}"), b""

    def _execution(self, name: str) -> _Known:
        if name not in self._known:
            self._known[name] = _Known(Forest(name))
        return self._known[name]

    def _call(self, head: dict[str, Any], raw: bytes) -> tuple[dict[str, Any], bytes]:
        fields = call_fields(head["about"])
        tail, completion, logprobs = _arrays(head["sizes"], raw)
        known = self._execution(fields["exec"])
        name = fields["call"]
        if known.frozen is not None:
            note = Note(exec=fields["exec"], text="late call refused", extra={"call": name})
            return _no(FROZEN, call=name), b"" if name in known.hashes else encode(note)
        base, keep = head.get("base"), int(head.get("keep", 0))
        prompt = tail
        if base is not None:
            if base not in known.forest:
                return _no(f"base {base} is not here: send the whole prompt", call=name), b""
            mark = known.forest[base]
            if not 0 <= keep <= mark.end:
                return _no(f"keep {keep} is longer than base {base} ({mark.end})", call=name), b""
            prompt = np.concatenate([known.forest.tokens(mark, 0, keep), tail])
        payload = _payload(prompt, completion, logprobs)
        if name in known.hashes:
            same = known.hashes[name] == payload
            return (
                _yes(call=name, state="duplicate") if same else _no("conflict: same id, other payload", call=name)
            ), b""
        call = Call(**fields, prompt_ids=prompt, completion_ids=completion, logprobs=logprobs)
        known.hashes[name] = payload
        known.forest.insert(call)
        return _yes(call=name, state="stored"), self._writer.call(call, base, keep)

    def _record(self, head: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        obj = head["record"]
        if not isinstance(obj, dict) or obj.get("k") not in RECORDS:
            return _no(f"a record is one of {', '.join(RECORDS)}"), b""
        record = decode(obj)
        if isinstance(record, Note) and record.text == FROZEN:
            return _no("an execution is frozen with the op freeze"), b""
        known = self._execution(str(getattr(record, "exec", "")))
        if isinstance(record, Intent):
            known.intents.add(record.call)
        elif isinstance(record, ExecEnd):
            known.expected = record.calls
        return _yes(state="stored"), encode(record)

    def _frozen(self, name: str) -> tuple[dict[str, Any], bytes]:
        if name not in self._known:
            return _no(f"no execution {name}"), b""
        known = self._known[name]
        if known.frozen is not None:
            return _yes(**known.frozen), b""
        about = self._freeze(name, known)
        return _yes(**about), encode(Note(exec=name, text=FROZEN, extra={"digest": about["digest"]}))

    def _freeze(self, name: str, known: _Known) -> dict[str, Any]:
        """Lets the tokens go: a frozen execution needs its digest and its ids only."""
        missing = sorted(known.intents - set(known.hashes))
        short = known.expected is not None and known.expected != len(known.hashes)
        digest = known.forest.digest()
        about = {"exec": name, "digest": digest, "calls": len(known.hashes), "incomplete": bool(missing) or short}
        known.frozen, known.forest = about, Forest(name)
        self._writer.forget(name)
        return about


def _yes(**more: Any) -> dict[str, Any]:
    return {"ok": True, **more}


def _no(why: str, **more: Any) -> dict[str, Any]:
    return {"ok": False, "why": why, **more}


def _payload(prompt: Ids, completion: Ids, logprobs: Logprobs | None) -> bytes:
    return chain_hash(b"payload", 0, prompt, completion, logprobs)


def _arrays(sizes: Any, raw: bytes) -> tuple[Ids, Ids, Logprobs | None]:
    """(prompt tail, completion, logprobs). Raises BadRecord."""
    prompt, completion, logprobs = (int(n) for n in sizes)
    if prompt < 0 or completion < 0 or logprobs not in (-1, completion):
        raise BadRecord(f"sizes {sizes}: logprobs are one per completion token, or -1 for none")
    if len(raw) != 4 * (prompt + completion + max(logprobs, 0)):
        raise BadRecord(f"{len(raw)} raw bytes for sizes {sizes}")
    ids = np.frombuffer(raw, "<i4", prompt + completion).astype(np.int32)
    if len(ids) and int(ids.min()) < 0:
        raise BadRecord("a negative token id")
    values = None if logprobs < 0 else np.frombuffer(raw, "<f4", logprobs, 4 * (prompt + completion)).astype(np.float32)
    return ids[:prompt], ids[prompt:], values


# ---- the shell -----------------------------------------------------------------------------------------------------


class Intake:
    """Files, flushes and connections. A failing disk stops it: what was acknowledged is on disk, nothing else is."""

    def __init__(self, folder: Path, *, token: str = "", limit_bytes: int = LIMIT_BYTES) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.store = Store()
        self.waiting_bytes = 0
        self.peak_bytes = 0
        self._token, self._limit = token, limit_bytes
        old = sorted(folder.glob("intake-*.jsonl"), key=lambda p: int(p.stem.rpartition("-")[2]))
        for path in old:
            repair_tail(path)
            self.store.recall(path)
        life = int(old[-1].stem.rpartition("-")[2]) + 1 if old else 1
        self.path = folder / f"intake-{life}.jsonl"
        self._file: BinaryIO = self.path.open("ab", buffering=0)
        self._lines: list[bytes] = [encode(RunHeader(run=folder.name, writer="trajd intake"))]
        self._flushed: asyncio.Future[None] | None = None
        self._room = asyncio.Condition()
        self._wake = asyncio.Event()
        self.failed: OSError | None = None

    async def write(self) -> None:
        """Runs beside the connections: one write and one fdatasync for all that came in meanwhile."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            lines, waiter = self._lines, self._flushed
            self._lines, self._flushed = [], None
            try:
                await asyncio.to_thread(self._put, b"".join(lines))
            except OSError as error:
                self.failed = error
                if waiter is not None:
                    waiter.set_exception(error)
                raise
            if waiter is not None:
                waiter.set_result(None)

    def _put(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._file.fileno(), view) :]
        os.fdatasync(self._file.fileno())

    async def durable(self, line: bytes) -> None:
        """Until this line, and all before it, are on disk. An empty line waits for those before it."""
        if self.failed is not None:
            raise self.failed
        if line:
            self._lines.append(line)
        if self._flushed is None:
            self._flushed = asyncio.get_running_loop().create_future()
        waiter = self._flushed
        self._wake.set()
        await asyncio.shield(waiter)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection: frames in, answers out, in order."""
        known = not self._token
        frames = self._frames(reader)
        try:
            async for head, raw in frames:
                if not known:
                    known = head.get("op") == "hello" and hmac.compare_digest(str(head.get("token")), self._token)
                    writer.write(pack_frame(_yes() if known else _no("no valid token")))
                    if not known:
                        break
                else:
                    answer, line = (_yes(), b"") if head.get("op") == "hello" else self.store.take(head, raw)
                    await self.durable(line)
                    writer.write(pack_frame(answer))
                await writer.drain()
        except (BadFrame, ConnectionError, asyncio.IncompleteReadError, OSError):
            pass
        finally:
            await frames.aclose()
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _frames(self, reader: asyncio.StreamReader) -> AsyncGenerator[tuple[dict[str, Any], bytes], None]:
        while True:
            try:
                head_size, raw_size, check = HEAD.unpack(await reader.readexactly(HEAD.size))
            except asyncio.IncompleteReadError as error:
                if error.partial:
                    raise BadFrame("a torn frame") from None
                return
            if head_size > MAX_HEAD or raw_size > MAX_RAW:
                raise BadFrame(f"a frame of {head_size} + {raw_size} bytes")
            size = head_size + raw_size
            await self._reserve(size)
            try:
                body = await reader.readexactly(head_size)
                raw = await reader.readexactly(raw_size)
                if xxhash.xxh32_intdigest(body + raw) != check:
                    raise BadFrame("its checksum does not fit")
                head = msgpack.unpackb(body)
                if not isinstance(head, dict):
                    raise BadFrame("its head is not a map")
                yield head, raw
            finally:
                await self._release(size)

    async def _reserve(self, size: int) -> None:
        """Wait for room; a frame above the limit goes alone."""
        async with self._room:
            await self._room.wait_for(lambda: not self.waiting_bytes or self.waiting_bytes + size <= self._limit)
            self.waiting_bytes += size
            self.peak_bytes = max(self.peak_bytes, self.waiting_bytes)

    async def _release(self, size: int) -> None:
        async with self._room:
            self.waiting_bytes -= size
            self._room.notify_all()

    def close(self) -> None:
        self._file.close()


async def run_intake(
    folder: Path, listen: str, *, token: str = "", ready: Callable[[str], None] | None = None, stop: asyncio.Event
) -> None:
    """Serve until `stop`. `listen`: unix:PATH (mode 0600) or tcp:HOST:PORT. Raises OSError if the disk fails."""
    intake = Intake(folder, token=token)
    kind, _, where = listen.partition(":")
    if kind == "unix":
        Path(where).unlink(missing_ok=True)
        server: Any = await asyncio.start_unix_server(intake.serve, where)
        os.chmod(where, 0o600)
    else:
        host, _, port = where.rpartition(":")
        server = await asyncio.start_server(intake.serve, host, int(port))
        where = ":".join(map(str, server.sockets[0].getsockname()[:2]))
    writing = asyncio.ensure_future(intake.write())
    stopping = asyncio.ensure_future(stop.wait())
    await intake.durable(b"")
    if ready is not None:
        ready(f"{kind}:{where}")
    try:
        await asyncio.wait({writing, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if writing.done():
            writing.result()
    finally:
        server.close()
        for task in (writing, stopping):
            task.cancel()
        await asyncio.gather(writing, stopping, return_exceptions=True)
        intake.close()
