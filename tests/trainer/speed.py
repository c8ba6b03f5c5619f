"""Tokens per second of forward and backward at the quickstart's size: `python -m tests.trainer.speed`. One JSON line.

Executions of about 180 tokens with two to four branches, packed to about 4,000 tokens, one thread.
"""

from __future__ import annotations

import json
import time
import warnings

warnings.filterwarnings("ignore")

import numpy as np  # noqa: E402
import torch  # noqa: E402

from celld.tiny.model import TinyConfig, TinyQwen3  # noqa: E402
from celld.trainer import cpu, loss, tree  # noqa: E402
from celld.trainer.model import Policy  # noqa: E402
from gyre_base.microstep import PackedExecution  # noqa: E402
from tests.trainer.forests import random_execution  # noqa: E402

REPEATS, BUDGET = 15, 4096


def main() -> None:
    torch.set_num_threads(1)
    cpu.start_parallel()
    shape = TinyConfig()
    policy = Policy(shape.to_hf())
    policy.load(dict(TinyQwen3(shape).initialise(0).state_dict()))
    rng = np.random.default_rng(0)
    executions: list[PackedExecution] = []
    while sum(map(len, executions)) < BUDGET - 180:
        executions.append(random_execution(rng, "e", segments=6, longest=60, vocab=640))
    seconds = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        plan, goal = tree.plan(executions), loss.targets(executions, 0)
        policy.zero_gradient()
        logp, _ = policy.logprobs(plan, goal.rows_N, goal.tokens_N, 1.0)
        loss.loss_sum(logp, goal, loss.LossOptions())[0].backward()
        seconds.append(time.perf_counter() - began)
    tokens = len(plan)
    print(
        json.dumps(
            {
                "tokens_per_s_best": round(tokens / min(seconds)),
                "tokens_per_s_median": round(tokens / sorted(seconds)[REPEATS // 2]),
                "tokens": tokens,
                "executions": len(executions),
                "attention_calls_per_layer": len(plan.buckets),
                "parameters": policy.gradient.numel(),
            }
        )
    )


if __name__ == "__main__":
    main()
