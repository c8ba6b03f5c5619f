"""`gyre show` of a whole run: a line for each execution, and why those that failed did."""

from __future__ import annotations

import json

from gyre_cli.show import failures
from tests.cli.conftest import make_run, say


def test_the_commonest_failures_are_told_with_an_execution_to_look_into(tmp_path):
    root = make_run(tmp_path / "run")
    why = "the harness ended with exit code 1:\n  File agent.py\nModuleNotFoundError: No module named 'agent'"
    told = {
        **{f"g1-{i:02}.0": {"outcome": "infra_failed", "error": why} for i in range(3)},
        "g1-03.0": {"outcome": "evaluator_failed", "error": "it hung"},
        "g1-04.0": {"outcome": "scored", "score": 1.0},
        "g1-05.0": {"outcome": "scored", "score": 0.0, "error": "a word that is nobody's failure"},
    }
    for name, outcome in told.items():
        (root / "executions" / name).mkdir(parents=True)
        (root / "executions" / name / "outcome.json").write_text(json.dumps(outcome))
    said = say("gyre", "show", "--run", str(root))
    assert said.returncode == 0 and len(said.stdout.splitlines()) == 1 + len(told) + 1
    assert said.stderr.splitlines() == [
        "3 infra_failed, such as g1-00.0: ModuleNotFoundError: No module named 'agent'",
        "1 evaluator_failed, such as g1-03.0: it hung",
    ]
    rows = [json.loads(line) for line in say("gyre", "show", "--run", str(root), "--json").stdout.splitlines()]
    assert [row["error"] for row in rows][:1] == [why]


def test_failures_without_a_word_are_told_too():
    rows = [{"execution": "a", "outcome": "infra_failed", "error": None}]
    assert failures(rows) == ["1 infra_failed, such as a: no word"]
