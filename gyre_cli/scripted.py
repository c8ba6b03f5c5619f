"""An engine that says what a script says, behind a real proxyd: tries a task and a harness without a model.

Speaks SGLang's /generate as far as proxyd uses it. The script is a JSON list of answers, given out in the order of the
calls: a text, or {"text": "...", "calls": [{"name": "...", "arguments": {}}]}. Its log-probabilities are 0: what a
script says, it says with certainty.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from aiohttp import web
from tokenizers import Tokenizer

from gyre_base.config import ConfigError


def read_script(path: Path) -> list[str]:
    """Answers as the model would write them. Raises ConfigError."""
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read as a script ({error})") from None
    if not isinstance(body, list) or not body:
        raise ConfigError(f"{path}: a script is a JSON list of answers, at least one")
    return [_answer(item, f"{path}: answer {place}") for place, item in enumerate(body, start=1)]


def _answer(item: Any, where: str) -> str:
    if isinstance(item, str):
        return item
    calls = item.get("calls", []) if isinstance(item, dict) else None
    if calls is None or not all(isinstance(c, dict) and isinstance(c.get("name"), str) for c in calls):
        raise ConfigError(f'{where} must be a text or {{"text": "", "calls": [{{"name": "", "arguments": {{}}}}]}}')
    lines = [str(item["text"])] if item.get("text") else []
    for call in calls:
        name, arguments = json.dumps(call["name"]), json.dumps(call.get("arguments", {}), ensure_ascii=False)
        lines.append(f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>')
    return "\n".join(lines)


class ScriptedEngine:
    """Serves until `stop`. `asked` counts calls; beyond the script it answers nothing, and says so in `ran_out`."""

    def __init__(self, answers: list[str], tokenizer: Path, version: str) -> None:
        self._encode = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).encode
        self._answers, self._version = answers, version
        self.asked = 0
        self.url = ""
        self._runner: web.AppRunner | None = None

    @property
    def ran_out(self) -> int:
        return max(0, self.asked - len(self._answers))

    async def start(self) -> None:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _abort(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        body = await http.json()
        params = body["sampling_params"]
        text = self._answers[self.asked] if self.asked < len(self._answers) else ""
        self.asked += 1
        ids = [*self._encode(text, add_special_tokens=False).ids, *params["stop_token_ids"][:1]]
        finish: dict[str, Any] = {"type": "stop", "matched": ids[-1]}
        if len(ids) > params["max_new_tokens"]:
            ids = ids[: params["max_new_tokens"]]
            finish = {"type": "length", "length": len(ids)}
        meta = {
            "id": body["rid"],
            "finish_reason": finish,
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(ids),
            "weight_version": self._version,
            "output_token_logprobs": [[0.0, i, None] for i in ids],
            "weight_versions": [{"version": self._version, "start": 0, "end": len(ids)}],
        }
        chunk = json.dumps({"output_ids": ids, "meta_info": meta})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(http)
        await response.write(f"data: {chunk}\n\ndata: [DONE]\n\n".encode())
        return response
