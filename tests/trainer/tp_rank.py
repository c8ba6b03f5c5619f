"""One tensor-parallel rank of the test: a few optimizer steps on a fixed micro-step, weights and copies to a file."""

from __future__ import annotations

import sys
import warnings

warnings.filterwarnings("ignore")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from celld.trainer import cpu, loss, tree  # noqa: E402
from celld.trainer.model import Policy, read_config, read_tensors  # noqa: E402
from celld.trainer.optimizer import AdamW  # noqa: E402
from gyre_base.config import TrainerConfig  # noqa: E402
from tests.trainer.forests import random_micro_step  # noqa: E402

STEPS, SEED = 3, 77


def train(policy: Policy) -> dict[str, object]:
    """Losses, gradient norms, the first gradient and the last weights (whole), and this rank's copies of the norms."""
    steps = random_micro_step(SEED, 4).executions
    plan, goal = tree.plan(steps), loss.targets(steps, 0)
    options = loss.LossOptions(clip_low=0.1, clip_high=9.0)
    optimizer = AdamW(policy, TrainerConfig())
    losses, norms, first = [], [], {}
    for _ in range(STEPS):
        policy.zero_gradient()
        logp, entropy = policy.logprobs(plan, goal.rows_N, goal.tokens_N, 1.0)
        total, _ = loss.loss_sum(logp, goal, options)
        total.backward()
        policy.finish_gradient()
        first = first or {
            k: v.clone() for k, v in policy.hf_tensors({n: p.grad for n, p in policy.parameters.items()}).items()
        }
        losses.append(float(total.detach()))
        norms.append(optimizer.step(1e-3))
    copies = {n: p.detach().clone() for n, p in policy.parameters.items() if "norm" in n}
    weights = {k: v.clone() for k, v in policy.hf_tensors().items()}
    entropy_mean = float(entropy.mean())
    return {
        "losses": losses, "norms": norms, "first": first, "weights": weights, "copies": copies, "entropy": entropy_mean,
    }  # fmt: skip


if __name__ == "__main__":
    model, store, rank, size, output = sys.argv[1:]
    torch.set_num_threads(1)
    cpu.start_parallel(tp=int(size), rank=int(rank), store=dist.FileStore(store, int(size)))
    policy = Policy(read_config(model))
    policy.load(read_tensors(model))
    torch.save(train(policy), output)
    dist.destroy_process_group()
