"""Cells of several real ranks: they train what one rank trains, and one that is lost takes its cell along, no more."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import signal

import numpy as np
import pytest
import torch

from celld.trainer import checkpoint, tree
from celld.trainer import loss as losses
from celld.trainer.model import Policy
from celld.trainer.optimizer import AdamW, learning_rate
from gyre_base import config as configuration
from gyre_base import messages as m
from gyre_base.keys import make_keys
from gyre_base.rundir import RunDir
from tests.trainer import experts
from tests.trainer.cells import a_model
from tests.trainer.fake_trajd import FakeTrajd, served
from tests.trainer.forests import random_micro_step
from tests.trainer.world import STEP_S, World

pytestmark = pytest.mark.slow
PATIENCE_S = 20.0  # a busy machine keeps a process waiting for seconds
LAYOUTS = {
    "tp2": {"tensor_parallel": 2},
    "pp2": {"pipeline_parallel": 2},
    "cp2": {"context_parallel": 2},
    "cp2ep2": {"context_parallel": 2, "expert_parallel": 2},  # of a mixture of experts
}


@contextlib.asynccontextmanager
async def a_world(folder, reference, batches: int, layout, kind="tied"):
    """Two cells of `layout`; a checkpoint after every step."""
    run = RunDir.create(folder / "run")
    keys = make_keys(run)
    a_model(folder / "model", reference, kind)
    tree_ = {
        "cluster": {"cells": 2, "peer_timeout_s": PATIENCE_S},
        "model": {"path": str(folder / "model")},
        "scheduler": {"steps": 8},
        "trainer": {
            "checkpoint_every_steps": 1,
            "checkpoints_kept": 9,
            "sequence_clip_low": 0.1,
            "sequence_clip_high": 9.0,
            **layout,
        },
    }
    run.write_atomic("run.json", configuration.to_json(configuration.from_tree(tree_)))
    steps = [{f"b{b}.s{s}": random_micro_step(100 * b + s, 3, segments=5) for s in range(4)} for b in range(batches)]
    zero = steps[0]["b0.s1"].executions[0]  # one that is counted and not computed
    changed = (dataclasses.replace(zero, advantage=0.0), *steps[0]["b0.s1"].executions[1:])
    steps[0]["b0.s1"] = dataclasses.replace(steps[0]["b0.s1"], executions=changed)
    world = World(run, keys, FakeTrajd(steps))
    async with served(world.fake, run, keys):
        try:
            yield world
        finally:
            world.close()


def one_rank_trains(
    policy, batches
) -> tuple[list[float], list[dict[str, torch.Tensor]], list[dict[str, torch.Tensor]]]:
    """The undisturbed run in this process: the norm, the mean gradient and the weights of each step."""
    config = configuration.TrainerConfig()
    options = losses.LossOptions(clip_low=0.1, clip_high=9.0)
    optimizer, norms, means, weights = AdamW(policy, config), [], [], []
    for number, batch in enumerate(batches):
        executions = [packed for step in batch.values() for packed in step.executions]
        goal = losses.targets(executions, base_step=number)
        policy.zero_gradient()
        logp, _ = policy.logprobs(tree.plan(executions), goal.rows_N, goal.tokens_N, 1.0)
        losses.loss_sum(logp, goal, options)[0].backward()
        policy.gradient.div_(len(executions))
        gradient = policy.hf_tensors({name: p.grad for name, p in policy.parameters.items()})
        means.append({name: part.clone() for name, part in gradient.items()})
        norms.append(optimizer.step(learning_rate(number, 8, config)))
        weights.append({name: part.clone() for name, part in policy.hf_tensors().items()})
    return norms, means, weights


def relative(mine: dict[str, np.ndarray], theirs: dict[str, torch.Tensor]) -> float:
    """Distance of two sets of tensors over the length of the second."""
    assert sorted(mine) == sorted(theirs)
    far = sum(float((torch.from_numpy(mine[name].copy()) - part).square().sum()) for name, part in theirs.items())
    return (far / sum(float(part.square().sum()) for part in theirs.values())) ** 0.5


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("layout", LAYOUTS)
async def test_a_cell_of_several_ranks_trains_what_one_rank_trains(tmp_path, policy, reference, layout):
    kind = "experts" if "expert_parallel" in LAYOUTS[layout] else "tied"
    if kind == "experts":
        policy, reference = Policy(experts.config_of()), experts.twin()
        policy.load(dict(reference.state_dict()))
    async with a_world(tmp_path, reference, 4, LAYOUTS[layout], kind) as world:
        fake = world.fake
        fake.quota, fake.hold_from = {"c0": 2, "c1": 2}, 3
        world.start("c0")
        world.start("c1")
        await asyncio.gather(world.train("c0", 1, 1), world.train("c1", 1, 1))
        await world.until(lambda: len(fake.heard(m.BatchesRetired)) == 3, 3 * STEP_S)
        norms, means, weights = one_rank_trains(policy, fake.batches[:3])

        # The batch's gradient: of Adam's first moment after one step it is the part that is new, clipped as a whole.
        kept = checkpoint.read(world.run.path("checkpoints", "0.1"))
        moments = {n.removeprefix("exp_avg."): a for n, a in kept.moments.items() if n.startswith("exp_avg.")}
        scale = 0.1 * min(1.0, 1.0 / norms[0])
        assert relative(moments, {name: part * scale for name, part in means[0].items()}) <= 1e-5
        for number, done in enumerate(fake.steps):
            assert done.metrics["grad_norm"] == pytest.approx(norms[number], rel=1e-5 if number == 0 else 1e-3)
            assert (done.metrics["cells"], done.metrics["micro_steps"]) == (2, 4)
            assert done.metrics["zero_advantage"] == (number == 0)
            kept = checkpoint.read(world.run.path("checkpoints", f"0.{number + 1}"))
            assert relative(kept.weights, weights[number]) <= 1e-4
        assert all(applied.weights_sum == pytest.approx(1.0, abs=1e-9) for applied in fake.heard(m.BatchApplied))

        # Every rank gives its own part and no other's; ranks that share the tokens, not the experts, have the same.
        await world.until(lambda: len(fake.computed) == 4)
        parts = [
            await world.ask(name, m.PullGradient(batch=3, life=1, rank=r)) for r, name in enumerate(("c1", "c1.1"))
        ]
        assert parts[0].ids == parts[1].ids and len(parts[0].ids) == 2
        assert (parts[0].digest == parts[1].digest) is (layout == "cp2")
        assert isinstance(await world.ask("c1.1", m.PullGradient(batch=3, life=1, rank=0)), m.Refused)
        assert isinstance(await world.ask("c1.1", m.PullGradient(batch=3, life=2, rank=1)), m.Refused)

        # It leaves together; what it saved is whole, so that one rank goes on from it, and the other way round.
        assert [world.kill(cell, signal.SIGTERM) for cell in ("c0", "c1")] == [0, 0]
        await asyncio.gather(world.ended("c0"), world.ended("c1"))
        assert [world.processes[name].returncode for name in ("c0.1", "c1.1")] == [0, 0]
        config = configuration.from_json(world.run.path("run.json").read_text())
        single = dataclasses.replace(
            config, trainer=dataclasses.replace(config.trainer, **dict.fromkeys(LAYOUTS[layout], 1))
        )
        world.run.write_atomic("run.json", configuration.to_json(single))
        world.ranks, world.processes = 1, {}
        world.start("c0")
        await world.train("c0", 2, 2)
        fake.quota, fake.hold_from = {}, 99
        await world.until(lambda: fake.steps[-1].version == "1.4")
        norms, _, weights = one_rank_trains_on(policy, reference, fake.batches)
        assert fake.steps[-1].metrics["grad_norm"] == pytest.approx(norms[-1], rel=1e-3)
        await world.until(lambda: fake.heard(m.BatchesRetired)[-1].below == 4)
        assert relative(checkpoint.read(world.run.path("checkpoints", "1.4")).weights, weights[-1]) <= 1e-4
    policy.load(dict(reference.state_dict()))


def one_rank_trains_on(policy, reference, batches):
    policy.load(dict(reference.state_dict()))
    return one_rank_trains(policy, batches)


@pytest.mark.timeout(1200)
async def test_a_lost_rank_takes_its_cell_along_and_nothing_is_trained_twice(tmp_path, policy, reference):
    async with a_world(tmp_path, reference, 3, LAYOUTS["tp2"]) as world:
        fake = world.fake
        fake.quota = {"c0": 2, "c1": 2}
        world.start("c0")
        world.start("c1")
        await asyncio.gather(world.train("c0", 1, 1), world.train("c1", 1, 1))

        # A follower that stands still in the middle of a micro-step: the leader notices, and does not wait for ever.
        world.send("c1.1", signal.SIGSTOP)
        await asyncio.to_thread(world.processes["c1"].wait, PATIENCE_S * 4)
        assert world.processes["c1"].returncode == 1
        world.kill_cell("c1")
        world.start("c1")

        # A follower killed while a commit is in doubt: its cell's sum is gone with it, the others stand.
        await world.until(lambda: all(cell == "c0" for cell, _ in fake.computed.values()), STEP_S * 2)
        fake.hold_commits = True
        await world.train("c1", 2, 2)
        await world.until(lambda: any(holder == ("c1", 2) for holder in fake.leased.values()))
        await world.until(lambda: any(w.cell == "c1" and w.life == 2 for w in fake.heard(m.MicroStepComputed)))
        world.kill("c1.1")
        fake.hold_commits = False
        await world.ended("c1", PATIENCE_S * 4)
        world.start("c1")
        await world.train("c1", 3, 3)
        await world.until(lambda: len(fake.steps) == 1, STEP_S * 2)

        # One killed before the core pulls from it: that contribution is lost as a whole and computed again.
        fake.hold_from = 1
        await world.until(lambda: fake.batch == 1 and len(fake.computed) == 4)
        assert {cell for cell, _ in fake.computed.values()} == {"c0", "c1"}
        world.kill("c1.1")
        fake.quota, fake.hold_from = {}, 99
        await world.until(lambda: fake.heard(m.ContributionLost), STEP_S * 2)
        assert {(lost.cell, lost.life) for lost in fake.heard(m.ContributionLost)} == {("c1", 3)}
        await world.ended("c1", PATIENCE_S * 4)
        fake.forget(("c1", 3))  # as trajd does after its silence: the leader may have claimed once more before its end
        fake.hold_from = 2
        await world.until(lambda: len(fake.steps) == 2, STEP_S * 2)

        # A leader killed: its follower ends by itself; the cell goes on from its checkpoint.
        await world.until(lambda: any(retired.below == 2 for retired in fake.heard(m.BatchesRetired)))
        world.kill("c0")
        await world.ended("c0", PATIENCE_S * 4)
        world.start("c0")
        await world.train("c0", 2, 2)
        fake.hold_from = 99
        await world.until(lambda: len(fake.steps) == 3, STEP_S * 2)

        assert [applied.batch for applied in fake.heard(m.BatchApplied)] == [0, 1, 2]
        for applied, batch in zip(fake.heard(m.BatchApplied), fake.batches, strict=True):
            assert sorted(applied.ids) == sorted(batch) and applied.weights_sum == pytest.approx(1.0, abs=1e-9)
        norms, _, weights = one_rank_trains(policy, fake.batches)
        assert fake.steps[0].metrics["grad_norm"] == pytest.approx(norms[0], rel=1e-5)
        assert [done.metrics["grad_norm"] for done in fake.steps] == pytest.approx(norms, rel=1e-3)
        await world.until(lambda: fake.heard(m.BatchesRetired)[-1].below == 3)
        assert relative(checkpoint.read(world.run.path("checkpoints", "1.3")).weights, weights[-1]) <= 1e-4
    policy.load(dict(reference.state_dict()))
