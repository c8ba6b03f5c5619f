"""Codex: tools, a parallel pair of sub-agents, one alone and a compaction, with every trouble on the way."""

from __future__ import annotations

import json
import re

from tests.harness import plays
from tests.harness.mind import FORK, MAIN, SUB, Mind, Step, call, plan, proof, sub
from tests.harness.plays import order
from tests.harness.stage import Stage, task
from tests.harness.trees import agent, line, whole

AGENT = re.compile(r'"agent_id":\s*"([^"]+)"')


def shell(command: str) -> str:
    return call("exec_command", cmd=command)


def spawn(name: str, mark: str = SUB, **more: object) -> str:
    return call("multi_agent_v1.spawn_agent", message=order(name, mark), **more)


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
# a summary is asked for without tools, which stand at the head of every other prompt
TREE = whole("calls a and b", "waits for a", "waits for b", "calls c", "waits for c")


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


def orders(turns) -> bool:
    return "<tools>" not in turns[0].text


async def test_a_fork(needs, real_tokenizer, tmp_path):
    needs("codex")
    main = [
        Step("begins", shell(proof("begun")), "PROOF-begun"),
        Step("calls f", spawn("f", FORK, fork_context=True), called(1)),
        Step("waits for f", wait(0), waited(1)),
        *plays.end(shell),
    ]
    mind = Mind(main, {"f": sub("f", shell, "switch")})
    async with Stage(tmp_path / "run", real_tokenizer, mind, ("codex",)) as stage:
        stage.verify(await stage.play(task(f"{MAIN}: follow your plan.")))
        assert stage.tree() == {
            **line("begins", "calls f", "waits for f", "writes", "ends"),
            **agent("f", "calls f"),  # its caller's reasoning and tool calls are left out: a history of its own
        }


async def test_agents_in_agents(needs, real_tokenizer, tmp_path):
    needs("codex")
    outer = [
        Step("o calls p and q", spawn("p") + "\n" + spawn("q"), called(2)),
        Step("o waits for p", wait(0), waited(1)),
        Step("o waits for q", wait(1), waited(2)),
        Step("o reports", "The report: PROOF-o"),
    ]
    main = [Step("calls o", spawn("o"), called(1)), Step("waits for o", wait(0), waited(1)), *plays.end(shell)]
    mind = Mind(main, {"o": outer, "p": sub("p", shell), "q": sub("q", shell, "kill")})
    async with Stage(tmp_path / "run", real_tokenizer, mind, ("codex", "-c", "agents.max_depth=2")) as stage:
        stage.verify(await stage.play(task(f"{MAIN}: follow your plan.")))
        assert stage.tree() == {
            **line("calls o", "waits for o", "writes", "ends"),
            **agent("o", "calls o", "o calls p and q", "o waits for p", "o waits for q", "o reports"),
            **agent("p", "o calls p and q"),
            **agent("q", "o calls p and q"),
        }


async def test_a_turn_that_overflows_the_context_is_the_end(needs, real_tokenizer, tmp_path):
    """Codex understands the refusal, and ends: it summarises by its own count only."""
    needs("codex")
    mind = plays.overflow(shell, "seq 1 3800")
    mind.orders = orders
    async with Stage(tmp_path / "run", real_tokenizer, mind, ("codex",), engine={"context_length": 32_500}) as stage:
        done = await stage.play(task(f"{MAIN}: follow your plan."))
        assert (done.exit_code, done.harness_errors) == (1, 0)
        assert stage.tree() == line("begins", "fills")
        last = json.loads(stage.printed().splitlines()[-1])
        assert last["type"] == "turn.failed" and "ran out of room in the model's context window" in str(last["error"])
