"""What an intake knows and what a frame means. Pure, but for reading the files of earlier lives at the start.

Owns idempotence: the same call again is a duplicate, another payload under its id is refused. Invariant: a call is
known only if its record was made, so a refused frame leaves no trace. A frozen execution takes no more calls; a retired
one is only a name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gyre_base.runcodec import call_fields
from gyre_base.runfile import (
    BadRecord,
    Call,
    CallWriter,
    ExecEnd,
    Ids,
    Intent,
    Logprobs,
    Note,
    Record,
    RunReader,
    common_prefix,
    decode,
    framed,
    record_frame,
)
from gyre_base.runrecords import chain_hash
from trajtools.forest import Forest

FROZEN, RETIRED = "frozen", "retired"
RECORDS = ("exec", "exec_end", "intent", "reward", "note")


@dataclass(eq=False)
class _Known:
    """One execution."""

    forest: Forest
    hashes: dict[str, bytes] = field(default_factory=dict)  # call -> digest of its tokens and logprobs
    frames: dict[str, bytes] = field(default_factory=dict)  # call -> digest of the frame that brought it, in this life
    records: dict[tuple[str, str], bytes] = field(
        default_factory=dict
    )  # (kind, call) -> the last record of these, as framed
    intents: set[str] = field(default_factory=set)
    expected: int | None = None
    frozen: dict[str, Any] | None = None
    latest: dict[str, str] = field(default_factory=dict)  # agent -> its latest call


class Store:
    """Decides what a frame means. `take` returns the answer and the frame to write before it may go out."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._gone: set[str] = set()
        self._writer = CallWriter(form=record_frame)

    def recall(self, path: Path) -> None:
        """What a file of an earlier life says."""
        for located in RunReader(path).records():
            record = located.record
            name = getattr(record, "exec", None)
            if not isinstance(name, str):
                continue
            known = self._execution(name)
            match record:
                case Call():
                    known.hashes[record.call] = _payload(record.prompt_ids, record.completion_ids, record.logprobs)
                    known.forest.insert(record)
                    known.latest[record.agent.id] = record.call
                case Note(text="frozen"):
                    self._freeze(name, known)
                case Note(text="retired"):
                    self._retire(name)
                case _:
                    self._heard(record, framed(record))

    def take(self, head: dict[str, Any], raw: bytes) -> tuple[dict[str, Any], bytes]:
        """(answer, frame of a record or b""). Bad input is an answer, never an exception."""
        try:
            match head.get("op"):
                case "call":
                    return self._call(head, raw)
                case "record":
                    return self._record(head)
                case "freeze":
                    return self._frozen(str(head.get("exec")))
                case "retire":
                    return self._retired(str(head.get("exec")))
                case op:
                    return no(f"unknown op {op!r}"), b""
        except (BadRecord, ValueError, TypeError, KeyError) as error:
            return no(f"{type(error).__name__}: {error}"), b""

    def _execution(self, name: str) -> _Known:
        if name not in self._known:
            self._known[name] = _Known(Forest(name))
        return self._known[name]

    def _call(self, head: dict[str, Any], raw: bytes) -> tuple[dict[str, Any], bytes]:
        fields = call_fields(head["about"])
        tail, completion, logprobs = _arrays(head["sizes"], raw)
        name = fields["call"]
        if fields["exec"] in self._gone:
            return no(RETIRED, call=name), b""
        if fields.get("level", "token") != "token":
            return no("a frame holds token ids: convert text-level records with trajtools", call=name), b""
        known = self._known.get(fields["exec"]) or _Known(Forest(fields["exec"]))
        base, keep = head.get("base"), int(head.get("keep", 0))
        said = chain_hash(str(base).encode(), keep, tail, completion, logprobs)
        if known.frames.get(name) == said:  # the acknowledgement was lost
            return yes(call=name, state="duplicate"), b""
        if known.frozen is not None:
            note = Note(exec=fields["exec"], text="late call refused", extra={"call": name})
            return no(FROZEN, call=name), b"" if name in known.hashes else framed(note)
        prompt = tail
        if base is not None:
            if base not in known.forest:
                return no(f"base {base} is not here: send the whole prompt", call=name), b""
            mark = known.forest[base]
            if not 0 <= keep <= mark.end:
                return no(f"keep {keep} is longer than base {base} ({mark.end})", call=name), b""
            prompt = np.concatenate([known.forest.tokens(mark, 0, keep), tail])
        payload = _payload(prompt, completion, logprobs)
        if name in known.hashes:
            same = known.hashes[name] == payload
            return (
                yes(call=name, state="duplicate") if same else no("conflict: same id, other payload", call=name)
            ), b""
        call = Call(**fields, prompt_ids=prompt, completion_ids=completion, logprobs=logprobs)
        if base is None:
            base, keep = self._nearest(known, call)
        made = self._writer.call(call, base, keep)
        self._known[call.exec] = known
        known.hashes[name], known.frames[name] = payload, said
        known.forest.insert(call)
        known.latest[call.agent.id] = name
        return yes(call=name, state="stored"), made

    @staticmethod
    def _nearest(known: _Known, call: Call) -> tuple[str | None, int]:
        """What the call before it of its agent shares: a client that sends whole prompts gets a slim file too."""
        before = known.latest.get(call.agent.id)
        if before is None:
            return None, 0
        return before, common_prefix(known.forest.tokens(known.forest[before]), call.prompt_ids)

    def _record(self, head: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        obj = head["record"]
        if not isinstance(obj, dict) or obj.get("k") not in RECORDS:
            return no(f"a record is one of {', '.join(RECORDS)}"), b""
        record = decode(obj)
        if isinstance(record, Note) and record.text in (FROZEN, RETIRED):
            return no(f"an execution is {record.text} by the op of that name"), b""
        if str(getattr(record, "exec", "")) in self._gone:
            return no(RETIRED), b""
        made = framed(record)
        return (yes(state="stored"), made) if self._heard(record, made) else (yes(state="duplicate"), b"")

    def _heard(self, record: Record, made: bytes) -> bool:
        """Take note of a record that is no call; False if it was the last word of its kind already."""
        name = getattr(record, "exec", None)
        if not isinstance(name, str):
            return True
        known = self._execution(name)
        key = type(record).__name__, str(getattr(record, "call", ""))
        if known.records.get(key) == made:
            return False
        known.records[key] = made
        if isinstance(record, Intent):
            known.intents.add(record.call)
        elif isinstance(record, ExecEnd):
            known.expected = record.calls
        return True

    def _retired(self, name: str) -> tuple[dict[str, Any], bytes]:
        """The consumer has it: nothing but the name is kept, and the name is never taken again."""
        if name in self._gone:
            return yes(exec=name, state="duplicate"), b""
        known = self._known.get(name)
        if known is None or known.frozen is None:
            return no(f"{name} is not frozen: freeze it first" if known else f"no execution {name}"), b""
        self._retire(name)
        return yes(exec=name, state=RETIRED), framed(Note(exec=name, text=RETIRED))

    def _retire(self, name: str) -> None:
        self._known.pop(name, None)
        self._gone.add(name)

    def _frozen(self, name: str) -> tuple[dict[str, Any], bytes]:
        if name not in self._known:
            return no(RETIRED if name in self._gone else f"no execution {name}"), b""
        known = self._known[name]
        if known.frozen is not None:
            return yes(**known.frozen), b""
        about = self._freeze(name, known)
        return yes(**about), framed(Note(exec=name, text=FROZEN, extra={"digest": about["digest"]}))

    def _freeze(self, name: str, known: _Known) -> dict[str, Any]:
        """Lets the tokens go: a frozen execution needs its digest and its ids only."""
        missing = sorted(known.intents - set(known.hashes))
        short = known.expected is not None and known.expected != len(known.hashes)
        digest = known.forest.digest()
        about = {"exec": name, "digest": digest, "calls": len(known.hashes), "incomplete": bool(missing) or short}
        known.frozen, known.forest, known.latest = about, Forest(name), {}
        self._writer.forget(name)
        return about


def yes(**more: Any) -> dict[str, Any]:
    return {"ok": True, **more}


def no(why: str, **more: Any) -> dict[str, Any]:
    return {"ok": False, "why": why, **more}


def _payload(prompt: Ids, completion: Ids, logprobs: Logprobs | None) -> bytes:
    return chain_hash(b"payload", 0, prompt, completion, logprobs)


def _arrays(sizes: Any, raw: bytes) -> tuple[Ids, Ids, Logprobs | None]:
    """(prompt tail, completion, logprobs). Raises BadRecord."""
    prompt, completion, logprobs = (int(n) for n in sizes)
    if prompt < 0 or completion < 0 or logprobs not in (-1, completion):
        raise BadRecord(f"sizes {sizes}: logprobs are one per completion token, or -1 for none")
    if len(raw) != 4 * (prompt + completion + max(logprobs, 0)):
        raise BadRecord(f"{len(raw)} raw bytes for sizes {sizes}")
    ids = np.frombuffer(raw, "<i4", prompt + completion).astype(np.int32)
    if len(ids) and int(ids.min()) < 0:
        raise BadRecord("a negative token id")
    values = None if logprobs < 0 else np.frombuffer(raw, "<f4", logprobs, 4 * (prompt + completion)).astype(np.float32)
    return ids[:prompt], ids[prompt:], values
