"""Qwen Code: tools, a parallel pair of sub-agents, one alone and a compaction, with every trouble on the way."""

from __future__ import annotations

import json

from tests.harness import plays
from tests.harness.mind import MAIN, SUMMARY, Mind, Step, call, plan, sub
from tests.harness.plays import order
from tests.harness.stage import Stage, follow, task
from tests.harness.trees import whole


def shell(command: str) -> str:
    """Its shell tool may miss the output of a command that ends at once, so this one lingers."""
    return call("run_shell_command", command=f"{command}; sleep 0.5")


def agent(prompt: str, kind: str = "general-purpose", **more: object) -> str:
    more.setdefault("run_in_background", False)
    return call("agent", description="work", prompt=prompt, subagent_type=kind, **more)


AGENTS = [
    Step("calls a and b", agent(order("a")) + "\n" + agent(order("b")), "PROOF-b"),
    Step("calls c", agent(order("c")), "PROOF-c"),
]
# after a summary the start-up reminders come to stand before the history again: one more root
TREE = whole("calls a and b", "calls c", summary="is held", second_root="loses proxyd")


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


def orders(turns) -> bool:
    return "state_snapshot" in turns[-1].text or "<tools>" not in turns[0].text


async def test_agents_in_agents(needs, real_tokenizer, tmp_path):
    await follow(plays.nested(shell, agent), "qwen-code", needs, real_tokenizer, tmp_path)


async def test_an_agent_in_the_background(needs, real_tokenizer, tmp_path):
    background = plays.background(shell, lambda prompt: agent(prompt, run_in_background=True), "launched")
    await follow(background, "qwen-code", needs, real_tokenizer, tmp_path)


async def test_a_fork(needs, real_tokenizer, tmp_path):
    """It has other tools than its caller, so that its prompt shares no beginning with the caller's."""
    fork = plays.fork(shell, lambda prompt: agent(prompt, "fork"), "launched", above="-")
    await follow(fork, "qwen-code", needs, real_tokenizer, tmp_path)


async def test_a_turn_that_overflows_the_context(needs, real_tokenizer, tmp_path):
    """It compacts and goes on; it asks for its summary twice."""
    needs("qwen-code")
    mind = plays.overflow(shell, "seq 1 3800")
    mind.orders = orders
    mind.summary = f"<analysis>All is well.</analysis>\n<state_snapshot>\n{SUMMARY} {{proofs}}\n</state_snapshot>"
    async with Stage(tmp_path / "run", real_tokenizer, mind, ("qwen-code",)) as stage:
        stage.verify(await stage.play(task(f"{MAIN}: follow your plan.")))
        assert {(step, label) for step, (label, _, _) in stage.rows()} == {
            *((step, "main") for step in ("begins", "fills", "writes", "ends")),
            ("summary", "main-summary"),
        }
