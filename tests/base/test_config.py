"""The configuration tree: what is refused, and in which words."""

from __future__ import annotations

import tomllib

import pytest

from gyre_base import config
from gyre_cli.template import commented


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("[scheduler]\nslot_per_cell = 3", "did you mean scheduler.slots_per_cell"),
        ("[sheduler]\nsteps = 3", "did you mean scheduler"),
        ("[scheduler]\nsteps = 'many'", "scheduler.steps must be int"),
        ("[scheduler]\nsteps = true", "scheduler.steps must be int"),
        ("[scheduler]\nsteps = 0", "scheduler.steps must be at least 1"),
        ("[scheduler]\npolicy = 'greedy'", "one of elastic, colocate, async"),
        ("scheduler = 3", "scheduler is a section"),
        ("[tasks]\nharness = 'run me'", "list of strings"),
        ("[tasks]\nharness_env = {A = 1}", "table of strings"),
        ("[zzz]\nqqq = 1", "gyre init"),
    ],
)
def test_a_wrong_key_or_value_names_the_right_one(toml, words, tmp_path):
    path = tmp_path / "gyre.toml"
    path.write_text(toml)
    with pytest.raises(config.ConfigError, match=words):
        config.load(path)


def test_a_missing_file_says_how_to_get_one(tmp_path):
    with pytest.raises(config.ConfigError, match="gyre init"):
        config.load(tmp_path / "none.toml")


def test_json_and_back_is_the_same():
    made = config.from_tree(
        {"scheduler": {"steps": 3}, "tasks": {"harness": ["a", "b"]}, "rollout": {"temperature": 1}}
    )
    assert config.from_json(config.to_json(made)) == made


def test_relative_paths_are_relative_to_the_file(tmp_path):
    path = tmp_path / "gyre.toml"
    path.write_text("[tasks]\ntrain = 'tasks/t.jsonl'")
    assert config.load(path).tasks.train == str(tmp_path / "tasks" / "t.jsonl")


def test_the_commented_file_names_every_key_and_loads():
    text = commented()
    assert all(f"\n# {key.rsplit('.', 1)[1]} = " in text for key in config.keys())
    uncommented = "\n".join(
        line[2:] if line.startswith("# ") and " = " in line.split("  # ")[0] else line for line in text.splitlines()[3:]
    )
    tree = tomllib.loads(uncommented)
    assert config.from_tree(tree) == config.Config()


def test_every_key_has_a_comment_or_a_name_that_says_it():
    silent = [
        line for line in commented().splitlines() if line.startswith("# ") and " = " in line and "  # " not in line
    ]
    assert len(silent) <= 18, silent


def test_the_engines_interpreter_stays_the_link_that_an_environment_is_known_by(tmp_path):
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "python").symlink_to("/usr/bin/env")
    (tmp_path / "gyre.toml").write_text('[engine]\npython = "env/python"\n')
    assert config.load(tmp_path / "gyre.toml", {}).engine.python == str(tmp_path / "env" / "python")
