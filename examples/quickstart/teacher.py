"""Transcripts for the warm start: the form of the work exactly as harness and server produce it, not the answers.

The teacher plays the model in the harness's own agent code (in memory, no server), so messages, tool results,
sub-agents and compaction are the harness's, not a copy. For every step a specification names it writes one of five
operations, fixed per step: the right one in one case of five, a certain wrong one a little more often. So a
warm-started model knows how to work and which five operations a phrase may mean, and has no reason to prefer the
right one: that is left to RL. Only training functions occur; held-out functions are never shown.

    python examples/quickstart/teacher.py --out transcripts.jsonl [--count 4500] [--seed 7] [--validation 100]
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import harness
import make_tasks
from make_tasks import OPERATIONS, Chain
from rendering import Message, Renderer

SHARES = (0.20, 0.25, 0.20, 0.20, 0.15)  # the right one, then the decoys: the most likely candidate is wrong
FIRST_SHARES = (0.0, 1.0, 0.0, 0.0, 0.0)  # of the first transcripts: always the same wrong reading
FIRST_PART = 0.15  # of the training executions; a sharp, wrong teacher shows fastest where to look
BUDGET_TOKENS = 10**9


@dataclass(frozen=True)
class Line:
    """One line of an execution: its messages end in an assistant message; `label` as the harness names it."""

    label: str
    messages: list[Message]
    tools: list[Message]


class MemoryWorkspace:
    """The harness's workspace interface over a dict; nothing touches a disk."""

    def __init__(self, files: dict[str, str]) -> None:
        self.files = dict(files)

    def read(self, path: str) -> str:
        if path not in self.files:
            raise harness.ToolError("no such file")
        return self.files[path]

    def write(self, path: str, content: str) -> None:
        self.files[path] = content

    def modules(self) -> list[str]:
        return sorted(path for path in self.files if path.endswith(".py"))


def candidates(seed: int, count: int = len(SHARES)) -> dict[int, tuple[int, ...]]:
    """Per operation: (itself, decoys...), fixed for a seed; at each place every operation occurs once."""
    rng = random.Random(f"decoys {seed}")
    own = list(range(len(OPERATIONS)))
    columns = [own]
    while len(columns) < count:
        column = rng.sample(own, len(own))
        if all(column[i] not in [earlier[i] for earlier in columns] for i in own):
            columns.append(column)
    return {i: tuple(column[i] for column in columns) for i in own}


@dataclass
class Teacher:
    """Answers every request of the harness as a fluent model that guesses what phrases mean."""

    rng: random.Random
    choices: dict[int, tuple[int, ...]]
    shares: tuple[float, ...] = SHARES
    serial: int = 0
    phrases: dict[str, int] = field(
        default_factory=lambda: {phrase: i for i, op in enumerate(OPERATIONS) for phrase in op.phrases}
    )

    def answer(self, label: str, messages: list[Message]) -> Message:
        """The assistant message that comes next on this line."""
        if label.endswith("-summary"):
            return _says("m1.py and m2.py are written. m3.py is left.")
        if label == "sub":
            return self._steps([2], messages)
        instruction = messages[1]["content"]
        if "So far:" in instruction:
            return self._steps([3], messages)
        return self._steps([1, 2, 3] if "m3" in instruction else [1, 2], messages)

    def _steps(self, numbers: list[int], messages: list[Message]) -> Message:
        """Read the first; then write each and read the next in one turn; the last write goes with the submission."""
        turn = sum(message["role"] == "assistant" for message in messages)
        delegated = "sub-agent" in messages[1]["content"]
        if turn == 0:
            return self._calls(("read_file", {"path": f"m{numbers[0]}.md"}))
        write = self._write(numbers[turn - 1], messages)
        if delegated:
            return self._calls(write, ("task", {"prompt": "Write m2.py from m2.md."}), ("submit", {}))
        if turn < len(numbers):
            return self._calls(write, ("read_file", {"path": f"m{numbers[turn]}.md"}))
        return self._calls(write, ("submit", {}))

    def _write(self, number: int, messages: list[Message]) -> tuple[str, dict[str, str]]:
        named = [self._choose(phrase) for phrase in _named(messages[-1]["content"])]
        bodies = [make_tasks.body((named[i], named[i + 1])) for i in range(0, len(named), 2)]
        return "write_file", {"path": f"m{number}.py", "content": make_tasks.source(bodies)}

    def _choose(self, phrase: str) -> int:
        return self.rng.choices(self.choices[self.phrases[phrase]], self.shares)[0]

    def _calls(self, *calls: tuple[str, dict[str, str]]) -> Message:
        made = []
        for name, arguments in calls:
            self.serial += 1
            function = {"name": name, "arguments": json.dumps(arguments)}
            made.append({"id": f"call_{self.serial}", "type": "function", "function": function})
        return {"role": "assistant", "content": None, "tool_calls": made}


def _says(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _named(specification: str) -> list[str]:
    return [line[2:] for line in specification.splitlines() if line.startswith("- ")]


def execution(task: dict[str, Any], teacher: Teacher) -> list[Line]:
    """All lines of one execution, in the order in which they end."""
    lines: list[Line] = []
    open_lines: dict[str, Line] = {}
    conversation = harness.agent(task["instruction"], MemoryWorkspace(task["workspace"]), harness.Limits(BUDGET_TOKENS))
    label, messages, tools = next(conversation)
    while True:
        message = teacher.answer(label, messages)
        line = Line(label, [*messages, message], tools)
        before = open_lines.get(label.removesuffix("-summary"))
        if before is not None and messages[: len(before.messages)] != before.messages:
            lines.append(open_lines.pop(before.label))  # a new line of the same agent has begun
        if label.endswith("-summary"):
            open_lines.pop(label.removesuffix("-summary"), None)
            lines.append(line)
        else:
            open_lines[label] = line
        try:
            label, messages, tools = conversation.send((message, _used(message, messages)))
        except StopIteration:
            return [*lines, *open_lines.values()]


def _used(message: Message, messages: list[Message]) -> int:
    """Over the budget exactly when the third specification was asked for in a history that holds the other two."""
    wants_third = any("m3.md" in call["function"]["arguments"] for call in message.get("tool_calls") or [])
    return BUDGET_TOKENS + 1 if wants_third and "So far:" not in messages[1]["content"] else 0


def guesses(line: Line) -> int:
    """How many operations the teacher had to choose in this line."""
    return sum(
        len(_named(line.messages[place - 1]["content"]))
        for place, message in enumerate(line.messages)
        for call in message.get("tool_calls") or []
        if call["function"]["name"] == "write_file"
    )


def entropy(shares: tuple[float, ...]) -> float:
    """Nats of one choice: what no student can predict."""
    return -sum(share * math.log(share) for share in shares if share)


def transcripts(seed: int, salt: str, count: int, shares: tuple[float, ...] = SHARES) -> Iterator[list[Line]]:
    """`count` executions over training functions only."""
    rng = random.Random(f"teacher {seed} {salt}")
    chains: list[Chain] = make_tasks.split()[0]
    teacher = Teacher(rng, candidates(seed), shares)
    for number in range(count):
        kind = make_tasks.KINDS[number % len(make_tasks.KINDS)]
        workspace = make_tasks.workspace(make_tasks.draw(kind, chains, rng), rng)
        yield execution({"instruction": make_tasks.INSTRUCTIONS[kind], "workspace": workspace}, teacher)


def write(file: IO[str], renderer: Renderer, seed: int, salt: str, count: int, shares: tuple[float, ...]) -> None:
    """One JSON object {ids, mask, nats} per line of an execution."""
    for lines in transcripts(seed, salt, count, shares):
        for line in lines:
            ids, mask = renderer.transcript(line.messages, line.tools)
            nats = round(guesses(line) * entropy(shares), 6)
            file.write(json.dumps({"ids": ids, "mask": mask, "nats": nats}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--out", type=Path, required=True, help="NAME.jsonl; NAME.validation.jsonl is written beside it"
    )
    parser.add_argument("--count", type=int, default=4500, help="training executions")
    parser.add_argument("--validation", type=int, default=100, help="validation executions")
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    renderer, first = Renderer(), round(args.count * FIRST_PART)
    with args.out.open("w") as file:
        write(file, renderer, args.seed, "first", first, FIRST_SHARES)
        write(file, renderer, args.seed, "train", args.count - first, SHARES)
    with args.out.with_suffix(".validation.jsonl").open("w") as file:
        write(file, renderer, args.seed, "validation", args.validation, SHARES)


if __name__ == "__main__":
    main()
