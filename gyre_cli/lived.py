"""An emulated run lived: daemons started, watched, stopped, and what their control path added to the times.

Owns nothing of the run but its processes; every figure comes from journals and from the engines' own counters.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from gyre_base.clock import WallClock
from gyre_base.config import Config
from gyre_base.journal import Entry, read
from gyre_base.rundir import RunDir
from gyre_cli import quickstart
from gyre_cli.supervisor import Supervisor


class Interrupted(RuntimeError):
    """Ended by a signal before the last measured step."""


@dataclass(frozen=True, kw_only=True)
class Lived:
    """What was measured of one live arm. Seconds really passed; overheads are shares of the time they lie in."""

    arm: str
    seconds: float  # from the first dispatch to the last measured step
    hours: float  # the same in the profile's time
    mean_staleness: float
    switches: int
    overhead_executions: float  # of the executions' time: not in an engine, while engines served
    overhead_parts: dict[str, float]  # where that lies: `parts_of`
    overhead_training: float  # of the micro-steps' time: not computing
    overhead_switching: float  # of the cells' time: switches beyond what the profile says


def live(run: RunDir, config: Config, steps: int, arm: str, say: Callable[[str], None]) -> Lived:
    """Start everything, stop after so many optimizer steps, read what was measured. Raises RunFailed, Interrupted."""
    watch = Watch(run, steps, arm, say)

    async def serve() -> None:
        watch.supervisor = Supervisor(run, config, watch.look)
        await watch.supervisor.serve()
        await asyncio.gather(*watch.asking)

    asyncio.run(serve())
    if not watch.results:
        raise Interrupted(f"{arm}: stopped at step {watch.step} of {steps}")
    return measure(run, config, steps, arm, watch)


class Watch:
    """Looks on while a run lives; asks the engines now and then what they did, and ends the run at the last step."""

    supervisor: Supervisor

    def __init__(self, run: RunDir, steps: int, arm: str, say: Callable[[str], None]) -> None:
        self._run, self._steps, self._arm, self._say = run, steps, arm, say
        self.step, self._dispatched = -1, False
        self.asking: list[asyncio.Future[None]] = []
        self.served: list[tuple[float, float]] = []  # (when, seconds that engines had spent on requests)
        self.results: dict[str, Any] = {}

    def look(self, rows: list[dict[str, Any]]) -> None:
        """With every status of the scheduler, about once a second."""
        step, level = rows[0]["step"], rows[0]["water_level"]
        if step != self.step or (level and not self._dispatched):
            self.step, self._dispatched = step, self._dispatched or level > 0
            self._say(f"{self._arm}: step {step} of {self._steps}, {level} executions in flight")
        if not self.asking or self.asking[-1].done():
            urls = [row["url"] for row in rows if row.get("cell") and row["url"]]
            self.asking.append(asyncio.ensure_future(self._ask(urls, step >= self._steps)))

    async def _ask(self, urls: list[str], is_last: bool) -> None:
        try:
            at = WallClock().now()
            self.served.append((at, sum(await asyncio.gather(*map(request_seconds, urls)))))
            if is_last and not self.results:
                rows = await quickstart.rows(self._run, "cellctl", "results")
                self.results = {row["kind"]: row["rows"] for row in rows}
        finally:
            if is_last:
                self.supervisor.stopping.set()


async def request_seconds(url: str) -> float:
    """Seconds that an emulated engine has spent on requests, summed over requests."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as response:
        text = await response.text()
    line = next(line for line in text.splitlines() if line.startswith("sglang:request_seconds_total"))
    return float(line.split()[-1])


def measure(run: RunDir, config: Config, steps: int, arm: str, watch: Watch) -> Lived:
    """The figures, from the scheduler's journal and its results, and from the engines' counters."""
    measured = watch.results["steps"][:steps]
    ended = measured[-1]["at"]
    until, request_s = max(pair for pair in watch.served if pair[0] <= ended)
    began, in_flight_s = _executions(run.path("journal", "cellctl.jsonl"), until)
    seconds = ended - began
    scale = config.emulate.time_scale
    computing, talking = (sum(row[name] for row in measured) for name in ("computing_s", "talking_s"))
    turns = watch.results["switches"]
    beyond = sum(_beyond_profile_s(turn, config) for turn in turns)
    return Lived(
        arm=arm,
        seconds=seconds,
        hours=seconds / scale / 3600.0,
        mean_staleness=sum(row["staleness_mean"] for row in measured) / len(measured),
        switches=len(turns),
        overhead_executions=1.0 - request_s / in_flight_s,
        overhead_parts=parts_of(run.path("journal")),
        overhead_training=talking / (computing + talking),
        overhead_switching=beyond / (config.cluster.cells * seconds),
    )


def _executions(journal: Path, until: float) -> tuple[float, float]:
    """(when the first was dispatched, their seconds from dispatch to the scheduler's note of their end)."""
    began: dict[str, float] = {}
    first, seconds = 0.0, 0.0
    for entry in read(journal):
        for command in entry.commands:
            if command["tag"] == "execution.order":
                began.setdefault(command["execution"], entry.at)
                first = first or entry.at
        if entry.at > until:
            break
        if entry.event["tag"] == "execution.finished" and entry.event["execution"] in began:
            seconds += entry.at - began.pop(entry.event["execution"])
    return first, seconds + sum(max(0.0, until - at) for at in began.values())


def _beyond_profile_s(turn: dict[str, Any], config: Config) -> float:
    """Of a switch: its seconds without what the profile says and without the micro-step that was in hand."""
    laws = config.emulate
    if turn["to"] == "train":
        return float(turn["seconds"]) - laws.to_train_s * laws.time_scale
    in_hand_s = float(turn["phases_s"].get("rank", 0.0))
    return float(turn["seconds"]) - laws.to_rollout_s * laws.time_scale - in_hand_s


@dataclass
class Marks:
    """Times of one execution, from the journals of all that had a hand in it."""

    ordered: float = 0.0  # by the scheduler
    started: float = 0.0  # its harness
    calls: list[float] = field(default_factory=list)  # each is known to the router
    answers: list[float] = field(default_factory=list)  # each is done by its engine
    no_engine_s: float = 0.0  # its calls waited while none served them
    finished: float = 0.0  # noted by the scheduler

    def read(self, entry: Entry) -> None:
        event = entry.event
        match event["tag"]:
            case "exec.started":
                self.started = event["at"]
            case "proxyd.call":
                self.calls.append(entry.at)
            case "proxyd.ended" if event["how"] == "finished":
                self.answers.append(entry.at)
            case "execution.finished":
                self.finished = self.finished or entry.at

    @property
    def is_whole(self) -> bool:
        """Ran from its order to its end without another attempt, its limit or a call that failed."""
        return bool(self.ordered and self.started and self.finished) and 0 < len(self.calls) == len(self.answers)

    def parts_s(self) -> dict[str, float]:
        """Seconds of it outside an engine, in their order."""
        between = sum(call - answer for call, answer in zip(self.calls[1:], self.answers, strict=False))
        return {
            "start": self.started - self.ordered,
            "first_call": self.calls[0] - self.started,
            "between_calls": between,
            "no_engine": self.no_engine_s,
            "end": self.finished - self.answers[-1],
        }


def parts_of(journals: Path) -> dict[str, float]:
    """Of the executions that ran undisturbed: shares of their time that passed outside an engine, by what went on."""
    found: defaultdict[str, Marks] = defaultdict(Marks)
    for path in sorted(journals.glob("*.jsonl")):
        for entry in read(path):
            if "execution" in entry.event:
                found[entry.event["execution"]].read(entry)
            elif "call" in entry.event:
                found[entry.event["call"].partition(":")[0]].read(entry)
            for command in entry.commands:
                if command["tag"] == "execution.order":
                    found[command["execution"]].ordered = entry.at
                elif command["tag"] == "proxyd.finish":
                    found[command["call"].partition(":")[0]].no_engine_s += command["waited_s"]
    whole = [marks for marks in found.values() if marks.is_whole]
    total_s = sum(marks.finished - marks.ordered for marks in whole)
    rows = [marks.parts_s() for marks in whole]
    return {name: round(sum(row[name] for row in rows) / total_s, 5) for name in (rows[0] if rows else ())}
