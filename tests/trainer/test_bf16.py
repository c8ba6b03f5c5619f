"""bf16: near fp32 as far as its 8 bits go, the same bits each time, steps that are smaller than it resolves, and all
ways of its weights: snapshots, checkpoints, a model's directory.

U, half the distance of two neighbours, is what one rounding changes at most. Between two states of a layer lie about a
dozen roundings, backwards twice as many; they are independent, so three layers come to sqrt(3 * 36) U = 10 U, and more
where states nearly cancel. Another choice of experts is no rounding: here it is that of fp32, as if it had sampled.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from celld import weights
from celld.tiny import model as tiny
from celld.trainer import checkpoint, dtypes, tree
from celld.trainer import loss as losses
from celld.trainer.embedding import Embedding
from celld.trainer.model import Policy, read_tensors
from celld.trainer.optimizer import AdamW
from celld.trainer.tensors import Tensors
from gyre_base import config as configuration
from gyre_base import messages as m
from gyre_base.config import TrainerConfig
from gyre_base.ids import PolicyVersion
from gyre_base.messages import PullWeights
from gyre_base.microstep import PackedExecution
from tests.trainer import experts
from tests.trainer.conftest import SMALL
from tests.trainer.forests import random_micro_step
from tests.trainer.test_replay import own_rows, routed
from tests.trainer.test_tree_and_loss import packed_loss

pytestmark = pytest.mark.usefixtures("policy")  # its process group
BF16 = torch.bfloat16
U = 2.0**-9


def rounded(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.to(BF16).float() for name, tensor in state.items()}


def a_policy(state: dict[str, torch.Tensor], dtype: torch.dtype = BF16, config=None) -> Policy:
    made = Policy(config or SMALL.to_hf(), dtype=dtype)
    made.load(state)
    return made


@pytest.fixture(scope="module", params=["dense", "experts"])
def pair(request, policy, reference) -> tuple[Policy, Policy]:
    """(fp32, bf16) of the same weights, which bf16 has; after `policy`: the process group is up."""
    if request.param == "dense":
        config, state = SMALL.to_hf(), rounded(dict(reference.state_dict()))
    else:
        config, state = experts.config_of(), rounded(dict(experts.twin().state_dict()))
    return a_policy(state, torch.float32, config), a_policy(state, BF16, config)


def executions(pair: tuple[Policy, Policy], seed: int) -> list[PackedExecution]:
    """Routed, where there are experts, as the fp32 policy would."""
    plain = random_micro_step(seed, 3, segments=9, longest=60).executions
    if not pair[0].shape.num_experts:
        return list(plain)
    ends = np.cumsum([len(packed) for packed in plain])
    rows = np.split(own_rows(pair[0], plain), ends[:-1])
    return [routed(packed, own) for packed, own in zip(plain, rows, strict=True)]


def trained(policy: Policy, steps: list[PackedExecution]) -> tuple[float, dict[str, float], torch.Tensor]:
    """(loss, statistics, gradient) of one micro-step."""
    policy.zero_gradient()
    total, stats = packed_loss(policy, steps, losses.LossOptions(clip_low=0.2, clip_high=4.0))
    assert total.dtype == torch.float32
    total.backward()
    policy.finish_gradient()
    assert policy.gradient.dtype == torch.float32
    return float(total.detach()), stats, policy.gradient.clone()


def far(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((mine - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradient_are_those_of_fp32_up_to_the_roundings_between(pair, seed):
    (exact, narrow), steps = pair, executions(pair, seed)
    assert {p.dtype for p in narrow.parameters.values()} == {BF16}
    (loss, stats, gradient), (near_loss, near_stats, near) = trained(exact, steps), trained(narrow, steps)
    assert near_loss == pytest.approx(loss, rel=25 * U)
    assert near_stats["kl"] == pytest.approx(stats["kl"], rel=25 * U)
    assert U < far(near, gradient) < 25 * U


def test_the_same_micro_step_gives_the_same_bits(pair):
    first, again = (trained(pair[1], executions(pair, 3)) for _ in range(2))
    assert first[:2] == again[:2] and torch.equal(first[2], again[2])


def test_pieces_train_what_the_whole_trains(pair, monkeypatch):
    """A piece rounds its part of a weight's gradient once more; the parts are added in fp32, however many. A product of
    few rows may be summed in another order than that of all."""
    narrow, steps = pair[1], executions(pair, 5)
    loss, _, gradient = trained(narrow, steps)
    monkeypatch.setattr(narrow, "piece_tokens", 3)
    piece_loss, _, pieced = trained(narrow, steps)
    assert piece_loss == pytest.approx(loss, rel=5 * U)
    assert far(pieced, gradient) < 5 * U


def test_the_gradient_of_a_token_that_occurs_often_does_not_stop_growing(policy):
    table = Embedding.like(policy.module.embedding.word_embeddings, policy.module.config).to(BF16)
    table.weight.grad_dtype = torch.float32
    table(torch.full((1, 2000), 7)).float().sum().backward()
    assert table.weight.grad[7].tolist() == [2000.0] * SMALL.hidden_size
    assert table.weight.grad.sum() == 2000 * SMALL.hidden_size


def test_scores_follow_from_the_bf16_states_in_fp32(pair):
    """Double precision gives the same; the log-probabilities are taken from them."""
    narrow = pair[1]
    plan = tree.plan(random_micro_step(5, 1, segments=1, longest=60).executions)
    rows = torch.arange(len(plan))
    with torch.no_grad():
        hidden, scores = narrow.hidden(plan), narrow.logits(plan, rows)
    assert hidden.dtype == BF16 and scores.dtype == torch.float32
    expected = hidden.double() @ narrow.hf_tensors()["model.embed_tokens.weight"].double().t()
    torch.testing.assert_close(scores.double(), expected, rtol=1e-5, atol=1e-5)


# ---- steps -----------------------------------------------------------------------------------------------------------


def test_steps_below_what_bf16_resolves_add_up(reference):
    """A step of 3e-5 is a thirtieth of the distance between bf16 numbers at 0.2: each alone rounds to nothing."""
    narrow = a_policy(rounded(dict(reference.state_dict())))
    before = {name: p.detach().clone() for name, p in narrow.parameters.items()}
    optimizer = AdamW(narrow, TrainerConfig(grad_clip=0.0))
    for _ in range(100):
        narrow.gradient.fill_(1.0)
        optimizer.step(3e-5)
    masters = narrow.from_hf_tensors({n: dtypes.to_tensor(a) for n, a in optimizer.masters().items()})
    for name, parameter in narrow.parameters.items():
        assert torch.equal(parameter, masters[name].to(BF16))
        torch.testing.assert_close(masters[name], before[name].float() - 3e-3, rtol=0, atol=1e-5)
        small = before[name].abs() < 0.25
        assert (parameter != before[name])[small].all(), name


def core(state: dict[str, torch.Tensor], dtype: torch.dtype) -> Tensors:
    policy = a_policy(state, dtype)
    return Tensors(configuration.from_tree({}), policy, AdamW(policy, TrainerConfig(weight_decay=0.1)), None)


async def taken(tensors: Tensors, kept: checkpoint.Checkpoint) -> None:
    for what, arrays in (("weights", kept.exact), ("moments", kept.moments)):
        layout = weights.layout_of(arrays)
        order = m.TakeTensors(number=1, what=what, layout=layout, steps=kept.optimizer_steps)
        await tensors.obey(order, arrays)


async def saved(tensors: Tensors, folder: Path) -> checkpoint.Checkpoint:
    """Written and read back."""
    given = {what: await tensors.obey(m.GiveTensors(number=2, what=what)) for what in ("weights", "masters", "moments")}
    state = checkpoint.Checkpoint(
        version=PolicyVersion(0, 3), next_batch=3, applied=(), optimizer_steps=tensors.optimizer.steps,
        config=tensors.policy.config, **given,
    )  # fmt: skip
    checkpoint.save(folder, state, keep=2)
    back = checkpoint.newest(folder)
    assert back is not None
    return back


def train(tensors: Tensors, seed: int, steps: int) -> None:
    for step in range(steps):
        generator = torch.Generator().manual_seed(seed + step)
        tensors.policy.gradient.copy_(torch.randn(tensors.policy.gradient.shape, generator=generator))
        tensors.optimizer.step(1e-3)


def equal(mine: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> bool:
    same = [np.array_equal(array, theirs[name]) and array.dtype == theirs[name].dtype for name, array in mine.items()]
    return bool(mine) and mine.keys() == theirs.keys() and all(same)


async def test_a_resumed_core_continues_bit_for_bit(tmp_path, reference):
    tensors, fresh = (core(dict(reference.state_dict()), BF16) for _ in range(2))
    train(tensors, 1, 3)
    kept = await saved(tensors, tmp_path)
    train(tensors, 4, 5)
    await taken(fresh, kept)
    train(fresh, 4, 5)
    assert equal(fresh.policy.hf_arrays(), tensors.policy.hf_arrays())
    assert equal(fresh.optimizer.masters(), tensors.optimizer.masters())
    assert equal(fresh.optimizer.hf_arrays(), tensors.optimizer.hf_arrays())
    for each in (tensors, fresh):
        each.close()


@pytest.mark.parametrize(("before", "after"), [(torch.float32, BF16), (BF16, torch.float32)])
async def test_a_checkpoint_of_one_dtype_goes_on_in_the_other_from_the_fp32_weights(tmp_path, reference, before, after):
    old, new = core(dict(reference.state_dict()), before), core(rounded(dict(reference.state_dict())), after)
    train(old, 1, 3)
    kept = await saved(old, tmp_path)
    await taken(new, kept)
    exact = old.optimizer.masters() or old.policy.hf_arrays()
    assert equal(new.optimizer.masters() or new.policy.hf_arrays(), exact)
    assert equal(new.optimizer.hf_arrays(), old.optimizer.hf_arrays())
    narrow = (old if before == BF16 else new).policy.hf_arrays()
    assert equal(narrow, {n: dtypes.to_array(dtypes.to_tensor(a).to(BF16)) for n, a in exact.items()})
    for each in (old, new):
        each.close()


async def test_a_checkpoints_weights_are_a_bf16_model_that_others_load(tmp_path, reference):
    tensors = core(dict(reference.state_dict()), BF16)
    train(tensors, 1, 2)
    await saved(tensors, tmp_path)
    tensors.close()
    folder = tmp_path / "0.3"
    files = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in files.values()} == {BF16}
    assert all(torch.equal(tensor, tensors.policy.hf_tensors()[name]) for name, tensor in files.items())
    assert all(torch.equal(tensor, files[name].float()) for name, tensor in tiny.load(folder).state_dict().items())
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == "bfloat16"


# ---- snapshots and directories ---------------------------------------------------------------------------------------


def test_a_snapshot_has_half_the_bytes_and_reaches_satellites_and_engines_with_the_same_bits(tmp_path, reference):
    narrow = a_policy(dict(reference.state_dict()))
    published = weights.Published()
    published.publish(weights.Snapshot.of("0.3", narrow.hf_arrays()))
    answer = published.answer(PullWeights())
    assert len(answer.payload) == 2 * sum(p.numel() for p in narrow.parameters.values())
    arrived = weights.Snapshot.received(answer)
    assert arrived is not None and equal(arrived.tensors(), narrow.hf_arrays())
    other = [(name, "F32", shape) for name, _, shape in answer.layout]
    assert weights.Snapshot.received(dataclasses.replace(answer, layout=tuple(other))) is None

    satellite = a_policy(rounded(dict(reference.state_dict())))
    satellite.load({name: torch.zeros_like(tensor) for name, tensor in satellite.hf_tensors().items()})
    satellite.load_arrays(arrived.tensors())
    assert all(torch.equal(t, narrow.hf_tensors()[n]) for n, t in satellite.hf_tensors().items())

    folder = arrived.write_hf(tmp_path / "0.3", SMALL.to_hf() | {"dtype": "float32"})
    served = tiny.load(folder).state_dict()
    assert all(torch.equal(tensor, narrow.hf_tensors()[name].float()) for name, tensor in served.items())
    config = json.loads((folder / "config.json").read_text())
    assert (config["torch_dtype"], config["dtype"]) == ("bfloat16", "bfloat16")


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_a_model_directory_in_bf16_is_taken_as_it_is(tmp_path, reference, dtype):
    tiny.save(reference, tmp_path)
    narrow = {name: tensor.to(BF16) for name, tensor in reference.state_dict().items()}
    save_file(narrow, tmp_path / "model.safetensors", {"format": "pt"})
    loaded = a_policy(read_tensors(tmp_path), dtype)
    assert all(torch.equal(tensor, narrow[name].to(dtype)) for name, tensor in loaded.hf_tensors().items())


def test_every_bf16_number_comes_back_from_an_array():
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    numbers = bits.view(BF16)
    array = dtypes.to_array(numbers)
    assert array.dtype == np.uint16 and torch.equal(dtypes.to_tensor(array).view(torch.int16), bits)
    content = b"".join(weights.safetensors_parts({"all": array}))
    assert np.array_equal(weights.safetensors_arrays(content)["all"], array)
