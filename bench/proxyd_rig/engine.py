"""A fake engine in a process of its own: SGLang's /generate as an incremental stream, cheap enough not to matter.

    python -m bench.proxyd_rig.engine [--tokens 64] [--chunk 16]

Prints its port. `POST /mode {"hold": N}` stops every stream after N chunks until `{"hold": -1}`; with `"keep": true` it
is for new streams only. `GET /stats` counts what runs. Streams end early by /abort_request or when the client leaves.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from typing import Any, cast

RID = re.compile(rb'"rid"\s*:\s*"([^"]*)"')
LENGTH = re.compile(rb"content-length:\s*(\d+)", re.IGNORECASE)
PROMPT = re.compile(rb'"input_ids"\s*:\s*\[([^\]]*)\]')
ANSWERS: dict[str, Any] = {
    "/health": {},
    "/v1/models": {"object": "list", "data": [{"id": "m", "object": "model"}]},
    "/get_model_info": {"model_path": "m", "is_generation": True},
    "/model_info": {"model_path": "m", "is_generation": True, "weight_version": "0.0"},
    "/get_server_info": {"model_path": "m", "served_model_name": "m"},
    "/server_info": {"model_path": "m", "served_model_name": "m"},
}


class Engine:
    """All streams. Token `t` of an answer is 65 + t % 26, the last one is `stop`."""

    def __init__(self, tokens: int, chunk: int, stop: int) -> None:
        self.tokens, self.chunk, self.stop = tokens, chunk, stop
        self.hold = -1
        self.running: dict[str, Stream] = {}

    def answer(self, path: str, body: bytes) -> Any:
        if path == "/mode":
            said = json.loads(body)
            self.hold = int(said["hold"])
            for one in [] if said.get("keep") else list(self.running.values()):
                one.hold = self.hold
                one.go_on()
            return {}
        if path == "/stats":
            return {"running": len(self.running)}
        if path == "/abort_request":
            stream = self.running.get(json.loads(body).get("rid", ""))
            if stream is not None:
                stream.abort()
            return {}
        return ANSWERS.get(path, {})


class Stream:
    """One /generate."""

    def __init__(self, engine: Engine, connection: Connection, rid: str, prompt: int, limit: int) -> None:
        self.engine, self.connection, self.rid, self.prompt = engine, connection, rid, prompt
        self.total = min(limit, engine.tokens)
        self.sent = 0
        self.chunks = 0
        self.hold = engine.hold
        engine.running[rid] = self
        self.go_on()

    def go_on(self) -> None:
        engine, out = self.engine, []
        while self.rid in engine.running and (self.hold < 0 or self.chunks < self.hold):
            count = min(engine.chunk, self.total - self.sent)
            self.sent += count
            self.chunks += 1
            done = self.sent >= self.total
            ids = [65 + t % 26 for t in range(self.sent - count, self.sent)]
            if done:
                ids[-1] = engine.stop
                del engine.running[self.rid]
            out.append(self._chunk(ids, {"type": "stop", "matched": engine.stop} if done else None))
        self._write(out)

    def abort(self) -> None:
        del self.engine.running[self.rid]
        self._write([self._chunk([], {"type": "abort", "message": "Aborted"})])

    def _write(self, out: list[bytes]) -> None:
        if self.rid not in self.engine.running:
            out.append(b"data: [DONE]\n\n")
        data = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in out)
        if self.rid not in self.engine.running:
            data += b"0\r\n\r\n"
            self.connection.stream = None
        self.connection.write(data)

    def _chunk(self, ids: list[int], finish: Any) -> bytes:
        meta = {
            "id": self.rid,
            "finish_reason": finish,
            "prompt_tokens": self.prompt,
            "completion_tokens": self.sent,
            "weight_version": "0.0",
            "output_token_logprobs": [[-0.5, i, None] for i in ids],
        }
        return b"data: " + json.dumps({"text": "", "output_ids": ids, "meta_info": meta}).encode() + b"\n\n"


class Connection(asyncio.Protocol):
    """One client connection."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.buffer = bytearray()
        self.stream: Stream | None = None
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        if self.stream is not None:
            self.engine.running.pop(self.stream.rid, None)

    def write(self, data: bytes) -> None:
        self.transport.write(data)

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        end = self.buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(self.buffer[:end])
        found = LENGTH.search(head)
        length = int(found.group(1)) if found else 0
        if len(self.buffer) < end + 4 + length:
            return
        body = bytes(self.buffer[end + 4 : end + 4 + length])
        del self.buffer[: end + 4 + length]
        self._request(head.split(b" ", 2)[1].decode().partition("?")[0], body)

    def _request(self, path: str, body: bytes) -> None:
        if path == "/generate":
            self.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
            rid, prompt = RID.search(body), PROMPT.search(body)
            limit = re.search(rb'"max_new_tokens"\s*:\s*(\d+)', body)
            name = rid.group(1).decode() if rid else str(id(body))
            count = prompt.group(1).count(b",") + 1 if prompt else 0
            stream = Stream(self.engine, self, name, count, int(limit.group(1)) if limit else 1 << 30)
            self.stream = stream if name in self.engine.running else None
            return
        out = json.dumps(self.engine.answer(path, body)).encode()
        self.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(out) + out)


async def serve(tokens: int, chunk: int, stop: int) -> None:
    engine = Engine(tokens, chunk, stop)
    server = await asyncio.get_running_loop().create_server(lambda: Connection(engine), "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--tokens", type=int, default=64)
    options.add_argument("--chunk", type=int, default=16)
    options.add_argument("--stop", type=int, default=0)
    given = options.parse_args()
    asyncio.run(serve(given.tokens, given.chunk, given.stop))


if __name__ == "__main__":
    main()
