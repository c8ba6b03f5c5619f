"""The other policies, and a cluster with nothing to lend, finish the same run."""

from __future__ import annotations

import pytest

from tests.system.running import RAMBLING, Run

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("policy", "cells"), [("async", 3), ("elastic", 1)])
def test_it_finishes_whatever_the_policy(tmp_path, random_model, policy, cells):
    with Run(tmp_path, random_model, RAMBLING, scheduler__policy=policy, cluster__cells=cells) as run:
        summary = run.start().finish()
        assert (summary["steps"], summary["executions_interrupted"], summary["tokens_trained_twice"]) == (4, 0, 0)
        assert summary["weights_sum_min"] == pytest.approx(1, abs=1e-9)
        if cells == 1:
            assert summary["policy"] == "colocate"
            assert "elastic needs two cells to lend one" in summary["policy_note"]
