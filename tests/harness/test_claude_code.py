"""Claude Code: tools, a parallel pair of sub-agents, one alone and a compaction, with every trouble on the way."""

from __future__ import annotations

import json

from tests.harness.mind import MAIN, SUB, Mind, Step, call, plan, sub
from tests.harness.stage import Stage, task


def shell(command: str) -> str:
    return call("Bash", command=command, description="work")


def agent(name: str) -> str:
    return call("Agent", description=name, prompt=f"{SUB}{name}: do it and report.", subagent_type="general-purpose")


AGENTS = [
    Step("calls a and b", agent("a") + "\n" + agent("b"), "PROOF-b"),
    Step("calls c", agent("c"), "PROOF-c"),
]
TREE = {
    "begins": ("main", "-", "-"),
    "is moved": ("main", "begins", "-"),
    "calls a and b": ("main", "is moved", "-"),
    "a works": ("sub-agent", "-", "calls a and b"),
    "a reports": ("sub-agent", "a works", "calls a and b"),
    "b works": ("sub-agent", "-", "calls a and b"),
    "b reports": ("sub-agent", "b works", "calls a and b"),
    "calls c": ("main", "calls a and b", "-"),
    "c works": ("sub-agent", "-", "calls c"),
    "c reports": ("sub-agent", "c works", "calls c"),
    "is cut": ("main", "calls c", "-"),
    "fills 1": ("main", "is cut", "-"),
    "fills 2": ("main", "fills 1", "-"),
    "is held": ("main", "fills 2", "-"),
    "summary": ("main-summary", "fills 2", "-"),  # the newest turn is kept as it is, not summarised
    "loses its engine": ("main", "-", "-"),
    "loses proxyd": ("main", "loses its engine", "-"),
    "writes": ("main", "loses proxyd", "-"),
    "ends": ("main", "writes", "-"),
}


async def test_a_whole_run(needs, real_tokenizer, tmp_path):
    needs("claude-code")
    mind = Mind(
        plan(shell, AGENTS, fill="seq 1 3800"),
        {"a": sub("a", shell), "b": sub("b", shell), "c": sub("c", shell, "kill")},
        orders=lambda turns: turns[-1].role == "user" and "TEXT ONLY" in turns[-1].text,
    )
    async with Stage(tmp_path / "run", real_tokenizer, mind, ("claude-code",)) as stage:
        stage.verify(await stage.play(task(f"{MAIN}: follow your plan.")))
        assert stage.tree() == TREE
        events = [json.loads(line) for line in stage.printed().splitlines()]
        assert [
            e["subtype"] for e in events if e["type"] == "system" and e["subtype"] in ("api_retry", "compact_boundary")
        ] == ["compact_boundary"]
        (result,) = [e for e in events if e["type"] == "result"]
        assert (result["is_error"], result["result"]) == (False, "All is done.")
