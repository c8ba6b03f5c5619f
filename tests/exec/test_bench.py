"""bench.exec measures a real executor; here only that it does, small."""

from __future__ import annotations

import json

import pytest

from bench import exec as bench


def test_it_prints_one_figure_per_line(capfd: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--json", "--executions", "3", "--window", "1", "--workspace", "plain"]) == 0
    rows = {row["name"]: row for row in map(json.loads, capfd.readouterr().out.splitlines())}
    assert rows["executions"]["value"] == 3 and rows["own_processes"]["value"] == 2
    assert rows["rss_mib_per_execution"]["value"] > 1 and rows["rss_mib_per_execution"]["holds"] is None
