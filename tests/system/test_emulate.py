"""A simulator profile lived through by the real daemons: undisturbed, and with a child that stands still."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from pathlib import Path

import pytest

from cellctl.simulate.profile import Arm, Durations, Laws, Profile
from gyre_cli import emulate
from tests.system.running import Run, command

pytestmark = pytest.mark.slow
SMALL = Profile(
    name="small",
    steps=2,
    groups_per_batch=2,
    group_size=2,
    tasks=16,
    durations=Durations(median_h=2.0, limit_h=5.0),
    laws=Laws(train_node_h=1.5, slots_per_node=4.0, replica_nodes=1),
    arms=(Arm(name="elastic", policy="elastic", nodes=(1, 1), steps_per_burst=2),),
)


class Emulated(Run):
    """A run whose directory is made before it starts, from a profile instead of a configuration."""

    def __init__(self, folder: Path, profile: Profile, seconds_per_hour: float, **cluster: float) -> None:
        self.root, self._folder, self.process = folder / "run", folder, None
        run, config = emulate.prepare(profile, profile.arms[0], 1, self.root, seconds_per_hour)
        tree = dataclasses.asdict(config)
        tree["cluster"] |= cluster
        run.write_atomic("run.json", json.dumps(tree))

    def begin(self) -> Emulated:
        self.start("up")
        return self


def test_gyre_emulate_tells_what_was_lived_beside_what_was_predicted(tmp_path):
    words = ("emulate", "--profile", "bench/elastic.toml", "--steps", "2", "--seconds-per-hour", "1.5", "--seed", "2")
    told = command("gyre", *words, "--json", run=tmp_path / "run", timeout_s=240.0)  # starts ten daemons
    assert told.returncode == 0, told.stderr
    row = json.loads(told.stdout)
    assert row["arm"] == "elastic"
    assert row["mean_staleness"] == row["predicted_mean_staleness"]  # the same groups in the same steps
    assert row["hours"] > 0.9 * row["predicted_hours"]  # a machine can be slow, never ahead of the profile
    assert 0.0 <= row["overhead_executions"] < 1.0
    assert command("cellctl", "replay", str(tmp_path / "run" / "journal" / "cellctl.jsonl")).returncode == 0
    again = command("gyre", *words, run=tmp_path / "run")
    assert again.returncode == 4 and "exists" in again.stderr


@pytest.mark.parametrize("child", ["rank", "engine"])
def test_a_child_that_stands_still_is_found_told_and_started_anew_and_the_run_ends(tmp_path, child):
    with Emulated(tmp_path, SMALL, 1.5, peer_timeout_s=2.0) as run:
        run.begin()
        run.until(lambda status: status["run"] == "training")
        pid = run.rows("celld-c0", "status")[0][f"{child}_pid"]
        os.kill(pid, signal.SIGSTOP)
        run.finish()
        log = (run.root / "log" / "celld-c0.log").read_text()
        assert f"the {child} is stalled: no answer" in log
        assert f"process {pid} is in state T (stopped)" in log
        explained = [event for event in run.journal("cellctl") if event["tag"] == "cell.fault"]
        assert {event["what"] for event in explained} == {child}
        assert any("state T (stopped)" in event["detail"] for event in explained)
