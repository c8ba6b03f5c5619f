"""Random packed executions for tests, and the flattened form of the same thing: each trajectory as a row of its own."""

from __future__ import annotations

import numpy as np

from gyre_base.microstep import (
    CallRange,
    Ints,
    MicroStep,
    PackedExecution,
    PackedPath,
    chain,
    ids_digest,
)


def random_segments(rng: np.random.Generator, count: int, longest: int) -> Ints:
    """A random forest in depth-first order: a new segment hangs below one on the current branch, or starts a root."""
    rows: list[tuple[int, int, int]] = []
    branch: list[int] = []
    at = 0
    for index in range(count):
        keep = int(rng.integers(0 if rng.random() < 0.1 else min(1, len(branch)), len(branch) + 1))
        branch = branch[:keep]
        length = int(rng.integers(1, longest + 1)) + (not branch)  # a root keeps a token that is no target
        rows.append((at, at + length, branch[-1] if branch else -1))
        branch.append(index)
        at += length
    return np.array(rows, dtype=np.int32).reshape(-1, 3)


def random_execution(
    rng: np.random.Generator, name: str, *, segments: int = 6, longest: int = 12, vocab: int = 64, step: int = 0
) -> PackedExecution:
    """One execution: tokens trainable at random, each owned by the first path that holds it (a few by nobody)."""
    shape = random_segments(rng, segments, longest)
    position, predecessor = chain(shape)
    count = len(position)
    trainable = (rng.random(count) < 0.6) & (predecessor >= 0)
    trainable[-1] = True
    logprob = np.where(trainable, rng.normal(-4.0, 0.5, count), np.nan).astype(np.float32)
    paths, owned = _paths(rng, shape, trainable)
    tokens = rng.integers(0, vocab, count).astype(np.int32)
    packed = PackedExecution(
        execution=name,
        group="g",
        advantage=float(rng.normal()),
        total_owned=int(owned.sum()),
        dispatched_step=step - int(rng.integers(0, 2)),
        tokens=tokens,
        position=position,
        predecessor=predecessor,
        logprob=logprob,
        owned=owned,
        trainable=trainable,
        segments=shape,
        paths=paths,
        calls=(),
    )
    first = int(np.flatnonzero(owned)[0])
    prompt = packed.prompt_before(first)
    call = CallRange(call="c0", start=first, end=first + 1, prompt_length=len(prompt), prompt_digest=ids_digest(prompt))
    packed = PackedExecution(**{**packed.__dict__, "calls": (call,)})
    packed.check()
    return packed


def random_micro_step(seed: int, executions: int, **options: int) -> MicroStep:
    rng = np.random.default_rng(seed)
    return MicroStep(tuple(random_execution(rng, f"e{seed}.{i}", **options) for i in range(executions)))


def path_indices(packed: PackedExecution, path: PackedPath) -> list[int]:
    """Packed indices of a trajectory from its root to its leaf."""
    return [i for s in path.segments for i in range(*packed.segments[s, :2])]


def _paths(rng: np.random.Generator, shape: Ints, trainable: np.ndarray) -> tuple[tuple[PackedPath, ...], np.ndarray]:
    parents = shape[:, 2].tolist()
    leaves = [s for s in range(len(shape)) if s not in parents]
    owned = np.zeros(len(trainable), dtype=bool)
    paths = []
    for leaf in rng.permutation(leaves).tolist():
        chain_up = [leaf]
        while parents[chain_up[-1]] >= 0:
            chain_up.append(parents[chain_up[-1]])
        ranges = []
        for segment in reversed(chain_up):
            for index in range(*shape[segment, :2]):
                if trainable[index] and not owned[index]:
                    ranges.append((index, index + 1))
                    owned[index] = True
        paths.append(PackedPath(trajectory=f"t{leaf}", segments=tuple(reversed(chain_up)), owned=tuple(ranges)))
    return tuple(paths), owned
