"""One bf16 rank of a cell of several, without sockets: a gradient, a few steps, and what it then gives, to a file."""

from __future__ import annotations

import asyncio
import json
import sys
import warnings

warnings.filterwarnings("ignore")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from celld.trainer import cpu, dtypes  # noqa: E402
from celld.trainer.model import Policy, read_config, read_tensors  # noqa: E402
from celld.weights import layout_of  # noqa: E402
from gyre_base import messages as m  # noqa: E402
from tests.trainer.forests import random_micro_step  # noqa: E402
from tests.trainer.layout_rank import SEED, copied, gradient_of, order_of, stepped, tensors_of  # noqa: E402

STEPS = 3


async def train(policy: Policy) -> dict[str, object]:
    """Loss where it is known, gradient, weights and masters (these go round through arrays once); what `stepped` finds.
    Asked for by order only the leader has arrays."""
    tensors, start = tensors_of(policy), copied(policy.hf_arrays())
    arrays = {name: dtypes.to_array(tensor) for name, tensor in policy.hf_tensors().items()}
    order = m.TakeTensors(number=1, what="weights", layout=layout_of(arrays))
    await tensors.obey(order, arrays if dist.get_rank() == 0 else None)
    stats = await tensors.obey(order_of(random_micro_step(SEED, 3, segments=9, longest=60), 0))
    first = gradient_of(policy)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        whole = {name: torch.randn(part.shape, generator=generator) for name, part in sorted(first.items())}
        for name, part in policy.from_hf_tensors(whole).items():
            policy.parameters[name].grad.copy_(part)
        tensors.optimizer.step(1e-3)
    given = {"weights": policy.hf_arrays(), "masters": tensors.optimizer.masters()}
    for what in given:
        asked = await tensors.obey(m.GiveTensors(number=2, what=what))
        assert asked.keys() == (given[what].keys() if dist.get_rank() == 0 else set())
    tensors.close()
    kept = {what: {name: dtypes.to_tensor(array) for name, array in given[what].items()} for what in given}
    again = stepped(policy, start, resumed=dist.get_world_size() > 1)
    return {"loss": stats.get("loss"), "gradient": first, **kept, "stepped": again}


if __name__ == "__main__":
    model, store, rank, size, layout, output = sys.argv[1:]
    torch.set_num_threads(1)
    cpu.start_parallel(**json.loads(layout), rank=int(rank), store=dist.FileStore(store, int(size)))
    policy = Policy(read_config(model), dtype=torch.bfloat16)
    policy.load(read_tensors(model))
    torch.save(asyncio.run(train(policy)), output)
    dist.destroy_process_group()
