"""What a run amounted to: `summary.json`, a table for people, and a picture. Made from the daemons' own rows and the
run directory.

Nothing is estimated: a figure that the run did not produce is null.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from gyre_base.config import Config
from gyre_base.rundir import RunDir
from gyre_base.runframes import Frames
from gyre_base.runpacked import head_of

SCORE_WINDOW = 8  # groups of which the training curve shows the mean


def gather(
    run: RunDir, config: Config, status: dict[str, Any], results: list[dict[str, Any]], trajd: dict[str, Any]
) -> dict[str, Any]:
    """The summary as one flat object; every value is measured in this run."""
    tables = {row["kind"]: row["rows"] for row in results}
    steps = latest_by_step(tables["steps"])
    evals = {row["key"]: row["groups"] for row in tables["evals"]}
    return {
        "policy": status["policy"],
        "policy_note": status["policy_note"],
        "seed": config.scheduler.seed,
        "cells": config.cluster.cells,
        "steps": int(status["step"]),  # a step whose report was lost with a fault is done all the same
        "group_size": config.scheduler.group_size,
        "groups_per_batch": config.scheduler.groups_per_batch,
        "jmax": config.trajectories.jmax,
        **held_out(evals),
        "train_score_first": mean_score(tables["groups"][:SCORE_WINDOW]),
        "train_score_last": mean_score(tables["groups"][-SCORE_WINDOW:]),
        "executions": status["executions"],
        "executions_retried": status["retries"],
        "executions_interrupted": int(status["harness_errors"]),
        "calls": int(status["calls"]),
        "role_switches": int(status["switches"]),
        "calls_moved": int(status["moved"]),
        "calls_moved_mid_generation": int(status["moved_mid_generation"]),
        **resent_tokens(run),
        "switch_s": switch_seconds(tables["switches"]),
        "mean_staleness": mean_of(steps, "staleness_mean"),
        "clip_fraction": mean_of(steps, "clip_fraction"),
        "clip_fraction_d0": mean_of(steps, "clip_fraction_d0"),
        "logprob_gap": mean_of(steps, "logprob_gap"),
        "replayed_share": mean_of(steps, "replayed_share"),
        "context_mismatches": total_of(steps, "context_mismatches"),
        "weights_sum_min": min((s["weights_sum"] for s in steps if "weights_sum" in s), default=None),
        "weights_sum_max": max((s["weights_sum"] for s in steps if "weights_sum" in s), default=None),
        **{
            key: trajd.get(key)
            for key in ("tokens_recorded", "tokens_stored", "tokens_trained", "tokens_trained_twice")
        },
        "trained_share_by_class": trajd.get("trained_by_class"),
        "seconds": phase_seconds(run.path("metrics", "timeline.jsonl")),
    }


def resent_tokens(run: RunDir) -> dict[str, int]:
    """Of calls that went on at another engine: tokens sent again, and those that were read there and not computed."""
    resent = reread = 0
    for path in run.path("calls").glob("*.gtr"):
        with open(path, "rb") as file:
            for frame in Frames(file):
                with contextlib.suppress(ValueError, KeyError, TypeError):  # damage, or none of these calls
                    sent, read = head_of(frame)["capture"]["resent"]
                    resent, reread = resent + sent, reread + read
    return {"tokens_resent": resent, "tokens_resent_read": reread}


def latest_by_step(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per optimizer step: a step redone after a fault counts as it was redone."""
    return list({row["step"]: row for row in rows}.values())


def held_out(evals: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Pass rate (mean share of hidden tests passed) and share of tasks wholly solved, before and after, sampled and
    greedy.
    """
    out: dict[str, Any] = {}
    for when in ("before", "after"):
        for kind, name in (("eval-sampled", "heldout_pass"), ("eval-greedy", "heldout_greedy")):
            groups = evals.get(f"eval-{when}:{kind}", [])
            scores = [x for group in groups for x in group["scores"]]
            out[f"{name}_{when}"] = fmean(scores) if scores else None
            out[f"{name}_solved_{when}"] = fmean(float(x >= 1.0) for x in scores) if scores else None
            out[f"{name}_tasks_{when}"] = len(scores)
    return out


def mean_score(groups: list[dict[str, Any]]) -> float | None:
    scores = [x for group in groups for x in group["scores"]]
    return fmean(scores) if scores else None


def mean_of(rows: Iterable[dict[str, Any]], key: str) -> float | None:
    values = [row[key] for row in rows if key in row]
    return fmean(values) if values else None


def total_of(rows: Iterable[dict[str, Any]], key: str) -> int | None:
    values = [row[key] for row in rows if key in row]
    return int(sum(values)) if values else None


def switch_seconds(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Seconds from the decision to the new role, by direction, with the median of each phase."""
    out: dict[str, dict[str, float]] = {}
    for to in ("train", "rollout"):
        some = [row for row in rows if row["to"] == to]
        if some:
            phases = {p for row in some for p in row["phases_s"]}
            out[to] = {
                "n": len(some),
                "median": median(row["seconds"] for row in some),
                "max": max(row["seconds"] for row in some),
                **{f"median_{p}": median(row["phases_s"].get(p, 0.0) for row in some) for p in sorted(phases)},
            }
    return out


def read_timeline(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def phase_seconds(path: Path) -> dict[str, float]:
    """Wall seconds by phase of the run."""
    out: dict[str, float] = {}
    rows = read_timeline(path)
    for before, after in pairwise(rows):
        out[before["phase"]] = out.get(before["phase"], 0.0) + after["at"] - before["at"]
    return {phase: round(seconds, 3) for phase, seconds in out.items()}


# ---- for people ---------------------------------------------------------------------------------------------------


def lines(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """(what, value) for the closing table."""
    s = summary

    def change(before: float | None, after: float | None) -> str:
        if before is None or after is None:
            return "not measured"
        return f"{before:.3f} -> {after:.3f}  ({after - before:+.3f})"

    switches = "; ".join(f"to {to}: {v['n']} of median {v['median']:.2f} s" for to, v in s["switch_s"].items())
    return [
        ("policy", f"{s['policy']} {s['policy_note']}".strip()),
        (
            f"held-out pass rate, sampled (n={s['heldout_pass_tasks_after']})",
            change(s["heldout_pass_before"], s["heldout_pass_after"]),
        ),
        (
            f"held-out pass rate, greedy (n={s['heldout_greedy_tasks_after']})",
            change(s["heldout_greedy_before"], s["heldout_greedy_after"]),
        ),
        ("wholly solved, sampled", change(s["heldout_pass_solved_before"], s["heldout_pass_solved_after"])),
        ("training score, first and last groups", change(s["train_score_first"], s["train_score_last"])),
        ("optimizer steps", str(s["steps"])),
        (
            "executions by outcome",
            "; ".join(f"{k}: " + ", ".join(f"{n} {o}" for o, n in v.items()) for k, v in s["executions"].items()),
        ),
        ("role switches", f"{s['role_switches']} ({switches})"),
        ("calls", f"{s['calls']}, moved {s['calls_moved']}, of these mid-generation {s['calls_moved_mid_generation']}"),
        (
            "tokens sent again with moved calls, read and not computed",
            f"{s['tokens_resent']}, {s['tokens_resent_read']}",
        ),
        ("executions interrupted by a switch", str(s["executions_interrupted"])),
        ("mean staleness E[d]", number(s["mean_staleness"])),
        ("clip fraction", f"{number(s['clip_fraction'])} (at d = 0: {number(s['clip_fraction_d0'])})"),
        ("tokens recorded, stored once", f"{s['tokens_recorded']}, {s['tokens_stored']}"),
        ("tokens trained, trained twice", f"{s['tokens_trained']}, {s['tokens_trained_twice']}"),
        ("contexts that differ from the engine's record", str(s["context_mismatches"])),
        ("weights per batch", f"{s['weights_sum_min']} .. {s['weights_sum_max']}"),
        ("seconds by phase", ", ".join(f"{k} {v:.0f}" for k, v in s["seconds"].items())),
        ("CPU seconds", ", ".join(f"{k} {v:.0f}" for k, v in s["cpu_s"].items())),
    ]


def number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.4f}"


# ---- picture ------------------------------------------------------------------------------------------------------

ROLE_COLOUR = {
    "rollout": "#4c9f70",
    "train": "#7a4fb5",
    "to-train": "#e3b23c",
    "to-rollout": "#e3b23c",
    "starting": "#cccccc",
    "down": "#c0392b",
}


def draw(run: RunDir, summary: dict[str, Any], results: list[dict[str, Any]], target: Path) -> None:
    """Cells over time with their roles, water level, score of the groups: one PNG and one SVG beside it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = read_timeline(run.path("metrics", "timeline.jsonl"))
    start = rows[0]["at"]
    figure, axes = pyplot.subplots(
        3, 1, figsize=(12, 7.5), sharex=True, height_ratios=[2, 1.5, 2], constrained_layout=True
    )
    draw_roles(axes[0], rows, start)
    axes[1].step([r["at"] - start for r in rows], [r["water_level"] for r in rows], where="post", color="#2c6fbb", lw=1)
    axes[1].set_ylabel("water level\n(executions)")
    axes[1].set_ylim(bottom=0)
    draw_scores(axes[2], rows, summary, results, start)
    axes[2].set_xlabel("seconds since the scheduler started")
    figure.suptitle(
        f"{run.root.name}: policy {summary['policy']}, {summary['steps']} steps, "
        f"{summary['role_switches']} role switches"
    )
    for suffix in (".png", ".svg"):
        figure.savefig(target.with_suffix(suffix), dpi=110)
    pyplot.close(figure)


def draw_roles(axis: Any, rows: list[dict[str, Any]], start: float) -> None:
    cells = list(rows[0]["roles"])
    for index, cell in enumerate(cells):
        for role, begin, end in spans(rows, cell):
            axis.barh(index, end - begin, left=begin - start, height=0.8, color=ROLE_COLOUR[role], linewidth=0)
    axis.set_yticks(range(len(cells)), [f"{c} (core)" if i == 0 else c for i, c in enumerate(cells)])
    axis.invert_yaxis()
    handles = [axis.barh(0, 0, color=c, label=r) for r, c in ROLE_COLOUR.items() if r not in ("to-rollout", "down")]
    labels = ["turning" if h.get_label() == "to-train" else h.get_label() for h in handles]
    axis.legend(handles, labels, loc="upper right", ncols=4, fontsize=8)


def spans(rows: list[dict[str, Any]], cell: str) -> list[tuple[str, float, float]]:
    """(role, from, to) of one cell, in seconds since the epoch."""
    out: list[tuple[str, float, float]] = []
    for row in rows:
        role = row["roles"][cell]
        if out and out[-1][0] == role:
            out[-1] = (role, out[-1][1], row["at"])
        else:
            if out:
                out[-1] = (out[-1][0], out[-1][1], row["at"])
            out.append((role, row["at"], row["at"]))
    return out


def draw_scores(
    axis: Any, rows: list[dict[str, Any]], summary: dict[str, Any], results: list[dict[str, Any]], start: float
) -> None:
    """Mean score of each step's groups at the time of the step; held-out before and after as flat lines."""
    tables = {row["kind"]: row["rows"] for row in results}
    per_step = summary["groups_per_batch"]
    groups = tables["groups"]
    steps = latest_by_step(tables["steps"])
    points = [(s["at"] - start, mean_score(groups[i * per_step : (i + 1) * per_step])) for i, s in enumerate(steps)]
    known = [(x, y) for x, y in points if y is not None]
    axis.plot([x for x, _ in known], [y for _, y in known], color="#888888", lw=1, label="training groups")
    for when, colour in (("before", "#c0392b"), ("after", "#1e8449")):
        value = summary[f"heldout_pass_{when}"]
        if value is not None:
            n = summary[f"heldout_pass_tasks_{when}"]
            axis.axhline(value, color=colour, ls="--", lw=1.5, label=f"held-out {when}: {value:.3f} (n={n}, sampled)")
    axis.set_ylabel("pass rate")
    axis.set_ylim(0, 1.02)
    axis.legend(loc="upper left", fontsize=8)
