"""The planner: the gain it sees, the refusal where there is none, memory as a floor for cells."""

from __future__ import annotations

import dataclasses
import json

from click.testing import CliRunner

from cellctl import plan
from cellctl.simulate import ablate
from cellctl.simulate.profile import even, load
from gyre_cli.cellctl import main


def test_cells_are_even_and_the_one_that_holds_the_tail_is_smallest():
    assert even(32, 6) == (6, 6, 5, 5, 5, 5)
    assert sum(even(7, 3)) == 7


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


def test_the_plan_says_what_to_write_into_the_configuration():
    profile, units = plan.small_site(load("qwengyre-122b"), 64, "", None, None)
    row = plan.plan(profile, plan.Site(nodes=units, seeds=1))
    assert sum(row["nodes_per_cell"]) == units == 8
    assert len(row["cell_slots"]) == row["cells"] > 1
    assert row["standalone_cells"] < row["cells"]
    assert (row["steps_per_burst"] - 1) / 2 + row["look_ahead_groups"] / profile.groups_per_batch <= 1.5


def test_every_elastic_candidate_has_the_staleness_that_was_accepted():
    for staleness in (0.5, 1.5, 2.0):
        site = plan.Site(nodes=12, staleness=staleness)
        for arm in [a for first in plan.first_round(site) for a in plan.second_round(site, first)]:
            assert arm.look_ahead + (arm.steps_per_burst - 1) / 2 == staleness
            assert sum(arm.nodes) == 12


def test_what_stats_prints_is_a_file_of_durations(tmp_path):
    path = tmp_path / "stats.jsonl"
    path.write_text(
        '{"executions": 4, "execution_s": {"p50": 1.0}}\n'
        '{"task": "a", "executions": 2, "duration_s": [3600.0, 5400.0]}\n'
        '{"task": "b", "executions": 2, "duration_s": [9000.0, 16000.0]}\n'
    )
    words = ["plan", "--gpus", "16", "--durations", str(path), "--limit-h", "5", "--seeds", "1", "--json"]
    curve = tmp_path / "curve.svg"
    done = CliRunner().invoke(main, [*words, "--curve", str(curve)])
    row = json.loads(done.stdout)
    assert done.exit_code == (0 if row["worth_it"] else 1)
    assert row["gain_over_colocate"] >= 1.0
    assert "16 GPUs" in curve.read_text()


def test_the_ablation_has_every_option_for_every_policy_that_it_can_help():
    base = load("qwengyre-122b")
    profile = dataclasses.replace(
        base, steps=4, groups_per_batch=4, group_size=4, arms=(base.arm("E0"), base.arm("C0"))
    )
    rows = list(ablate.rows(profile, 1))
    assert {r["policy"] for r in rows} == {"elastic", "colocate"}
    assert {r["option"] for r in rows if r["policy"] == "elastic"} == {o.name for o in ablate.options(profile)}
    as_it_is = [r for r in rows if r["option"] == "as it is"]
    assert [r["gain"] for r in as_it_is] == [1.0, 1.0]
    assert all(r["over_colocate"] > 0 for r in rows if r["policy"] == "elastic")
