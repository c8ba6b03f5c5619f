"""Executions and groups as the scheduler acts on them: dispatched, given to executors, ended, tried again, closed.

Functions of the scheduler's state; the books are ledger.py's.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cellctl import alarms, policies
from gyre_base import messages as m
from gyre_base.daemon import Answer, Send, WakeAt
from gyre_base.shards import proxyd_peer, shard_of
from gyre_base.vocabulary import Outcome, Purpose

if TYPE_CHECKING:
    from cellctl.core import Scheduler


FAILURE_LENGTH = 200  # characters of a failed execution's words that an alarm repeats
ON_ITS_WAY_S = 10.0  # an order that an executor does not know after so long was lost


@dataclass
class Executor:
    """An executor process as the scheduler sees it."""

    name: str
    slots: int
    held: int = 0


def proxyd_of(s: Scheduler, execution: str) -> str:
    """The peer that an execution belongs to."""
    return proxyd_peer(shard_of(execution, s.config.proxyd.shards))


def opening(s: Scheduler, execution: str, purpose: Purpose) -> m.OpenExecution:
    temperature = 0.0 if purpose is Purpose.EVAL_GREEDY else s.config.rollout.temperature
    paused = bool(s.ledger.in_flight[execution].paused)
    return m.OpenExecution(execution=execution, purpose=purpose, temperature=temperature, paused=paused)


def in_flight(s: Scheduler) -> list[policies.ExecutionView]:
    """What a policy may pause, oldest first."""
    return [
        policies.ExecutionView(
            name=e.id,
            task=s.ledger.groups[e.group].task,
            group=e.group,
            purpose=e.purpose,
            dispatched_at=e.dispatched_at,
            paused=bool(e.paused),
        )
        for e in s.ledger.in_flight.values()
        if not e.calls_no_more
    ]


def pause(s: Scheduler, order: policies.Pause) -> bool:
    """Hold an execution's calls or let them go on; the router has them, nothing of it is lost. False if it changes
    nothing.
    """
    changed = s.ledger.pause(order.execution, order.why if order.paused else "")
    if changed:
        record = s.ledger.in_flight[order.execution]
        s.say(Send(proxyd_of(s, record.id), opening(s, record.id, record.purpose)))
    return changed


def executor_joined(s: Scheduler, event: m.Hello, now: float, *, reborn: bool) -> None:
    """Both sides' lists are made one: what it lost is tried again, what it should not have is cancelled.

    An order may still be on its way to an executor that lives on: what was given to it just now is not lost.
    """
    left_with_us = event.name not in s.executors  # both were ended, as by a requeue: no execution is to blame
    s.executors.setdefault(event.name, Executor(event.name, event.slots)).slots = event.slots
    for execution in list(s.ledger.held_by(event.name)):
        if execution.id not in event.holds and (reborn or now - execution.assigned_at > ON_ITS_WAY_S):
            end_attempt(s, execution.id, Outcome.INFRA_FAILED, None, 0.0, now, excused=left_with_us)
    for held in event.holds:
        if held not in s.ledger.in_flight:
            s.say(Send(f"executor:{event.name}", m.CancelExecution(execution=held, why="superseded")))
    count_held(s)


def executor_lost(s: Scheduler, name: str, now: float, *, left: bool) -> None:
    """What it held is dispatched again, within the retry budget unless it `left` because it was told to."""
    s.executors.pop(name, None)
    for execution in list(s.ledger.held_by(name)):
        end_attempt(s, execution.id, Outcome.INFRA_FAILED, None, 0.0, now, excused=left)


def dispatch(s: Scheduler, tasks: list[str], size: int, purpose: Purpose, now: float, *, spread_s: float = 0.0) -> None:
    """Open groups; with `spread_s` they go out one after the other over that time, in the order given."""
    for number, task in enumerate(tasks):
        at = now + spread_s * number / len(tasks)
        for execution in s.ledger.open_group(task, size, purpose, str(s.version), now):
            s.say(Send(proxyd_of(s, execution.id), opening(s, execution.id, purpose)))
            if at > now:
                heapq.heappush(s.staggered, (at, execution.id))
            else:
                s.waiting.append(execution.id)
    if s.staggered:
        s.say(WakeAt(at=s.staggered[0][0]))


def release(s: Scheduler, now: float) -> None:
    """Staggered executions whose time has come go to an executor."""
    due = False
    while s.staggered and s.staggered[0][0] <= now:
        s.waiting.append(heapq.heappop(s.staggered)[1])
        due = True
    if due and s.staggered:
        s.say(WakeAt(at=s.staggered[0][0]))


def assign(s: Scheduler, now: float) -> None:
    """Give waiting executions to the executor with the fewest. Executors queue beyond their own concurrency."""
    while s.waiting and s.executors:
        execution = s.ledger.in_flight.get(s.waiting.popleft())
        if execution is None:
            continue
        executor = min(s.executors.values(), key=lambda e: (e.held / max(1, e.slots), e.name))
        executor.held += 1
        execution.executor, execution.assigned_at = executor.name, now
        s.say(Send(f"executor:{executor.name}", order_of(s, execution.id)))


def order_of(s: Scheduler, execution: str) -> m.ExecutionOrder:
    record = s.ledger.in_flight[execution]
    return m.ExecutionOrder(
        execution=execution,
        group=record.group,
        task={"id": s.ledger.groups[record.group].task},
        attempt=record.attempt,
        purpose=record.purpose,
        limit_s=s.config.tasks.harness_limit_s,
    )


def ended(s: Scheduler, event: m.ExecutionEnded, _now: float) -> None:
    s.ledger.end_calls(event.execution)


def finished(s: Scheduler, event: m.ExecutionFinished, now: float) -> None:
    record = s.ledger.in_flight.get(event.execution)
    if record is not None:
        executor = record.executor
        s.totals["harness_errors"] += event.harness_errors
        s.totals["calls"] += event.calls
        if not event.outcome.counts:
            first = next(iter(event.error.strip().splitlines()), "") or "no word of why"
            s.last_failure = f"{event.execution}: {event.outcome.value}: {first[:FAILURE_LENGTH]}"
        end_attempt(s, event.execution, event.outcome, event.score, event.wall_s, now)
        s.say(Send(proxyd_of(s, event.execution), m.CloseExecution(execution=event.execution)))
        if executor in s.executors:
            s.executors[executor].held -= 1
        s.say(Send(f"executor:{executor}", m.ExecutionNoted(execution=event.execution)))
    else:  # a repeat, or an attempt that was replaced: it may be forgotten there
        s.say(Send("executor:*", m.ExecutionNoted(execution=event.execution)))


def end_attempt(
    s: Scheduler, name: str, outcome: Outcome, score: float | None, wall_s: float, now: float, *, excused: bool = False
) -> None:
    record = s.ledger.in_flight[name]
    if outcome.counts:
        s.forecast.learn(s.ledger.groups[record.group].task, wall_s)
    again = s.ledger.finish(name, outcome, score, wall_s, now, excused=excused)
    if again is not None:
        s.say(Send(proxyd_of(s, name), m.CloseExecution(execution=name)))
        s.say(Send(proxyd_of(s, again.id), opening(s, again.id, again.purpose)))
        s.waiting.append(again.id)
    elif s.ledger.closes(record.group):
        close_group(s, record.group, now)


def close_group(s: Scheduler, name: str, now: float) -> None:
    group = s.ledger.groups[name]
    final = s.ledger.close(name)
    scores = [e.score for e in final if e.outcome and e.outcome.counts and e.score is not None]
    row = {"group": name, "task": group.task, "scores": scores, "version": group.version}
    if group.purpose is not Purpose.TRAIN:
        s.evals.setdefault(f"{s.phase}:{group.purpose.value}", []).append(row)
        del s.ledger.groups[name]
        return
    s.group_scores.append(row)
    s.promises.keep(f"group:{name}", Send("trajd:trajd", closing(s, name, final)), now)


def closing(s: Scheduler, name: str, final: list[Any]) -> m.GroupClosed:
    group = s.ledger.groups[name]
    members = tuple(
        m.FinalExecution(execution=e.id, outcome=e.outcome or Outcome.UNSCORED, score=e.score) for e in final
    )
    return m.GroupClosed(
        group=name,
        task=group.task,
        serial=group.serial,
        dispatched_version=group.version,
        executions=members,
        seconds=max(e.wall_s for e in final),
        closing=s.ledger.closed_groups,
        to_come=s.ledger.open_by_purpose[Purpose.TRAIN],
    )


def packed(s: Scheduler, event: m.GroupPacked, now: float) -> None:
    group = s.ledger.groups.get(event.group)
    s.promises.answered(f"group:{event.group}")
    s.say(Answer(m.Done()))
    if group is None or group.packed:
        return
    s.ledger.pack(event.group, event.enough)
    if event.enough:
        s.groups_packed += 1
        s.barren_groups = 0
        s.alarms.pop(alarms.GROUPS, None)
        return
    s.barren_groups += 1
    alarms.barren(s, now)
    if not s.policy.replaces:
        s.owed_groups += 1


def count_held(s: Scheduler) -> None:
    for executor in s.executors.values():
        executor.held = sum(1 for _ in s.ledger.held_by(executor.name))
