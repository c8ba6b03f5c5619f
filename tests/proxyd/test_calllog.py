"""What was answered is on disk; a full disk holds calls; the next life has the same trees."""

from __future__ import annotations

import asyncio
import errno
import os
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gyre_base.rundir import RunDir
from gyre_base.runfile import CallWriter, Note, RunHeader, RunReader, Span, framed, record_frame
from gyre_base.runframes import MAGIC
from proxyd import calllog
from proxyd.capture import Plan
from proxyd.chat import ChatModel, Piece
from proxyd.conversation import Conversation, Message
from proxyd.daemon import left_open
from proxyd.labels import Relabel
from proxyd.records import Facts, Progress, call_record, relabel_note, restore
from tests.proxyd.talk import Talk, tool
from tests.proxyd.test_capture import SYSTEM, TASK, Execution, echo, random_answer, random_new, twins
from tests.proxyd.test_shapes import claude, heard, results, text, user

HEADER = RunHeader(run="r", writer="proxyd")


def texts(path: Path) -> list[str]:
    return [located.record.text for located in RunReader(path).records() if isinstance(located.record, Note)]


async def test_a_record_is_on_disk_when_its_future_is_done(tmp_path: Path) -> None:
    log = calllog.CallLog(tmp_path / "proxyd-1.gtr", HEADER, durable=True)
    await asyncio.gather(*(log.note(Note(text=str(n))) for n in range(100)))
    assert texts(log.path) == [str(n) for n in range(100)], "in order, all of them"
    log.close()


async def test_one_bad_record_fails_alone(tmp_path: Path) -> None:
    log = calllog.CallLog(tmp_path / "proxyd-1.gtr", HEADER, durable=False)
    bad = log.append(lambda: [][0])
    good = log.note(Note(text="good"))
    with pytest.raises(IndexError):
        await bad
    await good
    assert texts(log.path) == ["good"]
    log.close()


async def test_a_full_disk_holds_answers_and_leaves_no_half_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calllog, "RETRY_S", 0.02)
    log = calllog.CallLog(tmp_path / "proxyd-1.gtr", HEADER, durable=True)
    write, full = os.write, [True]

    def short(descriptor: int, data: Any) -> int:
        if full[0] and descriptor == log._descriptor:
            if len(data) > 8:
                return write(descriptor, bytes(data)[:8])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", short)
    future = log.note(Note(text="kept"))
    await asyncio.sleep(0.15)
    assert not future.done() and log.trouble == "No space left on device"
    full[0] = False
    await asyncio.wait_for(future, 5.0)
    assert texts(log.path) == ["kept"] and not log.trouble
    log.close()


async def test_a_reader_that_follows_the_log_meets_every_record_once_and_no_damage(tmp_path: Path) -> None:
    log = calllog.CallLog(tmp_path / "proxyd-1.gtr", HEADER, durable=False)
    reader, got = RunReader(log.path), list[str]()
    rng = random.Random(0)

    def follow() -> None:
        got.extend(located.record.text for located in reader.records() if isinstance(located.record, Note))

    written: list[asyncio.Future[None]] = []
    for number in range(400):
        written.append(log.note(Note(text=f"{number} " + "x" * rng.choice([1, 9_000, 300_000]))))
        if number % 7 == 0:
            await asyncio.to_thread(follow)
    await asyncio.gather(*written)
    follow()
    assert [int(text.partition(" ")[0]) for text in got] == list(range(400))
    assert not reader.report.bad and reader.report.torn is None
    log.close()


def test_a_torn_and_a_damaged_record_of_an_earlier_life_cost_the_next_one_these_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = RunDir.create(tmp_path)
    for life in (1, 2, 10):
        frames = [framed(Note(text=f"{life}.{n}")) for n in range(4)]
        frames[1] = frames[1][:-1] + b"?"
        run.path("calls", f"proxyd-0-{life}.gtr").write_bytes(MAGIC + b"".join(frames)[:-1])
    run.path("calls", "proxyd-1-1.gtr").write_bytes(MAGIC + framed(Note(text="another shard's")))
    run.path("calls", "proxyd-0-11.gtr").write_bytes(MAGIC[:5])
    found = [record.text for record in calllog.earlier_records(run, "proxyd-0") if isinstance(record, Note)]
    assert found == [f"{life}.{n}" for life in (1, 2, 10) for n in (0, 2)]
    assert sum("1 bad frames, torn (" in said for said in caplog.messages) == 3


# ---- the next life -----------------------------------------------------------------------------------------------


def write_life(path: Path, execution: str, asked: list[tuple[str, Plan, Piece]], relabels: list[Relabel]) -> None:
    writer = CallWriter(form=record_frame, keyframe_calls=3)
    with path.open("wb") as file:
        file.write(MAGIC + framed(HEADER))
        for seq, (call, plan, completion) in enumerate(asked):
            facts = Facts(execution, call, seq, 1.0, 2.0, "stop", 1.0, 0.5, 0, 0)
            count = len(completion.ids)
            progress = Progress(list(completion.ids), [-0.5] * count, [Span("0.0", 0, count)])
            base = plan.base.call if plan.base is not None else None
            file.write(writer.call(call_record(facts, plan, Piece.of(progress.ids), progress), base, plan.keep))
        for relabel in relabels:
            file.write(framed(relabel_note(execution, relabel)))


@given(seed=st.integers(0, 10**9))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_next_life_plans_every_request_as_this_one_does(chat: ChatModel, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    run = Execution(chat)
    node, plan = run.turn([SYSTEM, TASK], random_answer(rng))
    asked = [(node.call, plan, node.completion)]
    known = [([SYSTEM, TASK], node)]
    relabels: list[Relabel] = []
    for _ in range(6):
        history, base = rng.choice(known)
        request = [*history, echo(base), *random_new(base, rng)]
        if rng.random() < 0.15:
            request = [SYSTEM, Message("user", TASK.text + base.spoken.text)]
        node, plan = run.turn(request, random_answer(rng))
        relabels += plan.relabels
        asked.append((node.call, plan, node.completion))
        known.append((request, node))
    directory = RunDir.create(tmp_path / str(seed))
    write_life(directory.path("calls", "proxyd-0-1.gtr"), "e", asked, relabels)
    again = restore(calllog.earlier_records(directory, "proxyd-0"), chat, {"e"})["e"]
    for history, base in known:
        request = Conversation((*history, echo(base), *random_new(base, rng)))
        here, there = run.forest.plan("new", request), again.plan("new", request)
        assert there.prompt_ids().tolist() == here.prompt_ids().tolist()
        assert there.base is not None and here.base is not None and there.base.call == here.base.call
        assert here.base is base or twins(here.base, base)
        assert (there.agent, there.attempt) == (here.agent, here.attempt)
        assert again.calls[base.call].spoken == base.spoken
        assert again.calls[base.call].tokens == base.tokens
    fresh = Conversation((Message("system", "other"), Message("user", "other")))
    assert again.plan("z", fresh).agent.role == run.forest.plan("z", fresh).agent.role


def test_only_open_executions_and_drains_that_were_obeyed_come_back(tmp_path: Path) -> None:
    journal = tmp_path / "proxyd-0.jsonl"
    lines = [
        '{"at":1,"event":{"tag":"execution.open","execution":"a","purpose":"train","temperature":1.0},"commands":[]}',
        '{"at":1,"event":{"tag":"execution.open","execution":"b","purpose":"eval-greedy","temperature":0.0},"commands":[]}',
        '{"at":2,"event":{"tag":"proxyd.call","call":"x"},"commands":[]}',
        '{"at":3,"event":{"tag":"execution.close","execution":"a"},"commands":[]}',
    ]
    for verb, cell, answer in (("drain", "c1", "done"), ("drain", "c2", "done"), ("drain", "zz", "refused")):
        lines.append(order_line(verb, cell, answer))
    lines.append(order_line("undrain", "c2", "done"))
    journal.write_text("\n".join(lines) + "\n")
    found, held = left_open(journal)
    assert list(found) == ["b"] and found["b"].temperature == 0.0
    assert held == {"c1"}
    assert left_open(tmp_path / "none") == ({}, set())


def order_line(verb: str, cell: str, answer: str) -> str:
    order = f'{{"tag":"order","verb":"{verb}","argument":"{cell}","options":{{}}}}'
    return f'{{"at":4,"event":{order},"commands":[{{"peer":"asker","tag":"{answer}"}}]}}'


def test_names_from_headers_purposes_and_thinking_come_back(thinker: ChatModel) -> None:
    talk = Talk(thinker, "messages")
    sub = {"x-claude-code-agent-id": "a1"}
    main = talk.say(claude([user(text("task"))]), "<think>\nso\n</think>\n\n" + tool("Agent", prompt="look"))
    child = talk.say(claude([user(text("look"))], system="sub"), "<think>\nhm\n</think>\n\nfound", sub)
    asked = [user(text("task")), heard(main), user(*results(main), text("sum up"))]
    summary = talk.say(claude(asked), "all done", {"x-claude-code-request-class": "compaction"})
    records = []
    for seq, (said, named) in enumerate(((main, ""), (child, "a1"), (summary, ""))):
        ids = said.node.completion.ids.tolist()
        progress = Progress(ids, [-0.5] * len(ids), [Span("0.0", 0, len(ids))])
        facts = Facts("e", said.node.call, seq, 1.0, 2.0, "stop", 1.0, 0.0, 0, 0, named)
        records.append(call_record(facts, said.plan, Piece.of(progress.ids), progress))
    assert [r.label for r in records] == ["main", "sub-agent", "main-summary"]
    talk.forest = restore(records, thinker, {"e"})["e"]
    more = talk.say(claude([user(text("look")), heard(child), user(text("sure?"))], system="sub"), "ok", sub)
    assert more.plan.base is not None and more.plan.base.call == child.node.call and more.plan.agent == child.plan.agent
    other = talk.say(claude([user(text("unheard of"))], system="sub"), "ok", sub)
    assert other.plan.agent == child.plan.agent, "the header names an agent of the earlier life"
    after = talk.say(claude([user(text("task; so far: all done"))]), "ok")
    assert after.plan.agent.id == "main" and not talk.relabelled
