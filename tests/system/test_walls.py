"""A whole run whose executions are in sandboxes: the same finish, and every scored workspace in the store."""

from __future__ import annotations

import subprocess

import pytest

from tests.exec.test_walls import needs_bwrap
from tests.system.running import RAMBLING, Run

pytestmark = pytest.mark.slow


@needs_bwrap
def test_a_run_in_sandboxes_trains_like_any_other(tmp_path, random_model):
    setting = {"tasks__workspace": "bwrap", "scheduler__steps": 2, "evaluation__tasks": 0}
    with Run(tmp_path, random_model, RAMBLING, **setting) as run:
        summary = run.start().finish()
        assert (summary["steps"], summary["executions_interrupted"], summary["tokens_trained_twice"]) == (2, 0, 0)
        assert summary["executions"]["train"] == {"scored": 16}
        git = ["git", "--git-dir", str(run.root / "workspaces.git"), "for-each-ref", "--format=%(refname:lstrip=2)"]
        kept = subprocess.run(git, capture_output=True, text=True, check=True).stdout.split()
        scored = [p.parent.name for p in run.root.glob("executions/*/outcome.json") if '"scored"' in p.read_text()]
        assert len(scored) == 16 and set(scored) == set(kept)
