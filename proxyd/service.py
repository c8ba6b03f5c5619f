"""From a request to its durable answer: the tree, the core's commands and the engines' streams meet here.

Owns the calls that are open (their tokens so far, who waits for them). A call is answered once its record is in the
log; the same call id attaches to what is running or gets the same answer again. Shell code: effects only, decisions
are the core's.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gyre_base.config import Config
from gyre_base.routing import shape_of
from gyre_base.runfile import CallWriter, record_frame
from proxyd.calllog import CallLog
from proxyd.capture import Forest, Node, Plan
from proxyd.chat import ChatModel, Piece
from proxyd.client import Exchange
from proxyd.conversation import NO_HINTS, Hints, Reply, Request
from proxyd.dialects import Dialect, Failure
from proxyd.engine import Ended, EngineClient
from proxyd.events import Abort, CallArrived, CallDropped, Cut, Finish, Refuse, SubmissionEnded, Submit
from proxyd.live import Chunk, Telling, progress_of
from proxyd.reading import Asked, Memory
from proxyd.records import Facts, Progress, call_record, relabel_note
from proxyd.stream import Sampled, join_spans
from proxyd.turns import Turns

log = logging.getLogger(__name__)
DROP_AFTER_S = 60.0  # a call for which nobody has waited this long is aborted; its relay may have been cut off
_NOTHING = Memory()  # of an execution that has asked nothing yet
TAIL = 200  # finished calls kept for `proxyd tail`
Told = Callable[[Node | Failure], None]


@dataclass(slots=True, eq=False)
class Running:
    """One submission at an engine."""

    submit: Submit
    sampled: Sampled
    stream: Exchange
    ended: asyncio.Event | None = None  # for who aborts it


@dataclass(slots=True, eq=False)
class Open:
    """A call between request and answer."""

    key: str  # of execution and call
    execution: str
    call: str
    plan: Plan
    budget: int
    t0: float
    tools: bytes
    named: str  # the agent's id in the harness's headers
    progress: Progress
    answer: Node | Failure | None = None
    temperature: float = 1.0
    running: Running | None = None
    sampled: Sampled | None = None  # of the submission that runs, which may sample `asked`
    asked: int = 0
    watchers: set[asyncio.Event] = field(default_factory=set)  # of those who are told live
    complete: bool = False
    waiters: int = 0
    waiting: list[Told] = field(default_factory=list)
    grace_s: float = DROP_AFTER_S

    def say(self, answer: Node | Failure) -> None:
        """To all who wait, and whoever asks from now on."""
        self.answer = answer
        waiting, self.waiting = self.waiting, []
        self.waiters -= len(waiting)
        for told in waiting:
            told(answer)
        self.heard()

    def said(self) -> Node | Failure:
        """The answer that is there."""
        assert self.answer is not None
        return self.answer

    def heard(self) -> None:
        for news in self.watchers:
            news.set()


_Over = tuple[Open, Submit, Sampled, Ended]  # a stream that ended


class Service:
    """Everything between HTTP and engines. `feed` hands an event to the core."""

    def __init__(
        self,
        config: Config,
        chat: ChatModel,
        engines: EngineClient,
        calls: CallLog,
        feed: Callable[[Any], None],
        now: Callable[[], float],
        fatal: Callable[[BaseException], None],
    ) -> None:
        self.config, self.chat = config, chat
        self._engines, self._log, self._feed = engines, calls, feed
        self.now, self.fatal = now, fatal
        self._routing = shape_of(config)
        self._writer = CallWriter(form=record_frame)
        self.forests: dict[str, Forest] = {}
        self._memories: dict[str, Memory] = {}
        self.open: dict[str, Open] = {}
        self.tail: deque[dict[str, Any]] = deque(maxlen=TAIL)
        self.progress = 0  # finished calls of this life
        self.prompt_tokens = self.new_prompt_tokens = self.sampled_tokens = 0  # of these
        self._over = Turns(self._ended)  # streams that ended in this turn of the loop
        self._background: set[asyncio.Task[None]] = set()
        self._stopping = False

    @property
    def vital_signs(self) -> int:
        """Grows with every finished call and every piece that an engine sends."""
        return self.progress + self._engines.chunks

    @property
    def log_trouble(self) -> str:
        """Why the log can't be written just now; empty when it can."""
        return self._log.trouble

    # ---- requests ---------------------------------------------------------------------------------------------------

    def read(self, execution: str, dialect: Dialect, body: bytes) -> Asked:
        """A body as far as it has to be read. Raises BadRequest."""
        return self._memories.get(execution, _NOTHING).read(dialect, body)

    def begin(
        self, execution: str, call: str, asked: Asked, hints: Hints = NO_HINTS, so_far: Sequence[Chunk] = ()
    ) -> Open | Node | Failure:
        """A call, new, running or finished under this id: what is open can be waited for (`join`, `tell`).

        `so_far`: tokens of it that were told live, perhaps by an earlier life. It goes on with them or fails.
        """
        told = [i for chunk in so_far for i in chunk.ids]
        opened = self.open.get(f"{execution}:{call}")
        if opened is not None:
            if opened.answer is not None:
                return opened.answer
            return opened if self._sampled(opened, len(told)) == told else _other_tokens()
        forest = self.forests.get(execution)
        node = forest.calls.get(call) if forest is not None else None
        if node is not None:
            return node if list(node.completion.ids[: len(told)]) == told else _other_tokens()
        return self._begin(execution, call, asked, hints, progress_of(so_far))

    def _sampled(self, opened: Open, count: int) -> list[int]:
        """The first tokens of a running call."""
        more = opened.sampled.ids if opened.sampled is not None else []
        return [*opened.progress.ids, *more][:count]

    def count(self, execution: str, request: Request) -> int:
        """Prompt tokens of a request, as they would be. Records nothing."""
        forest = self.forests.get(execution) or Forest(self.chat)
        return forest.measure(request.conversation)

    def _plan(self, execution: str, call: str, asked: Asked, hints: Hints) -> Plan:
        forest = self.forests.setdefault(execution, Forest(self.chat))
        request, plan = asked.request, None
        if asked.since is not None:
            plan = forest.go_on(call, asked.since, request.conversation, hints)
        if plan is None:
            plan = forest.plan(call, asked.whole().conversation, hints)
        self._memories.setdefault(execution, Memory()).told(asked, plan.start)
        return plan

    def _begin(
        self, execution: str, call: str, asked: Asked, hints: Hints, progress: Progress
    ) -> Open | Node | Failure:
        now, request = self.now(), asked.request
        plan = self._plan(execution, call, asked, hints)
        limit = self.config.engine.context_length
        if plan.prompt_tokens >= limit:
            return Failure("overflow", limit=limit, tokens=plan.prompt_tokens)
        budget = min(self.config.rollout.max_new_tokens, limit - plan.prompt_tokens)
        budget = min(budget, request.max_tokens) if request.max_tokens else budget
        if progress.ids and len(progress.ids) >= budget:
            return _other_tokens()
        key, tools = f"{execution}:{call}", request.conversation.tools
        opened = Open(key, execution, call, plan, budget, now, tools, hints.agent, progress)
        self.open[opened.key] = opened
        for relabel in plan.relabels:
            self._log.note(relabel_note(execution, relabel))
        arrived = CallArrived(
            call=opened.key,
            execution=execution,
            prompt_tokens=plan.prompt_tokens,
            budget=budget,
            sampled=len(progress.ids),
        )
        self._feed(arrived)
        return opened if opened.answer is None else opened.answer

    def join(self, opened: Open, told: Told) -> None:
        """Be told the durable answer."""
        opened.waiters += 1
        opened.waiting.append(told)

    def leave(self, opened: Open, told: Told) -> None:
        """Wait no longer. The call runs on for a while."""
        if told in opened.waiting:
            opened.waiting.remove(told)
            self._left(opened)

    def _left(self, opened: Open) -> None:
        opened.waiters -= 1
        if not opened.waiters and opened.answer is None:
            asyncio.get_running_loop().call_later(opened.grace_s, self._drop, opened)

    async def tell(self, opened: Open, telling: Telling) -> AsyncGenerator[bytes]:
        """Pieces of a call as it is sampled, all but its end. Left early, the call runs on for a while."""
        news = asyncio.Event()
        opened.watchers.add(news)
        opened.waiters += 1
        try:
            while opened.answer is None:
                news.clear()
                while (chunk := since(opened, telling.count, self.chat.stop_ids)) is not None:
                    yield telling.take(chunk)
                await news.wait()
        finally:
            opened.watchers.discard(news)
            self._left(opened)

    def given_up(self, execution: str, call: str) -> None:
        """The relay says that nobody will come for this call any more."""
        opened = self.open.get(f"{execution}:{call}")
        if opened is not None:
            opened.grace_s = 0.0
            self._drop(opened)

    def _drop(self, opened: Open) -> None:
        if not opened.waiters and opened.answer is None and opened.key in self.open:
            self._feed(CallDropped(call=opened.key))

    def reply(self, node: Node, request: Request) -> Reply:
        """An answer as a dialect words it."""
        finish = "tool_calls" if node.spoken.calls and node.finish == "stop" else node.finish
        return Reply(
            call=node.call,
            created=int(node.at),
            model=request.model or self.config.model.served_name,
            text=node.spoken.text,
            calls=node.spoken.calls,
            finish=finish,
            prompt_tokens=node.prompt_tokens,
            completion_tokens=len(node.completion.ids),
            reasoning=node.spoken.reasoning,
            reasoning_tokens=node.reasoning_tokens,
        )

    # ---- the core's commands ----------------------------------------------------------------------------------------

    def perform(self, command: Submit | Abort | Cut | Finish | Refuse) -> None:
        """Start one effect; nothing here waits."""
        opened = self.open[command.call]
        match command:
            case Submit():
                self._submit(opened, command)
            case Abort(url=url, rid=rid):
                if opened.running is not None:
                    ended = opened.running.ended = opened.running.ended or asyncio.Event()
                    self._spawn(self._engines.abort(url, rid, ended))
            case Cut():
                if opened.running is not None:
                    self._cut(opened, opened.running)
            case Finish():
                self._finish(opened, command)
            case Refuse(kind=kind, why=why):
                self._refuse(opened, kind, why)

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._ended_task)
        return task

    def _ended_task(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fatal(error)

    def _submit(self, opened: Open, submit: Submit) -> None:
        """One stream from submission to SubmissionEnded, whatever happens in between."""
        progress = opened.progress
        asked = opened.budget - len(progress.ids)
        parts = [opened.plan.prompt_json()]
        if progress.ids:
            parts.append(Piece.of(progress.ids).json)
        sampled = opened.sampled = Sampled(submit.version)
        opened.temperature, opened.asked = submit.temperature, asked
        before = opened.plan.prompt_tokens + len(progress.ids)
        # a row is of the token before: the engine computes that one itself, whatever it found of the prompt elsewhere
        routed_from = before - 1 if self._routing is not None else None
        body = [self._engines.body(submit, b",".join(parts), asked, routed_from)]

        def ended(outcome: Ended) -> None:
            self._over.add((opened, submit, sampled, outcome))

        stream = self._engines.stream(submit.url, body, sampled, opened.heard, ended)
        opened.running = Running(submit, sampled, stream)

    def _cut(self, opened: Open, running: Running) -> None:
        log.warning("cut the stream of call %s at %s", opened.call, running.submit.url)
        running.stream.cut()
        outcome = Ended("cut", lost=True, why="it did not end after an abort")
        self._over.add((opened, running.submit, running.sampled, outcome))

    def _ended(self, over: _Over) -> None:
        opened, submit, sampled, outcome = over
        if self._stopping or opened.running is None or opened.running.submit is not submit:
            return  # it was cut in the same turn of the loop
        try:
            self._end(opened, submit, sampled, outcome)
        except Exception as error:
            self.fatal(error)
            raise

    def _end(self, opened: Open, submit: Submit, sampled: Sampled, outcome: Ended) -> None:
        how, lost, why, asked = outcome.how, outcome.lost, outcome.why, opened.asked
        if opened.running is not None and opened.running.ended is not None:
            opened.running.ended.set()
        progress, before = opened.progress, len(opened.progress.ids)
        if sampled.routed:
            progress.routed.append((before, len(sampled.ids), sampled.routed))
        del sampled.ids[asked:], sampled.logprobs[asked:]
        progress.spans = join_spans(progress.spans, sampled.versions(), before)
        if (submit.number > 1 or before) and sampled.prompt_tokens is not None:
            progress.resent += sampled.prompt_tokens
            progress.reread += sampled.cached_tokens
        progress.ids += sampled.ids
        progress.logprobs += sampled.logprobs
        opened.running = opened.sampled = None
        wanted = opened.plan.prompt_tokens + before
        if sampled.prompt_tokens is not None and sampled.prompt_tokens != wanted:
            log.critical(
                "call %s: the engine counts %d prompt tokens, we sent %d", opened.key, sampled.prompt_tokens, wanted
            )
        finish = sampled.verdict(asked, self.chat.stop_ids) if how != "refused" else ""
        self._feed(
            SubmissionEnded(
                call=opened.key,
                number=submit.number,
                how="finished" if finish else ("refused" if how == "refused" else "cut"),
                sampled=len(sampled.ids),
                finish=finish,
                lost=lost,
                why=why,
            )
        )
        if opened.answer is not None and opened.running is None:
            self.open.pop(opened.key, None)  # it was refused while the engine still had it

    # ---- the end of a call ------------------------------------------------------------------------------------------

    def _finish(self, opened: Open, command: Finish) -> None:
        """Into the tree and the log; the answer goes out when the log has it."""
        opened.complete = True
        now, forest = self.now(), self.forests[opened.execution]
        completion = Piece.of(opened.progress.ids)
        parsed = self.chat.parse(completion.ids, opened.call, opened.tools)
        node = forest.finished(
            opened.call,
            opened.plan,
            completion,
            parsed.spoken,
            command.finish,
            at=now,
            waited_s=command.waited_s,
            reasoning_tokens=parsed.reasoning_tokens,
        )
        facts = Facts(
            execution=opened.execution,
            call=opened.call,
            seq=len(forest.calls) - 1,
            t0=opened.t0,
            t1=now,
            finish=command.finish,
            temperature=opened.temperature,
            waited_s=command.waited_s,
            moved=command.moved,
            ill_formed=parsed.ill_formed,
            named=opened.named,
        )
        plan, progress, writer = opened.plan, opened.progress, self._writer
        base, routing = plan.base.call if plan.base is not None else None, self._routing

        def frame() -> bytes:
            return writer.call(call_record(facts, plan, completion, progress, routing), base, plan.keep)

        self._log.append(frame).add_done_callback(lambda written: self._written(opened, node, facts, written))

    def _written(self, opened: Open, node: Node, facts: Facts, written: asyncio.Future[None]) -> None:
        self.open.pop(opened.key, None)
        if opened.answer is not None:
            return
        if written.exception() is not None:
            opened.say(Failure("internal", why=f"the call could not be recorded: {written.exception()}"))
            return
        self.progress += 1
        self.prompt_tokens += node.prompt_tokens
        self.new_prompt_tokens += len(node.tail.ids)
        self.sampled_tokens += len(node.completion.ids)
        self.tail.append(_row(opened, node, facts))
        opened.say(node)

    def _refuse(self, opened: Open, kind: str, why: str) -> None:
        if opened.answer is None:
            opened.say(Failure(kind, why=why))
        if opened.running is None:
            self.open.pop(opened.key, None)
        forest = self.forests.get(opened.execution)
        if kind == "forbidden" and forest is not None and not forest.calls:
            del self.forests[opened.execution]  # an execution that was never open, or is no more
            self._memories.pop(opened.execution, None)

    def closed(self, execution: str) -> None:
        """The execution is over: its tree and writer state go."""
        self._memories.pop(execution, None)
        if self.forests.pop(execution, None) is not None:
            self._log.append(lambda: self._forget(execution))

    def _forget(self, execution: str) -> bytes:
        self._writer.forget(execution)
        return b""

    async def stop(self) -> None:
        """Close every stream; the engines abort what their client leaves."""
        self._stopping = True
        for opened in self.open.values():
            if opened.running is not None:
                opened.running.stream.cut()
        tasks = list(self._background)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._engines.close()


def _row(opened: Open, node: Node, facts: Facts) -> dict[str, Any]:
    """A finished call for `proxyd tail`: numbers only."""
    return {
        "at": round(facts.t1, 3),
        "execution": opened.execution,
        "call": opened.call,
        "agent": node.agent.id,
        "base": node.base.call if node.base is not None else None,
        "prompt_tokens": node.prompt_tokens,
        "new_prompt_tokens": len(node.tail.ids),
        "completion_tokens": len(node.completion.ids),
        "finish": facts.finish,
        "seconds": round(facts.t1 - facts.t0, 3),
        "waited_s": round(facts.waited_s, 3),
        "moved": facts.moved,
        "versions": sorted({s.policy for s in opened.progress.spans}),
        "attempt": opened.plan.attempt.n,
    }


def since(opened: Open, at: int, stop_ids: frozenset[int]) -> Chunk | None:
    """What was sampled after the first `at` tokens. The last token of an answer waits for the disk: with it there would
    be nothing left to go on with.
    """
    progress, running = opened.progress, opened.sampled
    if at < len(progress.ids):
        span = next(s for s in progress.spans if s.end > at)
        end = min(span.end, len(progress.ids) - opened.complete)
        return Chunk(progress.ids[at:end], progress.logprobs[at:end], span.policy) if at < end else None
    if running is None:
        return None
    at -= len(progress.ids)
    end = min(len(running.ids), opened.asked)
    end -= bool(running.verdict(opened.asked, stop_ids))
    return Chunk(running.ids[at:end], running.logprobs[at:end], running.version) if at < end else None


def _other_tokens() -> Failure:
    return Failure("internal", why="this call does not go on with the tokens that were told of it")
