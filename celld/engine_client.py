"""The cell agent's view of an engine: SGLang's control surface over HTTP, the same for `sglang` and `tiny`.

Owns every endpoint name and body that the agent uses, and the check at start that an engine can be trusted with
training data. Never routes or generates for anyone: that is proxyd's. Every call is bounded in time.

Order that a role switch needs: (proxyd stops routing) -> abort or wait_idle -> pause -> flush -> release -> ... ->
resume weights -> update -> resume kv_cache -> proceed -> model_info shows the version. The pause holds a request that
strays in: without it the real engine would run it on memory that is not there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import aiohttp
import orjson

from gyre_base.routing import BadRouting, RoutingShape

PauseMode = Literal["abort", "retract", "in_place"]
PROBE_TOKENS = 4


class EngineError(Exception):
    """Something about an engine; the subclass says what to do."""


class EngineUnreachable(EngineError):
    """No answer: not started, gone, or too slow for the time given."""


class EngineRefused(EngineError):
    """It answered and said no."""

    def __init__(self, what: str, status: int, message: str) -> None:
        super().__init__(f"{what} was refused ({status}): {message}")
        self.status = status
        self.message = message


class EngineUnsuitable(EngineError):
    """It can't be used for rollout as it is started; `remedies` are the settings to change."""

    def __init__(self, base_url: str, remedies: Sequence[str]) -> None:
        super().__init__(f"{base_url} can't be used for rollout: " + "; ".join(remedies))
        self.remedies = tuple(remedies)


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """What a probe found."""

    model_path: str
    weight_version: str
    context_length: int
    max_running_requests: int
    surface: str  # SGLang version that is spoken
    raw: dict[str, Any] = field(repr=False)  # the whole of /server_info


@dataclass(frozen=True, kw_only=True)
class EngineLoads:
    """What an engine holds, summed over its data-parallel ranks."""

    running: int
    waiting: int
    used_tokens: int
    throughput: float  # generated tokens per second

    @property
    def idle(self) -> bool:
        return self.running == 0 and self.waiting == 0


class EngineClient:
    """One engine. Use as an async context manager, or call `close`."""

    def __init__(
        self, base_url: str, *, admin_key: str | None = None, api_key: str | None = None, timeout_s: float = 30.0
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self.timeout_s = timeout_s
        self._plain = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._admin = {"Authorization": f"Bearer {admin_key}"} if admin_key else self._plain
        self._session: aiohttp.ClientSession | None = None
        self._released: set[str] = set()

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    # -- what it is ---------------------------------------------------------------------------------------------

    async def alive(self, timeout_s: float = 2.0) -> bool:
        """Whether it answers. /model_info, because the real engine's /health fails in a pause."""
        try:
            await self._get("/model_info", timeout_s)
        except EngineError:
            return False
        return True

    async def model_info(self) -> dict[str, Any]:
        """/model_info; its `weight_version` is the proof of what is served."""
        return _object(await self._get("/model_info"))

    async def weight_version(self) -> str:
        """The version served now."""
        return str((await self.model_info()).get("weight_version"))

    async def loads(self) -> EngineLoads:
        """What it holds. The real engine's numbers are a snapshot some decode steps old."""
        ranks = _object(await self._get("/v1/loads")).get("loads") or []
        return EngineLoads(
            running=sum(rank["num_running_reqs"] for rank in ranks),
            waiting=sum(rank["num_waiting_reqs"] for rank in ranks),
            used_tokens=sum(rank.get("num_used_tokens", 0) for rank in ranks),
            throughput=sum(rank.get("gen_throughput", 0.0) for rank in ranks),
        )

    async def tokens(self) -> int | None:
        """Tokens generated since it started, of /metrics; None where it tells none."""
        text = await self._get("/metrics")
        lines = str(text).splitlines() if isinstance(text, str) else []
        counts = [line.rsplit(" ", 1)[1] for line in lines if line.startswith("sglang:generation_tokens_total")]
        return int(sum(map(float, counts))) if counts else None

    async def probe(
        self, *, token_id: int = 0, need_release: bool = True, routing: RoutingShape | None = None
    ) -> EngineFacts:
        """Check settings and one short generation against what training data needs. Raises EngineUnsuitable.

        `routing`: it must say the experts of each token, of such a model.
        The engine must be serving: in a pause the generation would wait for ever, that is, until the time is up.
        """
        info, model = _object(await self._get("/server_info")), await self.model_info()
        remedies = _remedies(info, need_release, routing is not None)
        if "weight_version" not in model:
            remedies.append("use SGLang 0.5.23 or newer: /model_info names no weight_version")
        if not remedies:
            remedies = await self._trial(token_id, routing)
        if remedies:
            raise EngineUnsuitable(self.base_url, remedies)
        return EngineFacts(
            model_path=str(model.get("model_path")),
            weight_version=str(model["weight_version"]),
            context_length=int(info.get("context_length") or 0),
            max_running_requests=int(info.get("max_running_requests") or 0),
            surface=str(info.get("version")),
            raw=info,
        )

    async def _trial(self, token_id: int, routing: RoutingShape | None) -> list[str]:
        """Generate a few tokens in a stream: increments, exact ids, a logprob per id, spans and experts of them all."""
        params = {"max_new_tokens": PROBE_TOKENS, "temperature": 1.0, "ignore_eos": True, "stream_interval": 1}
        body = {"input_ids": [token_id], "sampling_params": params, "stream": True, "return_logprob": True}
        if routing is not None:
            body |= {"return_routed_experts": True, "routed_experts_start_len": 0}
        raw = await self._request("POST", "/generate", body, None, self._plain)
        chunks = [orjson.loads(line[6:]) for line in raw.split(b"\n\n") if line.startswith(b"data: {")]
        if not chunks or any("meta_info" not in chunk for chunk in chunks):
            message = chunks[0].get("error", {}).get("message", "") if chunks else "no chunk"
            raise EngineRefused("the probe's generation", 400, message)
        return _trial_remedies(chunks) + _routing_remedies(chunks, routing)

    # -- what it does -------------------------------------------------------------------------------------------

    async def abort(self, rid: str) -> None:
        """Stop a request, and every other whose id begins so: ids must have one length."""
        await self._post("/abort_request", {"rid": rid})

    async def abort_all(self) -> None:
        """Stop every request; their clients get what there is."""
        await self._post("/abort_request", {"abort_all": True})

    async def pause(self, mode: PauseMode, timeout_s: float | None = None) -> None:
        """Hold new requests; running ones are aborted, requeued or frozen."""
        await self._post("/pause_generation", {"mode": mode}, timeout_s)

    async def proceed(self) -> None:
        """End a pause."""
        await self._post("/continue_generation", {})

    async def flush(self, wait_s: float = 0.0) -> None:
        """Forget cached prefixes. Refused while requests run, after waiting up to `wait_s` for them."""
        await self._post(f"/flush_cache?timeout={wait_s:g}", {}, self.timeout_s + wait_s)

    async def release(self, tags: Sequence[str] = ("kv_cache", "weights")) -> None:
        """Let go of memory. A busy real engine would die of it, so it is flushed first, which a busy one refuses.

        (/v1/loads is no proof: its numbers can be older than a request that runs.)
        """
        await self.flush()
        await self._post("/release_memory_occupation", {"tags": list(tags)})
        self._released.update(tags)

    async def resume(self, tags: Sequence[str] = ("weights", "kv_cache")) -> None:
        """Take memory again. Weights must be sent after `resume(("weights",))`; their content is undefined.

        What this client did not release is left out: the real engine dies of being asked for it.
        """
        if gone := [tag for tag in tags if tag in self._released]:
            await self._post("/resume_memory_occupation", {"tags": gone})
            self._released.difference_update(gone)

    async def update_weights(
        self, path: Path | str, version: str, *, flush: bool = True, timeout_s: float | None = None
    ) -> None:
        """Load weights as `version`, in a session bracket, and verify that the engine says so.

        Without a pause this waits for what is in flight. A failed update leaves no open session behind.
        """
        await self._post("/begin_weight_update", {})
        body = {"model_path": str(path), "weight_version": version, "flush_cache": flush}
        try:
            answer = _object(await self._post("/update_weights_from_disk", body, timeout_s))
        finally:
            await self._post("/end_weight_update", {})
        served = await self.weight_version()
        if not answer.get("success") or served != version:
            raise EngineRefused("the weight update", 409, f"it serves {served}, not {version}: {answer.get('message')}")

    async def checksums(self) -> list[dict[str, str]]:
        """A digest per tensor, one mapping per rank."""
        answer = _object(await self._post("/weights_checker", {"action": "checksum"}))
        return [rank["checksums"] for rank in answer["ranks"]]

    async def wait_idle(self, timeout_s: float, poll_s: float = 0.05) -> EngineLoads:
        """Wait until nothing runs or waits. Raises EngineUnreachable when the time is up."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            loads = await self.loads()
            if loads.idle:
                return loads
            if asyncio.get_running_loop().time() >= deadline:
                raise EngineUnreachable(
                    f"{self.base_url} still holds {loads.running} running and {loads.waiting} waiting requests "
                    f"after {timeout_s:g} s"
                )
            await asyncio.sleep(poll_s)

    async def wait_serving(self, timeout_s: float, poll_s: float = 0.1) -> None:
        """Wait until a starting engine answers."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not await self.alive():
            if asyncio.get_running_loop().time() >= deadline:
                raise EngineUnreachable(f"{self.base_url} did not answer within {timeout_s:g} s")
            await asyncio.sleep(poll_s)

    # -- transport ----------------------------------------------------------------------------------------------

    async def _get(self, path: str, timeout_s: float | None = None) -> Any:
        return _decoded(await self._request("GET", path, None, timeout_s, self._plain))

    async def _post(self, path: str, body: dict[str, Any], timeout_s: float | None = None) -> Any:
        return _decoded(await self._request("POST", path, body, timeout_s, self._admin))

    async def _request(
        self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float | None, headers: dict[str, str]
    ) -> bytes:
        if self._session is None:
            # a connection per call: an engine closes idle ones after seconds, and a POST on such a one looks like death
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True))
        data = None if body is None else orjson.dumps(body)
        kind = {"Content-Type": "application/json"} if data is not None else {}
        limit = aiohttp.ClientTimeout(total=self.timeout_s if timeout_s is None else timeout_s)
        url = self.base_url + path
        try:
            async with self._session.request(
                method, url, data=data, headers={**headers, **kind}, timeout=limit
            ) as response:
                raw = await response.read()
        except TimeoutError as error:
            raise EngineUnreachable(f"{method} {url}: no answer within {limit.total:g} s") from error
        except aiohttp.ClientError as error:
            raise EngineUnreachable(f"{method} {url}: {error}") from error
        if response.status != 200:
            raise EngineRefused(f"{method} {path}", response.status, _message(raw))
        return raw


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise EngineError(f"the engine answered {type(value).__name__} where an object was expected")
    return value


def _decoded(raw: bytes) -> Any:
    """JSON where it is JSON; some endpoints answer plain text or nothing."""
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        return raw.decode(errors="replace")


def _message(raw: bytes) -> str:
    """The text of an error in any of the shapes that the surface has."""
    body = _decoded(raw)
    if isinstance(body, dict):
        error = body.get("error", body.get("message", body.get("detail", body)))
        return str(error.get("message", error)) if isinstance(error, dict) else str(error)
    return str(body).strip()[:500]


def _remedies(info: dict[str, Any], need_release: bool, need_routing: bool) -> list[str]:
    """Settings of /server_info that would spoil rollout data, as what to do about them."""
    wanted = {
        "incremental_streaming_output": "start it with --incremental-streaming-output (whole chunks are quadratic)"
    }
    if need_release:
        wanted["enable_memory_saver"] = "start it with --enable-memory-saver (release would do nothing)"
    if need_routing:
        wanted["enable_return_routed_experts"] = (
            "start it with --enable-return-routed-experts, or set engine.routed_experts to false"
        )
    return [remedy for name, remedy in wanted.items() if not info.get(name)]


def _routing_remedies(chunks: list[dict[str, Any]], routing: RoutingShape | None) -> list[str]:
    """What is wrong with the experts that the probe's stream tells."""
    if routing is None:
        return []
    try:
        routing.reported(str(chunks[-1]["meta_info"].get("routed_experts") or ""), PROBE_TOKENS)
    except BadRouting as error:
        return [f"set engine.routed_experts to false: the engine's are not those of this model ({error})"]
    return []


def _trial_remedies(chunks: list[dict[str, Any]]) -> list[str]:
    """What is wrong with the chunks of the probe's stream."""
    remedies = []
    ids = [token for chunk in chunks for token in chunk.get("output_ids") or ()]
    pairs = [pair for chunk in chunks for pair in chunk["meta_info"].get("output_token_logprobs") or ()]
    if len(ids) != PROBE_TOKENS:
        remedies.append(f"set incremental streaming: {PROBE_TOKENS} tokens came as {len(ids)} ids")
    if [pair[1] for pair in pairs] != ids or not all(isinstance(pair[0], float) for pair in pairs):
        remedies.append("output_token_logprobs must give one finite logprob per output id")
    spans = chunks[-1]["meta_info"].get("weight_versions")
    if not spans or spans[0]["start"] != 0 or spans[-1]["end"] != PROBE_TOKENS:
        remedies.append("use SGLang 0.5.23 or newer: the final chunk has no weight_versions over all tokens")
    return remedies
