"""A request that is read in part is planned as if it had been read whole."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxyd.capture import Forest, Plan
from proxyd.chat import ChatModel
from proxyd.dialects import Dialect
from proxyd.reading import Memory, place_of
from tests.proxyd.talk import DIALECTS
from tests.proxyd.test_capture import spelled

FILL = "x y z " * 900


def said(dialect: Dialect, kind: str, words: str) -> dict[str, Any]:
    if kind == "responses":
        return {"type": "message", "role": "user", "content": words}
    return {"role": "user", "content": words}


def heard(kind: str, words: str) -> dict[str, Any]:
    if kind == "responses":
        return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": words}]}
    return {"role": "assistant", "content": words}


def body_of(kind: str, messages: list[Any], rng: random.Random, **more: Any) -> bytes:
    field = DIALECTS[kind].field
    body = {"model": "m", field: messages, "stream": True, **more}
    items = list(body.items())
    if rng.random() < 0.3:
        rng.shuffle(items)
    return json.dumps(dict(items), separators=rng.choice([(",", ":"), (", ", ": ")])).encode()


def plan_by(forest: Forest, memory: Memory, dialect: Dialect, body: bytes, call: str) -> tuple[Plan, bool]:
    asked = memory.read(dialect, body)
    plan = forest.go_on(call, asked.since, asked.request.conversation) if asked.since is not None else None
    short = plan is not None
    plan = plan or forest.plan(call, asked.whole().conversation)
    memory.told(asked, plan.start)
    return plan, short


@given(seed=st.integers(0, 10**9), kind=st.sampled_from(sorted(DIALECTS)))
@settings(max_examples=40, deadline=None)
def test_reading_in_part_and_reading_whole_plan_the_same(chat: ChatModel, seed: int, kind: str) -> None:
    rng, dialect = random.Random(seed), DIALECTS[kind]
    one, other, memory = Forest(chat), Forest(chat), Memory()
    histories = [[said(dialect, kind, FILL)]]
    for turn in range(8):
        history = rng.choice(histories)
        if rng.random() < 0.2:  # an edit somewhere
            history = [*history[:-1], said(dialect, kind, f"edited {turn}")]
        more = {"tools": []} if rng.random() < 0.2 else {}
        if kind != "chat" and rng.random() < 0.3:
            more |= {"system" if kind == "messages" else "instructions": rng.choice(["s", "t"])}
        body = body_of(kind, history, rng, **more)
        plan, _ = plan_by(one, memory, dialect, body, f"c{turn}")
        whole = other.plan(f"c{turn}", dialect.read(body).conversation)
        assert plan.prompt_ids().tolist() == whole.prompt_ids().tolist()
        assert (plan.start, plan.agent, plan.attempt, plan.asked) == (
            whole.start,
            whole.agent,
            whole.attempt,
            whole.asked,
        )
        words = rng.choice(["ok", "so", f"turn {turn}"])
        for forest, planned in ((one, plan), (other, whole)):
            completion = spelled(chat, words)
            forest.finished(f"c{turn}", planned, completion, chat.parse(completion.ids, f"c{turn}").spoken, "stop")
        histories.append([*history, heard(kind, words), said(dialect, kind, f"on {turn}")])


@pytest.mark.parametrize("kind", sorted(DIALECTS))
def test_a_growing_history_is_read_in_part(chat: ChatModel, kind: str) -> None:
    forest, memory, dialect = Forest(chat), Memory(), DIALECTS[kind]
    history, shorts = [said(dialect, kind, FILL)], []
    for turn in range(4):
        body = json.dumps({"model": "m", dialect.field: history}, separators=(",", ":")).encode()
        plan, short = plan_by(forest, memory, dialect, body, f"c{turn}")
        shorts.append(short)
        completion = spelled(chat, "ok")
        forest.finished(f"c{turn}", plan, completion, chat.parse(completion.ids, f"c{turn}").spoken, "stop")
        history += [heard(kind, "ok"), said(dialect, kind, f"on {turn}")]
    assert shorts == [False, True, True, True]


def test_a_second_list_of_the_same_name_is_not_taken_for_a_continuation(chat: ChatModel) -> None:
    memory, dialect = Memory(), DIALECTS["chat"]
    history = [said(dialect, "chat", FILL)]
    body = json.dumps({"messages": history}).encode()
    memory.told(memory.read(dialect, body), b"start")
    twice = body[:-2] + b', {"role":"user","content":"new"}], "messages": [{"role":"user","content":"alone"}]}'
    asked = memory.read(dialect, twice)
    assert asked.since is None and [m.text for m in asked.request.conversation.messages] == ["alone"]


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (b'{"messages":[1,2]}', b"[1,2"),
        (b'{"a":{"messages":[0]}, "messages" : [ 1 , 2 ] , "b":1}', b"[ 1 , 2"),
        (b'{"messages":[]}', None),
        (b'{"messages":"x"}', None),
        (b'{"messages":[1', None),
        (b"[1]", None),
        (b"", None),
    ],
)
def test_the_list_is_found_where_it_is(body: bytes, found: bytes | None) -> None:
    place = place_of(body, "messages")
    assert (body[place.begin : place.end] if place else None) == found
