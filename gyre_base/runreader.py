"""Reading a run file: delta lines resolved, damage reported, duplicates ignored, from any offset and while it grows.

Owns the rules for what a reader does with each line (docs, "Run file", damaged files). Never changes the file. Memory:
the distinct tokens of the executions in flight (`forget` drops one), not the sum of their prompts.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from gyre_base.runcodec import KINDS, BadRecord, call_fields, decode, ids_array, logprobs_array, parse_object
from gyre_base.runrecords import NO_IDS, Call, Ids, Logprobs, Record, chain_hash, common_prefix

_TIPS = 8  # recent histories against which a full line is stored; more only helps beyond 8 parallel agents
_BUFFER = 1 << 20  # lines can be megabytes long


@dataclass(frozen=True)
class Located:
    """A record and where its line lies: bytes [offset, end)."""

    offset: int
    end: int
    record: Record


@dataclass(frozen=True)
class Bad:
    """A line taken out, or a defect of a call that was kept (`kept`: as context only)."""

    offset: int
    end: int
    reason: str
    kept: bool = False


@dataclass
class ReadReport:
    """What a reader met besides good records. `torn`: (offset, bytes) of an unfinished last line (a crash)."""

    records: Counter[str] = field(default_factory=Counter)
    unknown_kinds: Counter[str] = field(default_factory=Counter)
    bad: list[Bad] = field(default_factory=list)
    defects: list[Bad] = field(default_factory=list)
    conflicts: list[tuple[str, str, int]] = field(default_factory=list)  # (execution, call, offset)
    duplicates: int = 0
    recovered: int = 0  # records found behind a torn one on the same line
    torn: tuple[int, int] | None = None


class RunReader:
    """Iterates one run file. Call `records` again to go on where it ended: a torn end is read once it is whole."""

    def __init__(self, source: str | Path | BinaryIO, offset: int = 0) -> None:
        self._source = source
        self.offset = offset
        self.report = ReadReport()
        self._histories: dict[str, _History] = {}

    def records(self) -> Iterator[Located]:
        """Every good record from `offset` to the present end, in file order. Raises RunFileError on a higher major."""
        if isinstance(self._source, (str, Path)):
            with open(self._source, "rb", buffering=_BUFFER) as file:
                file.seek(self.offset)
                yield from self._lines(file)
        else:
            yield from self._lines(self._source)

    def forget(self, execution: str) -> None:
        """Drop the state of an execution that gets no more calls. A later delta on it would be an orphan."""
        self._histories.pop(execution, None)

    def _lines(self, file: BinaryIO) -> Iterator[Located]:
        self.report.torn = None
        for raw in file:
            start, end = self.offset, self.offset + len(raw)
            line = raw.strip(b"\x00\r\n\t \xef\xbb\xbf") if start == 0 else raw.strip(b"\x00\r\n\t ")
            if not raw.endswith(b"\n") and line and not _is_whole(line):
                self.report.torn = (start, len(raw))
                return
            self.offset = end
            if line:
                yield from self._line(line, start + raw.find(line), end)

    def _line(self, line: bytes, start: int, end: int) -> Iterator[Located]:
        try:
            record = self._record(parse_object(line), start, end)
        except BadRecord as error:
            self.report.bad.append(Bad(start, end, str(error)))
            yield from self._behind_torn(line, start, end)
            return
        if record is not None:
            yield Located(start, end, record)

    def _behind_torn(self, line: bytes, start: int, end: int) -> Iterator[Located]:
        """A crash between two writes glues a torn record to the next whole one: look for a suffix that is a record."""
        at = line.find(b'{"k":', 1)
        for _ in range(16):  # bounded: a megabyte of noise must not be parsed at every brace
            if at < 0:
                return
            try:
                record = self._record(parse_object(line[at:]), start + at, end)
            except BadRecord:
                at = line.find(b'{"k":', at + 1)
                continue
            self.report.recovered += 1
            if record is not None:
                yield Located(start + at, end, record)
            return

    def _record(self, obj: dict[str, Any], start: int, end: int) -> Record | None:
        """The record of one object; None if there is nothing to pass on (unknown kind, duplicate, conflict)."""
        kind = obj["k"]
        if kind not in KINDS:
            self.report.unknown_kinds[kind] += 1
            return None
        record = self._call(obj, start, end) if kind == "call" else decode(obj)
        if record is not None:
            self.report.records[kind] += 1
        return record

    def _call(self, obj: dict[str, Any], start: int, end: int) -> Call | None:
        fields = call_fields(obj)
        execution, call_id = fields["exec"], fields["call"]
        line = _Line.of(obj)
        if line.logprobs is not None and len(line.logprobs) != len(line.completion):
            reason = f"call {call_id}: {len(line.logprobs)} logprobs, {len(line.completion)} tokens: context only"
            self.report.defects.append(Bad(start, end, reason, kept=True))
        history = self._histories.setdefault(execution, _History())
        prompt, digest = history.resolve(line)
        if call_id in history:
            if history.same(call_id, line, prompt, digest):
                self.report.duplicates += 1
            else:
                self.report.conflicts.append((execution, call_id, start))
            return None
        history.add(call_id, line, prompt, digest)
        logprobs = line.logprobs if line.logprobs is None or len(line.logprobs) == len(line.completion) else None
        return Call(**fields, prompt_ids=prompt, completion_ids=line.completion, logprobs=logprobs)


def read_run(source: str | Path | BinaryIO, offset: int = 0) -> tuple[list[Record], ReadReport]:
    """Everything at once, for files known to be small. Long files: iterate a `RunReader`."""
    reader = RunReader(source, offset)
    return [located.record for located in reader.records()], reader.report


def _is_whole(line: bytes) -> bool:
    try:
        parse_object(line)
    except BadRecord:
        return False
    return True


# ---- what is kept of earlier calls, to resolve later ones ---------------------------------------------------------


@dataclass(slots=True)
class _Line:
    """The part of a call line that says which tokens it is about."""

    base: str | None
    keep: int
    tail: Ids
    completion: Ids
    logprobs: Logprobs | None
    stated: str | None  # the chain hash that the line carries

    @classmethod
    def of(cls, obj: dict[str, Any]) -> _Line:
        base, keep, stated = obj.get("base"), obj.get("keep", 0), obj.get("h")
        if not isinstance(keep, int) or keep < 0 or not isinstance(base, (str, type(None))):
            raise BadRecord("base or keep is of a wrong type")
        tail = ids_array(obj.get("prompt_ids", []), "prompt_ids")
        completion = ids_array(obj.get("completion_ids", []), "completion_ids")
        return cls(base, keep if base is not None else 0, tail, completion, logprobs_array(obj.get("logprobs")), stated)


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


class _History:
    """The calls of one execution: tails and completions, plus the whole tokens of a few recent ones."""

    def __init__(self) -> None:
        self._bodies: dict[str, _Body] = {}
        self._tips: OrderedDict[str, Ids] = OrderedDict()

    def __contains__(self, call: str) -> bool:
        return call in self._bodies

    def resolve(self, line: _Line) -> tuple[Ids, bytes]:
        """(prompt int32[P], chain hash). Raises BadRecord if the base is not here or the hash does not fit."""
        prompt, parent = line.tail, b""
        if line.base is not None:
            base = self._bodies.get(line.base)
            if base is None:
                raise BadRecord(f"its base {line.base} is missing (an orphan until the next full line)")
            if line.keep > base.tokens:
                raise BadRecord(f"keep {line.keep} is longer than its base {line.base} ({base.tokens})")
            prompt, parent = np.concatenate([self._sequence(line.base, line.keep), line.tail]), base.hash
        digest = chain_hash(parent, line.keep, line.tail, line.completion, line.logprobs)
        if line.stated is not None and line.stated != digest.hex():
            raise BadRecord("the chain hash does not fit: a digit changed or the base is another one")
        return prompt, digest

    def same(self, call: str, line: _Line, prompt: Ids, digest: bytes) -> bool:
        """Whether a second line of this id says the same tokens and logprobs, whatever its form."""
        body = self._bodies[call]
        if body.hash == digest:
            return True
        if body.answer != _answer(line) or body.tokens != len(prompt) + len(line.completion):
            return False
        return bool(np.array_equal(self._sequence(call, len(prompt)), prompt))

    def add(self, call: str, line: _Line, prompt: Ids, digest: bytes) -> None:
        """Store it against the recent history it shares most with: distinct tokens are kept, not prompts."""
        base, keep = line.base, line.keep
        if base is None:
            base, keep = self._nearest_tip(prompt)
        self._bodies[call] = _Body(base, keep, prompt[keep:].copy(), line.completion, _answer(line), digest)
        if base is not None and keep == self._bodies[base].tokens:
            self._tips.pop(base, None)  # it lives on in the one that extends it
        self._tips[call] = np.concatenate([prompt, line.completion])
        if len(self._tips) > _TIPS:
            self._tips.popitem(last=False)

    def _nearest_tip(self, prompt: Ids) -> tuple[str | None, int]:
        best: str | None = None
        longest = 0
        for call in reversed(self._tips):
            shared = common_prefix(self._tips[call], prompt)
            if shared > longest:
                best, longest = call, shared
            if longest == len(prompt):
                break
        return best, longest

    def _sequence(self, call: str | None, n: int) -> Ids:
        """The first n tokens of a call's prompt + completion, filled from the end along the bases."""
        out: Ids = np.empty(n, np.int32)
        while n > 0 and call is not None:
            if (tip := self._tips.get(call)) is not None:
                out[:n] = tip[:n]
                break
            body = self._bodies[call]
            prompt = body.keep + len(body.tail)
            if n > prompt:
                out[prompt:n] = body.completion[: n - prompt]
            if n > body.keep:
                out[body.keep : min(n, prompt)] = body.tail[: n - body.keep]
            n, call = min(n, body.keep), body.base
        return out


def _answer(line: _Line) -> bytes:
    return chain_hash(b"answer", 0, NO_IDS, line.completion, line.logprobs)
