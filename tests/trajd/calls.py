"""A call log as proxyd writes it: executions with several turns, a sub-agent and a compaction now and then."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gyre_base.runfile import Agent, Call, CallWriter, Note, RunHeader, Span, context_digest, framed, record_frame
from gyre_base.runframes import MAGIC

MAIN = Agent()


class Log:
    """Appends to one file of `calls/`. Tokens come from a seed, so two logs of the same calls are equal."""

    def __init__(self, folder: Path, life: int = 1, shard: int = 0) -> None:
        self.path = folder / f"proxyd-{shard}-{life}.gtr"
        self._writer = CallWriter(form=record_frame)
        self.add(MAGIC + framed(RunHeader(run="test", writer="test")))

    def add(self, data: bytes) -> None:
        with self.path.open("ab") as file:
            file.write(data)

    def call(
        self,
        execution: str,
        number: int,
        prompt: np.ndarray,
        *,
        tokens: int = 8,
        base: str | None = None,
        keep: int = 0,
        agent: Agent = MAIN,
        label: str = "main",
    ) -> np.ndarray:
        """One call; returns prompt and completion, the history for the next."""
        rng = np.random.default_rng([number, *execution.encode()])
        completion = rng.integers(100, 500, tokens).astype(np.int32)
        call = Call(
            exec=execution,
            call=f"c{number}",
            seq=number,
            t0=float(number),
            t1=number + 0.5,
            agent=agent,
            label=label,
            spans=(Span("0.0", 0, tokens),),
            context=context_digest(prompt),
            prompt_ids=prompt,
            completion_ids=completion,
            logprobs=-rng.random(tokens).astype(np.float32),
        )
        self.add(self._writer.call(call, base=base, keep=keep))
        return np.concatenate([prompt, completion])

    def execution(self, name: str, turns: int = 3, sub_agent: bool = False) -> None:
        """A conversation: every turn adds four tokens that the harness says."""
        history = np.arange(10, dtype=np.int32)
        before: str | None = None
        for turn in range(turns):
            said = np.full(4, 50 + turn, np.int32)
            prompt = np.concatenate([history, said])
            history = self.call(name, turn, prompt, base=before, keep=len(history) if before else 0)
            before = f"c{turn}"
        if sub_agent:
            prompt = np.concatenate([np.arange(5), np.arange(600, 607)]).astype(np.int32)
            self.call(name, turns, prompt, agent=Agent(id="s", role="sub-agent", parent="c0"), label="sub-agent")

    def relabel(self, execution: str, call: str, purpose: str, label: str) -> None:
        about = {"call": call, "purpose": purpose, "label": label}
        self.add(framed(Note(text="relabel", exec=execution, extra=about)))
