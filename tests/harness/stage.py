"""A real harness in a sandbox without network, its relay, a real proxyd and two scripted engines, with troubles.

A step's trouble befalls the first answer to it, after a few of its tokens: the engine stops there until the trouble
has happened. Nothing of it may be seen by the harness. A trouble may also be that another step must have been said
first (`after <step>`): so an order that depends on the harness's own haste is made certain.

GYRE_TEST_DELIVERY=live plays everything with live delivery.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from gyre_base import messages as m
from gyre_base.vocabulary import Outcome, Purpose
from gyre_exec.single import run_one
from tests.exec import judge
from tests.harness.mind import MAIN, Mind, Step
from tests.harness.plays import Play
from tests.proxyd.fakes import FakeEngine, World
from trajtools.check import check

EXECUTION = "run.0"
TOKENS_BEFORE_TROUBLE = 4
AWAY_S = 2.0
SETTLES_S = 1.0  # for a harness to take in what was said to it
DELIVERY = os.environ.get("GYRE_TEST_DELIVERY", "durable")


@dataclass
class Engine(FakeEngine):
    """Answers from a prompt and what is already said of its answer, and lets troubles happen in mid-answer."""

    stage: Stage | None = None
    step_of: dict[str, Step] = field(default_factory=dict)

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        body = await http.json()
        assert self.stage is not None
        try:
            self.step_of[body["rid"]] = self.stage.planned(body["input_ids"])[1]
        except BaseException as error:
            self.stage.give_up(error)
            raise
        response = await super()._generate(http)
        if body["rid"] not in self.aborted:
            self.stage.said.append(self.step_of[body["rid"]].name)
        return response

    async def _wait_to_go_on(self, rid: str, sent: int) -> None:
        assert self.stage is not None
        step = self.step_of[rid]
        if sent == TOKENS_BEFORE_TROUBLE and step.trouble and step.name not in self.stage.happened:
            self.stage.happened.append(step.name)
            trouble = self.stage.cause(step.trouble, self)
            while rid not in self.aborted and not trouble.done() and self.die_after is None:
                await asyncio.wait((trouble,), timeout=0.02)


class Stage(World):
    """One execution of one harness. `play` runs it and gives its outcome."""

    def __init__(self, root: Path, tokenizer: Path, mind: Mind, harness: tuple[str, ...], **overrides: Any) -> None:
        tree: dict[str, Any] = {
            "engine": {"context_length": 64_000},
            "rollout": {"max_new_tokens": 4096, "delivery": DELIVERY},
            "tasks": {"workspace": "bwrap", "harness": list(harness), "harness_limit_s": 240.0},
        }
        for section, values in overrides.items():
            tree.setdefault(section, {}).update(values)
        super().__init__(root, tokenizer, **tree)
        self.mind, self.epoch = mind, 0
        self.happened: list[str] = []
        self.said: list[str] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._wrong: asyncio.Future[None] | None = None
        self._opening = list(self.chat.opening.ids)

    # ---- the engines ----------------------------------------------------------------------------------------------

    def planned(self, ids: list[int]) -> tuple[list[int], Step]:
        """The whole answer that belongs to a prompt (of which it may already hold a part), and its step."""
        start = self._answer_at(ids)
        text = self.chat.tokenizer.decode(ids[:start], skip_special_tokens=False)
        words, step = self.mind.answer(text)
        whole = self.says(words)
        assert whole[: len(ids) - start] == ids[start:], "the tokens so far are not those that were sampled"
        return whole[len(ids) - start :], step

    def _answer_at(self, ids: list[int]) -> int:
        """Where the last answer begins."""
        opening = self._opening
        return next(n for n in range(len(ids), 0, -1) if ids[n - len(opening) : n] == opening)

    def cause(self, trouble: str, engine: Engine) -> asyncio.Task[None]:
        """Begin one of: switch, kill, drop, die, away, "after <step>"."""
        word, _, step = trouble.partition(" ")
        happens = self._after(step) if word == "after" else getattr(self, f"_{trouble}")(engine)
        self._tasks.append(asyncio.create_task(happens))
        return self._tasks[-1]

    def give_up(self, error: BaseException) -> None:
        """The model does not know what to say: the harness would wait for it for ever."""
        if self._wrong is not None and not self._wrong.done():
            self._wrong.set_exception(error)

    async def _after(self, step: str) -> None:
        """Another agent's step must have been said."""
        assert step in {s.name for s in self.mind.steps()}, f"no step is called {step!r}"
        while step not in self.said:  # noqa: ASYNC110 - it is said by a handler of a request
            await asyncio.sleep(0.02)
        await asyncio.sleep(SETTLES_S)

    async def _switch(self, engine: Engine) -> None:
        """Its cell leaves for training: what runs there goes on elsewhere."""
        self.epoch += 1
        await self.serve(away=engine.name)
        await self.cellctl.say(m.DrainCell(cell=engine.name, epoch=self.epoch))
        await self.cellctl.until(lambda: any(d.epoch == self.epoch for d in self.cellctl.said(m.CellDrained)))
        await self.serve()

    async def _kill(self, _: Engine) -> None:
        await self.stop_proxyd(signal.SIGKILL)
        await self.start_proxyd()

    async def _drop(self, _: Engine) -> None:
        """Every connection between the relay and proxyd breaks."""
        endpoint = self.run.endpoint("proxyd-0")
        assert endpoint is not None
        cut = list(own_connections(urlsplit(endpoint.extra["http"]).port or 0))
        assert cut, "the relay has no connection to proxyd"
        for sock in cut:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        await asyncio.sleep(0.3)

    async def _die(self, engine: Engine) -> None:
        """The engine breaks the connection in mid-answer; it is well again when it is asked the next time."""
        engine.die_after = TOKENS_BEFORE_TROUBLE
        await self.cellctl.until(lambda: self.cellctl.said(m.EngineLost))
        engine.die_after = None

    async def _away(self, engine: Engine) -> None:
        """No engine at all for a while: calls are held."""
        self.epoch += 1
        await self.serve(away="ab")
        await self.cellctl.say(*(m.DrainCell(cell=name, epoch=self.epoch) for name in "ab"))
        await asyncio.sleep(AWAY_S)
        await self.serve()

    async def serve(self, away: str = "") -> None:
        await self.cellctl.serve(*self.engines, away=tuple(away))

    # ---- the play -------------------------------------------------------------------------------------------------

    async def play(self, task: dict[str, Any]) -> m.ExecutionFinished:
        """Runs the harness on a task until it ends. Raises what a trouble raised."""
        for name in "ab":
            engine = Engine(name, lambda ids: self.planned(ids)[0], admin=self.keys.admin, stage=self)
            self.engines.append(await engine.start())
        await self.cellctl.open(EXECUTION)
        await self.serve()
        order = m.ExecutionOrder(
            execution=EXECUTION, group="g", task=task, attempt=0, purpose=Purpose.TRAIN, limit_s=240.0
        )
        self._wrong = asyncio.get_running_loop().create_future()
        done = await run_one(self.run, self.config, order, self._wrong)
        if self._wrong.done():
            self._wrong.result()
        await asyncio.gather(*self._tasks)
        assert done is not None
        return done

    def printed(self) -> str:
        """What the harness wrote on its output."""
        import zstandard

        folder = self.run.path("executions", EXECUTION)
        packed = folder / "stdout.zst"
        with zstandard.open(packed, "rt", encoding="utf-8") as file:
            return file.read()

    async def stop_proxyd(self, how: signal.Signals = signal.SIGTERM, shard: int = 0) -> int:
        with contextlib.suppress(ProcessLookupError):  # an executor in this process ends all children when it ends
            return await super().stop_proxyd(how, shard)
        return 0

    def verify(self, done: m.ExecutionFinished, exit_code: int = 0) -> None:
        """What holds of every run: it ended well, saw no error, and its call log keeps every rule."""
        why = f"{done}\n{self.printed()[-3000:]}"
        assert (done.outcome, done.exit_code, done.score) == (Outcome.SCORED, exit_code, 1.0), why
        assert done.harness_errors == 0, why
        report = check(self.run.path("calls"))
        assert report.ok, "\n".join(report.lines())
        drained = sum(d.moved_mid_generation for d in self.cellctl.said(m.CellDrained))
        assert drained >= sum(step.trouble in ("switch", "away") for step in self.mind.steps()), "no call was moved"
        assert sorted(self.happened) == sorted(step.name for step in self.mind.steps() if step.trouble)
        calls = self.calls(EXECUTION)
        for call in calls.values():
            prompt, answer = call.prompt_ids.tolist(), call.completion_ids.tolist()
            assert answer == self.planned(prompt)[0], "tokens were lost, doubled or changed"
            above = calls.get(call.parent or "")
            before = [*above.prompt_ids.tolist(), *above.completion_ids.tolist()] if above else []
            assert prompt[: len(before)] == before, "a history did not continue with its own ids"

    def tree(self) -> dict[str, tuple[str, str, str]]:
        """Step -> (label, step whose history the call continues, step that called its agent); "-" where there is none.

        Raises AssertionError if a step was said twice: then a call was sampled again.
        """
        rows = self.rows()
        assert len(dict(rows)) == len(rows), f"sampled twice: {sorted(step for step, _ in rows)}"
        return dict(rows)

    def rows(self) -> list[tuple[str, tuple[str, str, str]]]:
        """The same of every call, for a harness that asks for a step twice itself."""
        calls = self.calls(EXECUTION)
        relabelled = {n.extra["call"]: n.extra["label"] for n in self.notes(EXECUTION) if n.text == "relabel"}
        steps = {name: self.planned(call.prompt_ids.tolist())[1].name for name, call in calls.items()}

        def made(tool_call: str) -> str:
            return next((steps[name] for name in calls if name.replace("-", "") in tool_call), tool_call)

        return [
            (
                steps[name],
                (
                    relabelled.get(name, call.label),
                    steps.get(call.parent or "", "-"),
                    made(call.agent.parent) if call.agent.parent else "-",
                ),
            )
            for name, call in calls.items()
        ]


def own_connections(port: int) -> Iterator[socket.socket]:
    """This process's sockets whose other end is a local port (duplicates: closing them closes nothing)."""
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if not str(entry.readlink()).startswith("socket:"):
                continue
            sock = socket.socket(fileno=os.dup(int(entry.name)))
            try:
                ours = sock.family == socket.AF_INET and sock.getpeername()[1] == port
            except OSError:  # it listens
                ours = False
            if ours:
                yield sock
            else:
                sock.close()


async def follow(given: Play, harness: str, needs: Any, tokenizer: Path, folder: Path, **env: str) -> None:
    """A whole play with one program, to the tree that it says; `env` is more environment for the program."""
    needs(harness)
    async with Stage(folder / "run", tokenizer, given.mind, (harness,), tasks={"harness_env": env}) as stage:
        stage.verify(await stage.play(task(f"{MAIN}: follow your plan.")))
        assert stage.tree() == given.tree


def task(instruction: str) -> dict[str, Any]:
    """Its score is a tenth of the length of the file `answer`."""
    return {
        "id": "t",
        "instruction": instruction,
        "workspace": {"readme.md": "hello"},
        "evaluator": {"command": ["python", "-I", "-S", "judge.py"], "tests": {"mode": "honest"}},
        "task_file_dir": str(Path(judge.__file__).parent),
    }
