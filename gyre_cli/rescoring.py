"""`gyre rescore` for people: progress on stderr, the comparison on stdout."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

import click

from gyre_base.rundir import RunDir
from gyre_cli import common

EVERY = 25  # states between two lines of progress where stderr is no terminal


def run(run_dir: str, source: str, workers: int | None, limit: int | None, as_json: bool) -> int:
    """The exit code."""
    from gyre_exec import rescore
    from gyre_exec.agreement import compare
    from gyre_exec.fields import TaskError

    root = RunDir.open(run_dir)
    try:
        plan = rescore.plan(root, rescore.ruler_from(source, root))
    except TaskError as error:
        common.fail(str(error), common.USAGE)
    for name, why in plan.refused:
        click.echo(f"{name}: {why}", err=True)
    if not plan.jobs:
        kept = f"{plan.lost} executions were not kept; set tasks.snapshots or tasks.keep_workspaces before the run"
        why = (
            kept if plan.lost else f"{len(plan.refused)} were refused" if plan.refused else "there is no execution yet"
        )
        common.fail(f"no state to measure in {root.root}: {why}", common.NO)
    jobs = plan.jobs[:limit]
    rescorer = rescore.Rescorer(root, workers or os.cpu_count() or 1)
    with Progress(len(jobs)) as progress:
        rows = asyncio.run(rescorer.measure(jobs, progress.done))
    compared = compare(rescore.pairs(root, jobs, rows, sampled_tokens(root)))
    failed = [row for row in rows if row["outcome"] == "evaluator_failed"]
    if as_json:
        common.print_json([{**row, **said(rows, plan.lost)} if row["kind"] == "agreement" else row for row in compared])
    else:
        show(compared, said(rows, plan.lost))
    for row in failed[:5]:
        click.echo(f"{row['execution']}: {row['error'].strip()}", err=True)
    if len(failed) > 5:
        click.echo(f"… and {len(failed) - 5} more that could not be measured", err=True)
    click.echo(f"written to {', '.join(sorted({str(rescorer.file_of(job)) for job in jobs}))}", err=True)
    return common.NO if failed else 0


def said(rows: list[dict[str, Any]], lost: int) -> dict[str, Any]:
    return {
        "evaluators": rulers(rows),
        "failed": sum(row["outcome"] == "evaluator_failed" for row in rows),
        "not_kept": lost,
    }


def rulers(rows: list[dict[str, Any]]) -> list[str]:
    """Name and version; a ruler whose hidden tests differ by task has a version for each."""
    versions: dict[str, set[str]] = {}
    for row in rows:
        versions.setdefault(row["evaluator"], set()).add(row["version"])
    return [
        f"{name} {next(iter(found))}"
        if len(found) == 1
        else f"{name} ({len(found)} versions: its tests differ by task)"
        for name, found in sorted(versions.items())
    ]


def sampled_tokens(run: RunDir) -> dict[str, int]:
    """Sampled tokens by execution, where the run has its call log."""
    from trajtools.load import Stream

    if not any(run.path("calls").glob("*.gtr")):
        return {}
    return {one.id: sum(mark.sampled for mark in one.forest.marks()) for one in Stream(run.path("calls")).executions()}


class Progress:
    """A bar on a terminal, a line now and then elsewhere."""

    def __init__(self, total: int) -> None:
        self._total, self._done = total, 0
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress as Bar

            self._bar = Bar(console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task("measuring", total=self._total)
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def done(self, row: dict[str, Any]) -> None:
        self._done += 1
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done)
        elif self._done % EVERY == 0 and self._done < self._total:
            click.echo(f"{self._done} of {self._total} states", err=True)


# ---- for people ---------------------------------------------------------------------------------------------------

WORDS = {
    "states": "states measured",
    "compared": "with a valid score by both rulers",
    "failed": "that the new ruler could not measure",
    "not_kept": "executions whose state was not kept",
    "old_mean": "mean score, old",
    "new_mean": "mean score, new",
    "difference_mean": "mean of new - old",
    "difference_abs_mean": "mean of |new - old|",
    "equal_share": "share with equal scores",
    "pearson": "correlation (Pearson)",
    "spearman": "rank correlation (Spearman)",
    "same_order_in_group": "share of a group's pairs in the same order",
    "ordered_pairs_in_groups": "pairs of a group that the old ruler orders",
    "length_bias_duration": "bias by duration: rank correlation of new - old",
    "length_bias_tokens": "bias by sampled tokens",
    "drift_per_step": "drift of new - old per optimizer step",
    "drift_error": "its standard error",
}


def show(rows: list[dict[str, Any]], said: dict[str, Any]) -> None:
    """Facts, then a table per kind."""
    facts = {**next(row for row in rows if row["kind"] == "agreement"), **said}
    width = max(map(len, WORDS.values()))
    click.echo(f"{'new ruler':<{width}}  {', '.join(said['evaluators'])}")
    for key, words in WORDS.items():
        value = facts.get(key)
        click.echo(f"{words:<{width}}  {'not measurable' if value is None else common.plain(value)}")
    click.echo()
    for kind, title in (("outcomes", "outcomes"), ("length", "by length"), ("drift", "over the steps")):
        table = [{k: v for k, v in row.items() if k != "kind"} for row in rows if row["kind"] == kind]
        if table:
            click.echo(title)
            common.print_table(table)
