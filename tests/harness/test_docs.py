"""docs/harnesses.md: every block is run, as a reader would."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests import pages

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "harnesses.md"


def test_the_page_runs(needs, tmp_path, monkeypatch):
    needs("claude-code")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    said = pages.run(PAGE, tmp_path, {"PAGE": str(PAGE)})
    assert said.count("scored") >= 2 and "all rules hold" in said
