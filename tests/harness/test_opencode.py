"""opencode: tools, a parallel pair of sub-agents, one alone, a title and a compaction, with every trouble."""

from __future__ import annotations

import json

from tests.harness.mind import MAIN, SUB, Mind, Step, call, plan, sub
from tests.harness.stage import Stage, task


def shell(command: str) -> str:
    return call("bash", command=command)


def agent(name: str) -> str:
    prompt = f"{SUB}{name}: do it and report."
    return call("task", description=name, prompt=prompt, subagent_type="general")


FILL = "seq -f 'the quick brown fox jumps over the lazy dog %g' 1 800"  # too long to be kept beside a summary
AGENTS = [
    Step("calls a and b", agent("a") + "\n" + agent("b"), "PROOF-b"),
    Step("calls c", agent("c"), "PROOF-c"),
]


TREE = {
    "side": ("side", "-", "-"),
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
    "summary": ("main-summary", "-", "-"),  # asked in a history of its own, without tools
    "loses its engine": ("main", "-", "-"),
    "loses proxyd": ("main", "loses its engine", "-"),
    "writes": ("main", "loses proxyd", "-"),
    "ends": ("main", "writes", "-"),
}


async def test_a_whole_run(needs, real_tokenizer, tmp_path):
    needs("opencode")
    mind = Mind(
        plan(shell, AGENTS, fill=FILL),
        {"a": sub("a", shell), "b": sub("b", shell), "c": sub("c", shell, "kill")},
        side=lambda turns: "A title" if "title generator" in turns[0].text else None,
        orders=lambda turns: "<tools>" not in turns[0].text,
    )
    engine = {"context_length": 30_000}
    async with Stage(tmp_path / "run", real_tokenizer, mind, ("opencode",), engine=engine) as stage:
        stage.verify(await stage.play(task(f"{MAIN}: follow your plan.")))
        assert stage.tree() == TREE
        kinds = {json.loads(line)["type"] for line in stage.printed().splitlines()}
        assert "error" not in kinds and "step_finish" in kinds
