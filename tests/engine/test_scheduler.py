"""The scheduler against a model of the pool: slots hold the tokens whose keys and values were computed into them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from celld.tiny.scheduler import MIN_SHARED_TOKENS, Plan, Request, Scheduler


@dataclass
class World:
    """Executes plans on slots of (salt, token) lists and checks that every position a plan relies on is right."""

    scheduler: Scheduler
    random: random.Random
    slots: dict[int, list[tuple[str, int]]] = field(default_factory=dict)

    def step(self) -> list[Request] | None:
        plan = self.scheduler.plan()
        if plan is None:
            return None
        self.execute(plan)
        sampled = plan.sampled
        return self.scheduler.commit(plan, [self.random.randrange(4) for _ in sampled], [-1.0] * len(sampled))

    def execute(self, plan: Plan) -> None:
        for copy in plan.copies:
            source = self.slots.get(copy.source, [])
            assert len(source) >= copy.length
            self.slots[copy.target] = source[: copy.length]
        assert self.scheduler.running == plan.decode + [chunk.request for chunk in plan.prefill]
        for row, request in enumerate(self.scheduler.running):
            assert request.row == row
        for request in plan.decode:
            self.compute(request, len(request.tokens) - 1, len(request.tokens))
        for chunk in plan.prefill:
            self.compute(chunk.request, chunk.start, chunk.stop)
        assert sum(chunk.stop - chunk.start for chunk in plan.prefill) <= self.scheduler.prefill_tokens
        assert sum(not chunk.completes for chunk in plan.prefill) <= 1

    def compute(self, request: Request, start: int, stop: int) -> None:
        there = self.slots.get(request.row, [])[:start]
        assert there == [(request.salt, token) for token in request.tokens[:start]]
        assert stop > start
        self.slots[request.row] = there + [(request.salt, token) for token in request.tokens[start:stop]]


def world(seed: int = 0, **options: int) -> World:
    return World(Scheduler(**{"rows": 4, "cache_slots": 3, "prefill_tokens": 16, **options}), random.Random(seed))


def request(rid: str, tokens: list[int], new: int = 5, **options: object) -> Request:
    return Request(rid=rid, tokens=list(tokens), max_new_tokens=new, **options)  # type: ignore[arg-type]


def drain(it: World) -> int:
    steps = 0
    while it.step() is not None:
        steps += 1
        assert steps < 2000
    return steps


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 10**6), rows=st.integers(1, 5), cache=st.integers(0, 4), budget=st.integers(1, 60))
def test_every_request_ends_and_no_step_reads_what_was_not_computed(seed: int, rows: int, cache: int, budget: int):
    chance = random.Random(seed)
    it = world(seed, rows=rows, cache_slots=cache, prefill_tokens=budget)
    scheduler, everything = it.scheduler, []
    stems = [[chance.randrange(4) for _ in range(chance.choice((3, 20, 50)))] for _ in range(3)]
    for number in range(60):
        action = chance.random()
        if action < 0.4:
            earlier = chance.choice(everything).tokens if everything and chance.random() < 0.5 else chance.choice(stems)
            tokens = [*earlier[: chance.randrange(1, 80)], *(chance.randrange(4) for _ in range(chance.randrange(6)))]
            new = request(
                str(number), tokens, chance.randrange(1, 9), salt=chance.choice("ab"), stop_ids=frozenset({3})
            )
            everything.append(new)
            scheduler.submit(new)
        elif action < 0.45 and everything:
            scheduler.abort([chance.choice(everything)])
        elif action < 0.5:
            scheduler.retract()
        elif action < 0.53 and not scheduler.running:
            scheduler.forget_cache()
        else:
            it.step()
    drain(it)
    assert not scheduler.running
    assert not scheduler.waiting
    assert scheduler.retained_slots <= cache
    for one in everything:
        assert one.finish_reason is not None
        assert len(one.logprobs) == one.completion_tokens <= one.max_new_tokens


def test_the_next_call_of_an_execution_computes_only_what_is_new():
    it = world(prefill_tokens=100)
    first = request("a", list(range(40)))
    it.scheduler.submit(first)
    drain(it)
    second = request("b", [*first.tokens, 1, 2, 3])
    it.scheduler.submit(second)
    plan = it.scheduler.plan()
    assert plan is not None
    assert [(chunk.start, chunk.stop) for chunk in plan.prefill] == [(44, 48)]  # the last sampled token and three more
    assert second.cached_tokens == 44


def test_a_longer_prefix_takes_the_place_of_the_shorter_one():
    it = world(cache_slots=1)
    tokens = list(range(8))
    for turn in range(5):
        one = request(str(turn), tokens)
        it.scheduler.submit(one)
        drain(it)
        assert one.cached_tokens == (0 if turn == 0 else len(tokens) - 2)
        tokens = [*one.tokens, turn]
    assert it.scheduler.retained_slots == 1


def test_the_least_recently_used_prefix_makes_room():
    it = world(cache_slots=2)
    for rid, start in (("a", 100), ("b", 200), ("a2", 100), ("c", 300)):
        it.scheduler.submit(request(rid, list(range(start, start + 9)), new=1))
        drain(it)
    for start, cached in ((100, 8), (300, 8), (200, 0)):
        probe = request(f"probe{start}", list(range(start, start + 9)), new=1)
        it.scheduler.submit(probe)
        drain(it)
        assert probe.cached_tokens == cached


def test_a_group_with_one_prompt_computes_it_once():
    it = world(rows=16, prefill_tokens=1000)
    prompt = list(range(MIN_SHARED_TOKENS + 10))
    group = [request(str(i), [*prompt, i], new=3) for i in range(8)]
    for one in group:
        it.scheduler.submit(one)
    first, second = it.scheduler.plan(), None
    assert first is not None
    assert [chunk.request.rid for chunk in first.prefill] == ["0"]
    it.execute(first)
    it.scheduler.commit(first, [0], [-1.0])
    second = it.scheduler.plan()
    assert second is not None
    assert [(chunk.start, chunk.stop) for chunk in second.prefill] == [(len(prompt), len(prompt) + 1)] * 7
    assert [one.cached_tokens for one in group] == [0] + [len(prompt)] * 7


def test_a_request_that_waits_for_a_shared_prefill_keeps_its_place():
    it = world(rows=2, prefill_tokens=1000)
    prompt = list(range(MIN_SHARED_TOKENS + 10))
    for rid, tokens in (("a", prompt), ("b", prompt), ("c", [7]), ("d", [8])):
        it.scheduler.submit(request(rid, tokens, new=1))
    order = [[one.rid for one in due] for due in iter(it.step, None)]
    assert order == [["a", "c"], ["b", "d"]]


def test_salts_do_not_share():
    it = world()
    for salt in ("0.0", "0.1"):
        one = request(salt, list(range(12)), new=1, salt=salt)
        it.scheduler.submit(one)
        drain(it)
        assert one.cached_tokens == 0


def test_the_first_token_is_reported_at_once_and_then_one_chunk_per_interval():
    it = world()
    it.scheduler.submit(request("a", [0], new=10, stream_interval=4, stop_ids=frozenset()))
    reported = [due[0].completion_tokens for due in iter(it.step, None) if due]
    assert reported == [1, 4, 8, 10]


def test_version_spans_meet_and_cover_every_token():
    one = request("a", [0], new=100)
    one.tokens += [1] * 9
    one.version_ends = [("0.0", 0), ("0.1", 4), ("0.2", 4), ("0.3", 7)]
    assert one.spans("0.3") == [
        {"version": "0.0", "start": 0, "end": 0},
        {"version": "0.1", "start": 0, "end": 4},
        {"version": "0.3", "start": 4, "end": 9},
    ]
    assert request("b", [0]).spans("0.5") == [{"version": "0.5", "start": 0, "end": 0}]


def test_the_cache_can_not_be_dropped_under_a_running_request():
    it = world()
    it.scheduler.submit(request("a", [1, 2, 3]))
    it.step()
    with pytest.raises(RuntimeError, match="running"):
        it.scheduler.forget_cache()
