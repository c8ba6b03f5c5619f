"""A run with two shards of proxyd, as a person sees it: one killed, the other not touched, every command shows both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gyre_base.shards import shard_of
from tests.system.running import command
from tests.system.test_emulate import SMALL, Emulated

pytestmark = pytest.mark.slow


def test_a_run_goes_on_while_one_of_its_shards_is_killed(tmp_path: Path) -> None:
    with Emulated(tmp_path, SMALL, 1.5) as run:
        tree = json.loads((run.root / "run.json").read_text())
        (run.root / "run.json").write_text(json.dumps({**tree, "proxyd": {"shards": 2}}))
        run.begin()
        run.until(lambda status: status["run"] == "training" and status["water_level"])
        told = command("proxyd", "status", "--json", run=run.root)
        assert [json.loads(line)["shard"] for line in told.stdout.splitlines()] == [0, 1], told.stderr
        life = run.life("proxyd-1")
        run.kill("proxyd-1")
        run.until_reborn("proxyd-1", life)
        summary = run.finish()
        assert (run.life("proxyd-0"), run.life("proxyd-1")) == (1, 2), "the other is not touched"
        assert summary["executions_interrupted"] == 0 and summary["executions_retried"] == 0
        found = [run.executions_in_log(f"proxyd-{shard}") for shard in (0, 1)]
        assert [{shard_of(name, 2) for name in names} for names in found] == [{0}, {1}], "each has its own log"
        ended = summary["executions"]["train"]  # some reach the profile's time limit
        assert set(ended) <= {"scored", "partial"}
        assert 0 < sum(ended.values()) <= sum(map(len, found)), "every one has its calls in a log"
        assert run.left() == []
