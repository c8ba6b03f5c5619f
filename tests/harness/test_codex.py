"""Codex: tools, a parallel pair of sub-agents, one alone and a compaction, with every trouble on the way."""

from __future__ import annotations

import json
import re

from tests.harness.mind import MAIN, SUB, Mind, Step, call, plan, sub
from tests.harness.stage import Stage, task

AGENT = re.compile(r'"agent_id":\s*"([^"]+)"')


def shell(command: str) -> str:
    return call("exec_command", cmd=command)


def spawn(name: str) -> str:
    return call("multi_agent_v1.spawn_agent", message=f"{SUB}{name}: do it and report.")


def wait(place: int):
    """For an agent by the order in which they were called."""
    return lambda heard: call("multi_agent_v1.wait_agent", targets=[AGENT.findall(heard)[place]], timeout_ms=60_000)


def called(count: int):
    """Whether so many agents were called: the conversation holds their ids, or it was summarised since."""
    return lambda heard: len(AGENT.findall(heard)) >= count or "PROOF-cut" in heard


def waited(count: int):
    """A report may come before it is waited for, so what counts is the waiting."""
    return lambda heard: heard.count('"timed_out":') >= count or "PROOF-cut" in heard


AGENTS = [
    Step("calls a and b", spawn("a") + "\n" + spawn("b"), called(2)),
    Step("waits for a", wait(0), waited(1)),
    Step("waits for b", wait(1), waited(2)),
    Step("calls c", spawn("c"), called(3)),
    Step("waits for c", wait(2), waited(3)),
]


TREE = {
    "begins": ("main", "-", "-"),
    "is moved": ("main", "begins", "-"),
    "calls a and b": ("main", "is moved", "-"),
    "a works": ("sub-agent", "-", "calls a and b"),
    "a reports": ("sub-agent", "a works", "calls a and b"),
    "b works": ("sub-agent", "-", "calls a and b"),
    "b reports": ("sub-agent", "b works", "calls a and b"),
    "waits for a": ("main", "calls a and b", "-"),
    "waits for b": ("main", "waits for a", "-"),
    "calls c": ("main", "waits for b", "-"),
    "c works": ("sub-agent", "-", "calls c"),
    "c reports": ("sub-agent", "c works", "calls c"),
    "waits for c": ("main", "calls c", "-"),
    "is cut": ("main", "waits for c", "-"),
    "fills 1": ("main", "is cut", "-"),
    "fills 2": ("main", "fills 1", "-"),
    "is held": ("main", "fills 2", "-"),
    "summary": ("main-summary", "-", "-"),  # asked without tools, which stand at the head of every other prompt
    "loses its engine": ("main", "-", "-"),
    "loses proxyd": ("main", "loses its engine", "-"),
    "writes": ("main", "loses proxyd", "-"),
    "ends": ("main", "writes", "-"),
}


async def test_a_whole_run(needs, real_tokenizer, tmp_path):
    needs("codex")
    mind = Mind(
        plan(shell, AGENTS, fill="seq 1 3800"),
        {"a": sub("a", shell), "b": sub("b", shell), "c": sub("c", shell, "kill")},
        orders=lambda turns: "<tools>" not in turns[0].text,
    )
    engine = {"context_length": 32_500}
    async with Stage(tmp_path / "run", real_tokenizer, mind, ("codex",), engine=engine) as stage:
        stage.verify(await stage.play(task(f"{MAIN}: follow your plan.")))
        assert stage.tree() == TREE
        kinds = [json.loads(line)["type"] for line in stage.printed().splitlines()]
        assert kinds[-1] == "turn.completed" and not {"error", "turn.failed"} & set(kinds)
