"""Plays that several programs can give, beside the whole run of mind.py: what is said, and the tree it leaves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.harness.mind import FORK, SUB, WRITE, Mind, Step, proof, sub
from tests.harness.trees import Tree, agent, line

Shell = Callable[[str], str]
Call = Callable[[str], str]  # of an agent, by its prompt
LAST = "All is done."


@dataclass(frozen=True)
class Play:
    """`mind` has the plans; each program adds how it asks for summaries."""

    mind: Mind
    tree: Tree


def order(name: str, mark: str = SUB) -> str:
    """The prompt of an agent."""
    return f"{mark}{name}: do it and report."


def end(shell: Shell, last: str = LAST) -> list[Step]:
    return [Step("writes", shell(WRITE), "PROOF-written"), Step("ends", last)]


def nested(shell: Shell, call: Call) -> Play:
    """An agent calls a parallel pair of its own; proxyd is killed below the second."""
    outer = [
        Step("o calls p and q", call(order("p")) + "\n" + call(order("q")), "PROOF-q"),
        Step("o reports", "The report: PROOF-o"),
    ]
    main = [Step("calls o", call(order("o")), "PROOF-o"), *end(shell)]
    return Play(
        Mind(main, {"o": outer, "p": sub("p", shell), "q": sub("q", shell, "kill")}),
        {
            **line("calls o", "writes", "ends"),
            **agent("o", "calls o", "o calls p and q", "o reports"),
            **agent("p", "o calls p and q"),
            **agent("q", "o calls p and q"),
        },
    )


def background(shell: Shell, call: Call, launched: str) -> Play:
    """An agent works on while its caller does, and reports when that has said that it rests. `launched`: what the
    tool says meanwhile.
    """
    main = [
        Step("calls b", call(order("b")), lambda heard: launched in heard),
        Step("works", shell(proof("worked")), "PROOF-worked"),
        Step("rests", "I rest.", "PROOF-b"),
        *end(shell),
    ]
    return Play(
        Mind(main, {"b": sub("b", shell, "after rests")}),
        {**line("calls b", "works", "rests", "writes", "ends"), **agent("b", "calls b")},
    )


def fork(shell: Shell, call: Call, launched: str = "", above: str = "calls f") -> Play:
    """An agent that goes on from its caller's history, `above` it; its cell leaves in mid-answer."""
    heard_of = (lambda heard: launched in heard) if launched else "PROOF-f"
    main = [
        Step("begins", shell(proof("begun")), "PROOF-begun"),
        Step("calls f", call(order("f", FORK)), heard_of),
        *([Step("rests", "I rest.", "PROOF-f")] if launched else []),
        *end(shell),
    ]
    trouble = "after rests" if launched else "switch"
    return Play(
        Mind(main, {"f": sub("f", shell, trouble)}),
        {
            **line("begins", "calls f", *(["rests"] if launched else []), "writes", "ends"),
            **agent("f", "calls f", above=above),
        },
    )


def overflow(shell: Shell, fill: str, parts: int = 2) -> Mind:
    """The tools of one turn say more than the context has left: the engine's refusal is the first that tells of it."""
    first, *names = (f"f{n}" for n in range(parts + 1))
    return Mind(
        [
            Step("begins", shell(f"{proof(first)}; {fill}"), f"PROOF-{first}"),
            Step("fills", "\n".join(shell(f"{proof(name)}; {fill}") for name in names), f"PROOF-{names[-1]}"),
            *end(shell),
        ]
    )
