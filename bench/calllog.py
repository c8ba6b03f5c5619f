"""What a record of the call log costs as a frame, against the same record as a JSON line.

    python -m bench.calllog [--json] [--quick]

CPU of one thread, both forms in turn, the best of five; bytes as written. `build_*` is what the log's writer does per
call (the record's object, chain hash and checksum included) for a whole prompt of so many tokens and an answer of so
many; `read_*` is reading a log back, deltas resolved, of the shapes C (branching) and L (712 k tokens) of `bench.gen`.
"""

from __future__ import annotations

import argparse
import io
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np

from bench import gen
from bench.figures import Figure, figure, show
from gyre_base.runcodec import to_line
from gyre_base.runfile import Call, CallWriter, RunReader, Span, common_prefix, context_digest, record_frame
from gyre_base.runframes import MAGIC

SIZES = ((60, 64), (500, 1_000), (20_000, 2_000), (600_000, 500))
BOUNDS = (1.3, 0.6, 0.3, 0.1)  # a short record is nearly all head, which a line writes a little faster
REPEATS = 5
AT_LEAST_S = 0.02  # of work between two looks at the clock, which is coarse


def at_most(bound: float) -> tuple[str, Callable[[float], bool]]:
    return f"<= {bound:g}", lambda value: value <= bound


def cpu_pair_s(one: Callable[[], object], other: Callable[[], object]) -> tuple[float, float]:
    """The least CPU seconds of each, asked in turn so that a busy machine meets both."""
    start = time.process_time()
    one()
    count = 1 + int(AT_LEAST_S / max(time.process_time() - start, 1e-6))
    best = [float("inf"), float("inf")]
    for _ in range(REPEATS):
        for place, work in enumerate((one, other)):
            start = time.process_time()
            for _ in range(count):
                work()
            best[place] = min(best[place], (time.process_time() - start) / count)
    return best[0], best[1]


def whole_call(prompt: int, answer: int) -> Call:
    """A call as proxyd records one, in full form."""
    rng = np.random.default_rng(prompt)
    ids = gen.ids(rng, prompt)
    capture = {"start": "0f" * 16, "asked": True, "root": None, "waited_s": 0.000123, "moved": 0}
    return Call(
        exec="g00012-07.0",
        call="call-000000000123",
        seq=3,
        t0=1_700_000_000.25,
        t1=1_700_000_003.75,
        label="main",
        parent="call-000000000122",
        finish="tool_calls",
        spans=(Span("a1b2c3.17", 0, answer),),
        context=context_digest(ids),
        prompt_ids=ids,
        completion_ids=gen.ids(rng, answer),
        logprobs=-rng.exponential(0.4, answer).astype(np.float32),
        extra={"capture": capture},
    )


def building(count: int) -> list[Figure]:
    out = []
    for (prompt, answer), bound in list(zip(SIZES, BOUNDS, strict=True))[:count]:
        call = whole_call(prompt, answer)
        frame, line = CallWriter(form=record_frame), CallWriter(form=to_line)
        frame_s, line_s = cpu_pair_s(lambda: frame.call(call), lambda: line.call(call))  # noqa: B023 - called here
        name = f"{prompt}_{answer}"
        out.append(figure(f"build_{name}_cpu_frame_vs_line", [frame_s / line_s], "x", *at_most(bound)))
        out.append(figure(f"build_{name}_frame_us", [frame_s * 1e6], "us"))
        ratio = len(frame.call(call)) / len(line.call(call))
        out.append(figure(f"build_{name}_bytes_frame_vs_line", [ratio], "x", *at_most(1.0)))
    return out


def reading(shapes: tuple[str, ...]) -> list[Figure]:
    out = []
    for shape in shapes:
        calls = list(as_logged(shape))
        frames, lines = (
            b"".join(writer.call(*each) for each in calls)
            for writer in (CallWriter(form=record_frame), CallWriter(form=to_line))
        )
        frames = MAGIC + frames
        frame_s, line_s = cpu_pair_s(lambda: read(frames), lambda: read(lines))  # noqa: B023 - called here
        out.append(figure(f"read_{shape}_cpu_frame_vs_line", [frame_s / line_s], "x", *at_most(0.7)))
        out.append(figure(f"read_{shape}_bytes_frame_vs_line", [len(frames) / len(lines)], "x", *at_most(1.0)))
    return out


def as_logged(shape: str) -> Iterator[tuple[Call, str | None, int]]:
    """(call, base, keep): what each shares with the call before of its agent, as proxyd writes it."""
    before: dict[str, Call] = {}
    for call in gen.shape(shape):
        base = before.get(call.agent.id)
        before[call.agent.id] = call
        if base is None:
            yield call, None, 0
        else:
            history = np.concatenate([base.prompt_ids, base.completion_ids])
            yield call, base.call, common_prefix(history, call.prompt_ids)


def read(data: bytes) -> None:
    for _ in RunReader(io.BytesIO(data)).records():
        pass


def main() -> int:
    options = argparse.ArgumentParser(prog="bench.calllog", description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--json", action="store_true", help="one object per line")
    options.add_argument("--quick", action="store_true", help="the smaller half")
    given = options.parse_args()
    figures = building(2 if given.quick else len(SIZES)) + reading(("C",) if given.quick else ("C", "L"))
    return show(figures, as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
