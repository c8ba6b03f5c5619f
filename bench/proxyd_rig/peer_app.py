"""The stack that most training toolkits run in front of their engines: FastAPI, httpx, and the whole history rendered
and tokenised with every call. Runs in an environment of its own; imports nothing of this project.

    python peer_app.py PORT ENGINE_URL TOKENIZER_DIR
"""

# mypy: ignore-errors
import json
import sys
from pathlib import Path

import httpx
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

port, engine, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
template = environment.from_string((folder / "chat_template.jinja").read_text())
client = httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None))
app = FastAPI()


@app.get("/health")
async def health():
    return {}


@app.post("/v1/chat/completions")
async def chat(request: Request):
    body = await request.json()
    text = template.render(messages=body["messages"], tools=body.get("tools"), add_generation_prompt=True)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    wanted = {"input_ids": ids, "sampling_params": {"max_new_tokens": 128}, "stream": True, "return_logprob": True}

    async def events():
        tokens, logprobs = [], []
        async with client.stream("POST", f"{engine}/generate", json=wanted) as response:
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line[6:])
                tokens += chunk["output_ids"]
                logprobs += [entry[0] for entry in chunk["meta_info"]["output_token_logprobs"]]
                delta = {"content": tokenizer.decode(chunk["output_ids"])}
                yield "data: " + json.dumps({"choices": [{"index": 0, "delta": delta}]}) + "\n\n"
        yield "data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


uvicorn.run(app, host="127.0.0.1", port=port, log_level="error", access_log=False)
