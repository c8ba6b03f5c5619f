"""What a reader keeps of the calls of one execution, to resolve later ones: delta lines, duplicates, distinct tokens.

Owns the memory: tails and completions of every call, whole tokens of a few recent histories (`runtape`). Knows nothing
of files and offsets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gyre_base.runblocks import Blocks
from gyre_base.runcodec import BadRecord, ids_array, logprobs_array
from gyre_base.runrecords import NO_IDS, Ids, Logprobs, chain_hash
from gyre_base.runtape import Rendered, Short, Tape, Tapes


@dataclass(slots=True)
class Line:
    """The part of a call line that says which tokens it is about."""

    base: str | None
    keep: int
    tail: Ids
    completion: Ids
    logprobs: Logprobs | None
    stated: str | None  # the chain hash that the line carries
    text: bool = False

    @classmethod
    def of(cls, obj: dict[str, Any], blocks: Blocks) -> Line:
        base, keep, stated = obj.get("base"), obj.get("keep", 0), obj.get("h")
        if not isinstance(keep, int) or keep < 0 or not isinstance(base, (str, type(None))):
            raise BadRecord("base or keep is of a wrong type")
        keep = keep if base is not None else 0
        if obj.get("level", "token") == "text":
            tail, completion = (_numbers(obj.get(key, []), key, blocks) for key in ("prompt", "completion"))
            return cls(base, keep, tail, completion, None, stated, text=True)
        tail = ids_array(obj.get("prompt_ids", []), "prompt_ids")
        completion = ids_array(obj.get("completion_ids", []), "completion_ids")
        return cls(base, keep, tail, completion, logprobs_array(obj.get("logprobs")), stated)


def _numbers(values: Any, key: str, blocks: Blocks) -> Ids:
    if not isinstance(values, list) or not all(isinstance(v, dict) for v in values):
        raise BadRecord(f"{key} is not a list of blocks")
    return blocks.numbers(values)


@dataclass(slots=True)
class _Body:
    """A call as stored: prompt = the first `keep` tokens of base's prompt + completion, then `tail`."""

    base: str | None
    keep: int
    tail: Ids
    completion: Ids
    answer: bytes  # digest of completion and logprobs
    hash: bytes  # chain hash of its line

    @property
    def tokens(self) -> int:
        return self.keep + len(self.tail) + len(self.completion)


@dataclass(frozen=True, slots=True)
class Place:
    """The first `keep` tokens of a prompt are on a tape, and a call before it shares them.

    With `completion` all of the call is on the tape already, and `keep` is what it shares with `base`.
    """

    tape: Tape | None
    keep: int
    completion: Ids | None = None
    base: str | None = None


NOWHERE = Place(None, 0)


class History:
    """The calls of one execution: tails and completions, plus the whole tokens of a few recent ones."""

    def __init__(self, blocks: Blocks) -> None:
        self.tapes = Tapes()
        self._blocks = blocks
        self._bodies: dict[str, _Body] = {}
        self._on: dict[int, tuple[Tape, str]] = {}  # id of a tape -> (it, the last call laid on it)

    def __contains__(self, call: str) -> bool:
        return call in self._bodies

    def tape_bytes(self) -> int:
        return sum(tape.size for tape in self.tapes.items)

    def drop_tapes(self) -> None:
        self.tapes = Tapes()
        self._on.clear()

    def resolve(self, line: Line, short: Short | None = None) -> tuple[Ids, bytes, Place]:
        """(prompt int32[P], chain hash, where it lies). Raises BadRecord: no base, wrong hash."""
        prompt, parent = line.tail, b""
        place = NOWHERE
        tape = short.tape if short is not None else None
        if line.base is not None:
            base = self._bodies.get(line.base)
            if base is None:
                raise BadRecord(f"its base {line.base} is missing (an orphan until the next full call)")
            if line.keep > base.tokens:
                raise BadRecord(f"keep {line.keep} is longer than its base {line.base} ({base.tokens})")
            head, parent = self._sequence(line.base, line.keep), base.hash
            place = Place(self._tape_of(line.base), line.keep)
            prompt = np.concatenate([head, line.tail])
        elif tape is not None:  # laid down before the hash is looked at: tokens that nobody claims do no harm
            assert short is not None
            _, before = self._on.get(id(tape), (tape, None))
            laid, prompt, completion = self.tapes.lay(tape, short.keep, line.tail, line.completion, short.text)
            place = Place(laid, short.keep, completion, before)
        tail = prompt if tape is not None else line.tail
        hashed = (
            (self._blocks.hashed(tail), self._blocks.hashed(line.completion)) if line.text else (tail, line.completion)
        )
        digest = chain_hash(parent, line.keep, *hashed, line.logprobs)
        if line.stated is not None and line.stated != digest.hex():
            raise BadRecord("the chain hash does not fit: a digit changed or the base is another one")
        return prompt, digest, place

    def same(self, call: str, line: Line, prompt: Ids, digest: bytes) -> bool:
        """Whether a second line of this id says the same tokens and logprobs, whatever its form."""
        body = self._bodies[call]
        if body.hash == digest:
            return True
        if body.answer != _answer(line) or body.tokens != len(prompt) + len(line.completion):
            return False
        return bool(np.array_equal(self._sequence(call, len(prompt)), prompt))

    def add(
        self, call: str, line: Line, prompt: Ids, digest: bytes, place: Place, text: Rendered | None = None
    ) -> tuple[Ids, Ids]:
        """Store it against the recent history it shares most with: distinct tokens are kept, not prompts.

        Returns its prompt and completion as views that hold no copy of the history. `text` renders the line's tokens.
        """
        tape, keep, base = place.tape, place.keep, place.base
        if tape is not None and place.completion is not None:
            laid, whole, completion = tape, prompt, place.completion
        else:
            if tape is None:
                tape, keep = self.tapes.nearest(prompt)
            _, base = self._on.get(id(tape), (tape, line.base))
            text = text if not keep and line.base is None else None  # only then it renders all that is new
            laid, whole, completion = self.tapes.lay(tape, keep, prompt[keep:], line.completion, text)
        stored = min(keep, self._bodies[base].tokens) if base is not None else 0
        self._bodies[call] = _Body(base, stored, whole[stored:].copy(), line.completion, _answer(line), digest)
        self._note(laid, call)
        return whole, completion

    def _note(self, tape: Tape, call: str) -> None:
        """The deepest call of a tape stands for it."""
        before = self._on.get(id(tape))
        if before is None or self._bodies[call].tokens >= self._bodies[before[1]].tokens:
            self._on[id(tape)] = (tape, call)
        alive = {id(t) for t in self.tapes.items}
        if len(self._on) > len(alive):
            self._on = {key: value for key, value in self._on.items() if key in alive}

    def _tape_of(self, call: str) -> Tape | None:
        return next((tape for tape, last in self._on.values() if last == call), None)

    def _sequence(self, call: str | None, n: int) -> Ids:
        """The first n tokens of a call's prompt + completion, filled from the end along the bases."""
        tapes = {last: tape for tape, last in self._on.values()}
        if call in tapes:
            return tapes[call].view(0, n)
        out: Ids = np.empty(n, np.int32)
        while n > 0 and call is not None:
            if (tape := tapes.get(call)) is not None:
                out[:n] = tape.view(0, n)
                break
            body = self._bodies[call]
            prompt = body.keep + len(body.tail)
            if n > prompt:
                out[prompt:n] = body.completion[: n - prompt]
            if n > body.keep:
                out[body.keep : min(n, prompt)] = body.tail[: n - body.keep]
            n, call = min(n, body.keep), body.base
        return out


def _answer(line: Line) -> bytes:
    return chain_hash(b"answer", 0, NO_IDS, line.completion, line.logprobs)
