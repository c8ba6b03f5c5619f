"""Builders of calls and forests for the tests of this folder."""

from __future__ import annotations

import numpy as np

from gyre_base.runfile import Agent, Attempt, Call, Span
from trajtools.forest import Forest


def make_call(name="c0", prompt=(1, 2, 3), completion=(4, 5), logprobs="auto", execution="e", **kw):
    """A call with made-up logprobs unless they are given."""
    if isinstance(logprobs, str):
        logprobs = -0.5 * np.arange(1, len(completion) + 1)
    return Call(
        exec=execution,
        call=name,
        prompt_ids=np.array(prompt, np.int32),
        completion_ids=np.array(completion, np.int32),
        logprobs=None if logprobs is None else np.array(logprobs, np.float32),
        **kw,
    )


def forest_of(*calls):
    forest = Forest(calls[0].exec if calls else "e")
    for call in calls:
        forest.insert(call)
    return forest


class Story:
    """Calls told one after another, one second each, labelled by agent. `say` gives the text behind the call."""

    def __init__(self, execution="e"):
        self.execution = execution
        self.calls = []

    def say(self, prompt, completion, agent="main", label=None, after=1.0, took=1.0, **kw):
        i = len(self.calls)
        role = "main" if agent == "main" else "sub-agent"
        purpose = kw.get("purpose", "turn")
        t0 = kw.pop("t0", self.calls[-1].t1 + after if self.calls else 0.0)
        label = label or (role + ("-summary" if purpose == "summary" else ""))
        call = make_call(
            f"c{i}", prompt, completion, execution=self.execution, seq=i, t0=t0, t1=t0 + took,
            agent=Agent(id=agent, role=role), label=label, **kw,
        )  # fmt: skip
        self.calls.append(call)
        return [*prompt, *completion]

    def forest(self):
        return forest_of(*self.calls)


def story():
    """A main path that is compacted, a sub-agent beside it, the path after the compaction: 6 calls."""
    told = Story()
    text = told.say([1, 2, 3], [10, 11])
    sub = told.say([1, 20], [21, 22], agent="s1")
    told.say([*sub, 5], [23, 24, 25], agent="s1")
    text = told.say([*text, 6], [12, 13, 14])
    told.say([*text, 8], [50, 51], purpose="summary")
    told.say([1, 2, 50, 51], [15])
    return told


def random_execution(rng, calls=14, vocab=5, execution="e"):
    """A made-up execution in which everything happens: drift, retries, edits, sub-agents, compaction, gaps."""
    story = Story(execution)
    texts = {"main": _ids(rng, vocab, 3)}
    agents = ["main"]
    for _ in range(calls):
        if rng.random() < 0.12:
            agents.append(f"s{len(agents)}")
            texts[agents[-1]] = [*texts["main"][:2], *_ids(rng, vocab, 2)]
        agent = agents[rng.integers(len(agents))]
        prompt = list(texts[agent])
        chance = rng.random()
        kw = {"spans": (), "logprobs": -rng.random(0).astype(np.float32)}
        completion = _ids(rng, vocab, rng.integers(0, 6))
        kw["logprobs"] = _logprobs(rng, len(completion))
        kw["spans"] = _spans(rng, len(completion))
        kw["delivered"] = [None, True, False][int(rng.integers(3))]
        if chance < 0.1:
            kw["purpose"] = "summary"
        elif chance < 0.15:
            kw["label"] = "unlabelled"
        elif chance < 0.2:
            kw["purpose"] = "aux"
        elif chance < 0.25 and story.calls:
            kw["attempt"] = Attempt(of=story.calls[-1].call, n=1)
        whole = story.say(prompt, completion, agent=agent, after=float(rng.choice([1.0, -0.5])), **kw)
        texts[agent] = _next_text(rng, prompt, whole, vocab, kw.get("purpose", "turn"))
    return story.calls


def _next_text(rng, prompt, whole, vocab, purpose):
    more = _ids(rng, vocab, rng.integers(1, 4))
    if purpose != "turn":
        return list(prompt) if rng.random() < 0.5 else [*prompt[:3], *more]
    match int(rng.integers(8)):
        case 0:
            return list(prompt)  # the same request again
        case 1:
            return [*whole[:-1], *more]
        case 2:
            return [*whole[: len(prompt) + 1], *more]
        case 3:
            return [*prompt[:-1], *more]
        case _:
            return [*whole, *more]


def _ids(rng, vocab, n):
    return rng.integers(0, vocab, int(n)).tolist()


def _logprobs(rng, n):
    if rng.random() < 0.1:
        return None
    out = -rng.random(n).astype(np.float32)
    out[rng.random(n) < 0.1] = rng.choice([np.nan, -np.inf, -9999.0, 1.0])
    return out


def _spans(rng, n):
    cut = int(rng.integers(0, n + 1))
    return tuple(s for s in (Span("0.1", 0, cut), Span("0.2", cut, n)) if s.start < s.end)
