"""What commands of `gyre` take out of a run's call log."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from gyre_base.rundir import RunDir
from gyre_cli.rescoring import sampled_tokens
from gyre_cli.show import history_of
from tests.trajd.calls import Log


def page(name: str) -> SimpleNamespace:
    return SimpleNamespace(execution=name, outcome={"outcome": "scored", "score": 0.5})


def test_sampled_tokens_and_the_tree_of_calls_come_from_frames(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run")
    assert sampled_tokens(run) == {} and history_of(run, page("x0")) is None
    for life in (1, 2):
        log = Log(run.path("calls"), life)
        for number in range(40):  # more than are held at once
            log.execution(f"x{life}{number}", turns=2)
    tokens = sampled_tokens(run)
    assert len(tokens) == 80 and set(tokens.values()) == {16}
    told = history_of(run, page("x27"))
    assert (told.execution, told.calls) == ("x27", 2)
    assert history_of(run, page("x99")) is None
