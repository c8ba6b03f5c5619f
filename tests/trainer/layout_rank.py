"""One rank of a cell of several, without sockets: a few steps on fixed micro-steps; what it has goes to a file."""

from __future__ import annotations

import asyncio
import sys
import warnings

warnings.filterwarnings("ignore")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from celld.trainer import cpu  # noqa: E402
from celld.trainer.gradients import Computed  # noqa: E402
from celld.trainer.model import Policy, read_config, read_tensors  # noqa: E402
from celld.trainer.optimizer import AdamW  # noqa: E402
from celld.trainer.tensors import Tensors  # noqa: E402
from gyre_base import config as configuration  # noqa: E402
from gyre_base import messages as m  # noqa: E402
from tests.trainer.forests import random_micro_step  # noqa: E402

STEPS, SEED = 3, 77


class OwnSum:
    """The exchange of a core that trains alone."""

    async def pull(self, batch, parts, own):
        return [Computed(own.flat, own.weight_sum, dict(own.stats))]

    def close(self) -> None: ...


async def train(policy: Policy) -> dict[str, object]:
    """Statistics of each micro-step, norms, the first gradient and the last weights and moments (whole)."""
    bounds = {"sequence_clip_low": 0.1, "sequence_clip_high": 9.0}
    config = configuration.from_tree({"trainer": bounds, "scheduler": {"steps": 8}})
    tensors = Tensors(config, policy, AdamW(policy, config.trainer), OwnSum())
    stats, norms, first = [], [], {}
    for step in range(STEPS):
        base, part = f"0.{step}", m.Contribution(cell="c0", life=1, ids=("s",))
        layout, payload = random_micro_step(SEED + step, 4).to_wire()
        order = m.ComputeMicroStep(number=1, batch=step, id="s", base_version=base, layout=layout, payload=payload)
        stats.append(await tensors.obey(order))
        first = first or policy.hf_tensors({name: p.grad.clone() for name, p in policy.parameters.items()})
        await tensors.obey(m.AddMicroStep(number=2, id="s"))
        assert await tensors.obey(m.GatherSums(number=3, batch=step, parts=(part,))) == (True,)
        done = await tensors.obey(m.StepBatch(number=4, batch=step, base_version=base, executions=4))
        norms.append(done.metrics["grad_norm"])
    weights = {name: tensor.clone() for name, tensor in policy.hf_tensors().items()}
    moments = {name: torch.from_numpy(array.copy()) for name, array in tensors.optimizer.hf_arrays().items()}
    tensors.close()
    return {"stats": stats, "norms": norms, "first": first, "weights": weights, "moments": moments}


if __name__ == "__main__":
    model, store, rank, tp, pp, output = sys.argv[1:]
    torch.set_num_threads(1)
    size = int(tp) * int(pp)
    cpu.start_parallel(tp=int(tp), pp=int(pp), rank=int(rank), store=dist.FileStore(store, size))
    policy = Policy(read_config(model))
    policy.load(read_tensors(model))
    torch.save(asyncio.run(train(policy)), output)
    dist.destroy_process_group()
