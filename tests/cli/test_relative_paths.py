"""A run that is named by a relative path works: what runs in another folder is told absolute ones."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from cellctl.simulate import profile
from gyre_cli import emulate


def test_an_emulated_run_tells_its_harnesses_where_its_files_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lived = dataclasses.replace(profile.load("qwengyre-122b"), steps=2)
    _, config = emulate.prepare(lived, lived.arms[0], 0, Path("runs/em"), 10.0)
    named = [word for word in config.tasks.harness if re.search(r"\bruns/em\b", word)]
    assert named and all(Path(word).is_absolute() and Path(word).exists() for word in named)
    assert Path(config.model.path).is_absolute() and Path(config.tasks.train).is_absolute()
