"""trajtools: what is in a recorded run, what repeats, what breaks prefix reuse, what would be trained. No cluster."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from gyre_cli import common
from gyre_cli.common import json_option
from gyre_cli.reading import (
    different,
    opened,
    out_file,
    readable,
    rules,
    rules_options,
    show_report,
    source_argument,
    speaker,
    spooled,
    tokenizer_option,
)


@click.group(
    epilog=common.examples(
        "trajtools dedup run.jsonl",
        "trajtools tree runs/latest --depth 1",
        "trajtools choose run.jsonl --jmax 3",
        "trajtools convert session.jsonl -o run.gtr",
        "zstdcat old.jsonl.zst | trajtools stats - --json",
    )
)
def main() -> None:
    """Recorded runs of agents: say what is in them, check them, slim them.

    SOURCE is a run file (.jsonl or .gtr), a run's directory, another tool's record (Claude Code, Codex, chat logs,
    SWE-agent, mini-swe-agent, OpenHands, NeMo-Gym, NeMo-RL, verifiers, ATIF), or - for standard input.
    """


@main.command()
@source_argument
@click.option("-o", "--out", type=out_file, help="Write the slim form here (.jsonl, or .gtr for the binary form).")
@click.option("--strict", is_flag=True, help="A torn last line is damage too.")
@tokenizer_option
@json_option
@readable
def dedup(source: Path, out: Path | None, strict: bool, tokenizer: Path | None, as_json: bool) -> None:
    """What repeats, by class of break, and what is stored once. Exit 1 if something in the file is damaged."""
    from trajtools.report import dedup as run

    different(source, out)
    with opened(source) as (stream, on_bytes):
        report = run(stream, out, on_bytes=on_bytes, say=speaker(tokenizer))
    show_report(report, as_json)
    raise SystemExit(0 if report.damage.ok and not (strict and report.damage.torn) else common.NO)


@main.command()
@source_argument
@click.option(
    "--by", type=click.Choice(["label", "agent"]), default="label", show_default=True, help="Rows of the table."
)
@json_option
@readable
def stats(source: Path, by: Any, as_json: bool) -> None:
    """Calls, tokens, reuse of prefixes, durations and outcomes, by label or agent.

    With --json, one object with all of it, then one per task with its durations: what cellctl simulate and plan read.
    """
    from trajtools.stats import stats as run

    with opened(source) as (stream, on_bytes):
        report = run(stream, by=by, on_bytes=on_bytes)
    common.print_json(report.objects()) if as_json else show_report(report, as_json)


@main.command()
@source_argument
@click.option(
    "--shuffles", type=click.IntRange(0), default=0, help="Build every forest again in this many random orders."
)
@json_option
@readable
def check(source: Path, shuffles: int, as_json: bool) -> None:
    """Every invariant of a run file; exit 1 with the call and the offset if one does not hold."""
    from trajtools.check import check as run

    with opened(source) as (stream, on_bytes):
        report = run(stream, shuffles=shuffles, on_bytes=on_bytes)
    show_report(report, as_json)
    raise SystemExit(0 if report.ok else common.NO)


@main.command()
@source_argument
@click.option("--execution", "-e", help="Only this one.")
@click.option("--depth", type=click.IntRange(0), help="Fold branches below this level.")
@click.option("--svg", type=out_file, help="Draw one execution into this file.")
@click.option("--html", type=out_file, help="Draw all of them into one page.")
@json_option
@readable
def tree(
    source: Path, execution: str | None, depth: int | None, svg: Path | None, html: Path | None, as_json: bool
) -> None:
    """The branching history: who continued what, how far, where it broke, what is trained."""
    from trajtools.load import Stream
    from trajtools.tree import history, terminal

    different(source, svg, html)
    kept, names = [], []
    with opened(source) as (stream, on_bytes):
        for one in Stream(stream, on_bytes=on_bytes).executions():
            names.append(one.id)
            if execution not in (None, one.id):
                continue
            told = history(one)
            if as_json:
                common.print_json(line.as_json(one.id) for line in told.lines())
            elif not svg and not html:
                click.echo("\n".join(terminal(told, depth)))
            if svg or html:
                kept.append(told)
    if execution is not None and execution not in names:
        common.fail(f"no execution {execution}; there are: {', '.join(names[:8])}", common.USAGE)
    _draw(kept, svg, html)


def _draw(kept: list[Any], svg: Path | None, html: Path | None) -> None:
    from trajtools import picture

    if svg is not None:
        if len(kept) != 1:
            common.fail(
                f"an SVG shows one execution and there are {len(kept)}: name one with -e, or use --html", common.USAGE
            )
        svg.write_text(picture.svg(kept[0]))
    if html is not None:
        html.write_text(picture.html(kept))


@main.command()
@source_argument
@click.argument("execution", required=False)
@click.argument("call", required=False)
@tokenizer_option
@json_option
@readable
def show(source: Path, execution: str | None, call: str | None, tokenizer: Path | None, as_json: bool) -> None:
    """The calls of an execution, or one call: what is new in its prompt, and its answer.

    EXECUTION may be left out if there is one; write `-` for it to name a CALL then.
    """
    from trajtools import inspect
    from trajtools.load import load

    with opened(source) as (stream, on_bytes):
        recording = load(stream, on_bytes=on_bytes)
    name = None if execution == "-" else execution
    if call is not None:
        show_report(inspect.show_call(recording, name, call, speaker(tokenizer)), as_json)
    elif name is None and len(recording.executions) != 1:
        _list(recording, as_json)
    else:
        show_report(inspect.show(recording, name), as_json)


def _list(recording: Any, as_json: bool) -> None:
    """One row per execution."""
    rows = []
    for name in sorted(recording.executions):
        one = recording.executions[name]
        reward = one.reward
        outcome = {"outcome": reward.status if reward else "unscored", "score": reward.value if reward else None}
        rows.append({"execution": name, "level": one.level, "calls": len(one.forest), "group": one.group, **outcome})
    common.print_json(rows) if as_json else common.print_tables(rows)


@main.command()
@source_argument
@rules_options
@json_option
@readable
def choose(source: Path, as_json: bool, **options: Any) -> None:
    """Which trajectories the rules keep of each execution, in what order, and why."""
    from trajtools.inspect import choices

    with opened(source) as (stream, on_bytes):
        for one in choices(stream, rules(**options), on_bytes=on_bytes):
            show_report(one, as_json)


@main.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.option(
    "-o", "--out", required=True, type=out_file, help="Run file to write: the input's bytes, then the rewards."
)
@click.option(
    "--rewards", type=click.Path(path_type=Path), help="JSON lines {exec, value, status?, error?}; - is stdin."
)
@click.option("--set", "pairs", multiple=True, metavar="EXEC=VALUE", help="One reward; VALUE null is unscored.")
@json_option
@readable
def score(source: Path, out: Path, rewards: Path | None, pairs: tuple[str, ...], as_json: bool) -> None:
    """Attach outcomes later; calls are not touched. Exit 1 if a reward names an execution that is not there."""
    from trajtools.rewards import attach, read_rewards

    different(source, out)
    if str(source) == "-" == str(rewards):
        common.fail("standard input is either the run file or the rewards: name a file for one", common.USAGE)
    given = list(read_rewards(_reward_lines(rewards))) if rewards is not None else []
    given += [_pair(pair) for pair in pairs]
    if not given:
        common.fail("no rewards given: use --rewards FILE or --set EXEC=VALUE", common.USAGE)
    with spooled(source) as file:
        report = attach(file, given, out)
    show_report(report, as_json)
    raise SystemExit(0 if report.ok else common.NO)


def _reward_lines(rewards: Path) -> Iterable[bytes]:
    return sys.stdin.buffer if str(rewards) == "-" else rewards.read_bytes().splitlines()


def _pair(pair: str) -> Any:
    from trajtools.rewards import BadReward, reward

    name, equals, value = pair.rpartition("=")
    if not equals or not name:
        raise BadReward(f"--set {pair}: write EXEC=VALUE")
    try:
        number = None if value == "null" else float(value)
    except ValueError:
        raise BadReward(f"--set {pair}: {value!r} is not a number") from None
    return reward({"exec": name, "value": number}, f"--set {pair}")


@main.command()
@source_argument
@click.option("--form", type=click.Choice(["flat", "tree"]), default="flat", show_default=True)
@click.option("-o", "--out", type=out_file, help="Write here; default: standard output.")
@rules_options
@json_option
@readable
def sample(source: Path, form: str, out: Path | None, as_json: bool, **options: Any) -> None:
    """Training samples, one JSON object per line: a row per trajectory, or one tree-packed sequence per execution."""
    import orjson

    from trajtools.load import load
    from trajtools.samples import Samples

    different(source, out)
    with opened(source) as (stream, on_bytes):
        recording = load(stream, on_bytes=on_bytes)
    samples = Samples(recording, form, rules(**options))
    part = out.with_name(out.name + ".part") if out is not None else None
    with part.open("wb") if part is not None else _stdout() as file:
        for row in samples.rows():
            file.write(orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE))
    if part is not None and out is not None:
        part.replace(out)
        show_report(samples.summary(), as_json)
    else:
        click.echo("\n".join(samples.summary().lines()), err=True)


@contextmanager
def _stdout() -> Iterator[Any]:
    yield sys.stdout.buffer
    sys.stdout.buffer.flush()


@main.command()
@click.argument("left", type=click.Path(path_type=Path))
@click.argument("right", type=click.Path(path_type=Path))
@json_option
@readable
def diff(left: Path, right: Path, as_json: bool) -> None:
    """Two recordings, or two forms of one, call by call; exit 1 if they differ."""
    from trajtools.inspect import diff as run

    if str(left) == "-" == str(right):
        common.fail("standard input is one of the two: name a file for the other", common.USAGE)
    with opened(left) as (one, _), opened(right) as (other, _):
        report = run(one, other)
    show_report(report, as_json)
    raise SystemExit(0 if report.ok else common.NO)


@main.command()
@source_argument
@click.option("-o", "--out", required=True, type=click.Path(path_type=Path), help="What to write; a folder for ATIF.")
@click.option(
    "--to", "form", type=click.Choice(["run", "gtr", "atif", "arrow", "parquet"]), help="Default: by the name."
)
@click.option("--atif-version", type=click.Choice(["1.7", "1.8"]), default="1.7", show_default=True)
@click.option("--prompt-ids", is_flag=True, help="ATIF: write every prompt's ids too (quadratic).")
@tokenizer_option
@json_option
@readable
def convert(
    source: Path,
    out: Path,
    form: str | None,
    atif_version: str,
    prompt_ids: bool,
    tokenizer: Path | None,
    as_json: bool,
) -> None:
    """Any readable record as a run file, a binary one (.gtr), ATIF, Arrow or Parquet."""
    from trajtools.conversion import convert as run
    from trajtools.conversion import form_of

    different(source, out)
    form = form_of(out, form)
    more = {"version": atif_version, "prompt_ids": prompt_ids, "say": speaker(tokenizer)} if form == "atif" else {}
    with opened(source) as (stream, on_bytes):
        report = run(stream, out, form, on_bytes=on_bytes, **more)
    show_report(report, as_json)


@main.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.option("-o", "--out", required=True, type=out_file, help="The file without its damage.")
@click.option("--side", type=out_file, help="What was taken out, with offset and reason (default: OUT.taken.jsonl).")
@json_option
@readable
def repair(source: Path, out: Path, side: Path | None, as_json: bool) -> None:
    """Take torn and glued lines out of a run file; exit 1 if there was something to take out."""
    from trajtools.mend import repair as run

    different(source, out, side)
    with spooled(source) as file:
        report = run(file, out, side)
    show_report(report, as_json)
    raise SystemExit(0 if report.ok else common.NO)


if __name__ == "__main__":
    main()
