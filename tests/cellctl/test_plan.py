"""The planner: the gain it sees, the refusal where there is none, memory as a floor for cells."""

from __future__ import annotations

import json

from click.testing import CliRunner

from cellctl import plan
from cellctl.simulate.profile import load
from gyre_cli.cellctl import main


def test_cells_are_even_and_the_one_that_holds_the_tail_is_smallest():
    assert plan.even(32, 6) == (6, 6, 5, 5, 5, 5)
    assert sum(plan.even(7, 3)) == 7


def test_durations_that_are_all_alike_are_not_worth_it(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text('{"task": "a", "hours": [1.0, 1.01]}\n{"task": "b", "hours": [1.0, 0.99]}\n')
    words = ["plan", "--gpus", "32", "--durations", str(path), "--limit-h", "1.1", "--seeds", "1", "--json"]
    done = CliRunner().invoke(main, words)
    row = json.loads(done.stdout)
    assert (done.exit_code, row["worth_it"]) == (1, False)
    assert "not worth it" in row["why"]


def test_a_long_tail_is_worth_it_over_the_better_baseline():
    profile, units = plan.small_site(load("qwengyre-122b"), 64, "", None, None)
    row = plan.plan(profile, plan.Site(nodes=units, seeds=2))
    assert row["worth_it"]
    assert min(row["gain_over_colocate"], row["gain_over_async"]) > 1.03


def test_memory_that_fills_the_site_leaves_nothing_to_lend():
    words = ["plan", "--gpus", "8", "--memory-per-cell", "600", "--json"]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 1
    assert "whole pool switches" in json.loads(done.stdout)["why"]


def test_simulate_prints_one_object_per_arm_and_a_picture(tmp_path):
    picture = tmp_path / "cells.svg"
    words = [
        "simulate",
        "--profile",
        "qwengyre-122b",
        "--arm",
        "E0",
        "--arm",
        "C0",
        "--seeds",
        "1",
        "--steps",
        "4",
        "--json",
    ]
    done = CliRunner().invoke(main, [*words, "--svg", str(picture)])
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    wanted = {"arm", "hours", "published_hours", "idle_share", "mean_staleness", "switches", "gpu_s"}
    assert [row["arm"] for row in rows] == ["E0", "C0"]
    assert all(wanted <= set(row) for row in rows)
    assert picture.read_text().startswith("<svg")
