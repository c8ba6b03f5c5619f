"""A run that is stopped, or loses its supervisor, leaves nothing running; the same command goes on and finishes it."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.system.running import RAMBLING, Run, command

pytestmark = pytest.mark.slow
STEPS = 6


def until_nothing_is_left(run: Run, timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while (left := run.left()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == [], run.story()


def test_a_stopped_run_and_one_whose_supervisor_was_killed_go_on_from_their_directory(
    tmp_path: Path, random_model: Path
) -> None:
    with Run(tmp_path, random_model, RAMBLING, scheduler__policy="colocate", scheduler__steps=STEPS) as run:
        run.start()
        run.until(lambda s: s["step"] >= 2 and s["water_level"] > 2)
        assert run.process is not None
        run.process.send_signal(signal.SIGTERM)  # as Ctrl-C does
        assert run.wait(60) == 1
        assert run.left() == []
        assert run.err().rstrip().endswith("stopped; the same command goes on from where it was")
        before = run.batches()

        run.start()
        run.until(lambda s: s["water_level"] > 2)
        assert command("gyre", "stop", run=run.root).returncode == 0
        assert run.wait(60) == 0 and "stopped by order" in run.err()  # what was asked for was done
        assert run.left() == []

        run.start()
        run.until(lambda s: s["step"] >= len(before) + 1 and s["water_level"] > 2)
        run.process.kill()
        run.process.wait()
        until_nothing_is_left(run)

        summary = run.start().finish()
        assert run.left() == []
        assert run.batches() == list(range(STEPS))  # none lost, none doubled
        assert (summary["policy"], summary["steps"]) == ("colocate", STEPS)
        assert (summary["tokens_trained_twice"], summary["context_mismatches"]) == (0, 0)
        assert summary["executions_interrupted"] == 0
        assert summary["weights_sum_min"] == pytest.approx(1, abs=1e-9)
