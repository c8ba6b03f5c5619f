"""`gyre init`: the job scripts as they come out, headers that carry any path, nothing written over unasked."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre_base import config as configuration
from gyre_base.config import ConfigError
from gyre_cli import init, script, slurm
from gyre_cli.init import Partition, Wishes
from gyre_cli.template import commented
from tests.cli.conftest import ROOT, complains, say

GOLDEN = ROOT / "tests" / "golden" / "sbatch"
USAGE, REFUSED = 2, 4
PLAIN = Wishes(
    template="gyre",
    name="mine",
    run="runs/one",
    nodes=4,
    gpus=None,
    cpus=None,
    time="",
    grace_s=180,
    partition="",
    account="",
    qos="",
    constraint="",
    image="",
    executors=1,
    executor_partition="",
    more=(),
)
GPU = Partition(name="h100", default=False, gpus=8, cpus=96, limit_s=86400.0)
OFTEN_WRONG = st.text(st.characters(min_codepoint=32, max_codepoint=0x17F, exclude_characters='"\\'), min_size=1)


def wishes(**changes: object) -> Wishes:
    return Wishes(**{**PLAIN.__dict__, **changes})  # type: ignore[arg-type]


SHAPES = {
    "gyre": {},
    "one-node": {"account": "a123", "qos": "long"},
    "uneven": {"constraint": "a100*2&l40*2"},
    "apptainer": {"run": "/scratch/me/one"},
    "pyxis": {},
    "executors": {"executors": 4, "partition": "cpu", "more": ("--mem=32G",)},
}


@pytest.mark.parametrize("template", script.templates())
def test_a_job_script_as_it_comes_out(template, request, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/home/me/gyre/.venv/bin/python")
    found = None if template == "executors" else GPU
    wish = wishes(template=template, **SHAPES[template])
    text = script.render(template, init.values(wish, found, Path("/home/me/my project"), "gyre.toml"))
    path = GOLDEN / f"{template}.sbatch"
    if request.config.getoption("--rewrite-golden"):
        path.write_text(text)
    assert text == path.read_text()
    assert "{{" not in text


def test_templates_hold_headers_and_one_start_and_nothing_to_decide():
    for path in (ROOT / "sbatch_templates").glob("*.sbatch"):
        lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
        assert [line.split()[0] for line in lines if line != "{{site}}"][-1] == "exec"
        assert all(line.startswith(("export ", "exec ", "{{site}}")) for line in lines)


@given(folder=OFTEN_WRONG, run=OFTEN_WRONG, name=OFTEN_WRONG)
def test_what_is_written_is_read_back_whatever_the_paths_are_called(tmp_path_factory, folder, run, name):
    base = Path("/home") / folder.replace("/", "_").strip(".") if folder.strip("./") else Path("/home/x")
    run = run.replace("/", "_")
    try:
        values = init.values(wishes(run=run, name=name), GPU, base, "gyre.toml")
    except ConfigError:
        return  # refused aloud
    path = tmp_path_factory.getbasetemp() / "x.sbatch"
    path.write_text(script.render("gyre", values))
    job = script.parse(path)
    assert job.argument("--run") == run
    assert job.options["job-name"] == name
    assert job.options["chdir"] == str(base)
    assert job.options["comment"].removeprefix(slurm.COMMENT) == str((base / run).resolve())


def test_a_path_that_no_header_carries_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="quote"):
        init.values(wishes(), None, Path('/home/a "b"'), "gyre.toml")


def test_partitions_are_read_as_sinfo_says_them():
    text = "main*|(null)|64|7-00:00:00\nh100|gpu:h100:8(S:0-1),nvme:1|96+|1-00:00:00\nh100|gpu:h100:4|96|1-00:00:00\n"
    found = init.parse_partitions(text + "old|gpu:2|16|infinite\n")
    assert found == [
        Partition(name="main", default=True, gpus=0, cpus=64, limit_s=604800.0),
        Partition(name="h100", default=False, gpus=8, cpus=96, limit_s=86400.0),
        Partition(name="old", default=False, gpus=2, cpus=16, limit_s=None),
    ]
    assert init.choose(found, "", gpus=True) == found[1]
    assert init.choose(found, "", gpus=False) == found[0]
    assert init.choose(found, "old", gpus=True) == found[2]
    with pytest.raises(ConfigError, match="'new': main, h100, old"):
        init.choose(found, "new", gpus=True)


def test_the_time_limit_is_cut_to_the_partitions():
    assert init.time_limit("", GPU) == "04:00:00"
    assert init.time_limit("", Partition(name="debug", default=False, gpus=1, cpus=8, limit_s=1800.0)) == "00:30:00"
    assert init.time_limit("1-00:00:00", None) == "1-00:00:00"
    with pytest.raises(ConfigError, match="--time soon"):
        init.time_limit("soon", None)


def test_what_was_chosen_stands_in_the_configuration_uncommented(tmp_path):
    path = tmp_path / "gyre.toml"
    chosen = init.chosen(wishes(template="pyxis", executors=3, executor_partition="cpu"), GPU, Path("/home/me"))
    path.write_text(commented(chosen))
    cluster = configuration.load(path).cluster
    assert (cluster.cells, cluster.executors, cluster.executor_partition) == (4, 3, "cpu")
    assert cluster.srun_options[0] == "--container-image=/home/me/gyre.sqsh"
    path.write_text(commented())
    assert configuration.load(path) == configuration.Config()


def test_every_key_has_its_comment_also_where_the_source_takes_several_lines():
    text = commented()
    assert "executor_options = []  # " in text


def test_on_a_machine_without_slurm_a_script_is_written_to_be_looked_through(tmp_path):
    said = say("gyre", "init", cwd=tmp_path, SLURM_CONF="", PATH=str(tmp_path))
    assert (said.returncode, said.stdout) == (0, "")
    assert "no Slurm here" in said.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gyre.sbatch", "gyre.toml"]


def test_nothing_is_written_over_and_what_is_replaced_is_kept(tmp_path):
    (tmp_path / "gyre.toml").write_text("# mine")
    assert say("gyre", "init", cwd=tmp_path, PATH=str(tmp_path)).returncode == 0
    assert (tmp_path / "gyre.toml").read_text() == "# mine"
    job = tmp_path / "gyre.sbatch"
    job.write_text("# my own script")
    complains(say("gyre", "init", cwd=tmp_path, PATH=str(tmp_path)), REFUSED, "gyre.sbatch", "exists", "--force")
    assert job.read_text() == "# my own script"
    assert say("gyre", "init", "--force", cwd=tmp_path, PATH=str(tmp_path)).returncode == 0
    assert (tmp_path / "gyre.sbatch.old").read_text() == "# my own script"
    assert job.read_text().startswith("#!/bin/bash")
    assert (tmp_path / "gyre.toml").read_text() == "# mine"


@pytest.mark.parametrize(
    ("words", "word"),
    [
        (("--template", "nope"), "executors"),
        (("--template", "uneven"), "--constraint"),
        (("--time", "soon"), "--time soon"),
    ],
)
def test_wishes_that_can_not_be_granted(tmp_path, words, word):
    complains(say("gyre", "init", *words, cwd=tmp_path, PATH=str(tmp_path)), USAGE, word)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_can_not_be_written(tmp_path):
    complains(say("gyre", "init", "none/gyre.toml", cwd=tmp_path, PATH=str(tmp_path)), USAGE, "cannot write", "none")
