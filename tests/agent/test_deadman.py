"""What a silent supervisor means to a cell."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from celld.agent.deadman import DeadMan, Verdict

EVERY_S, SILENCE_S = 2.0, 20.0


def watched(until_s: float, *, heard_until: float, beats_until: float, readable: bool = True) -> list[Verdict]:
    """Verdicts at 2 s steps of a supervisor that is heard and beats for so long."""
    switch, out = DeadMan(SILENCE_S, heard_at=0.0, looked_at=0.0), []
    now = 0.0
    while now < until_s:
        now += EVERY_S
        if now <= heard_until:
            switch.heard(now)
        switch.saw(f"beat {min(now, beats_until)}" if readable else None, now)
        out.append(switch.verdict(now, EVERY_S))
    return out


def test_a_supervisor_that_is_heard_is_alive_whatever_the_disk_says():
    assert set(watched(200, heard_until=200, beats_until=0)) == {Verdict.ALIVE}
    assert set(watched(200, heard_until=200, beats_until=0, readable=False)) == {Verdict.ALIVE}


def test_a_node_that_is_cut_off_stops_and_does_not_requeue():
    verdicts = watched(200, heard_until=50, beats_until=200)
    assert verdicts[:34] == [Verdict.ALIVE] * 34  # until 68 s
    assert set(verdicts[34:]) == {Verdict.CUT}


def test_a_node_that_sees_neither_supervisor_nor_disk_stops_and_does_not_requeue():
    assert watched(200, heard_until=50, beats_until=50, readable=False)[-1] is Verdict.CUT


def test_a_lost_supervisor_orphans_the_job():
    verdicts = watched(200, heard_until=50, beats_until=50)
    first = next(v for v in verdicts if v is not Verdict.ALIVE)
    assert first is Verdict.ORPHANED


@given(ends=st.integers(0, 60), gap=st.floats(30, 1000))
def test_a_cell_that_stood_still_itself_gives_the_supervisor_another_chance(ends, gap):
    switch, now = DeadMan(SILENCE_S, heard_at=0.0, looked_at=0.0), 0.0
    for _ in range(ends):
        now += EVERY_S
        switch.heard(now)
        switch.saw(f"beat {now}", now)
        switch.verdict(now, EVERY_S)
    assert switch.verdict(now + gap, EVERY_S) is Verdict.ALIVE
