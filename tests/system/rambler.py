"""A scripted harness whose calls are long: standard library only; the instruction is JSON {"turns": N}.

A random model never stops by itself, so each call runs to the run's max_new_tokens. Any answer but a good one ends it
with code 1: what a fault of the infrastructure would look like to an agent.
"""

import http.client
import json
import os
import sys
import urllib.parse
from typing import Any


def call(messages: list[dict[str, Any]]) -> str:
    """One streamed completion; ends the process unless it came whole."""
    base = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])
    connection = http.client.HTTPConnection(base.hostname or "", base.port, timeout=300)
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "stream": True, "messages": messages})
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    connection.request("POST", base.path + "/chat/completions", body, headers)
    answer = connection.getresponse()
    lines = answer.read().decode().split("\n\n")
    if answer.status != 200 or "data: [DONE]" not in lines:
        sys.exit(f"the server answered {answer.status}: {lines[:1]!r}")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    if any("error" in chunk for chunk in chunks):
        sys.exit(f"an error in the stream: {chunks[-1]!r}")
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


def main() -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": sys.argv[-1]}]
    for _ in range(json.loads(sys.argv[-1])["turns"]):
        text = call(messages)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Go on."}]
        with open("answer", "a") as file:
            file.write(text)


if __name__ == "__main__":
    main()
