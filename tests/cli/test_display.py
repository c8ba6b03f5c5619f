"""What a run says of itself while it runs."""

from __future__ import annotations

from gyre_cli.display import Display

RUN = {"run": "training", "step": 0, "steps": 2, "water_level": 3, "switches": 1, "score": None}


def test_an_alarm_is_told_when_it_begins_and_not_with_every_status(capsys):
    display = Display("run")
    groups = {"alarm": "groups", "what": "2 in a row had too few valid executions"}
    for rows in ([RUN], [RUN, groups], [RUN, {**groups, "what": "3 in a row …"}], [RUN], [RUN, groups]):
        display.update(rows)
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("alarm:")]
    assert told == ["alarm: groups: 2 in a row had too few valid executions"] * 2
