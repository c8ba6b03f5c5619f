"""opencode: tools, a parallel pair of sub-agents, one alone, a title and a compaction, with every trouble."""

from __future__ import annotations

import json

from tests.harness import plays
from tests.harness.mind import MAIN, Mind, Step, call, plan, sub
from tests.harness.plays import order
from tests.harness.stage import Stage, follow, task
from tests.harness.trees import line, whole


def shell(command: str) -> str:
    return call("bash", command=command)


def agent(prompt: str) -> str:
    return call("task", description="work", prompt=prompt, subagent_type="general")


FILL = "seq -f 'the quick brown fox jumps over the lazy dog %g' 1 800"  # too long to be kept beside a summary
AGENTS = [
    Step("calls a and b", agent(order("a")) + "\n" + agent(order("b")), "PROOF-b"),
    Step("calls c", agent(order("c")), "PROOF-c"),
]
# a summary is asked for in a history of its own, without tools
TREE = {**line("side", label="side"), **whole("calls a and b", "calls c")}


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


async def test_agents_in_agents(needs, real_tokenizer, tmp_path):
    """It offers its agents no agents of their own unless its settings say so."""
    nested = plays.nested(shell, agent)
    nested.mind.orders, nested.mind.side = orders, side
    nested.tree.update(line("side", label="side"))
    settings = {"subagent_depth": 2, "agent": {"general": {"permission": {"task": "allow"}}}}
    env = {"OPENCODE_CONFIG_CONTENT": json.dumps(settings)}
    await follow(nested, "opencode", needs, real_tokenizer, tmp_path, **env)


def orders(turns) -> bool:
    return "<tools>" not in turns[0].text


def side(turns) -> str | None:
    return "A title" if "title generator" in turns[0].text else None


async def test_a_turn_that_overflows_the_context(needs, real_tokenizer, tmp_path):
    """It compacts and goes on, and says in the end with its exit code that there was an error."""
    needs("opencode")
    mind = plays.overflow(shell, FILL)
    mind.orders, mind.side = orders, side
    async with Stage(tmp_path / "run", real_tokenizer, mind, ("opencode",), engine={"context_length": 30_000}) as stage:
        stage.verify(await stage.play(task(f"{MAIN}: follow your plan.")), exit_code=1)
        tree = {**line("begins", "fills"), **line("summary", label="main-summary"), **line("writes", "ends")}
        assert stage.tree() == {**line("side", label="side"), **tree}
