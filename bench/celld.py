"""What a cell costs: trees against rows, steps and decoding against transformers, pulls against a socket, streaming.

    python -m bench.celld [--json] [--only NAME,...] [--peers DIR]

NAME is a figure or a group. trees: forward and backward of C (scaled to 1/50, on the quickstart's model) tree-packed
against each trajectory as a row, relative to what tokens and attention pairs predict; and the share of the uncapped
time that Jmax 1 and 5 take (the paper has 41.4 and 74.8). long_run: one linear run in pieces, peak memory of 64 k
tokens over that of 16 k (4 where it grows with the tokens, 16 with their square), and what pieces save and cost.
shared_tokens: one run of 16 k tokens on two ranks that share them (trainer.context_parallel), the larger one's memory
and CPU time over those of one that has all; half is ideal. bf16: the same run of 1 k tokens in bf16 and in fp32. step,
decode: the same model and tokens in transformers, which lives in an environment of its own under DIR, made on first
use; without DIR these figures are left out. pull: 256 MiB of weights by celld's default transport, checked, against one
plain `sendall`, between two processes; and by Mooncake's TCP. switch: a tiny engine of 0.1 GB with calls in flight
turns and comes back, by phase. stream: two cells, one three times as fast, sleeping for their computation.

trees, bf16, step and decode are CPU seconds of one thread, so a busy machine matters little; pull and stream are wall
time, the sides of each ratio in turns. Exit code 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.metadata
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

import aiohttp
import orjson

from bench.figures import Figure, figure, show
from bench.proxyd_rig.measuring import PeerMissing, python_of

if TYPE_CHECKING:
    from gyre_base.keys import Keys
    from gyre_base.rundir import RunDir

T = TypeVar("T")
PEER = "transformers"
SEEDS = range(3)
REPEATS = 5
PULL_BYTES = 256 << 20
PULL_WARM = 3  # rounds in which memory is touched for the first time
STEP_ROWS, STEP_LENGTH = 4, 512
DECODE_ROWS, DECODE_PROMPT, DECODE_NEW = 32, 60, 300


def at_least(bound: float) -> tuple[str, Callable[[float], bool]]:
    return f">= {bound:g}", lambda value: value >= bound


def at_most(bound: float) -> tuple[str, Callable[[float], bool]]:
    return f"<= {bound:g}", lambda value: value <= bound


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# ---- trees ----------------------------------------------------------------------------------------------------------


def trees(_peers: Path | None) -> list[Figure]:
    """Forests of shape C of some seeds, with Jmax 1, 5 and none."""
    from bench.celld_rig import trees as rig

    policy = rig.policy_of(rig.MODEL)
    token_s, pair_s = rig.prices(policy)
    say(f"{policy.gradient.numel() / 1e6:.1f} M parameters, {1e6 * token_s:.1f} us/token, {1e9 * pair_s:.2f} ns/pair")
    tree_s: dict[int | None, list[float]] = {1: [], 5: [], None: []}
    ratios: dict[int | None, list[float]] = {5: [], None: []}
    for seed in SEEDS:
        for jmax, seconds in tree_s.items():
            packed = rig.packed_c(seed, jmax)
            seconds.append(min(rig.cpu_s(policy, [[packed]]) for _ in range(2)))
            if jmax not in ratios:
                continue
            rows = rig.flattened(packed)
            flat_s = rig.cpu_s(policy, rig.passes(rows))
            (tokens, pairs), (flat_tokens, flat_pairs) = rig.tokens_and_pairs([packed]), rig.tokens_and_pairs(rows)
            predicted = (tokens * token_s + pairs * pair_s) / (flat_tokens * token_s + flat_pairs * pair_s)
            ratios[jmax].append(seconds[-1] / flat_s / predicted)
            say(
                f"C seed {seed}, Jmax {jmax or 'none'}: {tokens:.0f} tokens for {flat_tokens:.0f} in {len(rows)} rows, "
                f"{seconds[-1]:.2f} s for {flat_s:.2f} s, {seconds[-1] / flat_s:.3f} where {predicted:.3f} is predicted"
            )
    share = {j: [100 * s / whole for s, whole in zip(tree_s[j], tree_s[None], strict=True)] for j in (1, 5)}
    return [
        figure("tree_time_vs_token_ratio_C_jmax5", ratios[5], "ratio", *at_most(1.15)),
        figure("tree_time_vs_token_ratio_C_all", ratios[None], "ratio", *at_most(1.15)),
        figure("fb_time_jmax1_pct", share[1], "%", "(paper 41.4)"),
        figure("fb_time_jmax5_pct", share[5], "%", "(paper 74.8)"),
    ]


# ---- long runs ------------------------------------------------------------------------------------------------------


def long_run(_peers: Path | None) -> list[Figure]:
    """Each run in a process of its own, on one thread. Minutes: attention's time grows with the square."""
    from bench.celld_rig import long_run as rig

    whole, pieces = rig.alone(4 << 10, 0), rig.alone(4 << 10, 1 << 10)
    if abs(pieces["norm"] - whole["norm"]) > 1e-5 * whole["norm"]:
        raise RuntimeError(f"pieces have a gradient of norm {pieces['norm']}, the whole {whole['norm']}")
    short, long = rig.alone(16 << 10, 1 << 10), rig.alone(64 << 10, 1 << 10)
    say(f"linear runs in pieces: 16 k tokens {short['bytes'] / 1e6:.0f} MB, 64 k {long['bytes'] / 1e6:.0f} MB")
    return [
        figure("long_run_memory_64k_vs_16k", [long["bytes"] / short["bytes"]], "ratio", *at_most(5)),
        figure("pieces_memory_vs_whole_4k", [pieces["bytes"] / whole["bytes"]], "ratio", *at_most(0.6)),
        figure("pieces_time_vs_whole_4k", [pieces["cpu_s"] / whole["cpu_s"]], "ratio"),
    ]


def shared_tokens(_peers: Path | None) -> list[Figure]:
    """Two ranks that share the tokens of one linear run, each against one that has all; the larger of the two."""
    from bench.celld_rig import long_run as rig

    alone, two = rig.alone(16 << 10, 0), rig.together(16 << 10, 0, ranks=2)
    if any(abs(each["norm"] - alone["norm"]) > 1e-5 * alone["norm"] for each in two):
        raise RuntimeError(f"two ranks have gradients of norm {[each['norm'] for each in two]}, one {alone['norm']}")
    return [
        figure(f"shared_tokens_{name}_2_vs_1", [max(each[key] for each in two) / alone[key]], "ratio", *at_most(0.65))
        for name, key in (("memory", "bytes"), ("time", "cpu_s"))
    ]


def bf16(_peers: Path | None) -> list[Figure]:
    """Forward and backward of one linear run in turns, from the same weights."""
    from bench.celld_rig import trees as rig

    narrow, wide = (rig.policy_of(rig.WIDE, dtype) for dtype in ("bf16", "fp32"))
    wide.load(narrow.hf_tensors())
    run = [[rig.plain_row(1 << 10, vocab=rig.WIDE.vocab_size)]]
    times = [(rig.cpu_s(narrow, run), rig.cpu_s(wide, run)) for _ in range(REPEATS + 1)][1:]
    far = float((narrow.gradient - wide.gradient).norm() / wide.gradient.norm())
    return [
        figure("bf16_time_vs_fp32", [mine / theirs for mine, theirs in times], "ratio"),
        figure("bf16_gradient_distance", [far], "ratio", *at_most(0.05)),
    ]


# ---- against transformers -------------------------------------------------------------------------------------------


class Transformers:
    """The peer's process, asked for CPU seconds."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        say(f"the peer: {self._answer()}")

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PeerMissing("the peer has ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def cpu_s(self, **job: Any) -> float:
        assert self._process.stdin is not None
        print(json.dumps(job), file=self._process.stdin, flush=True)
        return float(self._answer()["cpu_s"])


@contextlib.contextmanager
def transformers_with(model: Path, peers: Path | None) -> Iterator[Transformers]:
    """Raises PeerMissing."""
    if peers is None:
        raise PeerMissing("name a folder with --peers")
    script = Path(__file__).parent / "celld_rig" / "transformers_peer.py"
    command, pipe = [str(python_of(peers, PEER)), str(script), str(model)], subprocess.PIPE
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as process:
        try:
            yield Transformers(process)
        finally:
            process.kill()


def step(peers: Path | None) -> list[Figure]:
    """One train step of a 5 M model on 4 rows of 512 tokens, every token a target; plan and loss included."""
    from bench.celld_rig import trees as rig
    from celld.tiny.model import TinyConfig, TinyQwen3, save
    from celld.trainer.optimizer import AdamW
    from gyre_base.config import TrainerConfig

    model = TinyConfig(
        vocab_size=4096, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=8, head_dim=32
    )
    rows = [rig.plain_row(STEP_LENGTH, every=1, vocab=model.vocab_size)] * STEP_ROWS
    with tempfile.TemporaryDirectory(prefix="gyre-bench-") as folder:
        save(TinyQwen3(model).initialise(0), folder)
        with transformers_with(Path(folder), peers) as peer:
            policy = rig.policy_of(model)
            optimizer = AdamW(policy, TrainerConfig())
            ours, theirs = [], []
            for _ in range(REPEATS + 1):
                began = time.process_time()
                rig.forward_backward(policy, rows)
                optimizer.step(1e-4)
                ours.append(time.process_time() - began)
                theirs.append(peer.cpu_s(job="step", rows=[row.tokens.tolist() for row in rows]))
    say(f"step of {policy.gradient.numel() / 1e6:.1f} M parameters: {min(ours):.2f} s for {min(theirs):.2f} s")
    ratios = [mine / other for mine, other in zip(ours[1:], theirs[1:], strict=True)]
    return [figure("step_vs_transformers", ratios, "ratio", *at_most(1.1))]


def decode(peers: Path | None) -> list[Figure]:
    """32 rows of 60 prompt tokens and 300 new ones: tokens per CPU second, ours with HTTP, streams and logprobs."""
    from celld.tiny.model import TinyConfig, TinyQwen3, save
    from tests.engine.process import EngineProcess

    config = TinyConfig(initializer_range=0.1)
    numbers = random.Random(0)
    rows = [[numbers.randrange(config.vocab_size) for _ in range(DECODE_PROMPT)] for _ in range(DECODE_ROWS)]
    with tempfile.TemporaryDirectory(prefix="gyre-bench-") as folder:
        save(TinyQwen3(config).initialise(1), folder)
        with transformers_with(Path(folder), peers) as peer, EngineProcess(Path(folder)) as engine:
            peer.cpu_s(job="generate", rows=rows[:2], new=4)
            asyncio.run(decode_all(engine.url, rows[:2], 4, "warm"))
            ratios = []
            for n in range(3):
                theirs = peer.cpu_s(job="generate", rows=rows, new=DECODE_NEW)
                before, began = engine.cpu_s(), time.monotonic()
                asyncio.run(decode_all(engine.url, rows, DECODE_NEW, f"r{n}"))
                mine, wall_s = engine.cpu_s() - before, time.monotonic() - began
                ratios.append(theirs / mine)
                say(f"decode: {mine:.2f} CPU s ({wall_s:.1f} s of wall time) for {theirs:.2f} CPU s of transformers")
    return [figure("tiny_decode_vs_transformers", ratios, "ratio", *at_least(0.5))]


async def decode_all(url: str, rows: list[list[int]], new: int, name: str) -> None:
    """All rows at once, each streamed. Raises RuntimeError if a row has not exactly `new` tokens."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        counts = await asyncio.gather(*(_stream(session, url, ids, f"{name}.{n}", new) for n, ids in enumerate(rows)))
    if set(counts) != {new}:
        raise RuntimeError(f"the engine made {sorted(set(counts))} tokens, not {new}")


async def _stream(session: aiohttp.ClientSession, url: str, ids: list[int], rid: str, new: int) -> int:
    sampling = {"max_new_tokens": new, "temperature": 1.0, "ignore_eos": True}
    body = {"rid": f"{rid}.", "input_ids": ids, "sampling_params": sampling, "stream": True, "return_logprob": True}
    count = 0
    async with session.post(url + "/generate", data=orjson.dumps(body)) as response:
        async for line in response.content:
            if line.startswith(b"data: {"):
                count += len(orjson.loads(line[6:])["output_ids"])
    return count


# ---- pulls ----------------------------------------------------------------------------------------------------------


def pull(_peers: Path | None) -> list[Figure]:
    """Pulls of new versions and of the one in hand: by the default transport, and by Mooncake where it is installed."""
    from celld.transfer.engine import installed

    ratios, again_ms = _pulled_by("auto")
    out = [figure("pull_vs_socket_256mib", ratios, "ratio", *at_least(0.8))]
    if installed():
        out.append(figure("mooncake_pull_vs_socket_256mib", _pulled_by("mooncake")[0], "ratio"))
    else:
        say("left out: mooncake_pull_vs_socket_256mib: mooncake can't be imported")
    return [*out, figure("repull_ms", again_ms, "ms", *at_most(50))]


def _pulled_by(kind: str) -> tuple[list[float], list[float]]:
    """(plain seconds over ours, milliseconds of a second pull) of each round."""
    from gyre_base import config as configuration
    from gyre_base.keys import make_keys
    from gyre_base.rundir import RunDir

    with tempfile.TemporaryDirectory(prefix="gyre-bench-") as folder:
        run = RunDir.create(Path(folder) / "run")
        keys = make_keys(run)
        run.write_atomic("run.json", configuration.to_json(configuration.from_tree({})))
        command = [sys.executable, "-m", "bench.celld_rig.owner", str(run.root), str(PULL_BYTES), kind]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=subprocess.DEVNULL, stderr=pipe, text=True) as owner:
            try:
                return asyncio.run(_pulls(owner, int(_word(owner, str.isdigit)), run, keys, kind))
            finally:
                owner.kill()


async def _pulls(
    owner: subprocess.Popen[str], port: int, run: RunDir, keys: Keys, kind: str
) -> tuple[list[float], list[float]]:
    """Each round is another version; the first ones, in which both sides meet their memory, are not counted."""
    from celld.transfer.bulk import Bulk, open_engine
    from celld.weights import transport_to

    transport = transport_to(run, keys, "rank-c0", Bulk(open_engine(kind, "tcp", "127.0.0.1")))
    ratios, again_ms, into = [], [], bytearray(PULL_BYTES)
    for step in range(1, REPEATS + PULL_WARM + 1):
        pulled_s, snapshot = await _timed(transport.pull("", 60.0))
        assert snapshot is not None and snapshot.version == f"0.{step}"
        again_s, again = await _timed(transport.pull(snapshot.version, 60.0))
        assert again is None, "the same version was pulled twice"
        began = time.monotonic()
        _plain(port, into)
        plain_s = time.monotonic() - began
        assert into == snapshot.payload
        say(f"pull of 256 MiB by {transport.name}: {pulled_s:.3f} s; {plain_s:.3f} s over a plain socket")
        if step > PULL_WARM:
            ratios.append(plain_s / pulled_s)
            again_ms.append(1e3 * again_s)
        assert owner.stdin is not None
        print("next", file=owner.stdin, flush=True)
        _word(owner, f"0.{step + 1}".__eq__)
    transport.close()
    return ratios, again_ms


async def _timed(work: Awaitable[T]) -> tuple[float, T]:
    began = time.monotonic()
    result = await work
    return time.monotonic() - began, result


def _word(owner: subprocess.Popen[str], is_it: Callable[[str], bool]) -> str:
    """The owner's next word; the libraries have words of their own."""
    assert owner.stderr is not None
    for line in owner.stderr:
        if is_it(line.strip()):
            return line.strip()
    raise RuntimeError("the owner of the weights has ended")


def _plain(port: int, into: bytearray) -> None:
    view = memoryview(into)
    with socket.create_connection(("127.0.0.1", port)) as giver:
        while view:
            count = giver.recv_into(view)
            if not count:
                raise RuntimeError("the plain socket ended early")
            view = view[count:]


# ---- switches -------------------------------------------------------------------------------------------------------


def switch(_peers: Path | None) -> list[Figure]:
    """A cell of 0.1 GB turns to training and back, with calls in flight; each phase with what bounds it."""
    from bench.celld_rig import switch as rig

    with tempfile.TemporaryDirectory(prefix="gyre-bench-") as folder:
        size, there, back = asyncio.run(rig.switches(Path(folder)))
        disks = [rig.disk_s(Path(folder), size) for _ in range(3)]
    for name, rounds in (("to training", there), ("to serving", back)):
        for phase in rounds[0]:
            seconds = median(phases[phase] for phases in rounds)
            say(f"{name}, {size / 1e6:.0f} MB: {phase} {1e3 * seconds:.0f} ms, bound by {rig.BOUNDS[phase]}")
    writes = [phases["write"] / min(disks) for phases in back]
    return [
        figure("switch_to_train_s", [sum(phases.values()) for phases in there], "s"),
        figure("switch_to_rollout_s", [sum(phases.values()) for phases in back], "s"),
        figure("switch_write_vs_disk", writes, "ratio"),
    ]


# ---- streaming ------------------------------------------------------------------------------------------------------


def stream(_peers: Path | None) -> list[Figure]:
    """Batches of 64 micro-steps on two emulated cells, 1 to 3."""
    from bench.celld_rig import stream as rig

    with tempfile.TemporaryDirectory(prefix="gyre-bench-") as folder:
        claimed, halved = asyncio.run(rig.batches(Path(folder)))
    return [
        figure("stream_vs_ideal_1to3", [s / rig.IDEAL_S for s in claimed], "ratio", *at_most(1.1)),
        figure("static_split_vs_ideal_1to3", [s / rig.IDEAL_S for s in halved], "ratio"),
    ]


# ---- run ------------------------------------------------------------------------------------------------------------

GROUPS: dict[Callable[[Path | None], list[Figure]], tuple[str, ...]] = {
    trees: (
        "tree_time_vs_token_ratio_C_jmax5",
        "tree_time_vs_token_ratio_C_all",
        "fb_time_jmax1_pct",
        "fb_time_jmax5_pct",
    ),
    long_run: ("long_run_memory_64k_vs_16k", "pieces_memory_vs_whole_4k", "pieces_time_vs_whole_4k"),
    shared_tokens: ("shared_tokens_memory_2_vs_1", "shared_tokens_time_2_vs_1"),
    bf16: ("bf16_time_vs_fp32", "bf16_gradient_distance"),
    step: ("step_vs_transformers",),
    pull: ("pull_vs_socket_256mib", "mooncake_pull_vs_socket_256mib", "repull_ms"),
    switch: ("switch_to_train_s", "switch_to_rollout_s", "switch_write_vs_disk"),
    stream: ("stream_vs_ideal_1to3", "static_split_vs_ideal_1to3"),
    decode: ("tiny_decode_vs_transformers",),
}


def figures(only: set[str], peers: Path | None) -> list[Figure]:
    out: list[Figure] = []
    for group, names in GROUPS.items():
        wanted = {n for n in names if not only or only & {n, group.__name__}}
        if not wanted:
            continue
        try:
            out += [one for one in group(peers) if one.name in wanted]
        except PeerMissing as why:
            say(f"left out: {', '.join(sorted(wanted))}: {why}")
    return out


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--json", action="store_true")
    options.add_argument("--only", default="", help="figures or groups, by comma")
    options.add_argument("--peers", type=Path, help="folder for the peer's environment; none: without the peer")
    given = options.parse_args()
    only = set(given.only.split(",")) if given.only else set()
    known = {group.__name__ for group in GROUPS} | {name for names in GROUPS.values() for name in names}
    if unknown := only - known:
        options.error(f"no figure or group {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}")
    warnings.filterwarnings("ignore", module=r"(megatron|torch)\..*")  # what it does without Apex
    versions = {name: importlib.metadata.version(name) for name in ("torch", "megatron-core")}
    say(f"{versions}, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    return show(figures(only, given.peers), as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
