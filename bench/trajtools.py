"""Speed, memory and sizes of trajtools on the shapes S, M, L and C of `bench.gen`, and what the choice keeps.

    python -m bench.trajtools [--json] [--quick] [--repeat N] [--keep DIR]

Times are CPU seconds of one thread, the best of N; ratios are of one file, both sides in one fresh process. `merge`
inserts calls that are in memory, their context digests given as proxyd writes them; the floor is one array compare of
each prompt with the one before. `messy`: S, M and C shuffled, pretty-spaced and key-reordered. `--quick`: S, C.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson

from bench import gen
from bench.figures import Figure, figure, show
from gyre_base.runfile import Call, context_digest, encode
from trajtools.choose import CLASSES, choose, class_of
from trajtools.forest import Forest, Segment, paint
from trajtools.load import load
from trajtools.writers.slim import write_slim

MESSY = ("shuffled", "pretty", "reordered")
SEEDS = range(24)
LEAVES_OF_FIRST = 1_487_000  # tokens: all 26 leaves of the first C as rows; gen.py fits what it can to the others


def cpu(work: Callable[[], Any], repeat: int) -> float:
    """The least CPU seconds of `repeat` runs."""
    best = float("inf")
    for _ in range(repeat):
        start = time.process_time()
        work()
        best = min(best, time.process_time() - start)
    return best


def at_least(bound: float) -> tuple[str, Callable[[float], bool]]:
    return f">= {bound:g}", lambda value: value >= bound


def at_most(bound: float) -> tuple[str, Callable[[float], bool]]:
    return f"<= {bound:g}", lambda value: value <= bound


# ---- merge ---------------------------------------------------------------------------------------------------------


def merge(calls: list[Call], repeat: int) -> tuple[float, float]:
    """(M tokens per second, share of the floor's speed)."""
    calls = [dataclasses.replace(c, context=context_digest(c.prompt_ids)) for c in calls]
    tokens = sum(len(c.prompt_ids) + len(c.completion_ids) for c in calls)

    def floor() -> None:
        for before, after in pairwise(calls):
            n = min(len(before.prompt_ids), len(after.prompt_ids))
            np.array_equal(before.prompt_ids[:n], after.prompt_ids[:n])

    def core() -> None:
        forest = Forest(calls[0].exec)
        for call in calls:
            forest.insert(call)

    slow, fast = cpu(core, repeat), cpu(floor, repeat)
    return tokens / slow / 1e6, fast / slow


# ---- files ---------------------------------------------------------------------------------------------------------


def messy(path: Path, how: str) -> Path:
    """The same log as another writer would have left it."""
    out = path.with_suffix(f".{how}.jsonl")
    lines = path.read_bytes().splitlines(keepends=True)
    rng = np.random.default_rng(1)
    if how == "shuffled":
        lines = [lines[i] for i in rng.permutation(len(lines)).tolist()]
    elif how == "pretty":
        lines = [json.dumps(orjson.loads(line)).encode() + b"\n" for line in lines]
    else:
        lines = [orjson.dumps(dict(reversed(orjson.loads(line).items()))) + b"\n" for line in lines]
    out.write_bytes(b"".join(lines))
    return out


def parse_only(path: Path) -> None:
    with path.open("rb", buffering=4 << 20) as file:
        for line in file:
            orjson.loads(line)


def plain_reader(path: Path) -> int:
    """What one writes first: parse into lists, compare lists, keep what is new."""
    tips: list[list[int]] = []
    stored = 0
    with path.open() as file:
        for line in file:
            obj = json.loads(line)
            if obj["k"] != "call":
                continue
            prompt = obj["prompt_ids"]
            whole = prompt + obj["completion_ids"]
            best, longest = None, 0
            for i, tip in enumerate(tips):
                n = min(len(tip), len(whole))
                same = n if tip[:n] == whole[:n] else next(j for j in range(n) if tip[j] != whole[j])
                if same > longest:
                    best, longest = i, same
            stored += len(whole) - longest
            if best is not None and longest == len(tips[best]):
                tips[best] = whole
            else:
                tips.append(whole)
    return stored


def against(path: Path, repeat: int, base: Callable[[Path], Any], base_repeat: int) -> float:
    """How much faster `dedup` is than `base`, both in one fresh process: a command has no heap full of other calls."""
    words = [str(path), base.__name__, str(repeat), str(base_repeat)]
    done = subprocess.run([sys.executable, "-c", _RATIO, *words], check=True, capture_output=True, text=True)
    return float(done.stdout)


_RATIO = """
import sys
from pathlib import Path
from bench import trajtools as bench
from trajtools.report import dedup
path, base, repeat, base_repeat = Path(sys.argv[1]), getattr(bench, sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
print(bench.cpu(lambda: base(path), base_repeat) / bench.cpu(lambda: dedup(path), repeat))
"""


def peak_rss_mib(path: Path) -> float:
    """Of `trajtools dedup` in a process of its own."""
    done = subprocess.run([sys.executable, "-c", _PEAK, str(path)], check=True, capture_output=True, text=True)
    return int(done.stderr.split()[-1]) / 1024


_PEAK = """
import re, sys
from gyre_cli.trajtools import main
try:
    main(["dedup", "--json", sys.argv[1]])
except SystemExit as done:
    assert not done.code, done.code
print(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1], file=sys.stderr)
"""


def start_s(*arguments: str) -> float:
    """CPU seconds of a whole command: what it takes on a machine that has a core to spare."""
    before = os.times()
    subprocess.run([sys.executable, "-m", "gyre_cli.trajtools", *arguments], check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


# ---- choice --------------------------------------------------------------------------------------------------------


def longest_first(forest: Forest, slots: int = 5) -> tuple[int, int]:
    """(unique trainable tokens, flattened tokens) of the naive rule: class by class, longest leaf first."""
    marks = forest.marks()
    painted = paint(marks)
    leaves = [max(s.marks, key=lambda m: m.end) for s in forest.segments() if not s.children and s.marks]
    leaves.sort(key=lambda m: (CLASSES.index(class_of(m)), -m.end))
    covered: dict[Any, int] = {}
    for leaf in leaves[:slots]:
        for segment in leaf.segment.path():
            covered[segment] = max(covered.get(segment, 0), min(segment.end, leaf.end) - segment.start)
    unique = sum(int(painted[s].trainable[:n].sum()) for s, n in covered.items() if s in painted)
    return unique, sum(leaf.end for leaf in leaves[:slots])


def most_possible(forest: Forest, slots: int = 5) -> int:
    """Unique trainable tokens of the best leaves of any class. Greedy is exact for paths of a tree."""
    painted = paint(forest.marks())
    paths = [set(s.path()) & set(painted) for s in forest.segments() if not s.children]
    size = {s: int(p.trainable.sum()) for s, p in painted.items()}
    covered: set[Segment] = set()
    for _ in range(min(slots, len(paths))):
        covered |= max(paths, key=lambda path: sum(size[s] for s in path - covered))
    return sum(size[s] for s in covered)


class Chosen(NamedTuple):
    """One forest, the default rule against longest first. Tokens; `leaves` is the sum of all leaves' lengths."""

    targets: int
    longest_targets: int
    flattened: int
    longest_flattened: int
    possible: int
    leaves: float

    @property
    def gain(self) -> float:
        return self.targets / self.longest_targets

    @property
    def cost(self) -> float:
        return self.flattened / self.longest_flattened


def choice(seeds: Iterable[int], scale: float) -> Iterator[Chosen]:
    for seed in seeds:
        forest = Forest("e0")
        for call in gen.shape("C", seed, scale):
            forest.insert(call)
        ours = choose(forest)
        unique, flattened = longest_first(forest)
        leaves = sum(s.end for s in forest.segments() if not s.children)
        cost = sum(t.end for t in ours.kept)
        yield Chosen(ours.owned, unique, cost, flattened, most_possible(forest), leaves / scale)


def tell_choice(found: list[Chosen]) -> None:
    """What the medians hide: all tokens together, and the seeds whose leaves add up as those of the first C did."""
    gain = sum(x.targets for x in found) / sum(x.longest_targets for x in found)
    cost = sum(x.flattened for x in found) / sum(x.longest_flattened for x in found)
    say(f"choice, all {len(found)} seeds together: {gain:.2f} x the targets for {cost:.2f} x the tokens")
    if like := [x for x in found if abs(x.leaves / LEAVES_OF_FIRST - 1) < 0.12]:
        medians = (statistics.median(x.gain for x in like), statistics.median(x.cost for x in like))
        say(f"choice, {len(like)} seeds most like the first: {medians[0]:.2f} x for {medians[1]:.2f} x (medians)")


# ---- all -----------------------------------------------------------------------------------------------------------


def figures(folder: Path, quick: bool, repeat: int) -> Iterator[Figure]:
    shapes = ("S", "C") if quick else gen.SHAPES
    paths = {name: folder / f"{name}.jsonl" for name in shapes}
    raw, merges = {}, {}
    for name, path in paths.items():
        calls = list(gen.shape(name))
        raw[name] = gen.write(iter(calls), path)
        merges[name] = merge(calls, repeat)
        speed, share = merges[name]
        say(f"{name}: {raw[name] / 1e6:.0f} MB, merge {speed:.0f} M tokens/s, {share:.2f} of the floor")
        del calls
    yield figure("merge_mtok_per_s_min", [min(m[0] for m in merges.values())], "Mtok/s")
    yield figure("merge_floor_ratio_min", [min(m[1] for m in merges.values())], "ratio", *at_least(0.4))
    canonical = {n: against(p, repeat, parse_only, 1 if n == "L" else repeat) for n, p in paths.items()}
    say("canonical against orjson: " + text(canonical))
    yield figure("dedup_vs_orjson_canonical_min", [min(canonical.values())], "ratio", *at_least(5.0))
    others: dict[str, float] = {}
    for name in [n for n in shapes if n != "L"]:
        for how in MESSY:
            path = messy(paths[name], how)
            others[f"{name} {how}"] = against(path, repeat, parse_only, repeat)
            path.unlink()
    say("messy against orjson: " + text(others))
    yield figure("dedup_vs_orjson_messy_min", [min(others.values())], "ratio", *at_least(0.8))
    plain = {n: against(p, repeat, plain_reader, 1) for n, p in paths.items() if n in ("S", "M", "C")}
    say("against the plain reader: " + text(plain))
    yield figure("dedup_vs_plain_reader_min", [min(plain.values())], "ratio", *at_least(10.0))
    if "L" in paths:
        yield figure("peak_rss_mib_L", [peak_rss_mib(paths["L"])], "MiB", *at_most(200.0))
    yield from _many(folder)
    yield from _sizes(folder, paths["C"], raw["C"])
    of_seeds = list(choice(SEEDS, 1.0 if not quick else 0.2))
    tell_choice(of_seeds)
    yield figure("choice_targets_gain", [x.gain for x in of_seeds], "ratio", *at_least(1.5))
    yield figure("choice_tokens_cost", [x.cost for x in of_seeds], "ratio", *at_most(0.6))
    yield figure("choice_of_most_possible", [x.targets / x.possible for x in of_seeds], "ratio", *at_least(0.95))
    small = folder / "small.jsonl"
    small.write_bytes(b"".join(encode(call) for call in gen.linear(3, 60, 0)))
    yield figure("help_s", [start_s("--help") for _ in range(7)], "s", *at_most(0.3))
    yield figure("small_dedup_s", [start_s("dedup", str(small)) for _ in range(7)], "s", *at_most(0.5))


def _many(folder: Path) -> Iterator[Figure]:
    peaks = {}
    for count in (1_000, 10_000):
        path = folder / "many.jsonl"
        gen.write(gen.many(count, 5, 0), path)
        peaks[count] = peak_rss_mib(path)
        path.unlink()
    say(f"interleaved executions: {peaks[1_000]:.0f} MiB for 1,000, {peaks[10_000]:.0f} MiB for 10,000")
    yield figure("peak_rss_mib_10k_executions", [peaks[10_000]], "MiB", *at_most(200.0))


def _sizes(folder: Path, path: Path, raw: int) -> Iterator[Figure]:
    recording = load(path)
    for name, out, bound in (("delta", "slim.jsonl", 0.1), ("binary", "slim.gtr", 0.02)):
        size = write_slim(recording, folder / out)
        say(f"C {name}: {size / 1e6:.2f} MB of {raw / 1e6:.0f} MB")
        yield figure(f"{name}_size_ratio_C", [size / raw], "ratio", *at_most(bound))


def text(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.1f}x" for name, value in values.items())


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--json", action="store_true")
    options.add_argument("--quick", action="store_true")
    options.add_argument("--repeat", type=int, default=3)
    options.add_argument("--keep", type=Path, help="write the files here and keep them")
    given = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="gyre-bench-") as temporary:
        folder = given.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        return show(list(figures(folder, given.quick, given.repeat)), as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
