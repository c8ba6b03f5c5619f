"""Forward and backward over forests of shape C, tree-packed and flattened, and what tokens and attention pairs predict.

The prediction's two prices are measured in the same run: seconds per token and per attention pair, fitted to plain rows
of three lengths that go through the same code.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import numpy as np
import torch

from bench import gen
from celld.tiny.model import TinyConfig, TinyQwen3
from celld.trainer import context, cpu, loss, tree
from celld.trainer.dtypes import DTYPES
from celld.trainer.model import Policy
from gyre_base.microstep import PackedExecution, PackedPath, chain
from trajtools.choose import Rules, choose
from trajtools.forest import Forest
from trajtools.pack import pack

SCALE = 0.02  # of C's 160 k tokens: the longest path has 3,200
MODEL = TinyConfig()  # the quickstart's: 2 layers of width 128, 0.5 M parameters
WIDE = TinyConfig(  # products large enough that what numbers they are of matters
    vocab_size=4096,
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
)
PASS_TOKENS = 12_000  # flattened rows go through the model in passes of about this size
PLAIN_LENGTHS = (200, 800, 3200)
TRAINABLE_EVERY = 4  # of plain rows; shape C has about as many targets per token


def policy_of(model: TinyConfig, dtype: str = "fp32") -> Policy:
    """A random policy on one thread."""
    torch.set_num_threads(1)
    cpu.start_parallel()
    policy = Policy(model.to_hf(), dtype=DTYPES[dtype])
    policy.load(dict(TinyQwen3(model).initialise(0).state_dict()))
    return policy


def packed_c(seed: int, jmax: int | None) -> PackedExecution:
    """One execution of shape C with at most `jmax` trajectories, as one sequence; ids folded into the vocabulary."""
    forest = Forest("e0")
    for call in gen.shape("C", seed, SCALE):
        forest.insert(call)
    packed = pack(choose(forest, Rules(jmax=jmax)), advantage=1.0)
    return dataclasses.replace(packed, tokens=packed.tokens % MODEL.vocab_size)


def flattened(packed: PackedExecution) -> list[PackedExecution]:
    """Each trajectory as a row of its own. Tokens of other paths are computed again: a path's ratio needs them all."""
    return [_row(packed, path) for path in packed.paths]


def _row(packed: PackedExecution, path: PackedPath) -> PackedExecution:
    index = np.concatenate([np.arange(*packed.segments[s, :2]) for s in path.segments])
    owned = np.zeros(len(packed), dtype=bool)
    for start, end in path.owned:
        owned[start:end] = True
    return row(packed.tokens[index], packed.logprob[index], packed.trainable[index], owned[index], packed.total_owned)


def row(
    tokens: np.ndarray, logprob: np.ndarray, trainable: np.ndarray, owned: np.ndarray, total_owned: int
) -> PackedExecution:
    """An execution that is one linear trajectory."""
    segments = np.array([[0, len(tokens), -1]], dtype=np.int32)
    position, predecessor = chain(segments)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], owned, [False]]).astype(np.int8))).reshape(-1, 2)
    ranges = tuple((int(start), int(end)) for start, end in edges)
    return PackedExecution(
        execution="row",
        group="g",
        advantage=1.0,
        total_owned=total_owned,
        dispatched_step=0,
        tokens=tokens,
        position=position,
        predecessor=predecessor,
        logprob=logprob,
        owned=owned,
        trainable=trainable,
        segments=segments,
        paths=(PackedPath(trajectory="t0", segments=(0,), owned=ranges),),
        calls=(),
    )


def plain_row(length: int, *, every: int = TRAINABLE_EVERY, vocab: int = MODEL.vocab_size) -> PackedExecution:
    """Random tokens in one trajectory; each `every`-th is a target."""
    rng = np.random.default_rng(length)
    trainable = np.arange(length) % every == every - 1 if every > 1 else np.arange(length) > 0
    logprob = np.where(trainable, -6.0, np.nan).astype(np.float32)
    tokens = rng.integers(0, vocab, length).astype(np.int32)
    return row(tokens, logprob, trainable, trainable.copy(), int(trainable.sum()))


def tokens_and_pairs(executions: Sequence[PackedExecution]) -> tuple[float, float]:
    """A token attends to itself and its ancestors, which are as many as it is deep."""
    return (
        float(sum(map(len, executions))),
        float(sum(int(p.position.astype(np.int64).sum()) + len(p) for p in executions)),
    )


def passes(rows: Sequence[PackedExecution]) -> list[list[PackedExecution]]:
    """Rows in passes of at most about PASS_TOKENS."""
    out: list[list[PackedExecution]] = [[]]
    for each in rows:
        if out[-1] and sum(map(len, out[-1])) + len(each) > PASS_TOKENS:
            out.append([])
        out[-1].append(each)
    return out


def forward_backward(policy: Policy, executions: Sequence[PackedExecution]) -> None:
    """What a rank does with a micro-step or its part of it, its plan included."""
    plan, goal = context.part(tree.plan(executions), policy.cp_rank, policy.cp), loss.targets(executions, 0)
    policy.zero_gradient()
    logp_N, _ = policy.logprobs(plan, goal.rows_N, goal.tokens_N, 1.0)
    loss.loss_sum(logp_N, goal, loss.LossOptions())[0].backward()  # type: ignore[no-untyped-call]
    policy.finish_gradient()


def cpu_s(policy: Policy, work: Sequence[Sequence[PackedExecution]]) -> float:
    """CPU seconds of forward and backward of all passes, on one thread."""
    began = time.process_time()
    for executions in work:
        forward_backward(policy, executions)
    return time.process_time() - began


def prices(policy: Policy) -> tuple[float, float]:
    """(seconds per token, seconds per attention pair) of plain rows: relative least squares over three lengths."""
    counts, seconds = [], []
    for length in PLAIN_LENGTHS:
        rows = [plain_row(length)] * max(1, 6400 // length)
        counts.append(tokens_and_pairs(rows))
        seconds.append(min(cpu_s(policy, [rows]) for _ in range(3)))
    weighted = np.array(counts) / np.array(seconds)[:, None]
    (token_s, pair_s), *_ = np.linalg.lstsq(weighted, np.ones(len(seconds)), rcond=None)
    if token_s <= 0 or pair_s <= 0:
        raise RuntimeError(f"the prices make no sense ({token_s}, {pair_s}): the machine is too busy, run it again")
    return float(token_s), float(pair_s)
