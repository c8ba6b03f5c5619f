"""What the doctor concludes from facts, and a whole visit to a machine without Slurm."""

from __future__ import annotations

import copy
import json
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre_base.config import ClusterConfig, Config, EngineConfig, TaskConfig
from gyre_cli import checks, doctor, findings, probe
from gyre_cli.findings import Finding, Level
from tests.cli.conftest import say

NODE = {
    "node": "n1",
    "host": "n1",
    "port": 40000,
    "at": 0.0,
    "address": "10.0.0.1",
    "python": "3.11.7",
    "packages": {"gyre-rl": "0.1", "torch": "2.13.0", "mooncake-transfer-engine": "0.3"},
    "programs": ["scontrol", "bwrap"],
    "limits": {"nofile": 131072, "nproc": -1, "memlock": -1},
    "gpus": [{"name": "H100", "memory_mib": 81920, "driver": "550"}] * 8,
    "visible_gpus": "0,1",
    "rdma": [{"device": "mlx5_0", "port": "1", "state": "4: ACTIVE", "rate": "400 Gb/sec", "link_layer": "InfiniBand"}],
    "shm_bytes": 2**36,
    "tmp_bytes": 2**36,
}
TINY = Config()
SGLANG = Config(engine=EngineConfig(kind="sglang"))
RDMA = Config(cluster=ClusterConfig(transfer_protocol="rdma", transport="mooncake"))
BOXED = Config(cluster=ClusterConfig(python=("apptainer", "exec", "x.sif", "python3")))
WALLED = Config(tasks=TaskConfig(workspace="bwrap"))
LOOK = {
    "node": "n1",
    "at": 0.0,
    "unreachable": {},
    "mount": ["nfs4", "server:/home"],
    "visible_s": 0.1,
    "torn": 0,
    "lock": "held",
    "written": "",
}


def node(name: str, **changes: Any) -> dict[str, Any]:
    return {**copy.deepcopy(NODE), "node": name, **changes}


def look(name: str, **changes: Any) -> dict[str, Any]:
    return {**LOOK, "node": name, **changes}


def levels(found: list[Finding] | Finding) -> dict[str, Level]:
    return {f.check: f.level for f in (found if isinstance(found, list) else [found])}


def test_a_sound_cluster_needs_nothing():
    here = node("login", gpus=[], rdma=[])
    assert {f.level for f in checks.of_nodes([node("n1"), node("n2")], here, RDMA)} == {Level.OK}
    assert levels(checks.of_nodes([node("n1")], here, SGLANG))["sglang"] is Level.FAIL
    assert {f.level for f in checks.of_folder([look("n1"), look("n2")], "/home", [])} == {Level.OK}


@pytest.mark.parametrize(
    ("config", "without", "check"),
    [
        (RDMA, {"rdma": []}, "RDMA"),
        (RDMA, {"packages": {"gyre-rl": "0.1", "torch": "2.13.0"}}, "transfer engine"),
        (WALLED, {"programs": []}, "workspaces"),
    ],
)
def test_what_a_configuration_asks_for_must_be_there(config, without, check):
    assert not findings.failed(checks.of_nodes([node("n1")], None, config))
    wrong = [f for f in checks.of_nodes([node("n1", **without)], None, config) if f.level is Level.FAIL]
    assert [f.check for f in wrong] == [check] and wrong[0].do
    assert not findings.failed(checks.of_nodes([node("n1", **without)], None, TINY))


def test_a_container_without_slurms_clients_is_told():
    assert levels(checks.of_nodes([node("n1", programs=[])], None, BOXED))["container"] is Level.WARN


def test_a_job_that_does_not_come_back_is_told():
    assert levels(checks.of_job({"Requeue": "1"}))["this job"] is Level.OK
    assert findings.failed(checks.of_job({"Requeue": "0"}))


FAULTS = [
    ({"address": "127.0.1.1"}, "names", Level.FAIL, "n2 is 127.0.1.1 on itself"),
    ({"address": ""}, "names", Level.FAIL, "unknown"),
    ({"python": "3.9.2"}, "Python", Level.FAIL, "3.9.2"),
    ({"packages": {**NODE["packages"], "torch": "2.1"}}, "torch", Level.FAIL, "2.1 on n2"),
    ({"packages": {k: v for k, v in NODE["packages"].items() if k != "torch"}}, "torch", Level.FAIL, "missing on n2"),
    ({"gpus": NODE["gpus"][:4]}, "GPUs", Level.WARN, "4 x H100"),
    ({"rdma": []}, "RDMA", Level.WARN, "n2"),
    ({"limits": {**NODE["limits"], "memlock": 65536}}, "RDMA", Level.FAIL, "memlock"),
    ({"limits": {**NODE["limits"], "nofile": 1024}}, "limit nofile", Level.WARN, "n2 1024"),
    ({"shm_bytes": 64 * 2**20}, "/dev/shm", Level.WARN, "n2"),
]


@pytest.mark.parametrize(("change", "check", "level", "word"), FAULTS)
def test_each_fault_of_one_node_is_found_named_and_has_a_way_out(change, check, level, word):
    found = checks.of_nodes([node("n1"), node("n2", **change)], None, TINY)
    (finding,) = [f for f in found if f.level in (Level.WARN, Level.FAIL)]
    assert (finding.check, finding.level) == (check, level)
    assert word in finding.found and finding.do


@pytest.mark.parametrize(
    ("change", "check", "level", "word"),
    [
        ({"visible_s": None}, "shared folder", Level.FAIL, "not the same folder on n2"),
        ({"visible_s": 9.0}, "shared folder", Level.WARN, "after 9 s"),
        ({"written": "Read-only file system"}, "shared folder", Level.FAIL, "n2: Read-only"),
        ({"torn": 3}, "atomic rename", Level.FAIL, "n2"),
        ({"lock": "free"}, "locks", Level.WARN, "not felt on n2"),
        ({"lock": "Function not implemented"}, "locks", Level.WARN, "n2: Function"),
    ],
)
def test_each_fault_of_the_shared_folder(change, check, level, word):
    found = checks.of_folder([look("n1"), look("n2", **change)], "/home", [])
    (finding,) = [f for f in found if f.level is not Level.OK]
    assert (finding.check, finding.level) == (check, level)
    assert word in finding.found and finding.do


def test_what_a_node_wrote_and_is_not_seen_here_is_a_fault():
    assert findings.failed(checks.of_folder([look("n1")], "/home", ["n1"]))


def test_who_does_not_reach_whom():
    broken = look("n2", unreachable={"n1": "n1 (10.0.0.1): timed out"})
    finding = checks.of_reach([look("n1"), broken])
    assert finding.level is Level.FAIL and "n2 to n1 (10.0.0.1): timed out" in finding.found
    assert checks.of_login(["n1"], inside=False).level is Level.NOTE
    assert checks.of_login(["n1"], inside=True).level is Level.FAIL


@given(ahead=st.floats(-100, 100), there=st.floats(0, 5), back=st.floats(0, 5), gap=st.floats(0, 50))
def test_a_clock_is_never_blamed_for_what_the_way_took(ahead, there, back, gap):
    """Our time t is the node's t + ahead; words take `there` and `back`."""
    hello = (back, {"node": "n", "at": 0.0 + ahead})
    told = back + gap
    skew = doctor.skews([hello], told, [{"node": "n", "at": told + there + ahead}])
    mean, unsure = skew["n"]
    assert abs(mean - ahead) <= unsure + 1e-9
    level = checks.of_skew(skew).level
    if abs(ahead) <= checks.SKEW_WARN_S:
        assert level is Level.OK
    if abs(ahead) > checks.SKEW_FAIL_S + there + back + 1e-6:
        assert level is Level.FAIL


def test_settings_of_slurm_that_matter():
    site = {
        "SLURM_VERSION": "22.05.8",
        "AuthInfo": "(null)",
        "JobRequeue": "1",
        "KillWait": "30 sec",
        "PreemptType": "preempt/none",
        "SlurmdTimeout": "300 sec",
        "ProctrackType": "proctrack/cgroup",
        "SelectTypeParameters": "CR_CORE",
        "AccountingStorageType": "accounting_storage/slurmdbd",
        "SchedulerParameters": "bf_continue",
    }
    assert {f.level for f in checks.of_settings(site)} == {Level.OK}
    worse = {
        "SLURM_VERSION": ("19.05.5", "Slurm version", Level.FAIL),
        "KillWait": ("5 sec", "signals", Level.WARN),
        "ProctrackType": ("proctrack/pgid", "process tracking", Level.WARN),
        "SelectTypeParameters": ("CR_CORE_MEMORY", "memory", Level.NOTE),
        "PreemptType": ("preempt/qos", "preemption", Level.NOTE),
        "AccountingStorageType": ("accounting_storage/none", "accounting", Level.NOTE),
        "JobRequeue": ("0", "requeue", Level.NOTE),
    }
    for key, (value, check, level) in worse.items():
        assert levels(checks.of_settings({**site, key: value}))[check] is level
    assert levels(checks.of_settings({**site, "SLURM_VERSION": "24.11.5"}))["Slurm version"] is Level.NOTE
    assert len(checks.of_settings({})) == len(checks.of_settings(site))  # an unknown release hides nothing


def test_a_partition_that_cancels_or_is_closed():
    sound = {"MaxTime": "1-00:00:00", "TotalNodes": "4", "State": "UP", "PreemptMode": "REQUEUE"}
    assert levels(checks.of_partition("p", sound)) == {"partition p": Level.OK}
    assert findings.failed(checks.of_partition("p", {**sound, "State": "DOWN"}))
    assert checks.of_partition("p", {**sound, "PreemptMode": "CANCEL"})[-1].level is Level.WARN


# ---- the probe ------------------------------------------------------------------------------------------------------


def test_a_probe_sees_a_folder_that_is_replaced_and_locked_and_a_port_that_is_open(tmp_path):
    me = probe.facts()["node"]
    with probe.listen() as server, doctor.shared_folder(tmp_path, "word"):
        port = server.getsockname()[1]
        seen = probe.folder_facts(tmp_path, "word", me)
        assert (seen["torn"], seen["lock"], seen["written"]) == (0, "held", "")
        assert probe.connects("127.0.0.1", port) == ""
    assert probe.lock_seen(tmp_path / "lock") == "free"
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound, and does not listen
        assert probe.connects("127.0.0.1", nobody.getsockname()[1]) != ""
    assert (tmp_path / f"from-{me}").read_text() == "word"


def test_a_file_that_is_written_in_place_is_seen_torn(tmp_path):
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            with (tmp_path / "replaced").open("w") as file:
                file.write("1 ")
                file.flush()
                stop.wait(0.001)
                file.write("1")

    thread = threading.Thread(target=write)
    thread.start()
    try:
        assert probe.torn_reads(tmp_path / "replaced") > 0
    finally:
        stop.set()
        thread.join()


def test_the_mount_of_a_path_is_the_innermost(tmp_path):
    assert probe.mount_of(Path("/proc/self"))[0] == "proc"
    assert probe.mount_of(tmp_path)[0] not in ("?", "proc")


def test_an_engine_in_an_environment_of_its_own_is_asked_there(tmp_path):
    python = tmp_path / "python"
    python.write_text("""#!/bin/sh\necho '{"sglang": "0.5.1", "torch": "1.0", "numpy": "2"}'\n""")
    python.chmod(0o755)
    found = probe.facts(engine_python=str(python))["packages"]
    assert found["sglang"] == "0.5.1" and found["torch"] == probe.installed("torch")
    assert "sglang" not in probe.facts(engine_python=str(tmp_path / "none"))["packages"]


def test_rdma_ports_are_read_from_the_kernels_tree(tmp_path):
    port = tmp_path / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    for key, value in (("state", "4: ACTIVE"), ("rate", "400 Gb/sec (4X NDR)"), ("link_layer", "InfiniBand")):
        (port / key).write_text(value + "\n")
    (found,) = probe.rdma(tmp_path)
    assert (found["device"], found["port"], found["state"]) == ("mlx5_0", "1", "4: ACTIVE")


# ---- a whole visit --------------------------------------------------------------------------------------------------


def test_a_machine_without_slurm_is_looked_at_and_nothing_is_left(tmp_path):
    said = say("gyre", "doctor", "--json", "--folder", str(tmp_path), cwd=tmp_path, PATH="/bin:/usr/bin", SLURM_CONF="")
    rows = [json.loads(line) for line in said.stdout.splitlines()]
    by_check = {row["check"]: row for row in rows}
    assert said.returncode == 0, said.stdout
    assert "no Slurm here" in by_check["Slurm"]["found"]
    assert by_check["run folder"]["level"] == "ok" and by_check["torch"]["level"] == "ok"
    assert list(tmp_path.iterdir()) == []
    plain = say("gyre", "doctor", "--folder", str(tmp_path), cwd=tmp_path, PATH="/bin:/usr/bin", SLURM_CONF="")
    assert plain.stdout.startswith(" ") and "\x1b" not in plain.stdout and "ok" in plain.stderr


def test_a_folder_that_is_not_there_fails_and_says_what_to_do(tmp_path):
    said = say("gyre", "doctor", "--json", "--folder", str(tmp_path / "none"), cwd=tmp_path, PATH="/bin:/usr/bin")
    (wrong,) = [row for row in map(json.loads, said.stdout.splitlines()) if row["level"] == "fail"]
    assert said.returncode == 1
    assert wrong["check"] == "run folder" and "--folder" in wrong["do"]


def test_a_step_that_says_other_things_too_is_understood(tmp_path):
    words = "echo 'Welcome to node n1'; echo '{\"node\": \"n1\"}'; echo '[1]'; echo 'n1: warning' >&2; cat >/dev/null"
    with doctor.Step(["sh", "-c", words], tmp_path) as step:
        assert [found for _, found in step.stamped(1, 10.0)] == [{"node": "n1"}]
    assert step.complaint() == "n1: warning"
