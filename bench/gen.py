"""Seeded call logs of the shapes that the figures are about. Same seed, same bytes.

    python -m bench.gen C out.jsonl [--seed 0] [--scale 1.0]

S linear to 105 k tokens, 200 calls · M linear to 302 k, 300 calls · L linear to 712 k, 400 calls · C: a compaction at
160 k, parallel sub-agents, 2 % retries, 1 % drift, 400 calls. Ids are log-uniform over a vocabulary of 151,643.

The sizes in C are fitted to what is known of the C that was measured first: 21.2 M prompt tokens, 0.501 M distinct,
118,933 sampled, 26 leaves, one compaction, and 112 rows of 3.11 M tokens where every break of the linear order starts a
row (150 seeds: 21.7 M, 0.495 M, 119.5 k, 25.5, 1.3). What a choice keeps of it was no part of the fit.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gyre_base.runfile import Agent, Attempt, Call, CallWriter, Ids, RunHeader, encode

VOCAB = 151_643
LINEAR = {"S": (200, 105_000), "M": (300, 302_000), "L": (400, 712_000)}
SHAPES = ("S", "M", "L", "C")


def ids(rng: np.random.Generator, n: int) -> Ids:
    """Half log-uniform (frequent tokens have small ids), half uniform."""
    small = np.exp(rng.random(n) * np.log(VOCAB)).astype(np.int32)
    return np.where(rng.random(n) < 0.35, small, rng.integers(0, VOCAB, n, np.int32)).astype(np.int32)


@dataclass
class _Writer:
    """Numbers the calls and gives them times."""

    rng: np.random.Generator
    execution: str
    calls: int = 0
    clock: float = 0.0
    out: list[Call] = field(default_factory=list)

    def call(self, prompt: Ids, completion: Ids, agent: Agent, purpose: str = "turn", of: str | None = None) -> Call:
        logprobs = np.round(-self.rng.exponential(0.4, len(completion)), 4).astype(np.float32)
        took = 1.0 + len(completion) / 100
        label = agent.role + ("-summary" if purpose == "summary" else "")
        made = Call(
            exec=self.execution, call=f"c{self.calls}", seq=self.calls, t0=self.clock, t1=self.clock + took,
            agent=agent, purpose=purpose, label=label, attempt=Attempt(of=of, n=1 if of else 0), finish="stop",
            prompt_ids=prompt, completion_ids=completion, logprobs=logprobs,
        )  # fmt: skip
        self.calls, self.clock = self.calls + 1, self.clock + took + 0.5
        return made


def linear(calls: int, tokens: int, seed: int, execution: str = "e0") -> Iterator[Call]:
    """One conversation that only grows."""
    rng = np.random.default_rng(seed)
    writer, main = _Writer(rng, execution), Agent()
    text = ids(rng, min(8_000, tokens // 8))
    per_turn = (tokens - len(text)) // calls
    for _ in range(calls):
        completion = ids(rng, max(1, int(per_turn * rng.uniform(0.1, 0.3))))
        yield writer.call(text, completion, main)
        text = np.concatenate([text, completion, ids(rng, max(0, per_turn - len(completion)))])


@dataclass
class _Agent:
    agent: Agent
    text: NDArray[np.int32]
    turns: int  # that it has left


def branching(calls: int, seed: int, execution: str = "e0", limit: int = 160_000, scale: float = 1.0) -> Iterator[Call]:
    """Compaction, sub-agents in parallel, retries and drift."""
    rng = np.random.default_rng(seed)
    writer = _Writer(rng, execution)
    system = ids(rng, int(10_000 * scale))
    main = _Agent(Agent(), np.concatenate([system, ids(rng, int(1_500 * scale))]), 1 << 30)
    subs: list[_Agent] = []
    count = 0
    while writer.calls < calls:
        if not subs and writer.calls and rng.random() < 0.0145:
            for _ in range(int(rng.integers(2, 5))):
                count += 1
                agent = Agent(id=f"s{count}", role="sub-agent", parent="main")
                start = np.concatenate([system[: int(7_300 * scale)], ids(rng, int(2_000 * scale))])
                subs.append(_Agent(agent, start, int(rng.integers(8, 24))))
        who = subs[int(rng.integers(len(subs)))] if subs else main  # who waits for its sub-agents calls nothing
        yield from _turn(writer, who, scale)
        subs = [s for s in subs if s.turns > 0]
        if len(main.text) > limit * scale:
            summary = writer.call(
                np.concatenate([main.text, ids(rng, int(60 * scale))]),
                ids(rng, int(1_500 * scale)),
                main.agent,
                "summary",
            )
            yield summary
            main.text = np.concatenate([system, summary.completion_ids, ids(rng, int(400 * scale))])


def _turn(writer: _Writer, who: _Agent, scale: float) -> Iterator[Call]:
    rng = writer.rng
    completion = ids(rng, max(2, int(rng.integers(100, 500) * scale)))
    who.turns -= 1
    made = writer.call(who.text, completion, who.agent)
    yield made
    if rng.random() < 0.02:
        made = writer.call(who.text, ids(rng, len(completion)), who.agent, of=made.call)
        yield made
        completion = made.completion_ids
    if rng.random() < 0.01:
        completion = completion.copy()
        completion[len(completion) // 2] ^= 1
    who.text = np.concatenate([who.text, completion, ids(rng, int(rng.integers(400, 1_400) * scale))])


def shape(name: str, seed: int = 0, scale: float = 1.0) -> Iterator[Call]:
    """The calls of one file; `scale` shrinks its tokens."""
    if name == "C":
        return branching(400, seed, scale=scale)
    calls, tokens = LINEAR[name]
    return linear(calls, int(tokens * scale), seed)


def many(executions: int, calls: int, seed: int) -> Iterator[Call]:
    """Small executions, their calls interleaved: every execution is open until the end of the file."""
    rows = [list(linear(calls, 600, seed + i, f"e{i}")) for i in range(min(executions, 50))]
    for turn in range(calls):
        for i in range(executions):
            call = rows[i % len(rows)][turn]
            yield Call(**{**{f: getattr(call, f) for f in call.__dataclass_fields__}, "exec": f"e{i}"})


def write(calls: Iterator[Call], path: Path) -> int:
    """The raw form: every prompt in full. Returns bytes."""
    size = 0
    with path.open("wb", buffering=1 << 20) as file:
        size += file.write(encode(RunHeader(run="bench", tokenizer={"vocab": VOCAB}, writer="bench.gen")))
        for call in calls:
            size += file.write(CallWriter().call(call))
    return size


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("shape", choices=SHAPES)
    options.add_argument("out", type=Path)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--scale", type=float, default=1.0)
    given = options.parse_args()
    print(write(shape(given.shape, given.seed, given.scale), given.out))


if __name__ == "__main__":
    main()
