"""One rank of a cell of several, without sockets: gradients of random forests, then a few steps; what it has goes to a
file."""

from __future__ import annotations

import asyncio
import json
import math
import sys
import warnings

warnings.filterwarnings("ignore")

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from celld.trainer import cpu, dtypes  # noqa: E402
from celld.trainer.gradients import Computed  # noqa: E402
from celld.trainer.mapping import is_expert  # noqa: E402
from celld.trainer.model import Policy, read_config, read_tensors  # noqa: E402
from celld.trainer.optimizer import MOMENTS, AdamW  # noqa: E402
from celld.trainer.tensors import Tensors  # noqa: E402
from gyre_base import config as configuration  # noqa: E402
from gyre_base import messages as m  # noqa: E402
from gyre_base.microstep import MicroStep  # noqa: E402
from tests.trainer.forests import random_micro_step  # noqa: E402
from tests.trainer.test_replay import random_rows, routed  # noqa: E402

STEPS, SEED = 3, 77
FORESTS = (  # micro-steps: executions, segments of each, length of the longest, piece_tokens
    (1, 1, 1, 0),
    (1, 1, 60, 0),
    (3, 6, 3, 0),
    (4, 6, 12, 0),
    (2, 9, 40, 0),
    (1, 1, 90, 7),
    (2, 9, 40, 16),
)


class OwnSum:
    """The exchange of a core that trains alone."""

    async def pull(self, batch, parts, own):
        yield Computed(own.flat, own.weight_sum, dict(own.stats))

    def close(self) -> None: ...


def with_given_experts(step: MicroStep, seed: int) -> MicroStep:
    """Of half of the tokens."""
    at = [np.flatnonzero(np.random.default_rng(seed).random(len(packed)) < 0.5) for packed in step.executions]
    pairs = zip(step.executions, at, strict=True)
    return MicroStep(tuple(routed(packed, random_rows(seed, len(own)), own) for packed, own in pairs))


def tensors_of(policy: Policy) -> Tensors:
    bounds = {"sequence_clip_low": 0.1, "sequence_clip_high": 9.0}
    config = configuration.from_tree({"trainer": bounds, "scheduler": {"steps": 8}})
    return Tensors(config, policy, AdamW(policy, config.trainer), OwnSum())


def order_of(step: MicroStep, number: int) -> m.ComputeMicroStep:
    layout, payload = step.to_wire()
    return m.ComputeMicroStep(
        number=1, batch=number, id="s", base_version=f"0.{number}", layout=layout, payload=payload
    )


def same_bits(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return sorted(mine) == sorted(theirs) and all(torch.equal(mine[name], theirs[name]) for name in theirs)


def gradient_of(policy: Policy) -> dict[str, torch.Tensor]:
    """Whole, under the hub's names."""
    whole = policy.hf_tensors({name: parameter.grad for name, parameter in policy.parameters.items()})
    return {name: part.clone() for name, part in whole.items()}


async def forests(tensors: Tensors) -> list[tuple[dict[str, float], dict[str, torch.Tensor]]]:
    """Statistics and gradient of each of FORESTS; every second one with given experts, if there are any."""
    found, policy = [], tensors.policy
    for number, (executions, segments, longest, piece) in enumerate(FORESTS):
        policy.piece_tokens = piece
        step = random_micro_step(SEED + number, executions, segments=segments, longest=longest)
        if policy.shape.num_experts and number % 2:
            step = with_given_experts(step, SEED + number)
        stats = await tensors.obey(order_of(step, number))
        found.append((stats, gradient_of(policy)))
        await tensors.obey(m.DropSum(number=2))
    policy.piece_tokens = 0
    return found


async def train(policy: Policy) -> dict[str, object]:
    """What `forests` gives; then of STEPS steps norms and the last weights and moments (whole)."""
    tensors, norms, start = tensors_of(policy), [], copied(policy.hf_arrays())
    found = await forests(tensors)
    for step in range(STEPS):
        base, part = f"0.{step}", m.Contribution(cell="c0", life=1, ids=("s",))
        await tensors.obey(order_of(random_micro_step(SEED + step, 4), step))
        await tensors.obey(m.AddMicroStep(number=2, id="s"))
        assert await tensors.obey(m.GatherSums(number=3, batch=step, parts=(part,))) == (True,)
        done = await tensors.obey(m.StepBatch(number=4, batch=step, base_version=base, executions=4))
        norms.append(done.metrics["grad_norm"])
    weights = {name: tensor.clone() for name, tensor in policy.hf_tensors().items()}
    moments = {name: torch.from_numpy(array.copy()) for name, array in tensors.optimizer.hf_arrays().items()}
    tensors.close()
    given = stepped(policy, start, resumed=dist.get_world_size() > 1)
    return {"forests": found, "norms": norms, "weights": weights, "moments": moments, "stepped": given}


def stepped(policy: Policy, start: dict[str, np.ndarray], *, resumed: bool) -> dict[str, object]:
    """What given gradients make of the weights `start`, of masters and moments; unclipped, since the norm is summed in
    another order on each layout. `resumed`: half-way all goes into a fresh optimizer, by way of whole arrays. Also how
    many numbers this rank keeps of each moment, and how many it has of the parameters."""
    policy.load_arrays(start)
    config = configuration.TrainerConfig(grad_clip=0.0, weight_decay=0.1)
    optimizer, shapes = AdamW(policy, config), {name: part.shape for name, part in policy.hf_tensors().items()}
    for step in range(2 * STEPS):
        if resumed and step == STEPS:
            exact, moments = copied(optimizer.masters() or policy.hf_arrays()), copied(optimizer.hf_arrays())
            policy.load({name: torch.zeros(shape) for name, shape in shapes.items()})
            optimizer = AdamW(policy, config)
            policy.load_arrays(exact)
            optimizer.start_from(exact)
            optimizer.load(moments, STEPS)
        generator = torch.Generator().manual_seed(step)
        whole = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        for name, part in policy.from_hf_tensors(whole).items():
            policy.parameters[name].grad.copy_(part)
        optimizer.step(1e-3)
    before = copied(policy.hf_arrays())
    policy.gradient.fill_(math.nan)
    optimizer.step(1e-3)
    after = policy.hf_arrays()
    assert all(np.array_equal(before[name], after[name]) for name in before), "not finite, and something changed"
    arrays = {"weights": before, "masters": copied(optimizer.masters()), "moments": copied(optimizer.hf_arrays())}
    kept = {moment: sum(held[moment].numel() for held in optimizer._adam.state.values()) for moment in MOMENTS}
    return {
        **{what: {name: dtypes.to_tensor(array) for name, array in arrays[what].items()} for what in arrays},
        "kept": kept,
        "has": {
            kind: sum(p.numel() for name, p in policy.parameters.items() if is_expert(name) is (kind == "experts"))
            for kind in ("common", "experts")
        },
    }


def copied(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: array.copy() for name, array in arrays.items()}


def assert_shared(rank: dict[str, object], whole: dict[str, object], layout: dict[str, int]) -> None:
    """What a rank of `stepped` found is what one rank alone finds, bit for bit, and it keeps its share alone."""
    for what in ("weights", "masters", "moments"):
        assert same_bits(rank[what], whole[what]), what
    copies = layout.get("cp", 1)
    share = rank["has"]["common"] / copies + rank["has"]["experts"] / (copies // layout.get("ep", 1))
    assert rank["kept"] == pytest.approx(dict.fromkeys(MOMENTS, share), abs=2)


if __name__ == "__main__":
    model, store, rank, size, layout, output = sys.argv[1:]
    torch.set_num_threads(1)
    meeting = dist.FileStore(store, int(size))
    cpu.start_parallel(**json.loads(layout), rank=int(rank), store=meeting)
    policy = Policy(read_config(model))
    tensors = read_tensors(model)
    policy.load(tensors)
    assert same_bits(policy.hf_tensors(), tensors), "what was loaded is not what is saved"
    torch.save(asyncio.run(train(policy)), output)
    dist.destroy_process_group()
