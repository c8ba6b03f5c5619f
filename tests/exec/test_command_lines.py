"""The command lines of walled workspaces, whole, as goldens (`--rewrite-golden` rewrites): pyxis can't run here."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gyre_exec import workspace_kinds as kinds
from gyre_exec.tasks import Needs, Task, from_dict
from gyre_exec.workspace import CommandLine, Settings, WorkspaceError

GOLDEN = Path(__file__).parents[1] / "golden" / "exec"
ENV = {"OPENAI_BASE_URL": "http://127.0.0.1:4000/x/g00001-03.0/v1", "HOME": "/workspace"}


def a_task(**needs: object) -> Task:
    task = from_dict(
        {"id": "t", "instruction": "do", "evaluator": {"command": ["true"]}}, folder="/tasks", where="here"
    )
    return replace(task, needs=Needs(**needs))  # type: ignore[arg-type]


def line_of(kind: type[kinds.Walled], tmp_path: Path, task: Task, **settings: object) -> CommandLine:
    place = kind(tmp_path / "g00001-03.0", Settings(**settings))  # type: ignore[arg-type]
    place.accept(task)
    place.harness.mkdir(parents=True, exist_ok=True)
    return place.command(["/usr/bin/agent", "--print", "do"], ENV)


def text_of(line: CommandLine, tmp_path: Path) -> str:
    """One word per line; what differs from machine to machine has a name."""
    words = [*line.argv, "", *(f"{name}={value}" for name, value in sorted(line.env.items()))]
    text = "\n".join(words) + "\n"
    for here, name in ((str(tmp_path), "RUN"), (kinds.NETNS, "NETNS"), (sys.executable, "PYTHON")):
        text = text.replace(here, name)
    return re.sub(r"[^,=]+/gyre-[0-9a-f]{16}\.sock", "SOCKET", text)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One on which everything is installed, within a Slurm job."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("srun", "apptainer", "bwrap"):
        (programs / name).write_text("#!/bin/sh\n")
        (programs / name).chmod(0o755)
    for name in ("SLURM_JOBID", "APPTAINER_CACHEDIR", "APPTAINER_TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    known = {"PATH": str(programs), "HOME": "/home/me", "SLURM_JOB_ID": "17", "SLURMD_NODENAME": "node3"}
    for name, value in {**known, "SLURM_CONF": "/etc/slurm.conf"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("name", "kind", "needs"),
    [
        ("pyxis", kinds.Pyxis, {}),
        ("pyxis-network", kinds.Pyxis, {"network": True, "workdir": "/app", "image": "python:3.11"}),
        ("apptainer", kinds.Apptainer, {}),
        ("apptainer-network", kinds.Apptainer, {"network": True, "env": {"A": "b"}, "image": "python:3.11"}),
    ],
)
def test_a_command_line_is_as_reviewed(
    name: str,
    kind: type[kinds.Walled],
    needs: dict[str, object],
    tmp_path: Path,
    machine: None,
    pytestconfig: pytest.Config,
) -> None:
    settings = {"image": "/images/base.sqsh", "file_bytes": 1 << 30, "processes": 512, "visible": (str(tmp_path),)}
    text = text_of(line_of(kind, tmp_path, a_task(**needs), **settings), tmp_path)
    golden = GOLDEN / f"{name}.txt"
    if pytestconfig.getoption("--rewrite-golden"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
    assert text == golden.read_text()


def test_what_a_kind_can_not_give_is_refused_with_what_to_do(tmp_path: Path, machine: None) -> None:
    for kind, needs, word in (
        (kinds.Pyxis, {}, "set tasks.image"),
        (kinds.Apptainer, {}, "set tasks.image"),
        (kinds.Bwrap, {"image": "python:3.11"}, "put it at tasks.images/python_3.11 (a directory)"),
        (kinds.Bwrap, {"dockerfile": True}, "put it at tasks.images/t (a directory)"),
        (kinds.Bwrap, {"workdir": "/"}, "can't be where its agent works"),
        (kinds.Bwrap, {"workdir": "here"}, "can't be where its agent works"),
    ):
        with pytest.raises(WorkspaceError) as caught:
            line_of(kind, tmp_path, a_task(**needs))
        assert word in str(caught.value)


def test_a_missing_program_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(WorkspaceError, match="bwrap is not installed"):
        line_of(kinds.Bwrap, tmp_path, a_task())


def test_a_path_that_a_container_can_not_bind_is_refused(tmp_path: Path, machine: None) -> None:
    place = tmp_path / "a:b"
    place.mkdir()
    with pytest.raises(WorkspaceError, match="can't be bound"):
        line_of(kinds.Apptainer, place, a_task(), image="/images/a.sif")
