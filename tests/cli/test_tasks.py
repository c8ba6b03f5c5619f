"""`gyre tasks` over a tree as users have it: several bad tasks at once, odd names, both forms."""

from __future__ import annotations

import json
from pathlib import Path

from tests.cli.conftest import EXAMPLE, complains, say

TOML = "[agent]\ntimeout_sec = 60\n"


def harbor(folder: Path, toml: str = TOML) -> Path:
    (folder / "tests").mkdir(parents=True)
    (folder / "instruction.md").write_text("Sort the file.\n\nThen stop.")
    (folder / "task.toml").write_text(toml)
    (folder / "tests" / "test.sh").write_text("echo 1 > /logs/verifier/reward.txt")
    return folder


def test_every_bad_task_is_named_with_its_place_and_the_code_is_1(tmp_path):
    harbor(tmp_path / "good one")
    harbor(tmp_path / "mål täsk")
    (harbor(tmp_path / "no judge") / "tests" / "test.sh").unlink()
    harbor(tmp_path / "bad", TOML + "[verifier\n")
    harbor(tmp_path / "odd", '[agent]\ntimeout_sec = "x"\n[environment]\ncpus = -1\n')
    (tmp_path / "list.jsonl").write_text('{"id": "a"}\n{\n')
    said = say("gyre", "tasks", "check", str(tmp_path), str(tmp_path / "list.jsonl"))
    places = [line.removeprefix(f"{tmp_path}/").partition(": ")[0] for line in said.stdout.splitlines()]
    wanted = ["bad/task.toml:3", "no judge", "odd/task.toml:2", "odd/task.toml:4"]
    assert (said.returncode, places) == (1, [*wanted, "list.jsonl:1 (task a)", "list.jsonl:2"])
    assert said.stderr == "2 tasks, 6 problems\n"
    said = say("gyre", "tasks", "check", "--json", str(tmp_path))
    assert said.returncode == 1 and json.loads(said.stdout)["tasks"] == 2


def test_the_list_has_a_line_per_task(tmp_path):
    harbor(tmp_path / "mål täsk", TOML + "[metadata.gyre]\npartial = false\n[environment]\ndocker_image = 'a/b:1'\n")
    rows = [json.loads(row) for row in say("gyre", "tasks", "list", "--json", str(tmp_path)).stdout.splitlines()]
    assert [(r["limit_s"], r["kind"], r["partial"], r["image"], r["hidden"]) for r in rows] == [
        (60, "harbor", "no", "a/b:1", 1)
    ]
    table = say("gyre", "tasks", "list", str(tmp_path)).stdout.splitlines()
    assert table[0].startswith("task ") and table[1].endswith("Sort the file. Then stop.")
    said = say("gyre", "tasks", "check", "--partial", str(tmp_path))
    assert said.returncode == 1 and "partial work can't be graded" in said.stdout


def test_the_shipped_tasks_pass_and_a_path_that_is_not_there_is_bad_usage(tmp_path):
    said = say("gyre", "tasks", "check", str(EXAMPLE / "tasks" / "heldout.jsonl"))
    assert (said.returncode, said.stdout, said.stderr) == (0, "160 tasks, 0 problems\n", "")
    complains(say("gyre", "tasks", "list", str(tmp_path / "none")), 2, "no such file or directory", "none")
