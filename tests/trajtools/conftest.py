"""A run file as the commands get it."""

from __future__ import annotations

import pytest
from trajbuild import story

from gyre_base.runfile import ExecStart, Reward, encode


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "run.jsonl"
    rewards = encode(Reward(exec="e", status="scored", value=1.0))
    path.write_bytes(encode(ExecStart(exec="e", group="g")) + b"".join(map(encode, story().calls)) + rewards)
    return path
