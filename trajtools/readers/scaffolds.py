"""Trajectory files of agent scaffolds: SWE-agent, mini-swe-agent, OpenHands. Text level: they keep no token ids."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gyre_base.runblocks import Blocks
from gyre_base.runfile import Agent, Call, ExecEnd, ExecStart, Note, Record, Reward
from trajtools.readers.common import Block, Talk, block, chat, flat, message_blocks, seconds, usage_of

# ---- SWE-agent -----------------------------------------------------------------------------------------------------


def is_sweagent(whole: Any) -> bool:
    return isinstance(whole, Mapping) and isinstance(whole.get("trajectory"), list) and "history" in whole


def sweagent_records(whole: Mapping[str, Any], name: str, blocks: Blocks) -> Iterator[Record]:
    """Newer files carry the whole query of every step; older ones one history."""
    execution = Path(name).name.removesuffix(".traj")
    steps = [s for s in whole["trajectory"] if isinstance(s, Mapping)]
    yield ExecStart(exec=execution, task=execution)
    calls: list[Call]
    if steps and all(isinstance(s.get("query"), list) for s in steps):
        calls = list(_queries(steps, execution, blocks))
    else:
        calls = list(_histories(whole["history"] or (), execution, blocks))
    yield from calls
    info = whole.get("info") if isinstance(whole.get("info"), Mapping) else {}
    status = str(info.get("exit_status") or "recorded") if info else "recorded"
    yield ExecEnd(exec=execution, status=status, calls=len(calls))
    if info and info.get("model_stats"):
        yield Note(exec=execution, text="model stats", extra={"model_stats": info["model_stats"]})


def _queries(steps: Sequence[Mapping[str, Any]], execution: str, blocks: Blocks) -> Iterator[Call]:
    talk = Talk(execution, blocks, prefix="step-")
    for step in steps:
        talk.forget()
        for message in step["query"]:
            talk.hear(message_blocks(message))
        said = {"role": "assistant", "content": step.get("response"), "tool_calls": step.get("tool_calls")}
        yield talk.answer(message_blocks(said), keep=False)


def _histories(history: Sequence[Any], execution: str, blocks: Blocks) -> Iterator[Call]:
    """One history per agent name; the first is the main one."""
    names = list(dict.fromkeys(str(m.get("agent") or "primary") for m in history if isinstance(m, Mapping)))
    for i, name in enumerate(names):
        agent = Agent(id=name, role="main" if i == 0 else "sub-agent")
        talk = Talk(execution, blocks, agent, prefix=f"{name}-")
        yield from chat(
            talk, [m for m in history if isinstance(m, Mapping) and str(m.get("agent") or "primary") == name]
        )


# ---- mini-swe-agent ------------------------------------------------------------------------------------------------


def is_mini(whole: Any) -> bool:
    """A bare list of messages, or {info, messages, trajectory_format}."""
    if isinstance(whole, Mapping):
        return isinstance(whole.get("messages"), list) and ("trajectory_format" in whole or "info" in whole)
    return isinstance(whole, list) and bool(whole) and all(isinstance(m, Mapping) and "role" in m for m in whole)


def mini_records(whole: Any, name: str, blocks: Blocks) -> Iterator[Record]:
    execution = Path(name).name.removesuffix(".json").removesuffix(".traj")
    messages = whole["messages"] if isinstance(whole, Mapping) else whole
    info = whole.get("info", {}) if isinstance(whole, Mapping) else {}
    yield ExecStart(exec=execution, task=execution)
    calls = list(chat(Talk(execution, blocks, prefix="turn-"), messages, _mini_about))
    yield from calls
    status = str(info.get("exit_status") or "recorded") if isinstance(info, Mapping) else "recorded"
    yield ExecEnd(exec=execution, status=status, calls=len(calls))


def _mini_about(message: Mapping[str, Any]) -> dict[str, Any]:
    extra = message.get("extra")
    response = extra.get("response") if isinstance(extra, Mapping) else None
    if not isinstance(response, Mapping):
        return {}
    at = seconds(extra.get("timestamp")) if isinstance(extra, Mapping) else None
    return {"t1": at, "extra": {"usage": usage_of(response.get("usage")), "model": response.get("model")}}


# ---- OpenHands -----------------------------------------------------------------------------------------------------


def openhands_history(obj: Any) -> list[Any] | None:
    """The events of one run: a bare list, or the `history` of a line of an evaluation; pairs are flattened."""
    history = obj.get("history") if isinstance(obj, Mapping) else obj
    if not isinstance(history, list) or not history:
        return None
    events = flat(history)
    fits = all(isinstance(e, Mapping) and ("action" in e or "observation" in e) for e in events)
    return events if fits else None


def openhands_records(objects: Sequence[Any], name: str, blocks: Blocks) -> Iterator[Record]:
    for number, obj in enumerate(objects):
        events = openhands_history(obj)
        if events is None:
            yield Note(text=f"line {number} is no run", extra={"left_out": {"lines that are no run": 1}})
            continue
        about = obj if isinstance(obj, Mapping) else {}
        execution = str(about.get("instance_id") or f"{Path(name).stem}-{number}")
        yield ExecStart(exec=execution, task=execution)
        calls = list(_openhands_calls(events, execution, blocks))
        yield from calls
        yield _openhands_reward(about, execution)
        yield ExecEnd(exec=execution, status=str(about.get("error") or "recorded"), calls=len(calls))


def _openhands_reward(about: Mapping[str, Any], execution: str) -> Reward:
    """Only a test's verdict is a score; what a model says of its own success is not."""
    result = about.get("test_result")
    report = result.get("report", result) if isinstance(result, Mapping) else about.get("report")
    resolved = report.get("resolved") if isinstance(report, Mapping) else None
    if isinstance(resolved, bool):
        return Reward(exec=execution, status="scored", value=float(resolved))
    return Reward(exec=execution, status="unscored")


def _openhands_calls(events: Sequence[Mapping[str, Any]], execution: str, blocks: Blocks) -> Iterator[Call]:
    """Actions of one model response are one answer; observations and the user's words are context."""
    talk = Talk(execution, blocks, prefix="action-")
    answer: list[Block] = []
    times: list[float] = []
    about: dict[str, Any] = {}
    response: Any = None
    for number, event in enumerate(events):
        if "observation" in event and not _by_agent(event, number):
            if answer and not _waits(events, number, response):
                yield talk.answer(answer, t1=times[-1] if times else None, extra=about)
                answer, times = [], []
            talk.hear(_event_blocks(event, "tool"))
        elif _by_agent(event, number):
            of = _response(event)
            if answer and (of is None or of.get("id") != response):
                yield talk.answer(answer, t1=times[-1] if times else None, extra=about)
                answer, times = [], []
            response = of.get("id") if of else None
            about = {"usage": usage_of(of.get("usage")), "model": of.get("model")} if of else {}
            answer.extend(_event_blocks(event, "assistant"))
            times.extend(t for t in [seconds(event.get("timestamp"))] if t is not None)
        else:
            talk.hear(_event_blocks(event, "user"))
    if answer:
        yield talk.answer(answer, t1=times[-1] if times else None, extra=about)


def _by_agent(event: Mapping[str, Any], number: int) -> bool:
    """An evaluation's history names no sources: there the first message is the task, every other action the agent's."""
    if not event.get("action") or event["action"] in ("system", "recall", "change_agent_state", "null"):
        return False
    source = event.get("source")
    return source == "agent" if source else not (number == 0 and event["action"] == "message")


def _waits(events: Sequence[Mapping[str, Any]], number: int, response: Any) -> bool:
    """Whether more actions of the same response follow an observation (they were issued together)."""
    later = next((e for e in events[number + 1 :] if e.get("action")), None)
    of = _response(later) if later is not None else None
    return response is not None and of is not None and of.get("id") == response


def _response(event: Mapping[str, Any]) -> Mapping[str, Any] | None:
    metadata = event.get("tool_call_metadata")
    found = metadata.get("model_response") if isinstance(metadata, Mapping) else None
    return found if isinstance(found, Mapping) else None


def _event_blocks(event: Mapping[str, Any], role: str) -> list[Block]:
    args = event.get("args") if isinstance(event.get("args"), Mapping) else event
    assert isinstance(args, Mapping)
    if event.get("observation"):
        return [block("tool", "tool_result", event.get("content", ""), event["observation"])]
    out = [block(role, "text", args["thought"])] if args.get("thought") else []
    if event.get("action") in ("message", "system"):
        return [*out, block("system" if event["action"] == "system" else role, "text", args.get("content", ""))]
    skip = ("thought", "action", "source", "id", "timestamp", "cause", "tool_call_metadata", "llm_metrics", "message")
    given = {k: v for k, v in args.items() if k not in skip and v not in (None, "", False)}
    return [*out, block(role, "tool_call", given, event.get("action"))]
