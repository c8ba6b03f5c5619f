"""What a router does with an engine, in the fewest words: the tests' hand on the HTTP surface."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp
import orjson

from celld.engine_client import EngineClient

_numbers = itertools.count()


def new_rid() -> str:
    """Ids of one length, so that none is the beginning of another."""
    return f"r{next(_numbers):08d}"


def generate_body(ids: list[int], **params: Any) -> dict[str, Any]:
    """A /generate body; `rid`, `stream` and `cache_salt` are the body's own, the rest are sampling parameters."""
    own = {name: params.pop(name) for name in ("rid", "stream", "cache_salt") if name in params}
    sampling = {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True, **params}
    return {"rid": new_rid(), "input_ids": ids, "sampling_params": sampling, "return_logprob": True, **own}


class Caller:
    """One engine, with its control client in `control`."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.control = EngineClient(url)

    async def __aenter__(self) -> Caller:
        self.session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.session.close()
        await self.control.close()

    async def reset(self, model: Path) -> None:
        """Back to the state that every test begins with."""
        control = self.control
        await self.slow(0)
        await control.abort_all()
        await control.proceed()
        await control.resume()
        await control.wait_idle(20)
        if await control.weight_version() != "0.0":
            await control.update_weights(model, "0.0")
        await control.flush(5)

    async def post(self, path: str, body: Any = None) -> tuple[int, Any]:
        """Status and decoded body (text where it is not JSON)."""
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        headers = {"Content-Type": "application/json"}
        async with self.session.post(self.url + path, data=data, headers=headers) as response:
            raw = await response.read()
            try:
                return response.status, orjson.loads(raw)
            except orjson.JSONDecodeError:
                return response.status, raw.decode()

    async def generate(self, ids: list[int], **params: Any) -> dict[str, Any]:
        """One whole answer."""
        status, answer = await self.post("/generate", generate_body(ids, **params))
        assert status == 200, answer
        return answer  # type: ignore[no-any-return]

    async def chunks(self, ids: list[int], **params: Any) -> AsyncIterator[dict[str, Any]]:
        """The chunks of one stream; it must end in [DONE]."""
        body = generate_body(ids, stream=True, **params)
        async with self.session.post(self.url + "/generate", json=body) as response:
            assert response.status == 200
            assert response.headers["Content-Type"].startswith("text/event-stream")
            done = False
            async for line in response.content:
                if line == b"data: [DONE]\n":
                    done = True
                elif line.startswith(b"data: "):
                    yield orjson.loads(line[6:])
            assert done

    async def stream(self, ids: list[int], **params: Any) -> dict[str, Any]:
        """A stream put together again: all ids and logprobs, the last chunk's meta_info otherwise."""
        parts = [chunk async for chunk in self.chunks(ids, **params)]
        return joined(parts)

    async def slow(self, step_s: float) -> None:
        """Sleep before every step from now on, so that a test gets its word in; 0 ends it."""
        assert (await self.post("/slow_down", {"forward_sleep_time": step_s}))[0] == 200

    async def metric(self, name: str) -> float:
        """A value of /metrics."""
        async with self.session.get(self.url + "/metrics") as response:
            lines = (await response.text()).splitlines()
        return float(next(line for line in lines if line.startswith(f"sglang:{name}{{")).rsplit(" ", 1)[1])

    async def running(self, count: int) -> None:
        """Wait until so many requests run."""
        for _ in range(400):
            if (await self.control.loads()).running >= count:
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"never saw {count} running requests")


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Incremental chunks as one answer."""
    meta = dict(parts[-1]["meta_info"])
    meta["output_token_logprobs"] = [pair for part in parts for pair in part["meta_info"]["output_token_logprobs"]]
    return {"output_ids": [token for part in parts for token in part["output_ids"]], "meta_info": meta}


def logprobs(answer: dict[str, Any]) -> list[float]:
    """The logprob of each output id, checked to belong to it."""
    pairs = answer["meta_info"]["output_token_logprobs"]
    assert [pair[1] for pair in pairs] == answer["output_ids"]
    return [pair[0] for pair in pairs]
