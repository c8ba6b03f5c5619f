"""The engine client: SGLang's /generate as a stream of chunks, /abort_request, and what each failure means.

Shell code: it does IO and judges nothing beyond "whose fault".
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import orjson

from proxyd.client import Exchange, HttpClient
from proxyd.events import Submit
from proxyd.stream import BadStream, Sampled

ASK_S = 5.0
SILENCE_S = 300.0  # without a byte; an engine under load may keep a request queued for long
ABORT_AGAIN_S = 0.5  # an abort that overtakes its request is ignored by the engine, so it is repeated
MAX_CHUNK = 1 << 30  # with the experts of every token and layer the last one is long: 2 kB per token are seen
LONG_CHUNK = 1 << 18  # pieces of a longer one are joined once, at its end


@dataclass(slots=True)
class Ended:
    """Why a stream ended. `how` as in SubmissionEnded."""

    how: str
    lost: bool = False
    why: str = ""


class _Refused(Exception):
    """The engine refuses the request itself."""


class _Busy(Exception):
    """The engine can't take it now; the engine is well."""


class _Events:
    """The body of /generate: chunks of a stream into `sampled`, or the words of a refusal."""

    def __init__(self, sampled: Sampled, heard: Callable[[int], None]) -> None:
        self._sampled, self._rest, self._heard = sampled, b"", heard
        self._held: list[bytes] = []  # what follows `_rest`, if that is long
        self._held_bytes = 0
        self.said = b""

    def __call__(self, status: int, piece: bytes) -> None:
        """Raises _Refused, BadStream, and ValueError on what is not JSON."""
        if status != 200:
            self.said = (self.said + piece)[:500]
            return
        if len(self._rest) > LONG_CHUNK:
            self._held.append(piece)
            self._held_bytes += len(piece)
            if b"\n" not in piece and self._held_bytes <= MAX_CHUNK:
                return
            piece = b"".join(self._held)
            self._held, self._held_bytes = [], 0
        *events, self._rest = (self._rest + piece if self._rest else piece).split(b"\n\n")
        count = 0
        for event in events:
            data = event.strip().removeprefix(b"data:")
            if not data or data.endswith(b"[DONE]"):
                continue
            chunk = orjson.loads(data)
            if "error" in chunk:
                raise _Refused(str(chunk["error"])[:300])
            self._sampled.take(chunk)
            count += 1
        if count:
            self._heard(count)
        if len(self._rest) > MAX_CHUNK:
            raise ValueError("a chunk without end")


class EngineClient:
    """For all engines; connections are kept."""

    def __init__(self, admin_key: str, stop_ids: frozenset[int], stream_interval: int) -> None:
        self._http = HttpClient({"Authorization": f"Bearer {admin_key}", "Content-Type": "application/json"})
        self.chunks = 0  # that any engine sent: proof of life by tokens
        self._stop = orjson.dumps(sorted(stop_ids))
        self._interval = stream_interval

    def close(self) -> None:
        self._http.close()

    def body(self, submit: Submit, ids_json: bytes, asked: int, routed_from: int | None = None) -> bytes:
        """The request, built around the prompt's stored JSON text. `routed_from`: the first token whose experts are
        wanted.
        """
        routed = b""
        if routed_from is not None:
            routed = b',"return_routed_experts":true,"routed_experts_start_len":%d' % routed_from
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
                routed,
                b"}",
            )
        )

    def stream(
        self, url: str, body: list[bytes], sampled: Sampled, heard: Callable[[], None], ended: Callable[[Ended], None]
    ) -> Exchange:
        """Fill `sampled` until the engine ends or fails, which `ended` is told once, later; `heard` is called for
        chunks as they come. What is cut is told to nobody.

        `body` is emptied once the engine has begun to answer: long prompts are megabytes, and answers take minutes.
        """

        def count(chunks: int) -> None:
            self.chunks += chunks
            heard()

        def then(status: int, error: Exception | None) -> None:
            ended(_ended(status, error, events.said, sampled))

        events = _Events(sampled, count)
        return self._http.begin("POST", url, "/generate", body, events, SILENCE_S, then)

    async def work(self, url: str) -> int | None:
        """Requests that run or wait at an engine, anyone's; None if it does not say."""
        parts: list[bytes] = []
        try:
            async with asyncio.timeout(ASK_S):
                status = await self._http.ask("GET", url, "/v1/loads", [], lambda _, p: parts.append(p), ASK_S)
            loads = orjson.loads(b"".join(parts))["loads"] if status == 200 else None
            return sum(int(r["num_running_reqs"]) + int(r["num_waiting_reqs"]) for r in loads) if loads else None
        except (TimeoutError, OSError, ValueError, KeyError, TypeError):
            return None

    async def abort(self, url: str, rid: str, ended: asyncio.Event) -> None:
        """Ask until the stream has ended. A failure is no news here: the stream will fail, too, or be cut."""
        body = orjson.dumps({"rid": rid})
        while not ended.is_set():
            with contextlib.suppress(OSError, TimeoutError, ValueError):
                await self._http.ask("POST", url, "/abort_request", [body], lambda _, piece: None, ASK_S)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), ABORT_AGAIN_S)


def _ended(status: int, error: Exception | None, said: bytes, sampled: Sampled) -> Ended:
    """Why a stream ended, from the status of a complete answer or what went wrong, and what the engine said."""
    try:
        if error is not None:
            raise error
        _check(status, said)
    except _Refused as refused:
        return Ended("refused", why=str(refused))
    except _Busy as busy:
        return Ended("cut", why=str(busy))
    except BadStream as bad:
        return Ended("cut", lost=True, why=f"bad stream: {bad}")
    except Exception as broken:  # of the connection, or not what an engine says
        if not sampled.finish:
            return Ended("cut", lost=True, why=f"{type(broken).__name__}: {broken}"[:200])
    if not sampled.finish:
        return Ended("cut", lost=True, why="the stream ended without a finish reason")
    return Ended("cut" if sampled.finish == "abort" else "finished", why=sampled.why)


def _check(status: int, said: bytes) -> None:
    if status == 200:
        return
    why = f"{status} {said.decode('utf-8', 'replace')}"
    if status in (400, 404, 413, 422):
        raise _Refused(why)
    if status in (429, 503):
        raise _Busy(why)
    raise OSError(why)
