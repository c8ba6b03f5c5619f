"""CPU of a proxyd process per call: `python -m tests.proxyd.measure [--executions N] [--turns N]`. A measurement, not
a test.

Each execution is one growing history of short tool turns, as in the quickstart: 75 tokens per answer in chunks of 16.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.proxyd.fakes import FakeEngine, World
from tests.proxyd.test_end_to_end import READ, SYSTEM, TASK, TOOLS, echo
from tests.proxyd.tokens import write_tokenizer


class ChunkedEngine(FakeEngine):
    """Sends a whole answer in chunks of 16 without waiting."""

    async def _send(
        self, http: Any, response: Any, rid: str, prompt: list[int], answer: list[int], params: Any
    ) -> None:
        for at in range(0, len(answer), 16):
            end = min(at + 16, len(answer))
            finish = {"type": "stop", "matched": answer[-1]} if end == len(answer) else None
            await response.write(self._chunk(rid, prompt, answer[at:end], end, finish))
        await response.write(b"data: [DONE]\n\n")


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def run(executions: int, turns: int, tokenizer: Path, root: Path) -> dict[str, float]:
    async with World(root, tokenizer, engine={"context_length": 1 << 20}, rollout={"max_new_tokens": 128}) as world:
        answer = world.says(READ + " " + "x" * 20)[:-1]
        answer = [*(answer * 4)[:74], world.chat.end_id]
        engine = await ChunkedEngine("a", lambda prompt: answer, admin=world.keys.admin).start()
        world.engines.append(engine)
        await world.cellctl.serve(engine)
        for n in range(executions):
            await world.cellctl.open(f"e{n}")

        async def one(n: int) -> None:
            history: list[dict[str, Any]] = [SYSTEM, TASK]
            for turn in range(turns):
                status, body, _ = await world.chat_call(f"e{n}", history, f"c{n}-{turn}", tools=TOOLS, stream=False)
                assert status == 200, body
                history = [*history, echo(body)]
                for call in body["choices"][0]["message"].get("tool_calls", []):
                    history.append({"role": "tool", "tool_call_id": call["id"], "content": "- reverse the text\n"})
                history.append({"role": "user", "content": f"turn {turn}"})

        assert world.process is not None
        await one(0)
        before, began = cpu_s(world.process.pid), time.monotonic()
        await asyncio.gather(*(one(n) for n in range(1, executions)))
        calls = (executions - 1) * turns
        return {
            "calls": calls,
            "cpu_ms_per_call": round(1000 * (cpu_s(world.process.pid) - before) / calls, 3),
            "wall_s": round(time.monotonic() - began, 2),
        }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--executions", type=int, default=65)
    options.add_argument("--turns", type=int, default=7)
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = write_tokenizer(Path(folder) / "tokenizer")
        print(json.dumps(asyncio.run(run(given.executions, given.turns, tokenizer, Path(folder) / "run"))))


if __name__ == "__main__":
    main()
