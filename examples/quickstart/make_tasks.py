"""Write the shipped tasks: "write these modules from their specifications", with hidden tests. Standard library only.

Each module has two functions. A function is a chain of two string operations (`s.strip()[::-1]`); its specification
names them in order, in words. Functions are compared by what they compute: all chains with the same behaviour form one
class, and a class is either for training or held out, never both. So no held-out function, under any spelling, is seen
in the warm start or in RL.

    python examples/quickstart/make_tasks.py [--seed 7] [--train 768] [--heldout 160] [--out examples/quickstart/tasks]
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path


@dataclass(frozen=True)
class Operation:
    """One step of a function: the code that does it and the ways a specification says it."""

    suffix: str  # appended to the expression so far
    phrases: tuple[str, str]

    def __call__(self, text: str) -> str:
        return _compiled(self.suffix)(text)


OPERATIONS = (
    Operation("[::-1]", ("reverse it", "turn it back to front")),
    Operation(".upper()", ("make it upper case", "use capital letters only")),
    Operation(".lower()", ("make it lower case", "use small letters only")),
    Operation(".swapcase()", ("swap the case of each letter", "exchange small and capital letters")),
    Operation(".strip()", ("remove spaces at both ends", "trim it")),
    Operation("[1:]", ("drop the first character", "skip one character")),
    Operation("[:-1]", ("drop the last character", "cut one character off the end")),
    Operation("[:4]", ("keep the first four characters", "take four from the start")),
    Operation("[-4:]", ("keep the last four characters", "take four from the end")),
    Operation("[::2]", ("keep every second character", "leave out every other character")),
)
Chain = tuple[int, int]  # indices into OPERATIONS, in the order they are applied

PROBES = ("  Blue Whale ", "aBcDeFgH", " x Yz-Qr", "Night owL", "zZ top ", "MIXED case Words", "  tabBy cat")
WORDS = ("amber", "Birch", "cOral", "DUNE", "Flint", "grove", "Haze", "iris", "JADE", "kelp", "Lilac", "moSS", "Opal")
INSTRUCTIONS = {
    "plain": "Write m1.py and m2.py from m1.md and m2.md.",
    "delegate": "Write m1.py and m2.py from m1.md and m2.md. Give m2.py to a sub-agent.",
    "long": "Write m1.py, m2.py and m3.py from m1.md, m2.md and m3.md.",
}
KINDS = ("plain", "plain", "plain", "delegate", "long")  # how often each kind of task occurs
TESTS_PER_FUNCTION = 4
SEED = 7  # of the shipped files; the split into training and held-out functions hangs on it
FUNCTIONS = ("f", "g")  # of every module


def _compiled(suffix: str, _cache: dict[str, Callable[[str], str]] = {}) -> Callable[[str], str]:  # noqa: B006
    if suffix not in _cache:
        _cache[suffix] = eval(f"lambda s: s{suffix}")  # noqa: S307 - our own constants
    return _cache[suffix]


def apply(chain: Chain, text: str) -> str:
    """What the function of this chain returns."""
    return OPERATIONS[chain[1]](OPERATIONS[chain[0]](text))


def body(chain: Chain) -> str:
    """The expression a right solution returns, starting from `s`."""
    return "s" + "".join(OPERATIONS[index].suffix for index in chain)


def behaviour(chain: Chain) -> tuple[str, ...]:
    """Two chains are the same function when this is equal."""
    return tuple(apply(chain, probe) for probe in PROBES)


def classes() -> list[tuple[Chain, ...]]:
    """All chains grouped by behaviour; those that equal a single operation or change nothing are left out."""
    trivial = {tuple(PROBES)} | {tuple(operation(probe) for probe in PROBES) for operation in OPERATIONS}
    groups: dict[tuple[str, ...], list[Chain]] = {}
    for chain in product(range(len(OPERATIONS)), range(len(OPERATIONS))):
        if behaviour(chain) not in trivial:
            groups.setdefault(behaviour(chain), []).append(chain)
    return [tuple(group) for group in groups.values()]


def split(seed: int = SEED, heldout_share: float = 0.3) -> tuple[list[Chain], list[Chain]]:
    """(training chains, held-out chains), disjoint by behaviour; every operation occurs in training."""
    groups = classes()
    random.Random(f"split {seed}").shuffle(groups)
    cut = round(len(groups) * heldout_share)
    heldout = [chain for group in groups[:cut] for chain in group]
    train = [chain for group in groups[cut:] for chain in group]
    missing = set(product(range(len(OPERATIONS)), (0, 1))) - {(c[place], place) for c in train for place in (0, 1)}
    if missing:
        raise ValueError(f"seed {seed} leaves operations without training: {sorted(missing)}")
    return sorted(train), sorted(heldout)


def specification(chains: Sequence[Chain], rng: random.Random) -> str:
    """The text of one module's .md: its functions in order, each operation said in one of its two ways."""
    parts = []
    for name, chain in zip(FUNCTIONS, chains, strict=True):
        steps = "".join(f"\n- {rng.choice(OPERATIONS[index].phrases)}" for index in chain)
        parts.append(f"{name}(s) returns a text. Start from s:{steps}\n")
    return "".join(parts)


def source(bodies: Sequence[str]) -> str:
    """The text of one module's .py with these returned expressions."""
    return "\n\n".join(f"def {name}(s):\n    return {text}\n" for name, text in zip(FUNCTIONS, bodies, strict=True))


def sample_input(rng: random.Random) -> str:
    """A short text with spaces at its ends, mixed case, and enough length for every operation to show."""
    text = " ".join(rng.sample(WORDS, 2))
    return " " * rng.randrange(3) + text + " " * rng.randrange(3)


@cache
def other_functions(chain: Chain) -> tuple[Chain, ...]:
    """One chain of every other behaviour there is."""
    everything = {behaviour(other): other for other in product(range(len(OPERATIONS)), range(len(OPERATIONS)))}
    return tuple(other for seen, other in everything.items() if seen != behaviour(chain))


def test_inputs(chain: Chain, rng: random.Random) -> list[str]:
    """Inputs that together tell this chain from every chain of another behaviour."""
    while True:
        inputs = [sample_input(rng) for _ in range(TESTS_PER_FUNCTION)]
        wanted = [apply(chain, text) for text in inputs]
        if not any(_agrees(other, inputs, wanted) for other in other_functions(chain)):
            return inputs


def _agrees(chain: Chain, inputs: Sequence[str], wanted: Sequence[str]) -> bool:
    return all(apply(chain, text) == result for text, result in zip(inputs, wanted, strict=True))


def test_module(module: str, chains: Sequence[Chain], rng: random.Random) -> str:
    """Hidden tests; each imports the module itself, so a missing module fails every test of its own."""
    cases = [
        f"def test_{name}_{number}():\n    from {module} import {name}\n    "
        f"assert {name}({text!r}) == {apply(chain, text)!r}\n"
        for name, chain in zip(FUNCTIONS, chains, strict=True)
        for number, text in enumerate(test_inputs(chain, rng), start=1)
    ]
    return "\n\n".join(cases)


def modules_of(kind: str) -> list[str]:
    return ["m1", "m2", "m3"] if kind == "long" else ["m1", "m2"]


def draw(kind: str, chains: Sequence[Chain], rng: random.Random) -> dict[str, list[Chain]]:
    """The functions of each module; none repeats within a task."""
    modules = modules_of(kind)
    drawn = rng.sample(chains, len(modules) * len(FUNCTIONS))
    return {module: drawn[place :: len(modules)] for place, module in enumerate(modules)}


def workspace(parts: dict[str, list[Chain]], rng: random.Random) -> dict[str, str]:
    """What the agent finds in its directory: one specification per module."""
    return {f"{module}.md": specification(part, rng) for module, part in parts.items()}


def task(identity: str, kind: str, chains: Sequence[Chain], rng: random.Random) -> dict[str, object]:
    """One line of the task file."""
    parts = draw(kind, chains, rng)
    return {
        "id": identity,
        "instruction": INSTRUCTIONS[kind],
        "workspace": workspace(parts, rng),
        "evaluator": {
            "command": ["python", "-I", "-S", "evaluate.py"],
            "tests": {f"test_{module}.py": test_module(module, part, rng) for module, part in parts.items()},
            "timeout_s": 10.0,
        },
    }


def tasks(prefix: str, chains: Sequence[Chain], count: int, rng: random.Random) -> Iterator[dict[str, object]]:
    """`count` tasks over the given functions; the kinds take fixed turns."""
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        yield task(f"{prefix}-{number:04d}-{kind}", kind, chains, rng)


def write(path: Path, lines: Iterator[dict[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line, sort_keys=True) + "\n" for line in lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--train", type=int, default=768)
    parser.add_argument("--heldout", type=int, default=160)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "tasks")
    args = parser.parse_args()
    train, heldout = split(args.seed)
    write(args.out / "train.jsonl", tasks("train", train, args.train, random.Random(f"train {args.seed}")))
    write(args.out / "heldout.jsonl", tasks("heldout", heldout, args.heldout, random.Random(f"heldout {args.seed}")))


if __name__ == "__main__":
    main()
