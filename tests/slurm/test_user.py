"""What a user of the login node meets: scripts that the real sbatch takes, the doctor among real nodes, status where no
port is open.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gyre_base import config as configuration
from gyre_cli import listing, script
from tests.cli.conftest import make_run
from tests.slurm.minislurm import Cluster, MiniSlurmError, until
from tests.slurm.running import START_S, emulated
from tests.system.running import ROOT, Run

NASTY = "it's a #1 100% test & more"
OPTIONS = {
    "uneven": ("--constraint", "big*1&small*1", "--nodes", "2"),
    "executors": ("--partition", "cpu", "--executors", "3"),
    "pyxis": ("--image", "/images/my gyre.sqsh"),
}
ELSEWHERE = "10.99.77.11"  # of a network that the nodes have among themselves and the login node does not


class Login:
    """Commands of ours on the login node."""

    def __init__(self, slurm: Cluster, home: Path) -> None:
        self.slurm = slurm
        self.env = {**os.environ, **slurm.env, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(home / "state")}

    def __call__(
        self, program: str, *words: str, cwd: Path, timeout_s: float = 120.0
    ) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", f"gyre_cli.{program}", *words]
        return subprocess.run(line, env=self.env, cwd=cwd, capture_output=True, text=True, timeout=timeout_s)

    def rows(self, program: str, *words: str, cwd: Path) -> tuple[int, list[dict[str, Any]]]:
        said = self(program, *words, "--json", cwd=cwd)
        return said.returncode, [json.loads(line) for line in said.stdout.splitlines()]


@pytest.fixture
def login(quiet_slurm: Cluster, tmp_path: Path) -> Login:
    return Login(quiet_slurm, tmp_path)


@pytest.fixture
def features(quiet_slurm: Cluster) -> Iterator[None]:
    """Nodes of two kinds."""
    for nodes, kind in (("node[1-2]", "big"), ("node[3-4]", "small")):
        quiet_slurm.run(
            "scontrol", "update", f"nodename={nodes}", f"availablefeatures={kind}", f"activefeatures={kind}"
        )
    yield
    quiet_slurm.run("scontrol", "update", "nodename=node[1-4]", "availablefeatures=", "activefeatures=")


@pytest.mark.slurm_slice
@pytest.mark.parametrize("template", script.templates())
def test_every_template_is_taken_by_the_real_sbatch_whatever_the_folder_is_called(
    login: Login, features: None, tmp_path: Path, template: str
) -> None:
    folder = tmp_path / NASTY
    folder.mkdir()
    made = login("gyre", "init", "--template", template, *OPTIONS.get(template, ()), cwd=folder)
    assert made.returncode == 0, made.stderr
    (job,) = folder.glob("*.sbatch")
    login.slurm.run("sbatch", "--test-only", str(job))
    if template != "executors":  # started as it is, it runs where it should; no run can begin without a model
        ident = login.slurm.run("sbatch", "--parsable", str(job), cwd=tmp_path)
        comment = login.slurm.run("squeue", "-h", "-j", ident, "-o", "%k")
        assert comment in ("", f"gyre:{folder}/runs/run")
        log = folder / f"gyre-{ident}.log"
        until(lambda: log.exists() and "error: model.path is not set" in log.read_text(), 60, f"nothing in {log}")


def test_a_job_that_this_cluster_can_never_run_is_refused_in_slurms_words(login: Login, tmp_path: Path) -> None:
    assert login("gyre", "init", "--nodes", "2", "--gpus", "64", cwd=tmp_path).returncode == 0
    code, rows = login.rows("gyre", "submit", "--dry-run", cwd=tmp_path)
    wrong = {row["check"]: row["found"] for row in rows if row.get("level") == "fail"}
    assert code == 1 and "Requested node configuration is not available" in wrong["sbatch"]
    assert not login.slurm.run("squeue", "-h")


# ---- the doctor -----------------------------------------------------------------------------------------------------


def by_check(rows: list[dict[str, Any]], *levels: str) -> dict[str, dict[str, Any]]:
    return {row["check"]: row for row in rows if row["level"] in levels}


@pytest.mark.slurm_slice
def test_the_doctor_finds_four_sound_nodes_and_leaves_nothing(login: Login, tmp_path: Path) -> None:
    code, rows = login.rows("gyre", "doctor", "--nodes", "4", "--gpus", "8", "--partition", "spot", cwd=tmp_path)
    assert (code, by_check(rows, "fail")) == (0, {})
    sound = by_check(rows, "ok")
    assert {"names", "reachability", "clocks", "atomic rename", "locks", "shared folder", "partition spot"} <= set(
        sound
    )
    assert "every one of 4 nodes" in sound["reachability"]["found"]
    assert by_check(rows, "warn")["GPUs"]["found"].startswith("Slurm gives GPUs on node1, node2, node3, node4")
    assert [path.name for path in tmp_path.iterdir()] == ["state"] or not list(tmp_path.iterdir())
    until(lambda: not login.slurm.run("squeue", "-h"), 30, "the doctor's job does not end")


def test_the_doctor_inside_an_allocation_looks_at_its_nodes_and_from_outside_at_those_of_a_job(
    login: Login, tmp_path: Path
) -> None:
    inside = tmp_path / "inside.json"
    doctor = f"{sys.executable} -m gyre_cli.gyre doctor --json"
    text = (
        f"#!/bin/bash\n#SBATCH -N3 --gres=gpu:8 --output={tmp_path}/log\n{doctor} >{inside}\necho $? >{tmp_path}/code\n"
    )
    (tmp_path / "job").write_text(f"{text}sleep 600\n")
    line = ["sbatch", "--parsable", str(tmp_path / "job")]
    job = subprocess.check_output(line, env=login.env, cwd=tmp_path, text=True).strip()
    until(lambda: (tmp_path / "code").exists(), 120, "no doctor in the job")
    rows = [json.loads(line) for line in inside.read_text().splitlines()]
    assert (tmp_path / "code").read_text().strip() == "0", by_check(rows, "fail")
    assert f"node node1 of job {job}" in rows[0]["found"]
    assert "every one of 3 nodes" in by_check(rows, "ok")["reachability"]["found"]
    code, rows = login.rows("gyre", "doctor", "--job", job, cwd=tmp_path)
    assert code == 0 and "every one of 3 nodes" in by_check(rows, "ok")["reachability"]["found"]
    code, rows = login.rows("gyre", "doctor", "--job", "99999", cwd=tmp_path)
    assert code == 1 and "does not run" in by_check(rows, "fail")["Slurm"]["found"]


def test_a_folder_of_each_nodes_own_is_no_shared_folder(login: Login, tmp_path: Path) -> None:
    """/dev/shm is another one on every node."""
    code, rows = login.rows("gyre", "doctor", "--nodes", "2", "--folder", "/dev/shm", cwd=tmp_path)
    assert code == 1
    found = by_check(rows, "fail")["shared folder"]["found"]
    assert "not the same folder on" in found and "node1" in found and "node2" in found


def test_a_node_that_calls_itself_by_a_loopback_address_is_found(login: Login, tmp_path: Path) -> None:
    """As Debian's installer writes it into /etc/hosts."""
    hosts = tmp_path / "hosts"
    own = login.slurm.on_node("node2", "cat", "/etc/hosts")
    hosts.write_text("127.0.1.1 node2\n" + "\n".join(line for line in own.splitlines() if not line.endswith(" node2")))
    login.slurm.on_node("node2", "mount", "--bind", str(hosts), "/etc/hosts")
    try:
        code, rows = login.rows("gyre", "doctor", "--nodes", "4", cwd=tmp_path)
    finally:
        login.slurm.on_node("node2", "umount", "/etc/hosts")
    wrong = by_check(rows, "fail")
    assert code == 1 and wrong["names"]["found"] == "node2 is 127.0.1.1 on itself"
    assert "admin" in wrong["names"]["do"]


def test_nodes_that_do_not_reach_each_other_are_named(login: Login, tmp_path: Path) -> None:
    """A route that is missing on one node, while the controller still reaches it."""
    blocked = login.slurm.address("node3")
    login.slurm.on_node("node1", "ip", "route", "add", "prohibit", f"{blocked}/32")
    try:
        code, rows = login.rows("gyre", "doctor", "--nodes", "4", cwd=tmp_path)
    finally:
        login.slurm.on_node("node1", "ip", "route", "del", "prohibit", f"{blocked}/32")
    wrong = by_check(rows, "fail")
    assert code == 1, rows
    assert "node1 to node3" in wrong["reachability"]["found"]


# ---- status where no port is open -----------------------------------------------------------------------------------


@pytest.fixture
def hidden(login: Login, tmp_path: Path) -> Iterator[Path]:
    """A run whose scheduler listens where the login node has no way to; served by a job."""
    run = make_run(tmp_path / "pro ject" / "runs" / "a", bind=ELSEWHERE)
    login.slurm.on_node("node1", "ip", "addr", "add", f"{ELSEWHERE}/32", "dev", "lo")
    text = f'#!/bin/bash\n#SBATCH -N2 -w node[1-2] --output={tmp_path}/log --comment="gyre:{run}"\n'
    (tmp_path / "job").write_text(f"{text}exec {sys.executable} -m gyre_cli.cellctl run --run '{run}'\n")
    line = ["sbatch", "--parsable", str(tmp_path / "job")]
    subprocess.check_output(line, env=login.env, text=True)
    try:
        until(lambda: (run / "endpoints" / "cellctl.json").exists(), 60, "no scheduler")
        yield run
    finally:
        login.slurm.clear()
        try:
            login.slurm.on_node("node1", "ip", "addr", "del", f"{ELSEWHERE}/32", "dev", "lo")
        except MiniSlurmError:
            pass


@pytest.mark.slurm_slice
def test_status_goes_by_a_step_inside_the_job_where_no_port_is_open(login: Login, hidden: Path, tmp_path: Path) -> None:
    project = hidden.parent.parent
    said = login("cellctl", "status", "--run", "runs/a", "--json", cwd=project)
    rows = [json.loads(line) for line in said.stdout.splitlines()]
    assert said.returncode == 0, said.stderr
    assert [row["cell"] for row in rows if "cell" in row] == ["c0", "c1"]
    assert "asking inside job" in said.stderr
    one = login("gyre", "status", "--run", "runs/a", cwd=project)
    assert one.returncode == 0 and one.stdout.startswith("run ")
    refused = login("cellctl", "flip", "c1", "--to", "train", "--run=runs/a", cwd=project)
    assert (refused.returncode, refused.stdout) == (4, "") and "c1 is starting" in refused.stderr
    unknown = login("cellctl", "explain", "c9", "--run", "runs/a", cwd=project)
    assert unknown.returncode == 2 and "c0, c1" in unknown.stderr
    silent = login("trajd", "status", "--run", "runs/a", cwd=project)
    assert silent.returncode == 3 and "trajd does not answer" in silent.stderr
    code, listed = login.rows("gyre", "status", cwd=tmp_path)
    (row,) = [row for row in listed if row["run"] == str(hidden)]
    assert (code, row["state"], row["nodes"]) == (0, "running", "node[1-2]") and row["left_s"] > 0


def test_a_waiting_job_is_listed_with_slurms_reason(login: Login, tmp_path: Path) -> None:
    login.slurm.run("sbatch", "-N4", "--exclusive", "--output=/dev/null", "--wrap", "sleep 600")
    assert login("gyre", "init", "--nodes", "2", cwd=tmp_path).returncode == 0
    login.slurm.run("sbatch", str(tmp_path / "gyre.sbatch"))
    until(lambda: login.rows("gyre", "status", cwd=tmp_path)[1], 30, "not listed")
    _, (row,) = login.rows("gyre", "status", cwd=tmp_path)
    assert (row["state"], row["run"]) == ("pending", f"{tmp_path}/runs/run")
    until(lambda: login.rows("gyre", "status", cwd=tmp_path)[1][0]["why"] in ("Resources", "Priority"), 30, "no reason")


def test_a_controller_that_is_down_is_told_and_nothing_hangs(login: Login, tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "a")
    login.slurm.kill_controller()
    try:
        said = login("gyre", "status", cwd=tmp_path)
        assert said.returncode == 0 and "stopped" in said.stdout and "the queue is not known" in said.stderr
        code, rows = login.rows("gyre", "doctor", cwd=tmp_path)
        assert code == 1 and "scontrol" in by_check(rows, "fail")["Slurm"]["found"]
    finally:
        login.slurm.start_controller()


# ---- containers -----------------------------------------------------------------------------------------------------

STAND_IN = """#!/bin/sh
# what `apptainer exec --nv IMAGE python3 ...` does as far as gyre can tell: the rest of the line, elsewhere
[ "$1 $2" = "exec --nv" ] && [ -f "$3" ] || exit 9
shift 4
BOXED="$APPTAINER_BIND" exec {python} "$@"
"""


def test_every_daemon_and_the_doctor_run_in_the_container_and_the_supervisor_does_not(
    login: Login, tmp_path: Path, model: Path
) -> None:
    programs, image = tmp_path / "bin", tmp_path / "my gyre.sif"
    programs.mkdir()
    image.touch()
    (programs / "apptainer").write_text(STAND_IN.format(python=sys.executable))
    (programs / "apptainer").chmod(0o755)
    login.env["PATH"] = f"{programs}:{login.env['PATH']}"
    assert (
        login("gyre", "init", "--template", "apptainer", "--nodes", "2", "--image", str(image), cwd=tmp_path).returncode
        == 0
    )
    python = list(configuration.load(tmp_path / "gyre.toml").cluster.python)
    with Run(tmp_path, model, emulated(tmp_path, cluster__python=python, scheduler__steps=100)):  # writes gyre.toml
        assert login("gyre", "doctor", "--nodes", "2", cwd=tmp_path).returncode == 0
        said = login("gyre", "submit", cwd=tmp_path)
        assert said.returncode == 0, said.stderr
        log = tmp_path / f"gyre-{said.stdout.strip()}.log"
        run = tmp_path / "runs" / "run"
        until(lambda: listing.last_progress(run / "metrics" / "timeline.jsonl"), START_S, f"no word: {log}")
        until(
            lambda: daemons(login.slurm).keys() >= {"cellctl", "trajd", "proxyd", "celld", "gyre up", "gyre exec"},
            START_S,
            f"no daemons: {log}",
        )
        boxed = daemons(login.slurm)
        assert {name for name, inside in boxed.items() if inside} >= {"cellctl", "trajd", "proxyd", "celld"}
        assert boxed["gyre up"] == ""
        login.slurm.clear()


def daemons(slurm: Cluster) -> dict[str, str]:
    """What each of our processes on the first two nodes has in its environment of the container."""
    out = {}
    for node in ("node1", "node2"):
        for pid in slurm.pids(node):
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
                environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            boxed = next((e.decode()[6:] for e in environment if e.startswith(b"BOXED=")), "")
            for at, word in enumerate(words):
                if word.startswith("gyre_cli.") and words[0].endswith("python"):
                    name = word.removeprefix("gyre_cli.")
                    out[f"gyre {words[at + 1]}" if name == "gyre" else name] = boxed
                elif word.startswith("celld.") and words[0].endswith("python"):
                    out[word] = boxed
    return out
