"""mini-swe-agent: one line of calls without streams, with every trouble on the way."""

from __future__ import annotations

from tests.harness.mind import MAIN, Mind, call, plan
from tests.harness.stage import Stage, task
from tests.harness.trees import line

FINISH = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
TREE = line("begins", "is moved", "is cut", "is held", "loses its engine", "loses proxyd", "writes", "ends")


def shell(command: str) -> str:
    return call("bash", command=command)


async def test_a_whole_run(needs, real_tokenizer, tmp_path):
    needs("mini-swe-agent")
    mind = Mind(plan(shell, [], ends=shell(FINISH)))
    async with Stage(tmp_path / "run", real_tokenizer, mind, ("mini-swe-agent",)) as stage:
        stage.verify(await stage.play(task(f"{MAIN}: follow your plan.")))
        assert stage.tree() == TREE
