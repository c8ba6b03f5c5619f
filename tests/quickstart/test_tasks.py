"""The shipped tasks: reproducible, solvable, and held-out functions that training never computes."""

from __future__ import annotations

import json
import random
import re
from itertools import product
from pathlib import Path
from typing import Any

import make_tasks
import pytest
import teacher

from tests.quickstart.conftest import QUICKSTART

PHRASES = {phrase: index for index, operation in enumerate(make_tasks.OPERATIONS) for phrase in operation.phrases}


def shipped(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (QUICKSTART / "tasks" / f"{name}.jsonl").read_text().splitlines()]


def chains_of(specification: str) -> list[make_tasks.Chain]:
    """The chains a specification names."""
    named = [PHRASES[line[2:]] for line in specification.splitlines() if line.startswith("- ")]
    return list(zip(named[::2], named[1::2], strict=True))


def behaviours(tasks: list[dict[str, Any]]) -> set[tuple[str, ...]]:
    chains = [chain for task in tasks for text in task["workspace"].values() for chain in chains_of(text)]
    return {make_tasks.behaviour(chain) for chain in chains}


def test_no_held_out_function_is_computed_by_any_training_function() -> None:
    train, heldout = behaviours(shipped("train")), behaviours(shipped("heldout"))
    assert len(heldout) >= 12 and not train & heldout


def test_no_transcript_of_the_warm_start_names_a_held_out_function() -> None:
    heldout = behaviours(shipped("heldout"))
    for lines in teacher.transcripts(7, "train", 300):
        for line in lines:
            for message in line.messages:
                if message["role"] == "tool" and "Start from s:" in message["content"]:
                    shown = {make_tasks.behaviour(chain) for chain in chains_of(message["content"])}
                    assert not shown & heldout


def test_there_are_enough_held_out_tasks_and_identities_are_unique() -> None:
    tasks = shipped("train") + shipped("heldout")
    assert len(shipped("heldout")) >= 128
    assert len({task["id"] for task in tasks}) == len(tasks)


def test_the_shipped_files_are_what_the_script_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["make_tasks.py", "--out", str(tmp_path)])
    make_tasks.main()
    for name in ("train.jsonl", "heldout.jsonl"):
        assert (tmp_path / name).read_bytes() == (QUICKSTART / "tasks" / name).read_bytes()


def solved(task: dict[str, Any]) -> dict[str, str]:
    """Right modules for a task, from the words of its specifications."""
    return {
        path.replace(".md", ".py"): make_tasks.source([make_tasks.body(chain) for chain in chains_of(text)])
        for path, text in task["workspace"].items()
    }


def share_passed(task: dict[str, Any], modules: dict[str, str]) -> float:
    """The tests' assertions run against these modules, in process."""
    spaces: dict[str, dict[str, Any]] = {}
    for path, text in modules.items():
        spaces[path[:-3]] = {}
        exec(text, spaces[path[:-3]])
    cases = re.findall(r"from (m\d) import ([fg])\n    assert (.*)\n", "\n".join(task["evaluator"]["tests"].values()))
    return sum(bool(eval(check, spaces[module])) for module, _, check in cases) / len(cases)  # noqa: S307


@pytest.mark.parametrize("name", ["train", "heldout"])
def test_the_named_operations_solve_every_task(name: str) -> None:
    assert all(share_passed(task, solved(task)) == 1.0 for task in shipped(name))


def test_a_function_of_another_behaviour_never_passes_all_tests() -> None:
    everything = list(product(range(len(make_tasks.OPERATIONS)), repeat=2))
    for chain in random.Random(0).sample(everything, 12):
        inputs = make_tasks.test_inputs(chain, random.Random(1))
        for other in everything:
            same = all(make_tasks.apply(other, text) == make_tasks.apply(chain, text) for text in inputs)
            assert same == (make_tasks.behaviour(other) == make_tasks.behaviour(chain))


def test_hidden_tests_and_answers_are_not_in_the_workspace() -> None:
    for task in shipped("train") + shipped("heldout"):
        assert all(path.endswith(".md") for path in task["workspace"])
        assert not any("assert" in text or "return s" in text for text in task["workspace"].values())


def test_every_phrase_names_one_operation() -> None:
    assert len(PHRASES) == 2 * len(make_tasks.OPERATIONS)
