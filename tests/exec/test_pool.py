"""The pool of executors: transcripts of the pure core, and properties over random worlds."""

from __future__ import annotations

import itertools
import math

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gyre_exec.pool import Bounds, Leave, Pool, Seen, Submit, Withdraw


def pool(least: int = 1, most: int = 4, slots: int = 10, idle_s: float = 60.0, unseen_s: float = 60.0) -> Pool:
    return Pool(Bounds(least=least, most=most, slots=slots, idle_s=idle_s, unseen_s=unseen_s))


def running(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "running")


def test_it_grows_with_the_dispatched_work_and_never_beyond_its_bound() -> None:
    core = pool()
    assert core.handle(Seen(level=0), 0.0) == [Submit(names=("ex0",))]
    assert core.handle(Seen(level=35, jobs=running("ex0")), 2.0) == [Submit(names=("ex1", "ex2", "ex3"))]
    jobs = {**running("ex0"), "ex1": "pending", "ex2": "pending", "ex3": "pending"}
    assert core.handle(Seen(level=500, jobs=jobs), 4.0) == []


def test_a_submitted_job_that_is_not_listed_yet_is_not_submitted_twice() -> None:
    core = pool()
    core.handle(Seen(level=15), 0.0)
    assert core.handle(Seen(level=15), 2.0) == []
    assert core.handle(Seen(level=15, jobs=running("ex0")), 4.0) == []


def test_a_job_that_ends_before_it_is_ever_seen_leaves_its_place_when_listings_can_be_trusted() -> None:
    core = pool(unseen_s=0.0)
    core.handle(Seen(level=5), 0.0)
    assert core.handle(Seen(level=5), 1.0) == []  # counted as a failure: after a pause
    assert core.handle(Seen(level=5), 6.0) == [Submit(names=("ex0",))]


def test_it_shrinks_by_what_waits_in_the_queue_and_then_by_what_stands_idle() -> None:
    core = pool()
    jobs = {**running("ex0", "ex1"), "ex2": "pending"}
    held = {"ex0": 3, "ex1": 0}
    assert core.handle(Seen(level=25, held=held, jobs=jobs), 0.0) == []
    assert core.handle(Seen(level=3, held=held, jobs=jobs), 10.0) == [Withdraw(name="ex2")]
    assert core.handle(Seen(level=3, held=held, jobs=running("ex0", "ex1")), 59.0) == []
    assert core.handle(Seen(level=3, held=held, jobs=running("ex0", "ex1")), 61.0) == [Leave(name="ex1")]


def test_an_executor_that_works_again_begins_its_idle_time_anew() -> None:
    core = pool()
    for now, held in ((0.0, 0), (50.0, 2), (60.0, 0), (100.0, 0)):
        assert core.handle(Seen(level=1, held={"ex0": 1, "ex1": held}, jobs=running("ex0", "ex1")), now) == []
    last = core.handle(Seen(level=1, held={"ex0": 1, "ex1": 0}, jobs=running("ex0", "ex1")), 121.0)
    assert last == [Leave(name="ex1")]


def test_a_lost_executors_place_is_filled_at_once_under_its_name() -> None:
    core = pool()
    both = Seen(level=15, held={"ex0": 8, "ex1": 7}, jobs=running("ex0", "ex1"))
    assert core.handle(both, 0.0) == []
    assert core.handle(Seen(level=15, held={"ex1": 7}, jobs=running("ex1")), 2.0) == [Submit(names=("ex0",))]


def test_a_name_that_somebody_still_has_is_not_given_again() -> None:
    core = pool()
    assert core.handle(Seen(level=15, held={"ex0": 8}, jobs={}), 0.0) == [Submit(names=("ex1", "ex2"))]


def test_jobs_that_end_before_they_join_are_tried_more_and_more_slowly() -> None:
    core, now, tries = pool(), 0.0, []
    while now < 400.0:
        if core.handle(Seen(level=1), now):
            tries.append(now)
            core.handle(Seen(level=1, jobs=running("ex0")), now + 1.0)  # it was there, and is gone at the next look
        now += 2.0
    pauses = [b - a for a, b in itertools.pairwise(tries)]
    assert pauses == sorted(pauses) and pauses[0] < 10 and pauses[-1] > 60
    core.handle(Seen(level=1, held={"ex0": 1}, jobs=running("ex0")), 1000.0)  # one that joins ends the caution
    assert core.handle(Seen(level=1), 1002.0) == [Submit(names=("ex0",))]


class Worlds(RuleBasedStateMachine):
    """Jobs start, join, end and are lost in any order; the work comes and goes."""

    def __init__(self) -> None:
        super().__init__()
        self.core, self.now, self.level = pool(least=1, most=3), 0.0, 0
        self.jobs: dict[str, str] = {}
        self.held: dict[str, int] = {}

    @rule(level=st.integers(0, 60), passed=st.floats(0.5, 100.0))
    def look(self, level: int, passed: float) -> None:
        self.now, self.level = self.now + passed, level
        for command in self.core.handle(Seen(level=level, held=dict(self.held), jobs=dict(self.jobs)), self.now):
            match command:
                case Submit(names=names):
                    assert not set(names) & set(self.jobs)
                    self.jobs |= dict.fromkeys(names, "pending")
                case Withdraw(name=name):
                    assert name not in self.held
                    del self.jobs[name]
                case Leave(name=name):
                    assert self.held[name] == 0 and len(self.jobs) > 1
                    del self.jobs[name], self.held[name]

    @rule(data=st.data(), busy=st.integers(0, 10))
    def join(self, data: st.DataObject, busy: int) -> None:
        if self.jobs:
            name = data.draw(st.sampled_from(sorted(self.jobs)))
            self.jobs[name], self.held[name] = "running", busy

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if self.jobs:
            name = data.draw(st.sampled_from(sorted(self.jobs)))
            del self.jobs[name]
            self.held.pop(name, None)

    @invariant()
    def never_too_many(self) -> None:
        assert len(self.jobs) <= 3

    def teardown(self) -> None:
        """Left alone, it comes to what the work needs."""
        for _ in range(12):
            self.look(self.level, 400.0)
            self.jobs = dict.fromkeys(self.jobs, "running")
            self.held = {name: self.held.get(name, 0) for name in self.jobs}
        wanted = max(1, min(3, math.ceil(self.level / 10)))
        assert len(self.jobs) >= wanted
        if not any(self.held.values()):
            assert len(self.jobs) == wanted


Worlds.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestWorlds = Worlds.TestCase
