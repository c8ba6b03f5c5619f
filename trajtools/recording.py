"""A recorded run in memory: one forest per execution and everything else that was recorded of it.

Owns what an execution is to the reports: its records, its level, what is wrong with it. Arrays of a call live in the
forest only, so memory is the distinct tokens. Reads and writes nothing (`load`, `writers`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from gyre_base.runblocks import Blocks
from gyre_base.runfile import Call, ExecEnd, ExecStart, Intent, Note, ReadReport, Record, Reward, RunHeader
from trajtools.breaks import Analysis, analyse
from trajtools.choose import DEFAULT, Rules
from trajtools.forest import ConflictingCall, Forest, Mark

OnCall: TypeAlias = Callable[[Call], None]
CONFLICT = "conflict"  # text of the note that keeps an execution quarantined in whatever is made of it
EPOCH_S = 1e8  # 1973: no counter of calls gets there


@dataclass(eq=False)
class Execution:
    """One execution of a log. `others`: its records that are not calls, in file order."""

    id: str
    forest: Forest
    others: list[Record] = field(default_factory=list)
    offsets: dict[str, int] = field(default_factory=dict)  # call -> byte offset of its line or frame
    conflicts: list[str] = field(default_factory=list)  # calls that came again with another payload
    blocks: Blocks | None = None  # set: its forest is of text blocks, not of tokens

    @property
    def reward(self) -> Reward | None:
        """The last word on its outcome."""
        return next((r for r in reversed(self.others) if isinstance(r, Reward)), None)

    @property
    def end(self) -> ExecEnd | None:
        return next((r for r in reversed(self.others) if isinstance(r, ExecEnd)), None)

    @property
    def group(self) -> str:
        return next((r.group for r in self.others if isinstance(r, ExecStart)), "")

    @property
    def task(self) -> str:
        return next((r.task for r in self.others if isinstance(r, ExecStart)), "")

    @property
    def level(self) -> str:
        return "text" if self.blocks is not None else "token"

    @property
    def timed(self) -> bool:
        """Whether its times are times. Many records keep only an order; their calls begin when they end, near 0."""
        times = [(mark.call.t0, mark.call.t1) for mark in self.forest.marks()]
        return any(t1 > t0 or t1 > EPOCH_S for t0, t1 in times)

    def lost_calls(self) -> list[str]:
        """Intents without a call: something was dispatched and never logged."""
        return [r.call for r in self.others if isinstance(r, Intent) and r.call not in self.forest]

    def gaps(self) -> list[int]:
        """Numbers of calls that are not here, where their writer numbered them."""
        numbers = {mark.call.seq for mark in self.forest.marks()}
        return sorted(set(range(max(numbers, default=0))) - numbers) if len(numbers) > 1 else []

    def missing(self) -> list[tuple[str, str]]:
        """(call or "", in words), one per sign that calls are missing; empty for a complete execution."""
        out = [(call, "was dispatched and never logged") for call in self.lost_calls()]
        if gaps := self.gaps():
            out.append(("", f"no call has the number {', '.join(map(str, gaps[:8]))}{', …' if len(gaps) > 8 else ''}"))
        if self.end is not None and self.end.calls is not None and self.end.calls != len(self.forest):
            out.append(("", f"its writer logged {self.end.calls} calls, {len(self.forest)} are here"))
        return out

    def told_missing(self) -> str:
        return "; ".join(" ".join(x for x in (call, what) if x) for call, what in self.missing())

    def withheld(self, rules: Rules = DEFAULT) -> str | None:
        """Why nothing of it may train, as `choose` takes it. After a conflict no one knows which call is true."""
        if self.conflicts:
            return "conflict"
        return "incomplete" if rules.incomplete == "mask" and self.missing() else None

    def calls(self, analysis: Analysis | None = None) -> Iterator[tuple[Call, str | None, int]]:
        """(call with its arrays, base, keep) by start time: what a writer needs for delta lines."""
        links = (analysis or analyse(self.forest)).links
        for mark in sorted(self.forest.marks(), key=lambda m: (m.call.t0, m.call.seq, m.id)):
            found = links.get(mark.id)
            yield whole_call(self.forest, mark), found.mark.id if found else None, found.shared if found else 0


@dataclass(eq=False)
class Recording:
    """A whole log."""

    executions: dict[str, Execution] = field(default_factory=dict)
    loose: list[Record] = field(default_factory=list)  # headers and notes that belong to no execution
    reports: dict[str, ReadReport] = field(default_factory=dict)  # by file
    conflicts: list[tuple[str, str, int]] = field(default_factory=list)  # (execution, call, offset)
    mixed: list[tuple[str, str]] = field(default_factory=list)  # calls of another level than their execution, left out
    size: int = 0
    format: str = "gyre.run"
    blocks: Blocks = field(default_factory=Blocks)

    @property
    def vocab(self) -> int | None:
        sizes = [r.tokenizer.get("vocab") for r in self.loose if isinstance(r, RunHeader)]
        return next((v for v in sizes if isinstance(v, int)), None)

    def execution(self, name: str) -> Execution:
        if name not in self.executions:
            self.executions[name] = Execution(name, Forest(name))
        return self.executions[name]

    def take(self, record: Record, offset: int = -1, on_call: OnCall | None = None) -> None:
        match record:
            case Call():
                self._take_call(record, offset, on_call)
            case RunHeader() | Note(exec=None):
                self.loose.append(record)
            case Note():
                execution = self.execution(str(record.exec))
                execution.others.append(record)
                if record.text == CONFLICT:  # of the file that this one was made from
                    execution.conflicts.extend(map(str, record.extra.get("calls") or ["?"]))
            case _:
                self.execution(record.exec).others.append(record)

    def _take_call(self, call: Call, offset: int, on_call: OnCall | None) -> None:
        execution = self.execution(call.exec)
        if not len(execution.forest):
            execution.blocks = self.blocks if call.level == "text" else None
        if call.level != execution.level:
            self.mixed.append((call.exec, call.call))
            return
        if on_call is not None:
            on_call(call)
        try:
            if execution.forest.insert(call):
                execution.offsets[call.call] = offset
        except ConflictingCall:
            self.conflict(call.exec, call.call, offset)

    def conflict(self, execution: str, call: str, offset: int) -> None:
        self.conflicts.append((execution, call, offset))
        self.execution(execution).conflicts.append(call)


def whole_call(forest: Forest, mark: Mark) -> Call:
    """The call as recorded, arrays included."""
    tokens = forest.tokens(mark)
    prompt, completion = tokens[: mark.prompt_tokens], tokens[mark.prompt_tokens :]
    return dataclasses.replace(mark.call, prompt_ids=prompt, completion_ids=completion, logprobs=mark.logprobs)


def relabel(execution: Execution) -> None:
    """proxyd learns from later calls what an earlier one was (a compaction, a side call) and says so in a note."""
    for note in execution.others:
        if isinstance(note, Note) and note.text == "relabel" and str(note.extra.get("call")) in execution.forest:
            mark = execution.forest[str(note.extra["call"])]
            purpose, label = (str(note.extra.get(k) or getattr(mark.call, k)) for k in ("purpose", "label"))
            mark.call = dataclasses.replace(mark.call, purpose=purpose, label=label)
