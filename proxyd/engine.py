"""The engine client: SGLang's /generate as a stream of chunks, /abort_request, and what each failure means.

Shell code: it does IO and judges nothing beyond "whose fault".
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from proxyd.events import Submit
from proxyd.stream import BadStream, Sampled

CONNECT_S = 5.0
SILENCE_S = 300.0  # without a byte; an engine under load may keep a request queued for long
ABORT_AGAIN_S = 0.5  # an abort that overtakes its request is ignored by the engine, so it is repeated
MAX_CHUNK = 64 << 20


@dataclass(frozen=True, slots=True)
class Ended:
    """Why a stream ended. `how` as in SubmissionEnded."""

    how: str
    lost: bool = False
    why: str = ""


class _Refused(Exception):
    """The engine refuses the request itself."""


class _Busy(Exception):
    """The engine can't take it now; the engine is well."""


class EngineClient:
    """One session for all engines; connections are kept."""

    def __init__(self, admin_key: str, stop_ids: frozenset[int], stream_interval: int) -> None:
        self.chunks = 0  # that any engine sent: proof of life by tokens
        self._headers = {"Authorization": f"Bearer {admin_key}", "Content-Type": "application/json"}
        self._stop = orjson.dumps(sorted(stop_ids))
        self._interval = stream_interval
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENCE_S)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30.0)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False)

    async def close(self) -> None:
        await self._session.close()

    def body(self, submit: Submit, ids_json: bytes, asked: int) -> bytes:
        """The request, built around the prompt's stored JSON text."""
        return b"".join(
            (
                b'{"rid":"',
                submit.rid.encode(),
                b'","input_ids":[',
                ids_json,
                b'],"sampling_params":{"max_new_tokens":',
                str(asked).encode(),
                b',"temperature":',
                orjson.dumps(submit.temperature),
                b',"top_p":1.0,"top_k":-1,"stop_token_ids":',
                self._stop,
                b',"stream_interval":',
                str(self._interval).encode(),
                b'},"stream":true,"return_logprob":true,"cache_salt":',
                orjson.dumps(submit.version),
                b"}",
            )
        )

    async def stream(self, url: str, body: bytes, sampled: Sampled) -> Ended:
        """Fill `sampled` until the engine ends or fails. Never raises but on cancellation."""
        try:
            async with self._session.post(f"{url}/generate", data=body, headers=self._headers) as response:
                await _check(response)
                async for chunk in _chunks(response.content):
                    if "error" in chunk:
                        raise _Refused(str(chunk["error"])[:300])
                    sampled.take(chunk)
                    self.chunks += 1
        except _Refused as error:
            return Ended("refused", why=str(error))
        except _Busy as error:
            return Ended("cut", why=str(error))
        except BadStream as error:
            return Ended("cut", lost=True, why=f"bad stream: {error}")
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as error:
            if not sampled.finish:
                return Ended("cut", lost=True, why=f"{type(error).__name__}: {error}"[:200])
        if not sampled.finish:
            return Ended("cut", lost=True, why="the stream ended without a finish reason")
        return Ended("cut" if sampled.finish == "abort" else "finished", why=sampled.why)

    async def work(self, url: str) -> int | None:
        """Requests that run or wait at an engine, anyone's; None if it does not say."""
        limit = aiohttp.ClientTimeout(total=CONNECT_S)
        try:
            async with self._session.get(f"{url}/v1/loads", headers=self._headers, timeout=limit) as response:
                loads = orjson.loads(await response.read())["loads"] if response.status == 200 else None
                return sum(int(r["num_running_reqs"]) + int(r["num_waiting_reqs"]) for r in loads) if loads else None
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError, KeyError, TypeError):
            return None

    async def abort(self, url: str, rid: str, ended: asyncio.Event) -> None:
        """Ask until the stream has ended. A failure is no news here: the stream will fail, too, or be cut."""
        body = orjson.dumps({"rid": rid})
        while not ended.is_set():
            with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                async with self._session.post(f"{url}/abort_request", data=body, headers=self._headers) as response:
                    await response.read()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), ABORT_AGAIN_S)


async def _check(response: aiohttp.ClientResponse) -> None:
    if response.status == 200:
        return
    text = (await response.content.read(500)).decode("utf-8", "replace")
    why = f"{response.status} {text}"
    if response.status in (400, 404, 413, 422):
        raise _Refused(why)
    if response.status in (429, 503):
        raise _Busy(why)
    raise aiohttp.ClientError(why)


async def _chunks(content: aiohttp.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """Objects of the `data:` lines. Reads to the end of the body, so that the connection can be used again.

    Raises ValueError on what is not JSON.
    """
    rest = b""
    async for piece in content.iter_any():
        rest += piece
        *events, rest = rest.split(b"\n\n")
        for event in events:
            data = event.strip().removeprefix(b"data:").strip()
            if data and data != b"[DONE]":
                yield orjson.loads(data)
        if len(rest) > MAX_CHUNK:
            raise ValueError("a chunk without end")
