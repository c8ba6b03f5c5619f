"""Real core and satellite processes over the real bus, against a scripted trajd: nothing twice, nothing lost."""

from __future__ import annotations

import asyncio
import dataclasses
import signal

import numpy as np
import pytest
import torch

from celld.tiny import model as tiny
from celld.trainer import loss as losses
from celld.trainer import tree
from celld.transfer.engine import installed
from celld.weights import BusTransport
from gyre_base import config as configuration
from gyre_base import messages as m
from gyre_base.keys import make_keys
from gyre_base.rundir import RunDir
from tests.trainer.fake_trajd import FakeTrajd, served
from tests.trainer.forests import random_micro_step
from tests.trainer.world import World


@pytest.fixture(params=["bus", "socket", "mooncake"])
async def world(request, tmp_path, reference):
    if request.param == "mooncake" and not installed():
        pytest.skip("mooncake can't be imported: the extra and libibverbs1")
    run = RunDir.create(tmp_path / "run")
    keys = make_keys(run)
    tiny.save(reference, tmp_path / "model")
    tree_ = {
        "cluster": {"cells": 2, "peer_timeout_s": 3.0, "transport": request.param},
        "model": {"path": str(tmp_path / "model")},
        "trainer": {"checkpoint_every_steps": 2, "sequence_clip_low": 0.1, "sequence_clip_high": 9.0},
    }
    run.write_atomic("run.json", configuration.to_json(configuration.from_tree(tree_)))
    names = [[f"b{b}.s{s}" for s in range(4)] for b in range(4)]
    batches = [
        {n: random_micro_step(100 * b + i, 3, segments=5) for i, n in enumerate(ns)} for b, ns in enumerate(names)
    ]
    zero = batches[0]["b0.s0"].executions[0]
    steps = (dataclasses.replace(zero, advantage=0.0), *batches[0]["b0.s0"].executions[1:])
    batches[0]["b0.s0"] = dataclasses.replace(batches[0]["b0.s0"], executions=steps)
    world = World(run, keys, FakeTrajd(batches), request.param)
    async with served(world.fake, run, keys):
        yield world
        world.close()


def gradient_of(policy, batch, options):
    """The undisturbed gradient sum of a batch, in this process."""
    policy.zero_gradient()
    executions = [packed for step in batch.values() for packed in step.executions]
    goal = losses.targets(executions, base_step=0)
    logp, _ = policy.logprobs(tree.plan(executions), goal.rows_N, goal.tokens_N, 1.0)
    losses.loss_sum(logp, goal, options)[0].backward()
    return policy.gradient.clone()


def assert_close(mine: torch.Tensor, theirs: torch.Tensor) -> None:
    assert float((mine - theirs).norm()) <= 1e-5 * float(theirs.norm())


@pytest.mark.timeout(240)
async def test_a_batch_survives_the_death_of_every_rank(world, policy, reference):
    fake, options = world.fake, losses.LossOptions(clip_low=0.1, clip_high=9.0)
    fake.quota, fake.refuse_once, fake.hold_from = {"c0": 2, "c1": 2}, {"b0.s1"}, 1
    world.start("c0")
    world.start("c1")
    await asyncio.gather(world.train("c0", 1, 1), world.train("c1", 1, 1))
    (row,) = (await world.ask("c1", m.StatusRequest())).rows
    assert (
        row["transport"] == {"bus": "bus", "socket": "plain sockets", "mooncake": "mooncake over tcp"}[world.transport]
    )

    # Both contribute to batch 0, although trajd refused one commit and its rank had to drop its sum.
    await world.until(lambda: len(fake.steps) == 1)
    (applied,) = fake.heard(m.BatchApplied)
    assert sorted(applied.ids) == sorted(fake.batches[0]) and applied.version == "0.1"
    assert applied.weights_sum == pytest.approx(1.0, abs=1e-9)
    metrics = fake.steps[0].metrics
    norm = float(gradient_of(policy, fake.batches[0], options).norm()) / 12
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    expected = {"cells": 2, "executions": 12, "micro_steps": 4, "context_mismatches": 0, "zero_advantage": 1}
    assert {name: metrics[name] for name in expected} == expected
    assert all(np.isfinite(value) for value in metrics.values())

    # The satellite pulls the new version by itself; batch 1 loses it after it has computed half.
    await world.until(lambda: len(fake.computed) == 4)
    assert {cell for cell, _ in fake.computed.values()} == {"c0", "c1"} and ("c1", "0.1") in fake.pulled
    world.kill("c1")
    fake.quota, fake.hold_from = {}, 99
    await world.until(lambda: fake.heard(m.ContributionLost))
    assert fake.heard(m.ContributionLost)[0].cell == "c1"
    await world.until(lambda: {cell for cell, _ in fake.computed.values()} == {"c0"} and len(fake.computed) == 4)

    # What the core holds now is the undisturbed gradient of the whole batch at the published weights.
    transport = BusTransport(world.run, world.keys, "rank-c0")
    snapshot = await transport.pull("", 10.0)
    assert snapshot is not None and snapshot.version == "0.1"
    assert await transport.pull("0.1", 10.0) is None
    transport.close()
    policy.load_arrays(snapshot.tensors())
    undisturbed = gradient_of(policy, fake.batches[1], options)
    held = await world.ask("c0", m.PullGradient(batch=1, life=1))
    assert sorted(held.ids) == sorted(fake.batches[1])
    assert_close(torch.from_numpy(np.frombuffer(held.payload, dtype="<f4").copy()), undisturbed)
    world.start("c1")
    fake.hold_from = 3
    await world.until(lambda: len(fake.steps) == 2)
    assert fake.steps[1].metrics["grad_norm"] == pytest.approx(float(undisturbed.norm()) / 12, rel=1e-5)
    await world.until(lambda: fake.heard(m.BatchesRetired))
    assert fake.heard(m.BatchesRetired)[0] == m.BatchesRetired(below=2, version="0.2")

    # Batch 2 is applied, no checkpoint holds it; the core dies, says so in its ledger, and batch 2 is trained again.
    fake.quota = {"c0": 2, "c1": 2}
    await world.train("c1", 2, 2)
    await world.until(lambda: len(fake.steps) >= 3)
    world.kill("c0")
    world.start("c0")
    await world.train("c0", 2, 2)
    await world.until(lambda: len(fake.heard(m.Ledger)) == 2)
    ledger = fake.heard(m.Ledger)[1]
    assert (ledger.next_batch, ledger.version) == (2, "1.2")
    assert sorted(ledger.applied) == sorted([*fake.batches[0], *fake.batches[1]])
    fake.hold_from = 99
    await world.until(lambda: fake.steps[-1].version == "1.4")
    again = [a for a in fake.heard(m.BatchApplied) if a.batch == 2]
    assert [a.version for a in again][-1] == "1.3" and all(sorted(a.ids) == sorted(fake.batches[2]) for a in again)

    # Stop, save, leave: nothing is claimed after a stop; TERM ends both cleanly and retracts their endpoints.
    stopped = await world.ask("c0", m.StopTraining(epoch=3))
    assert (stopped.training, stopped.version, stopped.epoch) == (False, "1.4", 3)
    late = await world.ask("c0", m.StartTraining(epoch=2))
    assert late.training is False
    saved = await world.ask("c0", m.SaveCheckpoint(why="test"))
    assert saved.version == "1.4" and saved.path.endswith("checkpoints/1.4")
    assert isinstance(await world.ask("c1", m.PullWeights()), m.Refused)
    await world.until(lambda: ("c1", "1.4") in fake.pulled)
    row = (await world.ask("c1", m.StatusRequest())).rows[0]
    assert (row["role"], row["version"], row["life"]) == ("satellite", "1.4", 2)
    assert [world.kill(cell, signal.SIGTERM) for cell in ("c0", "c1")] == [0, 0]
    assert world.run.endpoint("rank-c0") is None and world.run.endpoint("rank-c1") is None
    policy.load(dict(reference.state_dict()))
