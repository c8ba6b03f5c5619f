"""What the scripted model says: a plan per agent, decided from the prompt alone, so that any order of calls will do.

A plan is a list of steps, each with the evidence that it is done: a text that some tool result, report or summary in
the prompt holds. The next step is the first one without evidence. Tools print evidence that the model only spells in
parts (`echo "PROOF"-3`), so its own words never count as done. An order to summarise is answered with all evidence
so far, which is how a plan goes on after a compaction.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Any

MAIN, SUB, FORK = "PLAN-MAIN", "PLAN-SUB-", "PLAN-FORK-"
TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>", re.DOTALL)
SUMMARY = "Done so far:"
PROOF = re.compile(r"PROOF-\w+")
WRITE = 'printf 0123456789 > answer; echo "PROOF"-written'  # what is scored


@dataclass(frozen=True)
class Turn:
    role: str
    text: str

    @property
    def heard(self) -> bool:
        """Whether it may tell what is done: a summary does, the model's other words don't."""
        return self.role != "assistant" or SUMMARY in self.text

    @property
    def result(self) -> bool:
        return "<tool_response>" in self.text


@dataclass(frozen=True)
class Step:
    """`say` is the answer, or makes it of the prompt's heard text. `trouble` befalls its first answer (stage.py)."""

    name: str
    say: str | Callable[[str], str]
    proof: str | Callable[[str], bool] = ""  # a text, or asked of the heard text; empty: never done (the last step)
    trouble: str = ""

    def done(self, heard: str, proofs: Container[str]) -> bool:
        return self.proof in proofs if isinstance(self.proof, str) else self.proof(heard)


@dataclass
class Mind:
    """`main` is the plan of the task, `subs` those of agents whose prompt bears `PLAN-SUB-<name>`."""

    main: Sequence[Step]
    subs: dict[str, Sequence[Step]] = field(default_factory=dict)
    side: Callable[[Sequence[Turn]], str | None] = lambda turns: None
    orders: Callable[[Sequence[Turn]], bool] = lambda turns: False
    summary: str = "<analysis>All is well.</analysis>\n<summary>" + SUMMARY + " {proofs}</summary>"

    def steps(self) -> list[Step]:
        return [*self.main, *(step for plan in self.subs.values() for step in plan)]

    def answer(self, prompt: str) -> tuple[str, Step]:
        """What comes after this prompt (which ends where an answer begins). Raises AssertionError at a strange one."""
        turns = [Turn(role, text) for role, text in TURN.findall(prompt)]
        heard = "\n".join(t.text for t in turns[turns[0].role == "system" :] if t.heard)  # the head proves nothing
        if (words := self.side(turns)) is not None:
            return words, Step("side", words)
        proofs = dict.fromkeys(PROOF.findall(heard))
        if self.orders(turns):
            words = self.summary.format(proofs=" ".join([self._who(turns), *proofs]))
            return words, Step("summary", words)
        plan = self._plan(turns)
        step = next(s for s in plan if not s.done(heard, proofs))
        return (step.say if isinstance(step.say, str) else step.say(heard)), step

    def _who(self, turns: Sequence[Turn]) -> str:
        """The mark of an agent: the first in what users said. A fork's history begins with that of another."""
        if forked := re.search(rf"{FORK}(\w+)", "\n".join(t.text for t in turns if t.heard)):
            return f"{SUB}{forked[1]}"
        for turn in turns:
            found = (
                re.search(rf"{MAIN}|{SUB}\w+", turn.text)
                if turn.heard and turn.role != "system" and not turn.result
                else None
            )
            if found:
                return found[0]
        raise AssertionError(f"whose prompt is this? {[(t.role, t.text[-300:]) for t in turns]}")

    def _plan(self, turns: Sequence[Turn]) -> Sequence[Step]:
        who = self._who(turns)
        return self.main if who == MAIN else self.subs[who.removeprefix(SUB)]


def plan(shell: Callable[[str], str], agents: Sequence[Step], fill: str = "", ends: str = "All is done.") -> list[Step]:
    """The play of all harnesses: turns, agents, a context that fills up (by output of `fill`), troubles in between."""
    fills = [Step(f"fills {n}", shell(f"{proof(f'f{n}')}; {fill}"), f"PROOF-f{n}") for n in (1, 2)] if fill else []
    return [
        Step("begins", f"I begin.\n{shell(proof('begun'))}", "PROOF-begun"),
        Step("is moved", shell(proof("moved")), "PROOF-moved", "switch"),
        *agents,
        Step("is cut", shell(proof("cut")), "PROOF-cut", "drop"),
        *fills,
        Step("is held", shell(proof("held")), "PROOF-held", "away"),
        Step("loses its engine", shell(proof("lost")), "PROOF-lost", "die"),
        Step("loses proxyd", shell(proof("again")), "PROOF-again", "kill"),
        Step("writes", shell(WRITE), "PROOF-written"),
        Step("ends", ends),
    ]


def sub(name: str, shell: Callable[[str], str], trouble: str = "") -> list[Step]:
    """The plan of a sub-agent: one tool and a report."""
    return [
        Step(f"{name} works", shell(proof(f"in{name}")), f"PROOF-in{name}", trouble),
        Step(f"{name} reports", f"The report: PROOF-{name}"),
    ]


def call(tool: str, **arguments: Any) -> str:
    """One tool call as the model writes it."""
    return f'<tool_call>\n{{"name": {json.dumps(tool)}, "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def proof(name: str) -> str:
    """A shell command that prints evidence without spelling it."""
    return f'echo "PROOF"-{name}'
