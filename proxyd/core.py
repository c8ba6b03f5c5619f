"""Routing: which engine serves which call, and what happens when an engine leaves or fails. One `handle(event, now)`.

Owns the engine table, the sticky map execution -> cell, and every call between arrival and answer. Knows token counts,
never tokens. Invariants (`check`): a call is in exactly one state; a cell whose drain was acknowledged runs nothing of
ours until a newer table lets it serve again; every call ends in exactly one Finish or Refuse.
"""

from __future__ import annotations

from typing import Any

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
from proxyd.balance import Balance, share
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
from proxyd.state import Call, Drain, Opened, State

UNKNOWN_HOLD_S = 10.0  # a call may overtake its OpenExecution by this much
ABORT_GRACE_S = 5.0  # an engine that has not ended an aborted call by then is cut off
BACKOFF_S = (0.1, 0.3, 1.0, 3.0, 5.0)  # pauses of a call, and of an engine, after failures; the last one repeats
PROMPT_RETRIES = 3  # engines that may fail under a call before it, too, has to pause
REFUSALS = 4  # 4xx from engines after which a call is given up: the request itself must be at fault


class Unexpected(RuntimeError):
    """An event nobody expects is a bug upstream, not a log line."""


class Router:
    """State of one shard. `cap`: calls in flight per engine, of all shards together; 0 for no bound.

    Public attributes are read by views; only `handle` changes them.
    """

    def __init__(self, cap: int = 0, shard: int = 0, shards: int = 1) -> None:
        self.shard = shard
        self.balance = Balance(share(cap, shard, shards), shards)
        self.life = 0  # in every rid: an engine may still hold what a killed life sent
        self.table_number = -1
        self.engines: dict[str, Engine] = {}
        self.drains: dict[str, Drain] = {}
        self.held_by_operator: set[str] = set()
        self.executions: dict[str, Opened] = {}
        self.closed: dict[str, None] = {}  # newest last, bounded
        self.calls: dict[str, Call] = {}
        self._waiting: dict[str, Call] = {}  # those of `calls` that are held or aborting, oldest first
        self.on_cell: dict[str, set[str]] = {}  # cell -> calls running or aborting there
        self.suspect: dict[str, tuple[int, float]] = {}  # engine url -> (failures in a row, not before)
        self.finished = 0
        self.moved = 0
        self._wake: float | None = None
        self._out: list[Any] = []

    # ---- entry ------------------------------------------------------------------------------------------------------

    def handle(self, event: Any, now: float) -> list[Any]:
        self._out = []
        match event:
            case CallArrived():
                self._arrived(event, now)
            case SubmissionEnded():
                self._ended(event, now)
            case OpenExecution():
                self._open(event, now)
            case CloseExecution(execution=execution):
                self._close(execution, now)
            case EngineTable():
                self._table(event, now)
            case DrainCell():
                self._drain(event, now)
            case CallDropped(call=call):
                self._unwant(self.calls.get(call), "unavailable", "nobody waits for it any more", now)
            case Tick():
                self._wake = None
                self._due(now)
            case EngineLoad(url=url, work=work):
                self._loaded(url, work, now)
            case OperatorOrder():
                self._obey(event, now)
            case Restarted(life=life, held=held):
                self.life, self.held_by_operator = life, set(held)
            case _:
                raise Unexpected(f"proxyd has no use for {event!r}")
        self._plan_wake(now)
        return self._out

    # ---- calls ------------------------------------------------------------------------------------------------------

    def _arrived(self, event: CallArrived, now: float) -> None:
        if event.call in self.calls:
            raise Unexpected(f"call {event.call} arrived twice; its story: {self.calls[event.call].story}")
        call = Call(event.call, event.execution, event.prompt_tokens, event.budget, now, held_since=now)
        call.sampled = event.sampled
        if event.execution in self.closed:
            self._out.append(Refuse(call=call.id, kind="forbidden", why=f"execution {event.execution} is closed"))
            return
        self.calls[call.id] = self._waiting[call.id] = call
        self._route(call, now)

    def _route(self, call: Call, now: float) -> None:
        """Send a held call on its way if an engine may have it."""
        opened = self.executions.get(call.execution)
        if opened is None or opened.paused or now < call.not_before:
            return
        engine = self._choose(call, opened, now)
        if engine is None:
            return
        if call.number:  # sent before: everything that was on a cell comes at once, and prompts are long
            call.not_before = self.balance.hold_until(engine.cell, call.prompt_tokens + call.sampled, now)
            if call.not_before > now:
                return
        call.number += 1
        del self._waiting[call.id]
        call.state, call.cell, call.url = State.RUNNING, engine.cell, engine.url
        call.waited_s += now - call.held_since
        self.on_cell.setdefault(engine.cell, set()).add(call.id)
        call.note(now, f"submission {call.number} to {engine.cell} with {call.sampled} tokens")
        self._out.append(
            Submit(
                call=call.id,
                number=call.number,
                rid=call.rid(self.shard, self.life),
                cell=engine.cell,
                url=engine.url,
                version=engine.version,
                sampled=call.sampled,
                temperature=opened.temperature,
            )
        )

    def _ended(self, event: SubmissionEnded, now: float) -> None:
        call = self.calls.get(event.call)
        if call is None or call.number != event.number or call.state is State.HELD:
            raise Unexpected(
                f"{event!r} is of no submission that runs; story: {call.story if call else 'unknown call'}"
            )
        draining = self._pending_drain(call.cell)
        was_aborting, cell, url = call.state is State.ABORTING, call.cell, call.url
        self.on_cell[cell].discard(call.id)
        call.sampled += event.sampled
        call.note(now, f"{event.how} at {cell} with {call.sampled} tokens {event.why}".rstrip())
        if call.unwanted:
            self._forget(call)
        elif event.how == "finished":
            self._finish(call, event.finish)
        else:
            self._go_on(call, event, now)
            if draining is not None and was_aborting:
                draining.moved += 1
                draining.moved_mid += event.sampled > 0
        self._engine_word(event, cell, url, now)
        self._acknowledge(cell, now)
        if call.id in self.calls and not call.unwanted:
            self._route(call, now)
        if self.balance.cap and self._waiting:
            self._route_all(now)

    def _forget(self, call: Call) -> None:
        del self.calls[call.id]
        self._waiting.pop(call.id, None)

    def _finish(self, call: Call, finish: str) -> None:
        self._forget(call)
        self.finished += 1
        self.suspect.pop(call.url, None)
        self._out.append(Finish(call=call.id, finish=finish, waited_s=round(call.waited_s, 6), moved=call.moved))

    def _go_on(self, call: Call, event: SubmissionEnded, now: float) -> None:
        """Keep what was sampled and hold the call for another engine."""
        was_aborting = call.state is State.ABORTING
        if call.sampled >= call.budget:
            self._finish(call, "length")
            return
        call.state, call.cell = State.HELD, ""
        self._waiting[call.id] = call
        if not was_aborting:
            call.held_since = now
        if event.how == "refused":
            call.refusals += 1
            if call.refusals >= REFUSALS:
                self._forget(call)
                story = "; ".join(call.story[-4:])
                self._out.append(Refuse(call=call.id, kind="internal", why=f"the engines refuse this request: {story}"))
                return
        if event.sampled > 0:
            call.failures = 0
        if was_aborting:
            call.moved += 1
            self.moved += 1
        else:
            call.failures += 1
            elsewhere = event.lost and call.failures <= PROMPT_RETRIES  # the engine pauses, not the call
            call.not_before = now if elsewhere else now + _backoff(call.failures)

    def _engine_word(self, event: SubmissionEnded, cell: str, url: str, now: float) -> None:
        """An engine at fault gets nothing for a while, and cellctl is told once per pause."""
        if not event.lost:
            return
        failures, until = self.suspect.get(url, (0, 0.0))
        if now < until:
            return
        self.suspect[url] = (failures + 1, now + _backoff(failures + 1))
        self._out.append(EngineLost(cell=cell, url=url, why=event.why))

    def _unwant(self, call: Call | None, kind: str, why: str, now: float) -> None:
        """Refuse a call; what runs of it is aborted and forgotten once the engine has let go."""
        if call is None or call.unwanted:
            return
        self._out.append(Refuse(call=call.id, kind=kind, why=why))
        if call.state is State.HELD:
            self._forget(call)
            return
        call.unwanted = True
        self._abort(call, now, why)

    def _abort(self, call: Call, now: float, why: str) -> None:
        if call.state is not State.RUNNING:
            return
        call.state, call.held_since, call.abort_by = State.ABORTING, now, now + ABORT_GRACE_S
        self._waiting[call.id] = call
        call.note(now, f"aborted: {why}")
        self._out.append(Abort(call=call.id, number=call.number, rid=call.rid(self.shard, self.life), url=call.url))

    # ---- executions -------------------------------------------------------------------------------------------------

    def _open(self, event: OpenExecution, now: float) -> None:
        """Also the word that an execution pauses or goes on: its calls stay open, without an engine."""
        known = self.executions.get(event.execution)
        if known is None:
            self.closed.pop(event.execution, None)
            self.executions[event.execution] = Opened(event.temperature, event.paused)
        else:
            goes_on = known.paused and not event.paused
            known.temperature, known.paused = event.temperature, event.paused
            if known.paused:
                for call in [c for c in self.calls.values() if c.execution == event.execution]:
                    self._abort(call, now, "its execution is paused")
            if not goes_on:
                return
        self._route_all(now)

    def _close(self, execution: str, now: float) -> None:
        opened = self.executions.pop(execution, None)
        if opened is not None:
            self.balance.moved_home(opened.home, "")
        self.closed[execution] = None
        while len(self.closed) > 100_000:
            del self.closed[next(iter(self.closed))]
        for call in [c for c in self.calls.values() if c.execution == execution]:
            self._unwant(call, "forbidden", f"execution {execution} is closed", now)

    # ---- engines ----------------------------------------------------------------------------------------------------

    def _table(self, event: EngineTable, now: float) -> None:
        if event.number <= self.table_number:
            return
        before = self.engines
        self.table_number = event.number
        self.engines = {e.cell: e for e in event.engines}
        for engine in event.engines:
            old = before.get(engine.cell)
            if old is None or (old.url, old.version) != (engine.url, engine.version):
                self.suspect.pop(engine.url, None)
        for cell in self.drains:
            self._end_block(cell)
        self._route_all(now)

    def _drain(self, event: DrainCell, now: float) -> None:
        drain = self.drains.get(event.cell)
        if drain is not None and event.epoch < drain.epoch:
            return
        if drain is None or event.epoch > drain.epoch:
            self.drains[event.cell] = Drain(event.epoch, self.table_number, now)
            for name in sorted(self.on_cell.get(event.cell, ())):
                self._abort(self.calls[name], now, f"cell {event.cell} leaves (epoch {event.epoch})")
        elif drain.answer is not None:
            if not self.on_cell.get(event.cell):  # else a repeat that came late: the cell serves again
                self._out.append(drain.answer)
            return
        self._acknowledge(event.cell, now)

    def _end_block(self, cell: str) -> None:
        """A drained cell serves again once a table newer than the order says so."""
        drain, engine = self.drains[cell], self.engines.get(cell)
        if drain.answer is not None and engine is not None and engine.serving and self.table_number > drain.table:
            drain.over = True

    def _pending_drain(self, cell: str) -> Drain | None:
        drain = self.drains.get(cell)
        return drain if drain is not None and drain.answer is None else None

    def _acknowledge(self, cell: str, now: float) -> None:
        drain = self._pending_drain(cell)
        if drain is None or self.on_cell.get(cell):
            return
        drain.answer = CellDrained(
            cell=cell,
            epoch=drain.epoch,
            moved=drain.moved,
            moved_mid_generation=drain.moved_mid,
            seconds=round(now - drain.since, 6),
            shard=self.shard,
        )
        self._out.append(drain.answer)
        self._end_block(cell)

    def _obey(self, order: OperatorOrder, now: float) -> None:
        """A person's drain blocks a cell until `undrain`; cellctl's own drains are another matter."""
        cell = order.argument
        if order.verb not in ("drain", "undrain") or cell not in self.engines:
            known = ", ".join(sorted(self.engines)) or "none"
            self._out.append(Answer(Refused(why=f"proxyd can drain and undrain a cell; cells: {known}")))
            return
        if order.verb == "undrain":
            self.held_by_operator.discard(cell)
            self._route_all(now)
        else:
            self.held_by_operator.add(cell)
            for name in sorted(self.on_cell.get(cell, ())):
                self._abort(self.calls[name], now, "drained by a person")
        self._out.append(Answer(Done(note=f"{len(self.on_cell.get(cell, ()))} calls still there")))

    def _blocked(self, cell: str) -> bool:
        drain = self.drains.get(cell)
        return cell in self.held_by_operator or (drain is not None and not drain.over)

    def usable(self, engine: Engine, now: float) -> bool:
        """Whether new calls may go there."""
        return engine.serving and not self._blocked(engine.cell) and self.suspect.get(engine.url, (0, 0.0))[1] <= now

    def _choose(self, call: Call, opened: Opened, now: float) -> Engine | None:
        usable = [e for e in self.engines.values() if self.usable(e, now)]
        leaving = bool(opened.home) and self._blocked(opened.home)
        engine, settles = self.balance.choose(call.execution, opened.home, usable, self.on_cell, now, leaving=leaving)
        if engine is not None and settles and engine.cell != opened.home:
            self.balance.moved_home(opened.home, engine.cell)
            opened.home = engine.cell
        return engine

    def _loaded(self, url: str, work: int, now: float) -> None:
        for engine in self.engines.values():
            if engine.url == url:
                self.balance.reported(url, work, len(self.on_cell.get(engine.cell, ())), now)

    # ---- time -------------------------------------------------------------------------------------------------------

    def _route_all(self, now: float) -> None:
        """Oldest first, until no engine has room."""
        for call in list(self._waiting.values()):
            if not self._room(now):
                return
            if call.state is State.HELD:
                self._route(call, now)

    def _room(self, now: float) -> bool:
        return any(self.usable(e, now) and not self.balance.full(e, self.on_cell) for e in self.engines.values())

    def _due(self, now: float) -> None:
        for call in list(self._waiting.values()):
            if call.state is State.ABORTING and now >= call.abort_by:
                call.abort_by = now + ABORT_GRACE_S
                self._out.append(Cut(call=call.id, number=call.number))
            elif call.state is State.HELD and self._overdue(call, now):
                self._unwant(call, "forbidden", f"execution {call.execution} is not open", now)
        self._route_all(now)

    def _overdue(self, call: Call, now: float) -> bool:
        return call.execution not in self.executions and now >= call.arrived + UNKNOWN_HOLD_S

    def _plan_wake(self, now: float) -> None:
        """Ask for one tick at the earliest moment at which something becomes due without a new event."""
        if not self._waiting:
            return
        due: list[float] = []
        for call in self._waiting.values():
            if call.state is State.ABORTING:
                due.append(call.abort_by)
            elif call.state is State.HELD:
                if call.execution not in self.executions:
                    due.append(call.arrived + UNKNOWN_HOLD_S)
                elif call.not_before > now:
                    due.append(call.not_before)
                else:
                    due += [until for _, until in self.suspect.values() if until > now]
        if due and (self._wake is None or min(due) < self._wake):
            self._wake = min(due)
            self._out.append(WakeAt(at=self._wake))

    # ---- for tests and views ----------------------------------------------------------------------------------------

    def check(self) -> None:
        """The invariants of the docstring. Raises AssertionError."""
        for call in self.calls.values():
            there = [cell for cell, names in self.on_cell.items() if call.id in names]
            assert there == ([] if call.state is State.HELD else [call.cell]), (call, there)
            assert (call.id in self._waiting) == (call.state is not State.RUNNING), call
        for names in self.on_cell.values():
            assert names <= set(self.calls)
        for cell, drain in self.drains.items():
            if drain.answer is not None and not drain.over:
                assert not self.on_cell.get(cell), f"{cell} was said to be drained"
        homes: dict[str, int] = {}
        for opened in self.executions.values():
            if opened.home:
                homes[opened.home] = homes.get(opened.home, 0) + 1
        assert homes == {k: v for k, v in self.balance.homes.items() if v}
        cap = self.balance.cap or len(self.calls)
        assert all(len(names) <= cap for names in self.on_cell.values()), "more calls on a cell than it may have"


def _backoff(failures: int) -> float:
    return BACKOFF_S[min(failures, len(BACKOFF_S)) - 1]
