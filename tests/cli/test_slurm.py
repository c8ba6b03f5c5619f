"""Slurm's words read, and the runs of a user listed, with lines as real Slurm releases print them."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre_base.rundir import RunDir
from gyre_cli import listing, registry, remote, slurm
from tests.cli.conftest import make_run, say


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("10:00", 600.0),
        ("1:02:03", 3723.0),
        ("1-02:03:04", 93784.0),
        ("1-02", 93600.0),
        ("90", 5400.0),
        ("0:00", 0.0),
        ("UNLIMITED", None),
        ("INVALID", None),
        ("", None),
        ("1-", None),
    ],
)
def test_times_as_slurm_writes_and_takes_them(text, value):
    assert slurm.seconds(text) == value


@given(st.integers(0, 10**7))
def test_a_time_left_is_read_back(total):
    days, rest = divmod(total, 86400)
    text = f"{days}-{rest // 3600:02d}:{rest // 60 % 60:02d}:{rest % 60:02d}"
    assert slurm.seconds(text) == total


LINE = "{id}|{state}|main|2|{nodes}|19:56|2026-11-30T09:37:26|None|gyre|{comment}"


def test_a_line_of_the_queue_with_a_comment_that_holds_anything():
    (job,) = slurm.parse_jobs(LINE.format(id="20", state="RUNNING", nodes="node[1-2]", comment="gyre:/a b|c/run"))
    assert job == slurm.Job(
        id="20",
        state="RUNNING",
        partition="main",
        count=2,
        nodes="node[1-2]",
        left_s=1196.0,
        end="2026-11-30T09:37:26",
        reason="",
        name="gyre",
        run="/a b|c/run",
    )
    (other,) = slurm.parse_jobs("7|PENDING|main|4||10:00|N/A|Resources|sim|(null)")
    assert (other.run, other.end, other.reason) == ("", "", "Resources")
    assert slurm.parse_jobs("slurm_load_jobs error: nothing") == []


def test_what_a_client_complains_is_one_line():
    text = "sbatch: error: invalid partition specified: nope\nallocation failure: Invalid partition name specified\n"
    assert slurm.said(text) == "invalid partition specified: nope; allocation failure: Invalid partition name specified"


def test_clients_get_nothing_of_a_surrounding_job(monkeypatch):
    for key in ("SLURM_JOB_ID", "SLURM_NTASKS", "SBATCH_PARTITION", "SQUEUE_STATES", "SLURM_CONF", "HOME"):
        monkeypatch.setenv(key, "x")
    kept = slurm.clean_environment()
    assert {"SLURM_CONF", "HOME"} <= set(kept)
    assert not {"SLURM_JOB_ID", "SLURM_NTASKS", "SBATCH_PARTITION", "SQUEUE_STATES"} & set(kept)


def test_a_missing_or_a_silent_client_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(slurm.SlurmError, match="squeue is not here"):
        slurm.my_jobs()
    client = tmp_path / "squeue"
    client.write_text("#!/bin/sh\nexec /bin/sleep 30\n")
    client.chmod(0o755)
    with pytest.raises(slurm.SlurmError, match=r"no answer within 0\.1 s"):
        slurm.call("squeue", timeout_s=0.1)
    client.write_text("#!/bin/sh\necho 'squeue: error: Unable to contact slurm controller' >&2\nexit 1\n")
    with pytest.raises(slurm.SlurmError, match="squeue: Unable to contact"):
        slurm.my_jobs()


def test_partitions_and_settings():
    record = slurm.parse_record("PartitionName=spot Default=NO GraceTime=20 MaxTime=UNLIMITED TRES=cpu=32,mem=62.50G")
    assert (record["GraceTime"], record["TRES"]) == ("20", "cpu=32,mem=62.50G")
    settings = slurm.parse_settings(
        "Configuration data as of x\nKillWait                = 30 sec\nAuthInfo  = a=b,c=d\n"
    )
    assert settings == {"KillWait": "30 sec", "AuthInfo": "a=b,c=d"}


# ---- the list of runs -----------------------------------------------------------------------------------------------


def queue_says(monkeypatch, *lines: str) -> None:
    monkeypatch.setattr(slurm, "here", lambda: True)
    monkeypatch.setattr(slurm, "my_jobs", lambda: slurm.parse_jobs("\n".join(lines)))


@pytest.fixture
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_runs_are_found_by_what_was_noted_by_their_folder_and_by_their_job(own_state, monkeypatch):
    far, near = make_run(own_state / "far" / "a"), make_run(own_state / "runs" / "b")
    (own_state / "runs" / "latest").symlink_to("b")
    registry.note(far, job="20")
    (near / "summary.json").write_text("{}")
    (far / "metrics" / "timeline.jsonl").write_text(
        json.dumps({"step": 2, "phase": "training", "at": time.time() - 61.0}) + '\n{"step": 3, "pha'
    )
    waiting = LINE.format(id="21", state="PENDING", nodes="", comment="gyre:/not/begun").replace("None", "Resources")
    queue_says(
        monkeypatch,
        LINE.format(id="20", state="RUNNING", nodes="node[1-2]", comment="(null)"),
        waiting,
        LINE.format(id="22", state="RUNNING", nodes="node3", comment="someone's own"),
    )
    rows, complaint = listing.rows()
    assert complaint == ""
    assert [(r["run"], r["state"], r["job"], r["step"]) for r in rows] == [
        (str(far), "running", "20", "2/60"),
        ("/not/begun", "pending", "21", "0/?"),
        (str(near), "done", "", "0/60"),
    ]
    assert rows[0]["left_s"] == 1196.0 and 60 <= rows[0]["changed_s"] <= 90
    assert rows[1]["why"] == "Resources"


def test_a_run_that_nobody_works_on_is_stopped_and_one_that_is_held_here_runs(own_state):
    root = make_run(own_state / "runs" / "a")
    assert [r["state"] for r in listing.rows()[0]] == ["stopped"]
    with RunDir(root).lock("supervisor"):
        assert [r["state"] for r in listing.rows()[0]] == ["running"]


def test_what_gyre_exec_leaves_is_no_run_that_stopped(own_state):
    root = make_run(own_state / "runs" / "exec")
    (root / "lives" / "supervisor.lock").unlink()
    assert listing.rows()[0] == []


def test_of_a_stopped_run_it_is_told_how_its_job_ended_while_slurm_remembers(own_state, monkeypatch):
    registry.note(make_run(own_state / "a"), job="20")
    queue_says(monkeypatch)
    said = {"20": "JobId=20 JobName=gyre JobState=TIMEOUT Reason=TimeLimit"}
    monkeypatch.setattr(slurm, "call", lambda *words: said[words[-1]])
    assert listing.rows()[0][0]["why"] == "job 20 ended TIMEOUT"
    said["20"] = "JobId=20 JobState=COMPLETED"
    assert listing.rows()[0][0]["why"] == "job 20 was stopped by order (gyre stop)"
    said["20"] = "JobId=20 JobState=COMPLETING"
    assert listing.rows()[0][0]["why"] == ""

    def forgotten(*words: str) -> str:
        raise slurm.SlurmError("scontrol: Invalid job id specified")

    monkeypatch.setattr(slurm, "call", forgotten)
    assert listing.rows()[0][0]["why"] == ""


def test_a_silent_queue_is_told_and_the_rest_is_listed(own_state, monkeypatch):
    make_run(own_state / "runs" / "a")

    def silent() -> list[slurm.Job]:
        raise slurm.SlurmError("squeue gives no answer within 10 s")

    monkeypatch.setattr(slurm, "here", lambda: True)
    monkeypatch.setattr(slurm, "my_jobs", silent)
    rows, complaint = listing.rows()
    assert len(rows) == 1 and "no answer" in complaint


def test_a_run_directory_that_is_gone_is_not_listed_and_a_broken_note_hides_no_other(own_state):
    registry.note(own_state / "gone")
    registry.note(make_run(own_state / "there"))
    (registry.folder() / "broken.json").write_text("{")
    assert [r["run"] for r in listing.rows()[0]] == [str(own_state / "there")]


def test_a_state_folder_that_can_not_be_written_stops_nothing(own_state, monkeypatch, capsys):
    (own_state / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(own_state / "file"))
    registry.note(own_state / "run")
    assert "cannot write" in capsys.readouterr().err
    assert registry.entries() == []


def test_gyre_status_without_a_run_lists_and_says_how_to_begin(tmp_path):
    none = say("gyre", "status", cwd=tmp_path, XDG_STATE_HOME=str(tmp_path / "state"))
    assert (none.returncode, none.stdout) == (0, "") and "gyre init" in none.stderr
    make_run(tmp_path / "runs" / "a")
    some = say("gyre", "status", "--json", cwd=tmp_path, XDG_STATE_HOME=str(tmp_path / "state"))
    (row,) = map(json.loads, some.stdout.splitlines())
    assert (row["run"], row["state"]) == (str(tmp_path / "runs" / "a"), "stopped")


@pytest.mark.parametrize(
    ("value_s", "text"), [(None, ""), (5, "0:05"), (3723, "1:02:03"), (93784, "1 d 02:03"), (0, "0:00")]
)
def test_durations_for_people(value_s, text):
    assert listing.duration(value_s) == text


# ---- the same command inside the job --------------------------------------------------------------------------------


def test_only_a_running_job_of_this_run_is_asked(own_state, monkeypatch):
    root = make_run(own_state / "a")
    queue_says(monkeypatch, LINE.format(id="9", state="PENDING", nodes="", comment=f"gyre:{root}"))
    assert remote.job_around(root) is None
    queue_says(monkeypatch, LINE.format(id="9", state="RUNNING", nodes="n1", comment="gyre:/other"))
    assert remote.job_around(root) is None
    queue_says(monkeypatch, LINE.format(id="9", state="RUNNING", nodes="n1", comment=f"gyre:{root}"))
    assert remote.job_around(root).id == "9"
    registry.note(root, job="8")
    queue_says(monkeypatch, LINE.format(id="8", state="RUNNING", nodes="n1", comment="(null)"))
    assert remote.job_around(root).id == "8"


def test_a_step_inside_does_not_ask_a_further_step(own_state, monkeypatch):
    root = make_run(own_state / "a")
    queue_says(monkeypatch, LINE.format(id="9", state="RUNNING", nodes="n1", comment=f"gyre:{root}"))
    monkeypatch.setenv(remote.INSIDE, "9")
    assert remote.again_inside(str(root)) is None


def test_a_node_that_was_lost_is_no_answer_although_srun_ends_well(capfd):
    lost = ["sh", "-c", "echo 'srun: error: Node failure on node3' >&2"]
    assert remote.ask(lost, {"PATH": "/bin:/usr/bin"}) == 3
    refused = [
        "sh",
        "-c",
        "echo 'error: c1 is starting' >&2; echo 'srun: error: n1: task 0: Exited with exit code 4' >&2; exit 4",
    ]
    assert remote.ask(refused, {"PATH": "/bin:/usr/bin"}) == 4
    assert capfd.readouterr().err.splitlines()[1:] == ["error: c1 is starting"]
