"""Routing: every call is answered exactly once, a drained cell is empty, tokens are counted once."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_base.daemon import Answer, Tick, WakeAt
from gyre_base.messages import (
    CellDrained,
    CloseExecution,
    Done,
    DrainCell,
    Engine,
    EngineLost,
    EngineTable,
    OpenExecution,
    OperatorOrder,
    Refused,
)
from gyre_base.vocabulary import Purpose
from proxyd.core import REFUSALS, UNKNOWN_HOLD_S, Router, Unexpected
from proxyd.events import (
    Abort,
    CallArrived,
    CallDropped,
    Cut,
    EngineLoad,
    Finish,
    Refuse,
    Restarted,
    SubmissionEnded,
    Submit,
)


def table(number: int, *cells: str, away: str = "", slots: int = 4) -> EngineTable:
    lines = [
        Engine(cell=c, url=f"http://{c}", version="0.0", order=n, slots=slots, serving=c not in away)
        for n, c in enumerate(cells)
    ]
    return EngineTable(number=number, engines=tuple(lines))


def opened(execution: str, temperature: float = 1.0) -> OpenExecution:
    return OpenExecution(execution=execution, purpose=Purpose.TRAIN, temperature=temperature)


def arrived(call: str, execution: str = "e", budget: int = 64) -> CallArrived:
    return CallArrived(call=call, execution=execution, prompt_tokens=10, budget=budget)


def ended(submit: Submit, how: str = "finished", sampled: int = 3, **more: Any) -> SubmissionEnded:
    finish = "stop" if how == "finished" else ""
    return SubmissionEnded(call=submit.call, number=submit.number, how=how, sampled=sampled, finish=finish, **more)


def only(commands: list[Any], kind: type) -> list[Any]:
    return [c for c in commands if isinstance(c, kind)]


def router(*cells: str) -> Router:
    core = Router()
    core.handle(Restarted(life=1), 0.0)
    core.handle(opened("e"), 0.0)
    core.handle(table(1, *(cells or ("a", "b"))), 0.0)
    return core


def test_a_call_is_sent_and_its_answer_finishes_it() -> None:
    core = router("a")
    (submit,) = core.handle(arrived("k"), 1.0)
    assert (submit.cell, submit.version, submit.sampled, submit.number) == ("a", "0.0", 0, 1)
    assert len(submit.rid) == 32
    assert core.handle(ended(submit), 2.0) == [Finish(call="k", finish="stop", waited_s=0.0, moved=0)]
    core.check()


def test_an_execution_stays_where_it_is_and_new_ones_go_where_room_is() -> None:
    core = router("a", "b")
    for name in "fgh":
        core.handle(opened(name), 0.0)
    cells = {}
    for name in "efgh":
        (submit,) = core.handle(arrived(f"k{name}", name), 0.0)
        cells[name] = submit.cell
        core.handle(ended(submit), 0.1)
    assert sorted(cells.values()) == ["a", "a", "b", "b"]
    for name in "efgh":
        (submit,) = core.handle(arrived(f"l{name}", name), 1.0)
        assert submit.cell == cells[name]
        core.handle(ended(submit), 1.1)


def test_the_same_life_number_gives_another_rid() -> None:
    rids = set()
    for life in (1, 2):
        core = router("a")
        core.handle(Restarted(life=life), 0.0)
        rids.add(core.handle(arrived("k"), 0.0)[0].rid)
    assert len(rids) == 2


def test_a_drain_moves_the_call_with_its_tokens_and_is_acknowledged_when_the_cell_is_empty() -> None:
    core = router("a", "b")
    (submit,) = core.handle(arrived("k"), 0.0)
    home, other = submit.cell, "ab".replace(submit.cell, "")
    core.handle(table(2, "a", "b", away=home), 1.0)
    commands = core.handle(DrainCell(cell=home, epoch=5), 1.0)
    assert only(commands, Abort) == [Abort(call="k", number=1, rid=submit.rid, url=submit.url)]
    assert not only(commands, CellDrained)
    assert not core.handle(DrainCell(cell=home, epoch=5), 1.1), "asked again while it runs: nothing new"
    drained, again = core.handle(ended(submit, "cut", 3), 1.5)
    assert drained == CellDrained(cell=home, epoch=5, moved=1, moved_mid_generation=1, seconds=0.5)
    assert (again.cell, again.sampled, again.number) == (other, 3, 2)
    (finish,) = core.handle(ended(again), 2.0)
    assert finish == Finish(call="k", finish="stop", waited_s=0.5, moved=1)
    assert core.handle(DrainCell(cell=home, epoch=5), 3.0) == [drained], "safe to ask again"
    assert core.handle(DrainCell(cell=home, epoch=4), 3.0) == [], "a stale epoch"
    core.check()


def test_a_drained_cell_gets_calls_again_only_by_a_newer_table() -> None:
    core = router("a")
    assert only(core.handle(DrainCell(cell="a", epoch=1), 0.0), CellDrained)
    assert not only(core.handle(arrived("k"), 0.1), Submit)
    assert not only(core.handle(table(1, "a"), 0.2), Submit), "an old table"
    (submit,) = only(core.handle(table(2, "a"), 0.3), Submit)
    assert core.handle(DrainCell(cell="a", epoch=1), 0.4) == [], "a late repeat stops nothing and claims nothing"
    assert core.handle(ended(submit), 0.5)[0].waited_s == pytest.approx(0.2)
    assert only(core.handle(DrainCell(cell="a", epoch=2), 0.6), CellDrained), "the next epoch is another drain"


def test_a_cell_drained_by_a_table_that_came_before_the_acknowledgement_serves_again_at_once() -> None:
    core = router("a")
    (submit,) = core.handle(arrived("k"), 0.0)
    core.handle(DrainCell(cell="a", epoch=1), 1.0)
    core.handle(table(2, "a"), 1.1)  # the scheduler changed its mind
    commands = core.handle(ended(submit, "cut", 1), 1.2)
    assert only(commands, CellDrained) and only(commands, Submit)


def test_a_call_that_ends_by_itself_during_a_drain_is_not_moved() -> None:
    core = router("a", "b")
    (submit,) = core.handle(arrived("k"), 0.0)
    core.handle(DrainCell(cell=submit.cell, epoch=1), 1.0)
    finish, drained = core.handle(ended(submit), 1.1)
    assert isinstance(finish, Finish) and (drained.moved, drained.moved_mid_generation) == (0, 0)


def test_an_engine_that_ignores_an_abort_is_cut_off() -> None:
    core = router("a")
    (submit,) = core.handle(arrived("k"), 0.0)
    (_, wake) = core.handle(DrainCell(cell="a", epoch=1), 1.0)
    assert isinstance(wake, WakeAt)
    assert only(core.handle(Tick(), wake.at), Cut) == [Cut(call="k", number=1)]
    assert only(core.handle(ended(submit, "cut", 0, lost=True, why="cut"), wake.at), CellDrained)


def test_a_lost_engine_is_reported_once_and_its_call_goes_on_elsewhere() -> None:
    core = router("a", "b")
    core.handle(opened("f"), 0.0)
    first = [core.handle(arrived(k, e), 0.0)[0] for k, e in (("k", "e"), ("l", "f"))]
    there = [s for s in first if s.cell == first[0].cell]
    commands = core.handle(ended(there[0], "cut", 2, lost=True, why="refused"), 1.0)
    assert only(commands, EngineLost) == [EngineLost(cell=there[0].cell, url=there[0].url, why="refused")]
    (again,) = only(commands, Submit)
    assert again.cell != there[0].cell and again.sampled == 2
    core.check()


def test_with_one_engine_a_failing_call_waits_longer_and_longer_and_is_never_dropped() -> None:
    core = router("a")
    (submit,) = core.handle(arrived("k"), 0.0)
    now, gaps = 0.0, []
    for _ in range(8):
        commands = core.handle(ended(submit, "cut", 0, lost=True, why="gone"), now)
        assert not only(commands, Refuse)
        (wake,) = only(commands, WakeAt)
        gaps.append(round(wake.at - now, 3))
        now = wake.at
        (submit,) = only(core.handle(Tick(), now), Submit)
    assert gaps[0] < gaps[-1] <= 5.0 and gaps == sorted(gaps)


def test_a_request_that_engines_refuse_is_given_up_with_its_story() -> None:
    core = router("a")
    (submit,) = core.handle(arrived("k"), 0.0)
    now = 0.0
    for _ in range(REFUSALS - 1):
        commands = core.handle(ended(submit, "refused", 0, why="400 bad"), now)
        now = only(commands, WakeAt)[0].at
        (submit,) = only(core.handle(Tick(), now), Submit)
    (refuse,) = core.handle(ended(submit, "refused", 0, why="400 bad"), now)
    assert refuse.kind == "internal" and "400 bad" in refuse.why
    assert not core.calls


def test_a_call_of_an_unknown_execution_waits_and_is_then_refused() -> None:
    core = router("a")
    (wake,) = core.handle(arrived("k", "nobody"), 5.0)
    assert wake == WakeAt(at=5.0 + UNKNOWN_HOLD_S)
    (refuse,) = core.handle(Tick(), wake.at)
    assert (refuse.kind, refuse.call) == ("forbidden", "k")
    core.handle(arrived("l", "late"), 20.0)
    (submit,) = only(core.handle(opened("late", 0.0), 21.0), Submit)
    assert submit.temperature == 0.0


def test_a_closed_execution_is_refused_and_what_runs_is_aborted() -> None:
    core = router("a")
    (submit,) = core.handle(arrived("k"), 0.0)
    commands = core.handle(CloseExecution(execution="e"), 1.0)
    assert only(commands, Refuse) and only(commands, Abort)
    assert core.handle(ended(submit, "cut", 1), 1.1) == []
    assert only(core.handle(arrived("l"), 2.0), Refuse)
    assert not core.calls
    core.check()


def test_a_call_that_nobody_waits_for_is_aborted() -> None:
    core = router("a")
    (submit,) = core.handle(arrived("k"), 0.0)
    assert only(core.handle(CallDropped(call="k"), 60.0), Abort)
    core.handle(ended(submit, "cut", 1), 60.1)
    assert not core.calls and core.handle(CallDropped(call="k"), 61.0) == []


def test_a_moved_call_goes_to_a_cell_that_stays_longest_while_it_has_room() -> None:
    core = router("a", "b", "c")
    core.executions["e"].home = "a"
    core.balance.moved_home("", "a")
    core.handle(DrainCell(cell="a", epoch=1), 0.0)
    (submit,) = only(core.handle(arrived("k"), 0.1), Submit)
    assert submit.cell == "c"


def test_a_call_whose_budget_is_used_up_is_finished_rather_than_sent_again() -> None:
    core = router("a", "b")
    (submit,) = core.handle(arrived("k", budget=3), 0.0)
    (finish,) = core.handle(ended(submit, "cut", 3, lost=True, why="gone"), 1.0)[:1]
    assert finish.finish == "length"


def test_a_person_can_drain_a_cell_and_take_it_back() -> None:
    core = router("a")
    (submit,) = core.handle(arrived("k"), 0.0)
    commands = core.handle(OperatorOrder(verb="drain", argument="a"), 1.0)
    assert only(commands, Abort) and isinstance(only(commands, Answer)[0].message, Done)
    assert not only(core.handle(ended(submit, "cut", 1), 1.1), Submit)
    assert only(core.handle(OperatorOrder(verb="undrain", argument="a"), 2.0), Submit)
    (answer,) = core.handle(OperatorOrder(verb="drain", argument="zz"), 3.0)
    assert isinstance(answer.message, Refused)


def test_more_calls_than_an_engine_may_have_wait_in_order() -> None:
    core = Router(cap=2)
    core.handle(opened("e"), 0.0)
    core.handle(table(1, "a"), 0.0)
    sent = [s for k in "klmn" for s in only(core.handle(arrived(k), 0.0), Submit)]
    assert [s.call for s in sent] == ["k", "l"]
    assert [s.call for s in only(core.handle(ended(sent[1]), 1.0), Submit)] == ["m"]
    assert [s.call for s in only(core.handle(ended(sent[0]), 2.0), Submit)] == ["n"]
    core.check()


def test_a_full_home_is_left_for_one_call_and_stays_the_home() -> None:
    core = Router(cap=3)
    core.handle(opened("e"), 0.0)
    core.handle(table(1, "a", "b", slots=4), 0.0)
    cells = [s.cell for k in "klmn" for s in only(core.handle(arrived(k), 0.0), Submit)]
    home = core.executions["e"].home
    assert cells[:3] == [home] * 3 and cells[3] != home and core.executions["e"].home == home


def test_work_of_others_counts_as_load_for_a_while() -> None:
    core = router("a", "b")
    core.handle(EngineLoad(url="http://a", work=3), 0.0)
    core.handle(opened("f"), 0.0)
    assert only(core.handle(arrived("k", "f"), 1.0), Submit)[0].cell == "b"
    core.handle(opened("g"), 100.0)
    core.handle(opened("h"), 100.0)
    later = {only(core.handle(arrived(f"k{e}", e), 100.0), Submit)[0].cell for e in "gh"}
    assert "a" in later, "an old report still counts"


def test_long_prompts_are_sent_again_one_after_the_other() -> None:
    core = router("a", "b")
    sent = []
    for n in range(4):
        core.handle(opened(f"x{n}"), 0.0)
        event = CallArrived(call=f"k{n}", execution=f"x{n}", prompt_tokens=500_000, budget=64)
        sent += only(core.handle(event, 0.0), Submit)
    moving = [s for s in sent if s.cell == "a"]
    assert len(sent) == 4 and moving, "first submissions are not held"
    core.handle(table(2, "b"), 1.0)
    core.handle(DrainCell(cell="a", epoch=1), 1.0)
    times, now, commands = [], 1.0, []
    for one in moving:
        commands += core.handle(ended(one, "cut", 1), now)
    while len(times) < len(moving):
        times += [now] * len(only(commands, Submit))
        wakes = [c.at for c in only(commands, WakeAt)]
        if len(times) < len(moving):
            now = min(wakes)
            commands = core.handle(Tick(), now)
    assert all(later - earlier >= 0.1 for earlier, later in itertools.pairwise(times)), times


def test_an_execution_keeps_its_favourite_among_equals_when_others_come_and_go() -> None:
    def favourite(cells: str) -> dict[str, str]:
        found = {}
        for n in range(60):
            core = router(*cells)
            core.handle(opened(f"x{n}"), 0.0)
            found[f"x{n}"] = only(core.handle(arrived("k", f"x{n}"), 0.0), Submit)[0].cell
        return found

    four, three = favourite("abcd"), favourite("abc")
    assert all(three[e] == cell for e, cell in four.items() if cell != "d")
    assert set(four.values()) == set("abcd")


def test_an_event_nobody_expects_is_an_error_with_its_story() -> None:
    core = router("a")
    (submit,) = core.handle(arrived("k"), 0.0)
    core.handle(ended(submit), 1.0)
    with pytest.raises(Unexpected):
        core.handle(ended(submit), 2.0)
    core.handle(arrived("l"), 2.0)
    with pytest.raises(Unexpected, match="arrived twice"):
        core.handle(arrived("l"), 3.0)


# ---- random weather -------------------------------------------------------------------------------------------------


@dataclass
class Weather:
    """Engines, harnesses and a scheduler that do anything they may, in any order."""

    rng: random.Random
    core: Router = field(default_factory=Router)
    now: float = 0.0
    number: int = 0
    epoch: int = 0
    running: dict[str, Submit] = field(default_factory=dict)
    aborted: set[str] = field(default_factory=set)
    tokens: dict[str, int] = field(default_factory=dict)
    budgets: dict[str, int] = field(default_factory=dict)
    answers: dict[str, int] = field(default_factory=dict)
    blocked: set[str] = field(default_factory=set)  # cells drained and not yet in a newer table as serving
    wakes: list[float] = field(default_factory=list)
    cells: tuple[str, ...] = ("a", "b", "c")

    def feed(self, event: Any) -> None:
        if isinstance(event, EngineTable):
            serving = {e.cell for e in event.engines if e.serving}
            before = set(self.core.drains)
        for command in self.core.handle(event, self.now):
            self.obey(command)
        if isinstance(event, EngineTable):
            self.blocked -= {c for c in serving if c in before and self.core.drains[c].over}
        self.core.check()

    def obey(self, command: Any) -> None:
        match command:
            case Submit():
                assert command.call not in self.running, "sent while it runs"
                assert command.sampled == self.tokens[command.call], "tokens lost or doubled"
                assert command.sampled < self.budgets[command.call]
                assert command.cell not in self.blocked or self.core.drains[command.cell].over
                self.running[command.call] = command
                self.blocked.discard(command.cell)
            case Abort(call=call):
                assert call in self.running
                self.aborted.add(call)
            case Cut(call=call):
                self.end(call, "cut", lost=True)
            case Finish(call=call) | Refuse(call=call):
                self.answers[call] += 1
            case CellDrained(cell=cell):
                assert not [s for s in self.running.values() if s.cell == cell], "drained, and still running"
                self.blocked.add(cell)
            case WakeAt(at=at):
                self.wakes.append(at)

    def end(self, call: str, how: str, *, lost: bool = False) -> None:
        submit = self.running.pop(call)
        self.aborted.discard(call)
        left = self.budgets[call] - self.tokens[call]
        sampled = self.rng.randrange(left + 1) if how != "refused" else 0
        self.tokens[call] += sampled
        finish = "stop" if how == "finished" else ""
        self.feed(
            SubmissionEnded(
                call=call, number=submit.number, how=how, sampled=sampled, finish=finish, lost=lost, why="weather"
            )
        )

    def step(self) -> None:
        self.now += self.rng.random()
        for at in [w for w in self.wakes if w <= self.now]:
            self.wakes.remove(at)
            self.feed(Tick())
        what = self.rng.random()
        if what < 0.3:
            self.arrive()
        elif what < 0.65 and self.running:
            call = self.rng.choice(sorted(self.running))
            how = "cut" if call in self.aborted and self.rng.random() < 0.8 else self.rng.choice(["finished", "cut"])
            self.end(call, how, lost=how == "cut" and self.rng.random() < 0.5)
        elif what < 0.7 and self.running:
            self.end(self.rng.choice(sorted(self.running)), "refused")
        elif what < 0.82:
            self.number += self.rng.choice([0, 1, 1, 1])
            away = "".join(c for c in self.cells if self.rng.random() < 0.3)
            self.feed(table(self.number, *self.cells, away=away))
        elif what < 0.92:
            self.epoch += self.rng.choice([-1, 0, 1, 1])
            self.feed(DrainCell(cell=self.rng.choice(self.cells), epoch=self.epoch))
        elif what < 0.94:
            self.feed(EngineLoad(url=f"http://{self.rng.choice(self.cells)}", work=self.rng.randrange(12)))
        elif what < 0.97:
            self.feed(self.rng.choice([opened, lambda e: CloseExecution(execution=e)])(self.rng.choice("efgh")))
        elif self.tokens:
            self.feed(CallDropped(call=self.rng.choice(sorted(self.tokens))))

    def arrive(self) -> None:
        call = f"k{len(self.tokens)}"
        self.tokens[call], self.answers[call], self.budgets[call] = 0, 0, self.rng.randrange(1, 20)
        self.feed(arrived(call, self.rng.choice("efghi"), self.budgets[call]))

    def calm(self) -> None:
        """Everything serves, engines answer: every call must come to its end."""
        for name in "efgh":
            self.feed(opened(name))
        for _ in range(400):
            self.now += 1.0
            self.number += 1
            self.feed(table(self.number, *self.cells))
            for call in sorted(self.running):
                if call in self.running:
                    self.end(call, "cut" if call in self.aborted else "finished")
            self.wakes = [w for w in self.wakes if w > self.now]
            self.feed(Tick())
            if not self.core.calls:
                return


@given(seed=st.integers(0, 10**9))
@settings(max_examples=80, deadline=None)
def test_in_any_weather_every_call_is_answered_once_and_no_token_is_lost(seed: int) -> None:
    rng = random.Random(seed)
    weather = Weather(rng, Router(cap=rng.choice([0, 0, 1, 2, 5])))
    weather.feed(Restarted(life=1))
    for _ in range(120):
        weather.step()
    weather.calm()
    assert set(weather.answers.values()) <= {1}, weather.answers
    assert not weather.core.calls and not weather.running
