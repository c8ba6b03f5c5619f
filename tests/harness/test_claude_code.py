"""Claude Code: tools, a parallel pair of sub-agents, one alone and a compaction, with every trouble on the way."""

from __future__ import annotations

import json

import pytest

from tests.harness import plays
from tests.harness.mind import MAIN, Mind, Step, call, plan, sub
from tests.harness.plays import order
from tests.harness.stage import DELIVERY, Stage, follow, task
from tests.harness.trees import whole


def shell(command: str) -> str:
    return call("Bash", command=command, description="work")


def agent(prompt: str, kind: str = "general-purpose", **more: object) -> str:
    return call("Agent", description="work", prompt=prompt, subagent_type=kind, **more)


AGENTS = [
    Step("calls a and b", agent(order("a")) + "\n" + agent(order("b")), "PROOF-b"),
    Step("calls c", agent(order("c")), "PROOF-c"),
]
# the newest turn is kept as it is, not summarised
TREE = whole("calls a and b", "calls c", summary="fills 2")


@pytest.mark.parametrize("delivery", sorted({DELIVERY, "live"}))
async def test_a_whole_run(needs, real_tokenizer, tmp_path, delivery):
    needs("claude-code")
    mind = Mind(
        plan(shell, AGENTS, fill="seq 1 3800"),
        {"a": sub("a", shell), "b": sub("b", shell), "c": sub("c", shell, "kill")},
        orders=lambda turns: turns[-1].role == "user" and "TEXT ONLY" in turns[-1].text,
    )
    rollout = {"delivery": delivery}
    async with Stage(tmp_path / "run", real_tokenizer, mind, ("claude-code",), rollout=rollout) as stage:
        stage.verify(await stage.play(task(f"{MAIN}: follow your plan.")))
        assert stage.tree() == TREE
        events = [json.loads(line) for line in stage.printed().splitlines()]
        assert [
            e["subtype"] for e in events if e["type"] == "system" and e["subtype"] in ("api_retry", "compact_boundary")
        ] == ["compact_boundary"]
        (result,) = [e for e in events if e["type"] == "result"]
        assert (result["is_error"], result["result"]) == (False, "All is done.")


def orders(turns) -> bool:
    return turns[-1].role == "user" and "TEXT ONLY" in turns[-1].text


async def test_agents_in_agents(needs, real_tokenizer, tmp_path):
    await follow(plays.nested(shell, agent), "claude-code", needs, real_tokenizer, tmp_path)


async def test_an_agent_in_the_background(needs, real_tokenizer, tmp_path):
    background = plays.background(shell, lambda prompt: agent(prompt, run_in_background=True), "agentId:")
    await follow(background, "claude-code", needs, real_tokenizer, tmp_path, CLAUDE_CODE_DISABLE_BACKGROUND_TASKS="")


async def test_a_fork(needs, real_tokenizer, tmp_path):
    fork = plays.fork(shell, lambda prompt: agent(prompt, kind="fork"), "agentId:")
    env = {"CLAUDE_CODE_DISABLE_BACKGROUND_TASKS": "", "CLAUDE_CODE_FORK_SUBAGENT": "1"}
    await follow(fork, "claude-code", needs, real_tokenizer, tmp_path, **env)


async def test_a_turn_that_overflows_the_context(needs, real_tokenizer, tmp_path):
    """It compacts and goes on. It asks twice for what comes next, with and without files that it read again."""
    needs("claude-code")
    mind = plays.overflow(shell, "seq 1 3800")
    mind.orders = orders
    async with Stage(tmp_path / "run", real_tokenizer, mind, ("claude-code",)) as stage:
        stage.verify(await stage.play(task(f"{MAIN}: follow your plan.")))
        assert {(step, label) for step, (label, _, _) in stage.rows()} == {
            *((step, "main") for step in ("begins", "fills", "writes", "ends")),
            ("summary", "main-summary"),
        }
        assert '"subtype":"compact_boundary"' in stage.printed()
