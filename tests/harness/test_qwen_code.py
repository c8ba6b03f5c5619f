"""Qwen Code: tools, a parallel pair of sub-agents, one alone and a compaction, with every trouble on the way."""

from __future__ import annotations

import json

from tests.harness.mind import MAIN, SUB, SUMMARY, Mind, Step, call, plan, sub
from tests.harness.stage import Stage, task


def shell(command: str) -> str:
    """Its shell tool may miss the output of a command that ends at once, so this one lingers."""
    return call("run_shell_command", command=f"{command}; sleep 0.5")


def agent(name: str) -> str:
    prompt = f"{SUB}{name}: do it and report."
    return call("agent", description=name, prompt=prompt, subagent_type="general-purpose", run_in_background=False)


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
    "summary": ("main-summary", "is held", "-"),
    "loses its engine": ("main", "-", "-"),
    "loses proxyd": ("main", "-", "-"),  # the start-up reminders stand before its history again: one more root
    "writes": ("main", "loses proxyd", "-"),
    "ends": ("main", "writes", "-"),
}


async def test_a_whole_run(needs, real_tokenizer, tmp_path):
    needs("qwen-code")
    mind = Mind(
        plan(shell, AGENTS, fill="seq 1 1900"),
        {"a": sub("a", shell), "b": sub("b", shell), "c": sub("c", shell, "kill")},
        summary=f"<analysis>All is well.</analysis>\n<state_snapshot>\n{SUMMARY} {{proofs}}\n</state_snapshot>",
        orders=lambda turns: "state_snapshot" in turns[-1].text or "<tools>" not in turns[0].text,
    )
    engine = {"context_length": 64_000}
    async with Stage(tmp_path / "run", real_tokenizer, mind, ("qwen-code",), engine=engine) as stage:
        stage.verify(await stage.play(task(f"{MAIN}: follow your plan.")))
        assert stage.tree() == TREE
        events = [json.loads(line) for line in stage.printed().splitlines()]
        assert (events[-1]["type"], events[-1]["is_error"]) == ("result", False)
