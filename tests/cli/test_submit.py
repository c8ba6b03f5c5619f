"""What `gyre submit` refuses, one wrong thing at a time, and the plan it prints. sbatch here is a file that notes how
it was called; the real one is met in tests/slurm.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from pathlib import Path
from typing import Any

import pytest

from gyre_base import config as configuration
from gyre_base.keys import make_keys
from gyre_base.rundir import RunDir
from gyre_cli import memory, planning, submit
from gyre_cli.findings import Level
from gyre_cli.planning import Measured
from tests.cli.conftest import EXAMPLE, Said, complains, say

NO, USAGE, REFUSED = 1, 2, 4
START = 'exec python3 -u -m gyre_cli.gyre up --config gyre.toml --run "runs/my run"'
HEADER = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --gres=gpu:4
#SBATCH --time=01:00:00 --signal=B:USR1@180 --requeue --no-kill --open-mode=append
"""
CLIENTS = {
    "scontrol": """case "$*" in
*hostnames*) echo a ;;
*partition*) echo "PartitionName=main Default=YES MaxTime=1 State=UP" ;;
esac""",
    "squeue": 'cat "$0.says" 2>/dev/null; true',
    "srun": "exit 1",
    "sbatch": """echo "$@" >>"$0.calls"
case "$1" in
--test-only) cat "$0.no" >&2 2>/dev/null && exit 1; echo "sbatch: Job 1 to start" >&2 ;;
*) echo "4711;mini" ;;
esac""",
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A configuration, a job script, and clients of Slurm that answer as the real ones would."""
    folder = tmp_path / "pro ject"
    folder.mkdir()
    write_model(folder / "model", parameters=1000)
    tasks = f'tasks.train = "{EXAMPLE}/tasks/train.jsonl"\ntasks.harness = ["true"]\n'
    (folder / "gyre.toml").write_text(f'cluster.cells = 2\nmodel.path = "model"\n{tasks}')
    (folder / "gyre.sbatch").write_text(f"{HEADER}{START}\n")
    clients = tmp_path / "bin"
    clients.mkdir()
    for name, body in CLIENTS.items():
        (clients / name).write_text(f"#!/bin/sh\n{body}\n")
        (clients / name).chmod(0o755)
    return folder


def write_model(folder: Path, *, parameters: int, dtype: str = "BF16", layers: int = 4) -> None:
    folder.mkdir(exist_ok=True)
    shape = {"num_hidden_layers": layers, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64}
    (folder / "config.json").write_text(json.dumps({**shape, "head_dim": 16}))
    tensors = {"a": {"dtype": dtype, "shape": [parameters // 2, 2], "data_offsets": [0, 0]}, "__metadata__": {}}
    header = json.dumps(tensors).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)


def run_submit(project: Path, *words: str) -> Said:
    state = {"XDG_STATE_HOME": str(project.parent / "state"), "PATH": f"{project.parent / 'bin'}:/usr/bin:/bin"}
    return say("gyre", "submit", *words, cwd=project, **state)


def dry(project: Path, *words: str) -> tuple[int, dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """(exit code, findings worse than a note by check, rows of the plan)."""
    said = run_submit(project, "--dry-run", "--json", *words)
    rows = [json.loads(line) for line in said.stdout.splitlines()]
    wrong = {row["check"]: row for row in rows if row.get("level") in ("warn", "fail")}
    return said.returncode, wrong, [row for row in rows if "level" not in row]


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_a_sound_job_is_handed_to_sbatch_and_its_id_is_all_of_stdout(project):
    said = run_submit(project, "gyre.sbatch", "--", "--partition=spot")
    assert (said.returncode, said.stdout) == (0, "4711\n"), said.stderr
    calls = (project.parent / "bin" / "sbatch.calls").read_text().splitlines()
    assert calls[-1] == f"--parsable --partition=spot {project}/gyre.sbatch"
    listed = say("gyre", "status", "--json", cwd=project, XDG_STATE_HOME=str(project.parent / "state"))
    assert listed.stdout == ""  # nothing began yet and the queue here knows no job
    (note,) = (project.parent / "state" / "gyre" / "runs").iterdir()
    assert json.loads(note.read_text())["job"] == "4711"


@pytest.mark.parametrize("words", [("gyre.sbatch", "--", "--time=5"), ("--", "--time=5")])
def test_options_for_sbatch_with_and_without_a_script(project, words):
    _, _, rows = dry(project, *words)
    assert [row["limit_s"] for row in rows if "time" in row] == [300.0]


def test_a_dry_run_prints_who_does_what_and_submits_nothing(project):
    code, wrong, rows = dry(project)
    assert (code, set(wrong)) == (0, {"run directory"})  # it is below /tmp, which looks local
    calls = (project.parent / "bin" / "sbatch.calls").read_text().splitlines()
    assert all(call.startswith("--test-only") for call in calls)
    job = rows[0]
    assert (job["nodes"], job["gpus_per_node"], job["run"]) == (2, 4, f"{project}/runs/my run")
    nodes = [row for row in rows if "node" in row]
    assert nodes == [
        {
            "node": "1",
            "cells": ["c0"],
            "core": True,
            "services": ["supervisor", "cellctl", "trajd", "proxyd-0", "ex0"],
            "gpus": 4,
        },
        {"node": "2", "cells": ["c1"], "core": False, "services": [], "gpus": 4},
    ]
    assert [row["role"] for row in rows if "role" in row] == ["rollout", "train, satellite", "train, core"]
    (life,) = [row for row in rows if "time" in row]
    assert (life["limit_s"], life["work_s"]) == (3600.0, 3360.0)
    assert not (project / "runs").exists()
    plain = run_submit(project, "--dry-run")
    assert "supervisor, cellctl" in plain.stdout and "\x1b" not in plain.stdout and "would be submitted" in plain.stderr


WRONG = [
    ("gyre.sbatch", " --requeue", "", "job script", "--requeue"),
    ("gyre.sbatch", " --no-kill", "", "job script", "--no-kill"),
    ("gyre.sbatch", "B:USR1", "USR1", "job script", "--signal=B:USR1@180"),
    ("gyre.sbatch", "exec python3", "python3", "process start", "exec"),
    ("gyre.sbatch", "exec python3", "exec /none/python3", "process start", "/none/python3"),
    ("gyre.sbatch", "--nodes=2", "--nodes=3", "cells", "cluster.cells = 3"),
    ("gyre.sbatch", "01:00:00", "00:02:00", "time limit", "--time"),
    ("gyre.toml", "cells = 2", "cells = 9", "cells", "at most 8"),
    ("gyre.toml", "cells = 2", 'cells = 2\ncluster.bind = "10.0.0.1"', "addresses", "auto"),
    ("gyre.toml", '"true"', "", "configuration", "tasks.harness"),
    ("gyre.toml", "tasks/train.jsonl", "none.jsonl", "configuration", "tasks.train"),
    ("gyre.toml", "cells = 2", 'cells = 2\ncluster.executor_partition = "cpu"', "executors", "main"),
    (
        "gyre.toml",
        "cells = 2",
        'cells = 2\ncluster.python = ["apptainer", "exec", "/none.sif", "python"]',
        "container",
        "sif",
    ),
]


@pytest.mark.parametrize(("name", "old", "new", "check", "word"), WRONG, ids=[f"{w[3]}: {w[4]}" for w in WRONG])
def test_one_wrong_thing_is_refused_by_name_with_a_way_out(project, name, old, new, check, word):
    edit(project / name, old, new)
    code, wrong, _ = dry(project)
    assert code == NO
    assert wrong[check]["level"] == "fail"
    assert word in f"{wrong[check]['found']} {wrong[check]['do']}"
    said = run_submit(project)
    assert (said.returncode, said.stdout) == (REFUSED, "")
    assert f"fail: {check}: " in said.stderr
    assert not [c for c in (project.parent / "bin" / "sbatch.calls").read_text().splitlines() if "--parsable" in c]


def test_what_sbatch_would_refuse_is_said_in_its_words(project):
    (project.parent / "bin" / "sbatch.no").write_text("sbatch: error: invalid partition specified: nope\n")
    code, wrong, _ = dry(project)
    assert (code, wrong["sbatch"]["found"]) == (NO, "sbatch: invalid partition specified: nope")


def test_a_second_job_of_a_run_is_refused(project):
    line = f"12|RUNNING|main|2|n[1-2]|10:00|x|None|gyre|gyre:{project}/runs/my run\n"
    (project.parent / "bin" / "squeue.says").write_text(line)
    code, wrong, _ = dry(project)
    assert code == NO and "scancel 12" in wrong["queue"]["do"]


def test_a_changed_configuration_of_a_run_that_goes_on_is_told(project):
    run = RunDir.create(project / "runs" / "my run")
    run.write_atomic("run.json", configuration.to_json(configuration.load(project / "gyre.toml")))
    assert "configuration" not in dry(project)[1]
    edit(project / "gyre.toml", "cells = 2", "cells = 2\nscheduler.steps = 7")
    code, wrong, rows = dry(project)
    assert (code, wrong["configuration"]["level"], rows[0]["steps"]) == (0, "warn", 60)
    assert "scheduler.steps = 7" in wrong["configuration"]["found"]


def test_a_run_that_somebody_works_on_is_refused(project):
    run = RunDir.create(project / "runs" / "my run")
    make_keys(run)
    with run.lock("supervisor"):
        code, wrong, _ = dry(project)
    assert code == NO and "somebody works" in wrong["run directory"]["found"]


def test_without_slurm_all_else_is_still_checked(project):
    for client in (project.parent / "bin").iterdir():
        client.unlink()
    said = say("gyre", "submit", "--dry-run", "--json", cwd=project, PATH=str(project.parent / "bin"))
    rows = {row["check"]: row for row in map(json.loads, said.stdout.splitlines()) if "level" in row}
    assert said.returncode == NO
    assert rows["Slurm"]["level"] == "fail" and rows["configuration"]["level"] == "ok"


def test_a_script_that_starts_something_else_and_one_that_is_not_there(project):
    complains(run_submit(project, "none.sbatch"), USAGE, "none.sbatch", "gyre init")
    (project / "gyre.sbatch").write_text("#!/bin/bash\nhostname\n")
    complains(run_submit(project), USAGE, "starts no `gyre up`", "gyre init")


# ---- times and memory -----------------------------------------------------------------------------------------------


def plan_of(project: Path) -> planning.Plan:
    return planning.make_plan(project / "gyre.sbatch", ())


def test_the_warning_must_leave_time_for_the_longest_save(project):
    plan = plan_of(project)
    assert submit.of_signal(plan, Measured()).level is Level.NOTE
    assert submit.of_signal(plan, Measured(save_s=30.0)).level is Level.OK
    short = submit.of_signal(plan, Measured(save_s=200.0))
    assert short.level is Level.FAIL and "B:USR1@480" in short.do


def test_saves_and_steps_are_measured_from_what_an_earlier_life_left(project):
    run = project / "runs" / "my run"
    (run / "journal").mkdir(parents=True)
    (run / "metrics").mkdir()
    events = [{"type": "tick"}, {"type": "saved", "seconds": 3.5}, {"type": "saved", "seconds": 9.25}]
    lines = [json.dumps({"at": 0.0, "event": event, "commands": []}, separators=(",", ":")) for event in events]
    (run / "journal" / "cellctl.jsonl").write_text("\n".join(lines) + '\n{"torn')
    rows = [{"at": at, "step": step} for at, step in ((0, 0), (5, 0), (100, 1), (205, 2), (9000, 3), (9100, 4))]
    (run / "metrics" / "timeline.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert planning.measure(run) == Measured(save_s=9.25, step_s=102.5)
    assert planning.measure(project / "none") == Measured()


def test_memory_of_each_role_follows_from_the_models_own_files(tmp_path):
    write_model(tmp_path / "m", parameters=2**20, layers=4)
    model = memory.read_model(tmp_path / "m")
    assert model == memory.Model(
        parameters=2**20,
        expert_parameters=0,
        stored_bytes=2**21,
        kv_bytes=2 * 4 * 2 * 16 * 2,
        layers=4,
        hidden=64,
    )
    rows = memory.roles(model, context_length=1024, running=8, micro_step_tokens=0)
    sizes = {row["role"]: round(row["least_gib"] * 2**30 / 2**20, 1) for row in rows}
    assert sizes == {"rollout": 2.5, "train, satellite": 12.0, "train, core": 20.0}
    assert memory.read_model(tmp_path) is None
    half = dataclasses.replace(model, expert_parameters=2**19)
    rows = memory.roles(half, context_length=1024, running=8, micro_step_tokens=0, copies=4, expert_copies=2)
    sizes = {row["role"]: round(row["least_gib"] * 2**30 / 2**20, 1) for row in rows}
    assert sizes == {"rollout": 2.5, "train, satellite": 36.0, "train, core": 44.0}  # moments once
    rows = memory.roles(model, context_length=1024, running=8, micro_step_tokens=0, dtype="bf16")
    sizes = {row["role"]: round(row["least_gib"] * 2**30 / 2**20, 1) for row in rows}
    assert sizes == {"rollout": 2.5, "train, satellite": 10.0, "train, core": 22.0}  # 2 + 4 + 4, + 8 + 4 of a weight


def test_a_model_that_does_not_fit_is_refused_and_one_that_does_is_not(project):
    edit(project / "gyre.toml", "cells = 2", 'cells = 2\nengine = { kind = "sglang", tensor_parallel = 2 }')
    write_model(project / "model", parameters=4 * 10**9)
    (finding,) = submit.of_memory(plan_of(project), 24.0)
    assert finding.level is Level.FAIL and "train, core" in finding.found and "24 GiB" in finding.found
    assert "rollout" not in finding.found  # its 7.5 GiB are on two GPUs
    (finding,) = submit.of_memory(plan_of(project), 80.0)
    assert finding.level is Level.OK and "train, core" in finding.found
    (finding,) = submit.of_memory(plan_of(project), None)
    assert finding.level is Level.NOTE and "--gpu-memory" in finding.do


def test_gpus_that_a_cell_lacks_or_nobody_uses(project):
    assert submit.of_gpus(plan_of(project)) == []  # the tiny engine needs none
    edit(project / "gyre.toml", "cells = 2", 'cells = 2\nengine = { kind = "sglang", tensor_parallel = 4 }')
    assert submit.of_gpus(plan_of(project)) == []
    edit(project / "gyre.toml", "tensor_parallel = 4", "tensor_parallel = 2")
    (finding,) = submit.of_gpus(plan_of(project))
    assert finding.level is Level.WARN and "cluster.cells = 4" in finding.do
    edit(project / "gyre.toml", "tensor_parallel = 2", "tensor_parallel = 8")
    (finding,) = submit.of_gpus(plan_of(project))
    assert finding.level is Level.FAIL and "a cell has 4 GPUs" in finding.found


def test_gpus_that_the_trainer_ranks_of_a_cell_lack(project):
    four = 'cells = 2\nengine = { kind = "sglang", tensor_parallel = 2 }\ntrainer = { tensor_parallel = 4 }'
    edit(project / "gyre.toml", "cells = 2", four)
    assert submit.of_gpus(plan_of(project)) == []
    edit(
        project / "gyre.toml",
        "trainer = { tensor_parallel = 4 }",
        "trainer = { tensor_parallel = 4, pipeline_parallel = 2 }",
    )
    (finding,) = submit.of_gpus(plan_of(project))
    assert finding.level is Level.FAIL and "8 trainer ranks" in finding.found and "pipeline_parallel" in finding.do


def test_a_run_directory_too_deep_for_sockets_is_told_before_the_first_harness_starts(project):
    edit(project / "gyre.sbatch", "runs/my run", "r" * 60)
    assert submit.of_paths(plan_of(project)).level is Level.NOTE  # plain workspaces open none
